"""A tiny policy that calls tools at random: whole calls are tokens of its vocabulary, and it favours them. And a task
for it: rows, calls, keys of a run and the environment that answers."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tests.support.tiny import build_model

SPECIALS = ("<pad>", "<eos>", "<unk>", "[s]", "[u]", "[a]", "[t]", "[/]")
EOS_ID = 1
CHARS = "".join(map(chr, range(32, 127))) + "\n"
CALL = '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
# System tokens for the tools, then each message; an answer ends with <eos>.
TEMPLATE = (
    "{% if tools %}[s]{% for t in tools %}{{ t.function.name }} {% endfor %}[/]{% endif %}"
    "{% for m in messages %}{{ '[' + m.role[0] + ']' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\\n{\"name\": ' + (c.function.name | tojson) + ', \"arguments\": ' }}"
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<eos>' if m.role == 'assistant' else '[/]' }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call in Hermes' format, as the template renders it."""
    return CALL.replace("NAME", json.dumps(name)).replace("ARGUMENTS", json.dumps(arguments))


def build_tokenizer(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> PreTrainedTokenizerFast:
    """Every character is a token, and so is each of these calls."""
    words = [*SPECIALS, *(call_text(*call) for call in calls), *CHARS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    # \s\S: Rust's dot leaves out line ends.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<tool_call>[\s\S]*?</tool_call>|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS[3:]),
        padding_side="left",
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_policy(
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    favour: Mapping[str, float] | None = None,
    seed: int = 0,
    **shape: Any,
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A policy whose answers are calls, <eos> and the letters of `favour`, in proportion to their numbers; calls and
    <eos> have 1.0. Anything else is very unlikely. shape: of the model."""
    tokenizer = build_tokenizer(calls)
    size = len(tokenizer)
    model = build_model(seed, vocab_size=size, tie_word_embeddings=False, max_position_embeddings=1024, **shape)
    steer(model, tokenizer, calls, favour)
    return model, tokenizer


def steer(model: Any, tokenizer: Any, calls: Sequence[Any], favour: Mapping[str, float] | None = None) -> None:
    """Let a model with a head of its own answer as `build_policy` says."""
    size = len(tokenizer)
    weights = torch.full((size,), 1e-6)
    weights[EOS_ID] = 1.0
    weights[len(SPECIALS) : len(SPECIALS) + len(calls)] = 1.0
    for char, weight in (favour or {}).items():
        weights[tokenizer.convert_tokens_to_ids(char)] = weight
    with torch.no_grad():
        # A component that is large for every token stays the same through the norms: the head's weights on it are
        # biases.
        model.get_input_embeddings().weight[:, 0] = 10.0
        hidden = model.config.hidden_size
        model.lm_head.weight[:, 0] = weights.log() / math.sqrt(hidden)


# ------------------------------------------------------------------------------------------------------------ sums

SUM_CALLS = [("add", {"a": 1, "b": 2}), ("add", {"a": 20, "b": 3}), ("add", {"a": "x", "b": 1})]
SUM_ROWS = [{"prompt": [{"role": "user", "content": str(number)}], "number": number} for number in range(40)]
SUM_KEYS: dict[str, Any] = {
    "max_steps": 4,
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_completion_length": 60,
    "max_prompt_length": 60,
    "max_tool_calling_iterations": 3,
    "learning_rate": 1e-2,
}


class Sums:
    """An environment that adds, and knows whether two trajectories act on it at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    def reset(self, number: int, **row: Any) -> None:
        assert self.number is None, "another trajectory still acts on this one"
        self.number, self.num_sums = number, 0

    async def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: the other
        """
        self.num_sums += 1
        await asyncio.sleep(self._seconds())
        return a + b

    def _seconds(self) -> float:
        return 0.0

    def get_reward(self) -> float:
        self.number, was = None, self.number
        assert was is not None
        return self.num_sums / 4 + was / 64
