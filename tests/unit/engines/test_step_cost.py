"""Seconds of engine steps from sums, by hand."""

from __future__ import annotations

import pytest

from hybrid_rl.engines.step_cost import StepCost, StepRates


def cost_of(*steps: tuple[int, int, float]) -> StepCost:
    """Of steps with so many sequences, tokens of prompts, and seconds."""
    cost = StepCost()
    for step in steps:
        cost.add(*step)
    return cost


def test_steps_on_a_line_give_that_line_and_prompts_what_is_left():
    """10 ms for a step and 5 ms for a sequence; 100 tokens of prompts add 100 ms to a step of 4 sequences. A step that
    made nothing is not one of those that tell what steps take."""
    cost = cost_of((4, 100, 0.13), (4, 0, 0.03), (2, 0, 0.02))
    cost.merge(cost_of((1, 0, 0.015), (0, 0, 0.0)))
    rates = cost.rates()
    assert rates is not None
    assert vars(rates) == pytest.approx({"of_step": 0.01, "of_sequence": 0.005, "of_prompt_token": 0.001})
    assert cost.seconds == pytest.approx(0.195) and cost.most_sequences == 4 and cost.num_ranks == 1


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # The line through them falls: 15 ms whatever the number.
        (((4, 0, 0.01), (2, 0, 0.02)), StepRates(0.015, 0.0, 0.0)),
        # The line is 4.5 ms times the number less 3.5 ms: through 0 it is (1 + 30) / (1 + 9) ms.
        (((1, 0, 0.001), (3, 0, 0.01)), StepRates(0.0, 0.0031, 0.0)),
        # Three points that are on no line: the slope is 2 ms, and the mean 2.5 ms at 2.
        (((1, 0, 0.001), (2, 0, 0.0015), (3, 0, 0.005)), StepRates(0.0, 0.019 / 14, 0.0)),
    ],
)
def test_no_part_is_negative(steps, expected):
    rates = cost_of(*steps).rates()
    assert rates is not None and vars(rates) == pytest.approx(vars(expected))


def test_steps_of_equal_size_do_not_tell_the_parts_apart():
    assert cost_of((3, 0, 0.1), (3, 0, 0.2), (5, 7, 0.3)).rates() is None
    assert StepCost().rates() is None
