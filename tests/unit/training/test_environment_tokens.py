"""Tokens that the policy did not make: whatever stands at them in any column, every algorithm computes the same."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybrid_rl.algos import WholeMiniBatch
from hybrid_rl.algos.policy_losses.covariance import token_keys
from hybrid_rl.batch import FIELDS, Batch, Jagged
from hybrid_rl.config import TrainerConfig
from hybrid_rl.errors import ConfigError
from tests.unit.training.combination_case import resolved, train
from tests.unit.training.test_combinations import SECTIONS, TOLERANCE, chosen, has_step_rewards

# What no column may hold at a token of the environment, or a term reads it. Rewards of tokens are read there: what the
# environment gave for a turn counts at the turn.
READ = {"completion_ids", "completion_mask", "token_rewards"}


def unchanged(batch: Batch) -> Batch:
    return batch


WILD = torch.tensor([math.nan, 1e30, -0.7, -1e30, math.inf])


def poisoned(batch: Batch) -> Batch:
    """Numbers of all kinds at all tokens of the environment, other ones in every column; of whole numbers those that
    exist: ids of tokens and experts, and versions."""
    completions = batch["completion_ids"]
    names = [name for name in batch if FIELDS[name].align == "completion" and name not in READ]
    columns = {}
    for offset, name in enumerate(sorted(names)):
        values = batch[name].values
        place = torch.arange(len(values)).view(-1, *[1] * (values.dim() - 1))
        wild = WILD[(place + offset) % len(WILD)] if values.is_floating_point() else place % 2
        if name == "policy_version":
            wild = -1 - 7 * place
        on = batch["completion_mask"].values.view_as(place)
        columns[name] = completions.with_values(torch.where(on, values, wild.to(values.dtype)))
    return batch.without(*columns).with_columns(**columns)


# Two optimizer steps with columns of before: so that ratios are not 1.
FIRST = {"old": ["recompute", "rollout", "detach"], "correction": ["tis"], "kl": ["loss"]}


def each_choice() -> Iterator[tuple[tuple[str, ...], TrainerConfig]]:
    """Every choice of every section, beside the first choices of the others that go with it. The means of trajectories
    are the loss_type that looks most closely at how long they are."""
    ordered = {
        name: [*FIRST.get(name, []), *(c for c in own if c not in FIRST.get(name, []))]
        for name, own in SECTIONS.items()
    }
    for section, choices in SECTIONS.items():
        for choice in choices:
            others = [[choice] if name == section else list(own) for name, own in ordered.items()]
            for places in itertools.product(*others):
                with contextlib.suppress(ConfigError):
                    yield places, resolved(chosen(places) | {"loss_type": "grpo"})
                    break
            else:
                raise AssertionError(f"{choice} goes with nothing")


def test_nothing_at_a_token_of_the_environment_changes_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: gradients, metrics, what is learned besides the model, the weight of the KL."""
    for places, config in each_choice():
        dense = has_step_rewards(config)
        clean, made = (train(config, monkeypatch, dense=dense, change=change) for change in (unchanged, poisoned))
        assert all(bool(gradient.isfinite().all()) for gradient in clean.gradients), places
        assert all(map(torch.equal, clean.gradients, made.gradients)), places
        assert repr(clean.metrics) == repr(made.metrics), places
        assert clean.learned == made.learned and clean.beta == made.beta, places
        mask = clean.batch["completion_mask"].values
        for name in {"advantages", "returns"} & clean.batch.keys():
            assert torch.equal(clean.batch[name].values[mask], made.batch[name].values[mask]), places


# ------------------------------------------------------------------------------- one sample, or one for each turn

# Ratios of whole completions, and quantiles within one, are of a sample.
OF_SAMPLES = {"gspo", "gspo token", "cispo by completion", "sapo by completion", "gmpo", "rspo", "vespo", "simko"}
OF_SAMPLES |= {"mis", "kl_rejection", "off-policy mask"}


def cut_at_holes(batch: Batch) -> Batch:
    """Each trajectory as two samples per turn, with what was before them as their prompts, the last ones first. The
    table model sees the token before only, so that logprobs stay what they are."""
    if "turn" in batch:
        return batch
    spans = []
    for sample, mask in enumerate(batch["completion_mask"]):
        edges = torch.cat([mask.new_zeros(1), mask, mask.new_zeros(1)]).int().diff()
        starts, ends = ((edges == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
        middles = [((start + end) // 2, start, end) for start, end in zip(starts, ends, strict=True)]
        halves = [half for middle, start, end in middles for half in ((start, middle), (middle, end))]
        pieces = [(start, end) for start, end in halves if start < end] or [(0, len(mask))]
        spans += [(turn, sample, *piece) for turn, piece in enumerate(pieces)]
    spans.sort(reverse=True)
    columns: dict[str, Any] = {"turn": torch.tensor([turn for turn, *_ in spans])}
    for name, column in batch.items():
        if FIELDS[name].align == "completion":
            columns[name] = Jagged.from_rows([column[n][a:b] for _, n, a, b in spans])
        elif name == "prompt_ids":
            before = [(column[n], batch["completion_ids"][n][:a]) for _, n, a, _ in spans]
            columns[name] = Jagged.from_rows([torch.cat(parts) for parts in before])
        else:
            rows = [column[n] for _, n, *_ in spans]
            columns[name] = torch.stack(rows) if isinstance(column, torch.Tensor) else rows
    return Batch(columns)


def test_a_trajectory_teaches_the_same_as_one_sample_and_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every estimator, loss, correction and KL that does not say that it is about a sample."""
    num_tried = 0
    for places, config in each_choice():
        if OF_SAMPLES & set(places):
            continue
        dense = has_step_rewards(config)
        whole, cut = (train(config, monkeypatch, dense=dense, change=change) for change in (unchanged, cut_at_holes))
        assert cut.batch.num_samples > 1.5 * whole.batch.num_samples, places
        for mine, theirs in zip(cut.gradients, whole.gradients, strict=True):
            assert float((mine - theirs).abs().max()) <= TOLERANCE * max(float(theirs.abs().max()), 1e-2), places
        assert cut.beta == pytest.approx(whole.beta) and cut.learned == pytest.approx(whole.learned), places
        num_tried += 1
    assert num_tried > 35


def test_what_is_drawn_at_random_depends_on_no_token_of_the_environment() -> None:
    """Keys of five tokens of two completions, alone and with others in between."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([False, True, True, False, False, True, False, True, True])
    rows = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1])
    numbers = [torch.randn(9, generator=generator) for _ in range(2)]
    with_holes = WholeMiniBatch(numbers[0], numbers[1], mask, rows, 2, torch.tensor([0, 0]), seed=5)
    bare = WholeMiniBatch(numbers[0][mask], numbers[1][mask], mask[mask], rows[mask], 2, torch.tensor([0, 0]), seed=5)
    assert torch.equal(token_keys(with_holes)[mask], token_keys(bare)) and len(set(token_keys(bare).tolist())) == 5
