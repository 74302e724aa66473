"""The plan of a rank's samples: the mini-batches that the driver assigned, and micro-batches under a token cap.

A pure function of the batch, so that the pass that computes logprobs and the pass that updates use the same plan and
see bit for bit the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.group_rewards import GroupEstimator
from hybrid_rl.batch import FIELDS, Batch, Column, Jagged
from hybrid_rl.batch.temperature import sampling_temperature
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.data.packing import pack_by_tokens
from hybrid_rl.errors import DataError
from hybrid_rl.models import prompt_groups
from hybrid_rl.models.attention.padded import length_buckets
from hybrid_rl.models.row import token_keys
from hybrid_rl.training.spec import LossSpec

Plan = list[list[list[int]]]  # mini-batches of micro-batches of sample indices

# On a CPU larger micro-batches gain 5 % of time at most and take up to 40 % more memory (128 x 4 and 256 x 8 layers); a
# GPU needs more tokens at once.
TOKENS_PER_MICRO_BATCH = {"cpu": 4096, "cuda": 16384}


def token_cap(device: torch.device, tokens_per_micro_batch: int | None, lengths: Iterable[int]) -> int:
    """Choose the cap on the tokens of one forward pass: as given, else what suits the device, and at least the longest
    of the samples, whose lengths are given."""
    if tokens_per_micro_batch is not None:
        return tokens_per_micro_batch
    return max(TOKENS_PER_MICRO_BATCH[device.type], *lengths, 1)


@dataclass(frozen=True)
class PlanSpec:
    """How a run cuts its batches.

    tokens_per_micro_batch: None = what suits the device. seed: of the order in which groups are packed, with one rank
    that of `assign_mini_batches`. is_packed: False if samples are computed next to each other, each with its prompt and
    padded to the longest: those of a micro-batch are then of similar length, and padding counts. splits_alike: True if
    groups whose samples all got the same reward come in micro-batches of their own, before the others: they teach
    nothing (`still_micro_batches`).
    """

    num_mini_batches: int
    tokens_per_micro_batch: int | None
    seed: int
    is_packed: bool = True
    splits_alike: bool = False

    @classmethod
    def of(cls, config: TrainerConfig) -> PlanSpec:
        """Take the values from a resolved configuration."""
        prompts, optimizer = config.data.prompts_per_step, config.optimizer
        estimator = config.advantage
        compares = isinstance(estimator, GroupEstimator) and estimator.is_zero_if_alike
        return cls(
            num_mini_batches=prompts // (optimizer.prompts_per_mini_batch or prompts),
            tokens_per_micro_batch=optimizer.tokens_per_micro_batch,
            seed=config.seed,
            is_packed=config.is_packed,
            splits_alike=compares and LossSpec.of(config).follows_advantages,
        )

    def plan(self, batch: Batch, step: int, context: RankContext, device: torch.device) -> Plan:
        """Make the one plan of a rank's batch in a training step, with as many micro-batches as any other rank has.

        Collective. Raises DataError for samples of several temperatures, and what `cut` and `align_plans` raise.
        """
        if batch.num_samples:
            sampling_temperature(batch)
        lengths = sample_lengths(batch)
        plans = self.cut(batch, self.seed + step, token_cap(device, self.tokens_per_micro_batch, lengths))
        # Each by itself: ranks that teach something do so in the same place, where all of them run a backward pass.
        counts = zip(*context.gather([num_micro_batches(plan) for plan in plans]), strict=True)
        return joined_plans(*(align_plans(plan, theirs) for plan, theirs in zip(plans, counts, strict=True)))

    def cut(self, batch: Batch, seed: int, max_tokens: int) -> tuple[Plan, Plan]:
        """Cut a rank's batch: for each of range(num_mini_batches) the micro-batches of the samples whose column
        `mini_batch` says so, none if this rank has no such sample. A batch without that column is one mini-batch.
        Returns the micro-batches of groups that are alike, none unless splits_alike, and all others, which follow them.

        No micro-batch computes more than max_tokens, a prompt that samples share counted once. Samples of one prompt
        stay together if they fit. Samples of a micro-batch run from long to short, so that equal lengths are side by
        side. Raises DataError for a sample over the cap and for a mini-batch that does not exist.
        """
        minis = _mini_batches(batch, self.num_mini_batches)
        groups = batch.group_rows()
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
        parts: list[list[list[int]]] = [[[] for _ in range(self.num_mini_batches)] for _ in range(2)]
        for group in order:
            differs = not self.splits_alike or _differs(batch["rewards"][groups[group]])
            for row in groups[group]:
                parts[differs][minis[row]].append(row)
        cut = _packed if self.is_packed else _padded
        alike, others = ([cut(batch, rows, max_tokens) for rows in part] for part in parts)
        return alike, others


def joined_plans(alike: Plan, others: Plan) -> Plan:
    """Join the two parts that `PlanSpec.cut` returns, mini-batch by mini-batch."""
    return [[*first, *then] for first, then in zip(alike, others, strict=True)]


def _differs(rewards: Tensor) -> bool:
    """Whether two rewards of a group are different; of samples that could not be scored, NaN, they are not compared."""
    scored = rewards[~rewards.isnan()]
    return bool(scored.numel()) and bool((scored != scored[0]).any())


def still_micro_batches(batch: Batch, plan: Plan, mask: Tensor, context: RankContext) -> list[list[bool]]:
    """Find the micro-batches in which no rank has a token in the loss with an advantage: where the loss follows
    advantages its gradient is 0, so a forward pass is enough. The last of a mini-batch is never one of them: an
    optimizer step needs gradients, if only zeros. mask: bool [M], tokens in the loss. Collective."""
    teaches = batch["completion_ids"].with_values(mask & (batch["advantages"].values != 0))
    mine = [[not bool(teaches.select(sample_rows([rows])).values.any()) for rows in mini[:-1]] for mini in plan]
    everywhere = zip(*context.data_gather(mine), strict=True)
    still = [[all(parts) for parts in zip(*ranks, strict=True)] for ranks in everywhere]
    return [[*flags, False] if mini else [] for flags, mini in zip(still, plan, strict=True)]


def _packed(batch: Batch, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Make micro-batches of samples that share their prompts, from long to short."""
    prompts, completions = batch["prompt_ids"].lengths.tolist(), batch["completion_ids"].lengths.tolist()
    pieces: list[tuple[int, list[int]]] = []  # tokens and samples of what is not cut further
    for members in prompt_groups(_shared_prompts(batch), rows):
        prompt = prompts[members[0]]
        for piece in _cut_group(prompt, [completions[row] for row in members], max_tokens):
            samples = [members[i] for i in piece]
            pieces.append((prompt + sum(completions[row] for row in samples), samples))
    packed = pack_by_tokens([num_tokens for num_tokens, _ in pieces], max_tokens)
    micros = [[row for i in micro for row in pieces[i][1]] for micro in packed]
    return [sorted(micro, key=lambda row: (-prompts[row] - completions[row], row)) for micro in micros]


def _padded(batch: Batch, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Make micro-batches of samples of similar length, from long to short."""
    lengths = (batch["prompt_ids"].lengths + batch["completion_ids"].lengths)[list(rows)].tolist()
    micros = []
    for bucket in length_buckets(lengths):
        members = sorted(bucket, key=lambda index: (-lengths[index], rows[index]))
        padded = [lengths[members[0]]] * len(members)
        micros += [[rows[members[i]] for i in micro] for micro in pack_by_tokens(padded, max_tokens)]
    return micros


def sample_rows(micro_batches: Sequence[Sequence[int]]) -> Tensor:
    """Return the samples of some micro-batches, one after the other, int64 [N]."""
    return torch.tensor([row for micro in micro_batches for row in micro], dtype=torch.int64)


def sample_lengths(batch: Batch) -> list[int]:
    """Return the tokens of each sample, prompt and completion."""
    lengths: list[int] = (batch["prompt_ids"].lengths + batch["completion_ids"].lengths).tolist()
    return lengths


def row_size(batch: Batch, rows: Sequence[int]) -> int:
    """Count the tokens of samples in one row: their completions, and each different prompt once."""
    prompts, completions = batch["prompt_ids"], batch["completion_ids"]
    firsts = [members[0] for members in prompt_groups(_shared_prompts(batch), rows)]
    return int(prompts.lengths[firsts].sum() + completions.lengths[list(rows)].sum())


def _shared_prompts(batch: Batch) -> Jagged:
    """Return numbers for the tokens of prompts that are equal only if a row can share them."""
    prompts = batch["prompt_ids"]
    if "routed_experts" not in batch or not batch.num_samples:
        return prompts
    return token_keys(prompts, batch["completion_ids"], batch["routed_experts"])[0]


def num_micro_batches(plan: Plan) -> list[int]:
    """Count the micro-batches of each mini-batch."""
    return [len(mini) for mini in plan]


def align_plans(plan: Plan, counts: Sequence[Sequence[int]]) -> Plan:
    """Return the plan with as many micro-batches in every mini-batch as the rank with the most has there.

    Ranks that compute together must run equally many forwards; what is added is empty, [], see `micro_batch`.

    counts: `num_micro_batches` of every rank. Raises DataError if they are of different numbers of mini-batches.
    """
    lengths = sorted({len(plan), *map(len, counts)})
    if len(lengths) > 1:
        raise DataError(
            f"ranks plan different numbers of mini-batches ({', '.join(map(str, lengths))}); pass the same "
            "num_mini_batches on every rank"
        )
    most = [max(numbers) for numbers in zip(*counts, strict=True)]
    return [[*mini, *([] for _ in range(number - len(mini)))] for mini, number in zip(plan, most, strict=True)]


def micro_batch(batch: Batch, rows: Sequence[int], idle_token: int = 0) -> Batch:
    """Return the samples of a micro-batch; for an empty one a sample of weight zero with the columns of `batch`.

    That sample has one token of prompt and one of completion, idle_token both, which no policy made: loss and gradient
    are 0, but every parameter takes part in forward and backward. If gradients are taken, idle_token must be the
    model's own (`CausalLM.idle_token`).
    """
    if rows:
        return batch.select(rows)
    return Batch({name: _masked(name, column, idle_token) for name, column in batch.items()})


def _masked(name: str, column: Column, idle_token: int) -> Column:
    """Return one sample with the value that the field table has for a token that was not produced, else zeros."""
    if isinstance(column, list):
        return [None]
    value = idle_token if name in ("prompt_ids", "completion_ids") else FIELDS[name].masked or 0
    if isinstance(column, Jagged):
        length = 2 if FIELDS[name].align == "sequence" else 1
        return Jagged(column.values.new_full((length, *column.values.shape[1:]), value), torch.tensor([0, length]))
    return column.new_full((1,), value)


def _mini_batches(batch: Batch, num_mini_batches: int) -> list[int]:
    """Return the mini-batch of each sample."""
    if "mini_batch" not in batch:
        if num_mini_batches != 1:
            raise DataError(f"a batch without the column mini_batch is 1 mini-batch, not {num_mini_batches}; add it")
        return [0] * batch.num_samples
    minis: list[int] = batch["mini_batch"].tolist()
    wrong = [row for row, mini in enumerate(minis) if not 0 <= mini < num_mini_batches]
    if wrong:
        raise DataError(
            f"sample {wrong[0]} is in mini-batch {minis[wrong[0]]}, but there are {num_mini_batches}, from 0: assign "
            f"mini-batches and count them with the same prompts_per_mini_batch"
        )
    return minis


def _cut_group(prompt: int, completions: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the completions of one prompt that go together: all of them, or as many as fit next to a copy of the
    prompt."""
    if prompt + sum(completions) <= max_tokens:
        return [list(range(len(completions)))]
    sizes = [max(length, 1) for length in completions]
    if prompt + max(sizes) > max_tokens:  # a sample is over the cap, which `pack_by_tokens` refuses
        return [[index] for index in range(len(sizes))]
    return pack_by_tokens(sizes, max_tokens - prompt)
