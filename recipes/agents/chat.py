"""Chat template and tokenizer of the small policies that call tools, and conversations as rows to imitate."""

import re
import string
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hybrid_rl.extras.quickstart.warm_start import IGNORED

PAD, START, END, UNKNOWN = "<pad>", "<|im_start|>", "<|im_end|>", "<unk>"

# The form of Hermes, which Qwen has too, but of each tool only its name and the names of its arguments are shown: a
# policy of this size cannot read descriptions.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>\\n' }}
{%- for tool in tools %}
{{- tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')\\n' }}
{%- endfor %}{{ '</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{ '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ message.content or '' }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
{{- '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# A tag, a word, or all that stands between two of them: what texts of this template are made of.
_PIECES = re.compile(r"</?[a-z_]+>|[A-Za-z_]{2,}|[^\w<>|]{2,}")

Message = dict[str, Any]


def build_tokenizer(examples: Sequence[str], max_length: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer with `TEMPLATE`, for sequences of up to max_length tokens.

    Each word of the examples, and what stands between words, is one token; so is any other character of ASCII, each
    digit among them.
    """
    piece_set = {piece for text in examples for piece in _PIECES.findall(text)}
    pieces = sorted(piece_set, key=lambda piece: (-len(piece), piece))  # the longest first, as the pattern tries them
    words = dict.fromkeys((PAD, END, START, UNKNOWN, *pieces, *string.printable))
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    split = "|".join((*map(re.escape, pieces), r"[\s\S]"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(split), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=max_length,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def call(name: str, **arguments: Any) -> Message:
    """The message of an assistant that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def render(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], tools: Sequence[Message]) -> str:
    """Return the text of a whole conversation. tools: JSON schemas."""
    shown: Any = {"tools": list(tools), "tokenize": False}
    return str(tokenizer.apply_chat_template(list(messages), **shown))


def encode_conversations(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Sequence[Message]], tools: Sequence[Message]
) -> tuple[Tensor, Tensor]:
    """Return `(input_ids, labels)`, int64 [N, T], padded on the right; `IGNORED` outside the assistant's answers.

    An answer ends with the token that ends it, which the engine makes; the line break after it is the template's.
    """
    vocabulary = tokenizer.get_vocab()
    end, start = vocabulary[END], vocabulary[START]
    header = tokenizer("<|im_start|>assistant\n")["input_ids"]
    rows = tokenizer([render(tokenizer, said, tools) for said in conversations])["input_ids"]
    width = max(map(len, rows))
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    for row, ids in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        for place in range(len(ids)):
            if ids[place] == start and ids[place : place + len(header)] == header:
                first, last = place + len(header), ids.index(end, place)
                labels[row, first : last + 1] = input_ids[row, first : last + 1]
    return input_ids, labels
