"""The work of the benchmarks: models, prompts and rewards, the same for every library. Imports none of them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIALS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*= "
VOCABULARY = (*SPECIALS, *CHARACTERS)
PAD_ID, EOS_ID = 0, 1
MAX_POSITIONS = 512

NEVER = 1e-7  # probability of a token that is not to appear
FIT_STEPS, FIT_BATCH, FIT_LENGTH, FIT_LEARNING_RATE = 100, 4, 32, 3e-3
LENGTH_TOLERANCE = 0.05  # relative, of the mean length that a fitted model must have


transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class Work:
    """One shape of work.

    prompt_length: characters of every prompt; None = sums such as "12+7=".
    mean_length: average tokens of a completion without a limit, EOS included; None = they never end by themselves.
    max_completion_length: in tokens.
    max_operand: of the sums.
    is_chat: sums are asked for in words, as the message of a user; for a model that is given, not made here.
    reward: `spread` gives nearly every completion a different number, `sum` and `last_number` reward the right answer.
    """

    name: str
    hidden_size: int = 128
    num_layers: int = 4
    prompt_length: int | None = None
    mean_length: float | None = 13.0
    max_completion_length: int = 128
    prompts_per_step: int = 16
    num_generations: int = 8
    max_operand: int = 99
    reward: Literal["spread", "sum", "last_number"] = "spread"
    is_chat: bool = False

    @property
    def num_samples(self) -> int:
        """Completions of one training step."""
        return self.prompts_per_step * self.num_generations

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence, prompt and completion."""
        return (self.prompt_length or len(f"{self.max_operand}+{self.max_operand}=")) + self.max_completion_length

    @property
    def end_probability(self) -> float:
        """Probability of EOS at every position."""
        return NEVER if self.mean_length is None else 1 / self.mean_length


CHAT_SUMS = Work(
    "chat-sums", max_completion_length=24, prompts_per_step=8, num_generations=8, max_operand=60, is_chat=True
)
CHAT_SUMS_64 = replace(CHAT_SUMS, name="chat-sums-64", max_completion_length=64)
CHAT_SUMS_LEARNED = replace(CHAT_SUMS, name="chat-sums-learned", max_completion_length=16, reward="last_number")
WORKS = {
    work.name: work
    for work in (
        Work("heavy-tail"),
        Work("heavy-tail-256x8", hidden_size=256, num_layers=8),
        Work("equal", mean_length=None, max_completion_length=32),
        Work("equal-256x8", hidden_size=256, num_layers=8, mean_length=None, max_completion_length=32),
        Work("equal-128", mean_length=None),
        Work("shared-prompt", prompt_length=256, mean_length=16.0),
        CHAT_SUMS,
        CHAT_SUMS_64,
        CHAT_SUMS_LEARNED,
    )
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of `CHARACTERS`; pads on the left."""
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_model(work: Work, seed: int, *, max_positions: int = MAX_POSITIONS) -> Qwen2ForCausalLM:
    """A random fp32 Qwen2: 4 heads, 2 key heads, tied embeddings, the same for a seed."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCABULARY),
            hidden_size=work.hidden_size,
            intermediate_size=4 * work.hidden_size,
            num_hidden_layers=work.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=max_positions,
            tie_word_embeddings=True,
            pad_token_id=PAD_ID,
            eos_token_id=EOS_ID,
            bos_token_id=None,
        )
    )


def token_targets(end_probability: float) -> Tensor:
    """Wanted probability of every token, float32 [V]: EOS as given, characters alike, padding and unknown never."""
    targets = torch.full((len(VOCABULARY),), NEVER)
    targets[EOS_ID] = end_probability
    targets[len(SPECIALS) :] = (1 - targets[: len(SPECIALS)].sum()) / len(CHARACTERS)
    return targets


def fit_lengths(model: Qwen2ForCausalLM, end_probability: float, *, num_steps: int = FIT_STEPS) -> None:
    """Train until every position ends a completion with this probability, so that lengths are geometric.

    The loss is the cross-entropy to `token_targets` on random characters, plus the excess of ln p of tokens that must
    be rare: cross-entropy by itself hardly notices a probability of 1e-4 that should be 1e-7.
    """
    generator = torch.Generator().manual_seed(0)
    targets = token_targets(end_probability)
    rare = targets <= NEVER
    optimizer = torch.optim.AdamW(model.parameters(), lr=FIT_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * max(0.02, 1 - step / num_steps)
    )
    for _ in range(num_steps):
        context = torch.randint(len(SPECIALS), len(VOCABULARY), (FIT_BATCH, FIT_LENGTH), generator=generator)
        logprobs = model(input_ids=context, use_cache=False).logits.log_softmax(-1)
        excess = (logprobs[..., rare] - math.log(NEVER)).relu().sum(-1)
        loss = (0.1 * excess - (logprobs * targets).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def end_probabilities(model: Qwen2ForCausalLM, prompt_length: int, num_tokens: int) -> Tensor:
    """Probability of EOS after random characters, float32 [8, num_tokens], from position prompt_length on."""
    generator = torch.Generator().manual_seed(1)
    shape = (8, prompt_length + num_tokens)
    context = torch.randint(len(SPECIALS), len(VOCABULARY), shape, generator=generator)
    return model(input_ids=context, use_cache=False).logits.softmax(-1)[:, prompt_length:, EOS_ID]


def check_lengths(model: Qwen2ForCausalLM, work: Work) -> float:
    """The mean probability of EOS along a completion; raises ValueError if lengths would not be those of the work."""
    probability = float(end_probabilities(model, work.prompt_length or 6, work.max_completion_length).mean())
    if work.mean_length is None:
        share_cut_short = probability * work.max_completion_length
        if share_cut_short > 1e-3:
            raise ValueError(f"{work.name}: {share_cut_short:.2g} of the completions would end early; fit for longer")
    elif abs(probability * work.mean_length - 1) > LENGTH_TOLERANCE:
        raise ValueError(
            f"{work.name}: mean length {1 / probability:.2f} instead of {work.mean_length}; fit for longer"
        )
    return probability


def continuous_batching(work: Work) -> dict[str, Any]:
    """Sizes for transformers' continuous batching: pages for all sequences of a rollout at their longest.

    It allocates its cache again for every rollout and by default most of the machine's memory, so a larger one is
    slower; these were the fastest of a few on a CPU.
    """
    page_size = 32
    num_blocks = work.num_samples * -(-work.longest_tokens // page_size)
    return {"page_size": page_size, "num_blocks": num_blocks, "max_batch_tokens": 1024}


def save_model(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Weights and tokenizer as `from_pretrained` reads them."""
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def save_fitted(work: Work, folder: Path, seed: int) -> float:
    """Save a model whose completions have the lengths of the work; returns its mean probability of EOS."""
    model = build_model(work, seed, max_positions=max(MAX_POSITIONS, work.longest_tokens))
    fit_lengths(model, work.end_probability)
    probability = check_lengths(model, work)
    save_model(model, folder)
    return probability


def load(folder: str | Path, dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model and tokenizer of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def rows(work: Work, count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts with the column `answer`, the same for a seed."""
    generator = random.Random(seed)
    if work.prompt_length is not None:
        texts = ("".join(generator.choices(CHARACTERS, k=work.prompt_length)) for _ in range(count))
        return [{"prompt": text, "answer": ""} for text in texts]
    pairs = [(generator.randint(0, work.max_operand), generator.randint(0, work.max_operand)) for _ in range(count)]
    return [(chat_row if work.is_chat else sum_row)(first, second) for first, second in pairs]


def chat_row(first: int, second: int) -> dict[str, Any]:
    """The row of one sum in words."""
    question = f"What is {first} + {second}? Answer with the number only."
    return {"prompt": [{"role": "user", "content": question}], "answer": str(first + second)}


def sum_row(first: int, second: int) -> dict[str, str]:
    """The row of one sum."""
    return {"prompt": f"{first}+{second}=", "answer": str(first + second)}


def all_sums(max_operand: int) -> list[dict[str, str]]:
    """Every sum once: (max_operand + 1) squared."""
    return [sum_row(first, second) for first in range(max_operand + 1) for second in range(max_operand + 1)]


def spread(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A number between 0 and 1 that differs between nearly all completions: every group has a signal."""
    return [sum((3 * place + 1) * token for place, token in enumerate(ids)) % 97 / 97 for ids in completion_ids]


def right_sum(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The share of characters in their right place, and 1 more for the right answer."""
    return [_score(text.strip(), right) for text, right in zip(completions, answer, strict=True)]


def _score(text: str, right: str) -> float:
    in_place = sum(a == b for a, b in zip(text, right, strict=False)) / max(len(text), len(right))
    return in_place + float(text == right)


def last_number(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last number of the answer to a message is the right one, else 0."""
    texts = (completion[-1]["content"] for completion in completions)
    return [float(re.findall(r"\d+", text)[-1:] == [right]) for text, right in zip(texts, answer, strict=True)]


REWARDS: dict[str, Callable[..., list[float]]] = {"spread": spread, "sum": right_sum, "last_number": last_number}
