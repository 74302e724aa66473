"""Every estimator that is registered, with each option at another value too, against the papers' formulas in loops, on
drawn samples: uneven groups, ties, samples without a reward or without a token, rewards at single tokens."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos import ADVANTAGES, AdvantageEstimator, AdvantageInputs
from hybrid_rl.algos.advantages import GRPO, VAPO
from tests.unit.algos.variants import variants
from tests.unit.algos.wild import Draw, seeds
from tests.unit.training.written_estimators import Sample, Token, advantages

ESTIMATORS: dict[str, AdvantageEstimator] = {
    **variants(ADVANTAGES),
    **{
        f"grpo by steps, {scale}": GRPO(token_level=True, scale_rewards=scale)  # type: ignore[arg-type]
        for scale in ("batch", "mad", "none")
    },
    "vapo, short": VAPO(length_adaptive_alpha=0.5),
}
NUM_SAMPLES, VOCABULARY = 14, 5


def drawn_samples(seed: int) -> list[Sample]:
    """Rewards are multiples of 1/4, so that sums of them are exact, and none is negative."""
    draw = Draw(seed)
    samples = []
    for place in range(NUM_SAMPLES):
        tokens = []
        for _ in range(int(draw.integers(0, 7, 1))):
            made = float(draw.uniform(0, 1, 1)) < 0.75
            old_logs = draw.uniform(-3, 0, VOCABULARY).log_softmax(0).tolist()
            own = int(draw.integers(0, VOCABULARY, 1))
            rollout, ref, teacher, value = draw.uniform(-2, 0, 4).tolist()
            dense = float(draw.of(torch.tensor([0.0, 0.0, 0.25, 0.5]), 1)) if made else 0.0
            tokens.append(
                Token(own, 0, made, old_logs[own], rollout, ref, teacher, value, dense, 0, old_logs, old_logs, old_logs)
            )
        reward = float(draw.of(torch.tensor([0.0, 0.0, 0.5, 1.0, 2.5, math.nan]), 1))
        parts = draw.of(torch.tensor([0.0, 0.5, 1.0, math.nan]), 2).tolist()
        group = 3 if place > 9 else place % 3
        total = reward + sum(token.dense for token in tokens)
        samples.append(Sample(tokens, total, float(draw.uniform(0, 1, 1)), group, False, parts))
    return samples


def inputs_of(samples: list[Sample]) -> AdvantageInputs:
    tokens = [token for sample in samples for token in sample.tokens]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=torch.float64)

    return AdvantageInputs(
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        groups=torch.tensor([sample.group for sample in samples]),
        rows=torch.tensor([row for row, sample in enumerate(samples) for _ in sample.tokens], dtype=torch.int64),
        mask=column("made").bool(),
        token_rewards=column("dense"),
        rollout_logprobs=column("rollout"),
        logprobs=column("old"),
        ref_logprobs=column("ref"),
        teacher_logprobs=column("teacher"),
        values=column("value"),
        sum_pi_squared=torch.tensor([sum(math.exp(2 * log) for log in t.old_logs) for t in tokens]).double(),
        baseline_rewards=torch.tensor([sample.greedy for sample in samples], dtype=torch.float64),
        function_rewards=torch.tensor([sample.parts for sample in samples], dtype=torch.float64),
        reward_weights=torch.ones(2).double(),
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@seeds(4, 200)
def test_advantages_are_those_of_the_definition(name: str, seeds: range) -> None:
    for seed in seeds:
        samples = drawn_samples(seed)
        expected = [0.0] * sum(len(sample.tokens) for sample in samples)
        places = [place for place, token in enumerate(t for s in samples for t in s.tokens) if token.made]
        for place, value in zip(places, sum(advantages(ESTIMATORS[name], samples), []), strict=True):
            expected[place] = value
        found = ESTIMATORS[name].compute(inputs_of(samples)).advantages.tolist()
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-6), seed
