"""Advantages of a batch: numbers of which no gradient can be made are refused with their value, those at masked tokens
are left out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from hybrid_rl.algos import AdvantageEstimator, AdvantageInputs, Advantages
from hybrid_rl.algos.options import key
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import load_config, resolve
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import DataError
from hybrid_rl.training.estimate import AdvantageSpec, with_advantages

COMPLETIONS = Jagged.from_rows([[5, 6], [7], [8, 9, 4], [3]], torch.int64)


def spec_of(**keys: Any) -> AdvantageSpec:
    return AdvantageSpec.of(resolve(*load_config({"num_generations": 2, **keys})))


def batch_of(rewards: list[float], **columns: list[float]) -> Batch:
    mask = torch.tensor([True, True, True, True, False, True, True])
    more = {name: COMPLETIONS.with_values(torch.tensor(values)) for name, values in columns.items()}
    return Batch(
        {
            "completion_ids": COMPLETIONS,
            "completion_mask": COMPLETIONS.with_values(mask),
            "group": torch.tensor([0, 0, 1, 1]),
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            **more,
        }
    )


@pytest.mark.parametrize("keys", [{"scale_rewards": "none"}, {"advantage": "rloo"}, {"advantage": "opo"}])
@pytest.mark.parametrize("size", [1e13, 1e38, 1e155, 1e300])
def test_rewards_too_large_for_a_gradient_end_the_run_with_their_value(keys: dict[str, Any], size: float) -> None:
    with pytest.raises(DataError, match=rf"of .* with the reward {re.escape(f'{size:.4g}')}; .*1e\+12"):
        with_advantages(batch_of([size, -size, 1.0, 0.0]), spec_of(**keys), RankContext(), 0.0)


@pytest.mark.parametrize("size", [1e13, 1e155, 1e300])
@pytest.mark.parametrize("scale", ["group", "batch", "mad"])
def test_rewards_of_any_size_are_normalised_right(scale: str, size: float) -> None:
    """Two and two: 1 / sqrt(2) of the group's deviation; the batch has 4 rewards; mad: 1.4826 times half the gap."""
    batch = with_advantages(batch_of([size, -size, size, -size]), spec_of(scale_rewards=scale), RankContext(), 0.0)
    expected = {"group": 1 / math.sqrt(2), "batch": math.sqrt(3) / 2, "mad": 1 / 1.4826}[scale]
    signs = [1, 1, -1, 1, 0, 1, -1]
    assert batch["advantages"].values.tolist() == pytest.approx([sign * expected for sign in signs], rel=1e-6)


@dataclass(frozen=True)
class Own(AdvantageEstimator):
    """An estimator that gives the same numbers for all inputs."""

    estimator: Literal["own"] = key("own", "the advantage estimator")
    numbers: tuple[float, ...] = key((), "what it gives")

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        return Advantages(torch.tensor(self.numbers, dtype=torch.float64))


def own(*numbers: float) -> AdvantageSpec:
    return AdvantageSpec(Own(numbers=numbers))


def test_what_an_estimator_gives_at_masked_tokens_is_left_out() -> None:
    batch = with_advantages(batch_of([1.0, 0, 1, 0]), own(1, 2, 3, 4, math.nan, 6, 7), RankContext(), 0.0)
    assert batch["advantages"].values.tolist() == [1, 2, 3, 4, 0, 6, 7]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -2e12])
def test_what_is_no_number_where_it_counts_is_refused(wrong: float) -> None:
    numbers = [1.0] * 7
    numbers[5] = wrong
    with pytest.raises(DataError, match=r"Own.compute gave advantages of (nan|inf|-2e\+12) .* the reward 0.25; "):
        with_advantages(batch_of([1.0, 0, 0.25, 0]), own(*numbers), RankContext(), 0.0)
    unscored = with_advantages(batch_of([1.0, 0, math.nan, 0]), own(*numbers), RankContext(), 0.0)
    assert unscored.num_samples == 4  # it is in no loss


def test_a_token_that_neither_policy_nor_reference_can_make_has_no_penalty_to_add() -> None:
    """-inf less -inf would make the reward NaN, that is, take the sample for one without."""
    columns = {name: [-1.0, -math.inf, -1.0, -1.0, -1.0, -1.0, -1.0] for name in ("old_logprobs", "ref_logprobs")}
    with pytest.raises(DataError, match="kl=reward: the penalty of a token is nan, with ln p = -inf of the policy"):
        with_advantages(
            batch_of([1.0, 0, 1, 0], **columns), spec_of(kl="reward", beta=0.1, advantage="rloo"), RankContext(), 0.1
        )
