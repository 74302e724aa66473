"""Tokens that the policy did not make: whatever stands at them in any column, every algorithm computes the same."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hybrid_rl.algos import AdvantageEstimator, WholeMiniBatch
from hybrid_rl.algos.advantages import GAE, GRPO, OPO, RLOO, ReinforcePlusPlus, VTrace
from hybrid_rl.algos.policy_losses.covariance import token_keys
from hybrid_rl.batch import FIELDS, Batch, Jagged, lengths_to_offsets
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import ConfigError
from hybrid_rl.training.balance import split_over_ranks
from hybrid_rl.training.estimate import AdvantageSpec, with_advantages
from hybrid_rl.training.mini_batch import with_trajectory_tokens
from hybrid_rl.training.spec import Counts, LossSpec
from tests.reference.grpo_case import build_model, flatten_gradient, load_recorded
from tests.support.agents.turns import cut_in_turns
from tests.support.float64 import KeepFloat64
from tests.unit.training.combination_case import Trained, resolved, train
from tests.unit.training.grpo_step import case_batch, case_config, loss_and_gradient
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


@functools.cache
def each_choice() -> list[tuple[tuple[str, ...], TrainerConfig]]:
    return list(_each_choice())


def _each_choice() -> Iterator[tuple[tuple[str, ...], TrainerConfig]]:
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


@pytest.fixture(scope="module")
def clean() -> dict[tuple[str, ...], Trained]:
    """The runs of all choices on the batch as it is."""
    with pytest.MonkeyPatch.context() as patch:
        return {places: train(config, patch, dense=has_step_rewards(config)) for places, config in each_choice()}


def test_nothing_at_a_token_of_the_environment_changes_a_number(
    clean: dict[tuple[str, ...], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: gradients, metrics, what is learned besides the model, the weight of the KL."""
    for places, config in each_choice():
        whole, made = clean[places], train(config, monkeypatch, dense=has_step_rewards(config), change=poisoned)
        assert all(bool(gradient.isfinite().all()) for gradient in whole.gradients), places
        assert all(map(torch.equal, whole.gradients, made.gradients)), places
        assert repr(whole.metrics) == repr(made.metrics), places
        assert whole.learned == made.learned and whole.beta == made.beta, places
        mask = whole.batch["completion_mask"].values
        for name in {"advantages", "returns"} & whole.batch.keys():
            assert torch.equal(whole.batch[name].values[mask], made.batch[name].values[mask]), places


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


def test_a_trajectory_teaches_the_same_as_one_sample_and_as_several(
    clean: dict[tuple[str, ...], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every estimator, loss, correction and KL that does not say that it is about a sample."""
    num_tried = 0
    for places, config in each_choice():
        if OF_SAMPLES & set(places):
            continue
        whole, cut = clean[places], train(config, monkeypatch, dense=has_step_rewards(config), change=cut_at_holes)
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


# ------------------------------------------------------------------------------------------------ rewards at turns

NAN = math.nan
# Trajectory 8: two turns of two tokens, with values .2 .4 .6 .8; .5 for the first turn, .25 for the second, 1 at the
# end. Trajectory 9 of the same group: one turn, .25 for it. Samples as (trajectory, turn), who made each token, values,
# rewards of tokens and ln of trainer / engine.
HALF = -math.log(2)
OTHER = ((9, 0), "pp", [0.0, 0.0], [0, 0.25], [0.0, 0.0])
FORMS = {
    "one sample": [
        (
            (8, 0),
            "ppeeppe",
            [0.2, 0.4, NAN, NAN, 0.6, 0.8, NAN],
            [0, 0.5, 0, 0, 0, 0.25, 0],
            [HALF, 0, NAN, NAN, 0, -HALF, NAN],
        ),
        OTHER,
    ],
    "given by the environment": [
        (
            (8, 0),
            "ppeeppe",
            [0.2, 0.4, NAN, NAN, 0.6, 0.8, NAN],
            [0, 0, 0, 0.5, 0, 0, 0.25],
            [HALF, 0, NAN, NAN, 0, -HALF, NAN],
        ),
        OTHER,
    ],
    "a sample for each turn": [
        ((8, 1), "epp", [NAN, 0.6, 0.8], [0, 0, 0.25], [NAN, 0, -HALF]),
        OTHER,
        ((8, 0), "pp", [0.2, 0.4], [0, 0.5], [HALF, 0]),
    ],
    "and one that never spoke": [
        ((8, 0), "ppeepp", [0.2, 0.4, NAN, NAN, 0.6, 0.8], [0, 0.5, 0, 0, 0, 0.25], [HALF, 0, NAN, NAN, 0, -HALF]),
        OTHER,
        ((7, 0), "e", [NAN], [0], [NAN]),
        ((6, 0), "", [], [], []),
    ],
}
REWARDS = {8: 1.75, 9: 0.25, 7: NAN, 6: NAN}
SPREAD = math.sqrt(7 / 15 + 1e-8)
ADVANTAGES: dict[str, tuple[AdvantageEstimator, dict[int, list[float]]]] = {
    # Errors: .2, .5 + .6 - .4 = .7, .2 and 1.25 - .8 = .45; half of what follows is added.
    "gae": (GAE(lam=0.5, whiten_advantages=False), {8: [0.65625, 0.9125, 0.425, 0.45], 9: [0.125, 0.25]}),
    # Targets v are .975, 1.75, 1.25 and 1.25; the first weight is 1/2, the last one is bounded by 1.
    "vtrace": (VTrace(), {8: [0.775, 1.35, 0.65, 0.45], 9: [0.25, 0.25]}),
    # Steps got .5, 1.25 and .25, 2/3 on average; -1/6, 7/12 and -5/12 are summed from the end.
    "token_level": (
        GRPO(token_level=True, scale_rewards="none"),
        {8: [5 / 12, 5 / 12, 7 / 12, 7 / 12], 9: [-5 / 12] * 2},
    ),
    "reinforce++": (ReinforcePlusPlus(), {8: [2 / 3 / SPREAD] * 2 + [1 / 6 / SPREAD] * 2, 9: [-5 / 6 / SPREAD] * 2}),
    # What is for whole trajectories sees 1.75 and .25, once.
    "grpo": (GRPO(scale_rewards="none"), {8: [0.75] * 4, 9: [-0.75] * 2}),
    "rloo": (RLOO(), {8: [1.5] * 4, 9: [-1.5] * 2}),
    "opo": (OPO(), {8: [1.75 - (4 * 1.75 + 2 * 0.25) / 6] * 4, 9: [0.25 - (4 * 1.75 + 2 * 0.25) / 6] * 2}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_at_turns_by_hand(name: str, form: str) -> None:
    samples, (estimator, expected) = FORMS[form], ADVANTAGES[name]
    keys, made, values, dense, gaps = zip(*samples, strict=True)
    completions = Jagged.from_rows([[5] * len(row) for row in made], torch.int64)

    def column(rows: Any, dtype: torch.dtype = torch.float32) -> Jagged:
        return Jagged.from_rows([torch.tensor(row, dtype=dtype) for row in rows])

    batch = Batch(
        {
            "prompt_ids": Jagged.from_rows([[3]] * len(samples), torch.int64),
            "completion_ids": completions,
            "completion_mask": column([[who == "p" for who in row] for row in made], torch.bool),
            "values": column(values),
            "token_rewards": column(dense),
            "old_logprobs": column([[gap - 1 for gap in row] for row in gaps]),
            "rollout_logprobs": column([[-1.0 if who == "p" else 0.0 for who in row] for row in made]),
            "group": torch.zeros(len(samples), dtype=torch.int64),
            "trajectory": torch.tensor([trajectory for trajectory, _ in keys]),
            "turn": torch.tensor([turn for _, turn in keys]),
            "rewards": torch.tensor([REWARDS[trajectory] for trajectory, _ in keys], dtype=torch.float64),
        }
    )
    found = with_advantages(batch, AdvantageSpec(estimator), RankContext(), 0.0)
    mask = batch["completion_mask"]
    for made_by_it in {"advantages", "returns"} & found.keys():
        assert not found[made_by_it].values[~mask.values].any()
    rows = {key: row[on].tolist() for key, row, on in zip(keys, found["advantages"], mask, strict=True)}
    by_trajectory = {n: [v for key in sorted(rows) if key[0] == n for v in rows[key]] for n in expected}
    assert by_trajectory == {n: pytest.approx(row, abs=1e-6) for n, row in expected.items()}
    if name in ("gae", "vtrace"):
        targets = {"gae": [0.85625, 1.3125, 1.025, 1.25], "vtrace": [0.975, 1.75, 1.25, 1.25]}[name]
        order = torch.tensor(sorted(range(len(keys)), key=lambda sample: keys[sample]))
        mine = found.select(order[batch["trajectory"][order] == 8])
        assert mine["returns"].values[mine["completion_mask"].values].tolist() == pytest.approx(targets, abs=1e-6)


# --------------------------------------------------------------------------------- a real model, packed and cut

RECORDED = load_recorded()["dapo_kl"]
BETA = 0.04


def batch_with_holes() -> Batch:
    """The recorded batch, four completions for each of four prompts: the environment is in the middle, at the end, at
    the start or alone, and one completion has no token at all."""
    batch = case_batch(RECORDED.old_logprobs, RECORDED.ref_logprobs)
    keep = torch.ones(len(batch["completion_ids"].values), dtype=torch.bool)
    keep[batch["completion_ids"].offsets[9]] = False  # the only token of sample 9
    columns = {name: batch[name] for name in batch if FIELDS[name].align == "completion"}
    lengths = batch["completion_ids"].lengths - torch.tensor([int(n == 9) for n in range(16)])
    columns = {name: Jagged(column.values[keep], lengths_to_offsets(lengths)) for name, column in columns.items()}
    rows = columns["completion_ids"].row_index()
    place = torch.arange(len(rows)) - columns["completion_ids"].offsets[rows]
    length = lengths[rows]
    hole = (
        ((place > 0) & (place % 4 == 3)) | ((rows % 5 == 1) & (place == length - 1)) | ((rows % 7 == 2) & (place < 2))
    )
    mask = Jagged(~(hole | (rows == 5)), columns["completion_ids"].offsets)
    return batch.without(*columns).with_columns(**(columns | {"completion_mask": mask}), trajectory=torch.arange(16))


def with_lengths(batch: Batch) -> Batch:
    lengths = {f"{name}_length": batch[f"{name}_ids"].lengths for name in ("prompt", "completion")}
    return batch.without(*(lengths.keys() & batch.keys())).with_columns(**lengths)


def in_run(batch: Batch, config: TrainerConfig) -> Batch:
    return with_advantages(batch, AdvantageSpec.of(config), RankContext(), 0.0)


def alone(batch: Batch) -> tuple[float, torch.Tensor]:
    """Loss (DAPO with a weighted k3) and gradient, each sample by itself through transformers' own attention."""
    module = build_model(torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    weight = float(1 / batch["completion_mask"].values.sum())  # in float32, as the weights of a loss are
    columns = ("prompt_ids", "completion_ids", "completion_mask", "old_logprobs", "ref_logprobs", "advantages")
    for prompt, ids, mask, old, ref, advantage in zip(*(batch[name] for name in columns), strict=True):
        if not len(ids):
            continue
        with KeepFloat64():
            logits = module(input_ids=torch.cat([prompt, ids])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0][mask]
        ratio, gap = (logprobs - old[mask]).exp(), ref[mask] - logprobs
        surrogate = torch.minimum(ratio * advantage[mask], ratio.clamp(0.8, 1.2) * advantage[mask])
        total = total + (-surrogate + BETA * ratio * (gap.exp() - 1 - gap)).sum() * weight
    total.backward()
    return float(total.detach()), flatten_gradient(module)


def test_packed_samples_with_holes_are_the_same_as_each_alone() -> None:
    config = case_config(beta=BETA)
    batch = in_run(batch_with_holes(), config)
    assert batch["completion_ids"].lengths[9] == 0 and 0.6 < batch["completion_mask"].values.double().mean() < 0.8
    expected_loss, expected = alone(batch)
    order = [*range(9), *range(10, 16)]
    random.Random(2).shuffle(order)
    for micro_batches in ([list(range(16))], [order[:6], [9], order[6:7], order[7:]]):
        loss, gradient, _ = loss_and_gradient(batch, config, micro_batches, torch.float64)
        assert loss == pytest.approx(expected_loss, abs=1e-10)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)
    # They are read all the same.
    ids = torch.where(batch["completion_mask"].values, batch["completion_ids"].values, 5)
    other = batch.without("completion_ids").with_columns(completion_ids=batch["completion_ids"].with_values(ids))
    _, gradient, _ = loss_and_gradient(other, config, [list(range(16))], torch.float64)
    assert float((gradient - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "sequence_sum"])
@pytest.mark.parametrize("form", [unchanged, cut_at_holes, cut_in_turns])
def test_gradients_of_ranks_add_up_whatever_samples_trajectories_are(
    form: Callable[[Batch], Batch], loss_type: str
) -> None:
    """Three ranks with their own groups, advantages and micro-batches."""
    config = case_config(loss_type=loss_type, beta=BETA)
    spec, whole = LossSpec.of(config), batch_with_holes()
    expected_loss, expected, _ = loss_and_gradient(in_run(whole, config), config, [list(range(16))], torch.float64)
    batch = form(with_lengths(whole))
    shares = split_over_ranks(with_lengths(batch), 3, pair_cost=0.01)
    counts = Counts(*map(sum, zip(*(Counts.of(batch.select(share), spec) for share in shares), strict=True)))
    total, gradient = 0.0, torch.zeros_like(expected)
    for share in shares:
        mine = with_trajectory_tokens(in_run(batch.select(share), config), spec)
        cuts = [list(range(start, mine.num_samples, 2)) for start in (0, 1)]
        loss, part, _ = loss_and_gradient(mine, config, cuts, torch.float64, counts=counts)
        total, gradient = total + loss, gradient + part
    assert total == pytest.approx(expected_loss, abs=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
