"""Chat templates in the form of well-known families, and a tokenizer of bytes with the special tokens that they use."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_rl.agents.chat import Chat

_TOOLS_AS_JSON = "{% if tools %}Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n{% endif %}"
_HERMES_CALLS = """\
{%- for call in m.tool_calls %}{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}\
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"""
# Results of tools that stand side by side share one block of the user.
_RESULTS_MERGED = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}\
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}\
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""

# Every turn is rendered by itself: nothing is ever rewritten.
HERMES = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
    + _TOOLS_AS_JSON
    + "<|im_end|>\n{% for m in messages %}{% if m.role == 'tool' %}"
    + _RESULTS_MERGED
    + "{% elif m.role != 'system' or not loop.first %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    + _HERMES_CALLS
    + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thinking is shown after the last message of the user only.
THINKING = (
    _TOOLS_AS_JSON
    + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    + "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
    + _RESULTS_MERGED
    + "{% else %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content and loop.index0 > ns.last %}"
    + "{{ '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ m.content.lstrip('\n') }}"
    + _HERMES_CALLS
    + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    + "{% if no_thinking %}{{ '<think>\n\n</think>\n\n' }}{% elif opens_thinking %}{{ '<think>\n' }}{% endif %}"
    + "{% endif %}"
)
# One call per answer; contents are trimmed.
LLAMA = (
    "<|begin|><|header|>system<|end_header|>\n\n"
    + _TOOLS_AS_JSON
    + "<|eot|>{% for m in messages %}{{ '<|header|>' + ('ipython' if m.role == 'tool' else m.role) }}"
    + "{{ '<|end_header|>\n\n' }}{% if m.tool_calls %}"
    + "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
    + """{% set f = m.tool_calls[0].function %}{{ '{"name": "' + f.name + '", "parameters": ' }}"""
    + "{{ f.arguments | tojson + '}' }}{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    + "{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot|>' }}"
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
# Users and answers alternate; tools stand before the last message of the user, so that a new one moves them.
MISTRAL = (
    "<s>{% set ns = namespace(index=0, last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    """{{ '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}' }}"""
    "{{ '[/TOOL_RESULTS]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    """{{ '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}"""
    """{{ ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']</s>' }}"""
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
# Nothing closes a turn: the header of the next one does, and policies write that header's token to end theirs.
GLM = (
    "[gMASK]<sop>{% if tools %}{{ '<|system|>\n' }}"
    + _TOOLS_AS_JSON
    + "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    + "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    + "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    + "{% else %}{{ '<|' + m.role + '|>' }}{% if m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}"
    + "{% for call in m.tool_calls %}{{ '\n<tool_call>' + call.function.name + '\n' }}"
    + "{% for key, value in call.function.arguments.items() %}{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' }}"
    + "{{ value if value is string else value | tojson }}{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}"
    + "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

FAMILIES = {"hermes": HERMES, "thinking": THINKING, "llama": LLAMA, "mistral": MISTRAL, "glm": GLM}
ENDS = {
    "hermes": "<|im_end|>",
    "thinking": "<|im_end|>",
    "llama": "<|eot|>",
    "mistral": "</s>",
    "glm": "<|observation|>",
}
SPECIALS = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|begin|>",
        "<|header|>",
        "<|end_header|>",
        "<|eot|>",
        "<|eom|>",
        "<|python_tag|>",
    ),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|pad|>"),
)
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("Ċ", "Ċ")]


def build_tokenizer(template: str, end: str) -> PreTrainedTokenizerFast:
    """Bytes with a few merges, so that a text can be written in several ways."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = template
    return tokenizer


def build_chat(family: str, **options: Any) -> Chat:
    """The chat format of one of the families."""
    return Chat(build_tokenizer(FAMILIES[family], ENDS[family]), **options)


def tool(name: str, **types: str) -> dict[str, Any]:
    """The schema of a tool with arguments of these JSON types."""
    properties = {key: {"type": kind, "description": f"the {key}"} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": f"{name}s.", "parameters": parameters}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(text: str, call: dict[str, Any] | None = None) -> dict[str, Any]:
    """The message that answers a tool call."""
    name = call["function"]["name"] if call else "add"
    return {"role": "tool", "name": name, "tool_call_id": call["id"] if call else "abcdefghi", "content": text}


def call_of(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
