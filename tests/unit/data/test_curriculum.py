"""The curriculum: draws by hand, what it does to the share of groups with signal, and what a checkpoint keeps."""

import json
import math
from typing import Any

import numpy as np
import pytest

from hybrid_rl.data.curriculum import CurriculumSampler, make_sampler
from hybrid_rl.data.prompts import PromptEncoder
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.data.source import load_source
from hybrid_rl.errors import DataError
from tests.support.inside.data import row_at


def make(tokenizer: Any, num_prompts: int, *, floor: float | None = 0.05, seed: int = 7, drops: int = 0) -> Any:
    rows = [{"prompt": "9" * 9}] * drops + [{"prompt": f"{n}"} for n in range(num_prompts)]
    encoder = PromptEncoder(tokenizer, max_prompt_length=5, overlong_prompts="drop")
    return make_sampler(load_source(rows, encoder), shuffle=None, seed=seed, floor=floor)


def test_draws_by_hand(tokenizer: Any) -> None:
    """The prompt with the smallest -ln(u) / weight comes first, with u from the raw bits of PCG64."""
    sampler: CurriculumSampler = make(tokenizer, 4, floor=0.1)
    rows = [row_at(sampler, place) for place in range(4)]
    sampler.observe(rows, [0.5, 1.0, 0.25, math.nan])
    weights = [1.0, 0.1, 4 * 0.25 * 0.75, 1.0]  # of p = 1/2; of the floor; of p = 1/4; not measured
    expected = []
    for take in range(6):
        bits = [int(raw) for raw in np.random.PCG64([7, take, 4]).random_raw(4)]
        times = [-math.log(((raw >> 11) + 0.5) / 2**53) / weight for raw, weight in zip(bits, weights, strict=True)]
        expected.append([str(place) for place in sorted(range(4), key=times.__getitem__)][:2])
    assert [[row.prompt for row in sampler.take(2)] for _ in range(6)] == expected
    assert sampler.epoch == 12 / 4


def test_prompts_come_in_proportion_to_their_weights(tokenizer: Any) -> None:
    sampler = make(tokenizer, 3, floor=0.2)
    sampler.observe([row_at(sampler, place) for place in range(3)], [0.5, 0.0, 0.9])
    drawn = [sampler.take(1)[0].index for _ in range(4000)]
    weights = np.array([1.0, 0.2, 4 * 0.9 * 0.1])
    shares = np.bincount(drawn) / 4000
    assert shares == pytest.approx(weights / weights.sum(), abs=0.03)  # four standard deviations


def test_rates_fade_and_dropped_rows_do_not_shift_them(tokenizer: Any) -> None:
    sampler = make(tokenizer, 3, drops=2)
    row = row_at(sampler, 1)
    assert row.index == 3
    for rate in (1.0, 0.0, 0.5):
        sampler.observe([row], [rate])
    assert sampler.metrics() == {
        "curriculum/measured": pytest.approx(1 / 3),
        "curriculum/success_rate": 0.5,  # ((1 + 0) / 2 + 0.5) / 2
        "curriculum/never_solved": 0.0,
        "curriculum/always_solved": 0.0,
    }
    with pytest.raises(DataError, match="row 3: the first reward function gives 1.5 on average.*set success_reward"):
        sampler.observe([row], [1.5])


def test_more_groups_teach_something(tokenizer: Any) -> None:
    """A policy that solves one prompt in five sometimes, and the others never or always, which does not change."""
    skill = np.array([0.5 if place % 5 == 0 else float(place % 2) for place in range(200)])

    def share_with_signal(sampler: PromptSampler) -> float:
        random, useful = np.random.default_rng(0), []
        for step in range(60):
            rows = sampler.take(16)
            rates = [float(random.binomial(8, skill[row.index]) / 8) for row in rows]
            sampler.observe(rows, rates)
            useful += [0 < rate < 1 for rate in rates] if step >= 30 else []
        return float(np.mean(useful))

    plain, chosen = share_with_signal(make(tokenizer, 200, floor=None)), share_with_signal(make(tokenizer, 200))
    assert plain == pytest.approx(0.2, abs=0.05) and chosen > 0.75


def test_a_resume_repeats_the_draws(tokenizer: Any) -> None:
    first, resumed = make(tokenizer, 50), make(tokenizer, 50)
    for step in range(4):
        rows = first.take(8)
        first.observe(rows, [(row.index + step) % 9 / 8 for row in rows])
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.take(30) == first.take(30) and resumed.metrics() == first.metrics()
    with pytest.raises(DataError, match="has no success rates, which curriculum_floor needs"):
        resumed.load_state_dict(make(tokenizer, 50, floor=None).state_dict())
    with pytest.raises(DataError, match="belongs to other data or settings .seed: saved 7, now 8"):
        make(tokenizer, 50, seed=8).load_state_dict(first.state_dict())


def test_more_prompts_than_there_are(tokenizer: Any) -> None:
    rows = make(tokenizer, 3).take(7)
    assert [len({row.index for row in rows[start : start + 3]}) for start in (0, 3)] == [3, 3]


def test_what_a_curriculum_cannot_do(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, max_prompt_length=None)
    with pytest.raises(DataError, match="curriculum_floor draws prompts again .*stream"):
        make_sampler(load_source(lambda: iter([{"prompt": "1"}]), encoder), shuffle=None, seed=0, floor=0.1)
    with pytest.raises(DataError, match="shuffle=false asks for their order"):
        make_sampler(load_source([{"prompt": "1"}], encoder), shuffle=False, seed=0, floor=0.1)
