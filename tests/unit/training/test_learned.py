"""Numbers that a policy loss learns beside the model: the steps that move them, and those that do not."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.inside.training import learned_numbers
from tests.support.inside.workers import actor_of
from tests.unit.training.grpo_step import case_config


def test_a_loss_that_sees_whole_mini_batches_has_old_logprobs_with_one_update_too() -> None:
    assert case_config(policy_loss="lambda_grpo").algorithm.old_logprobs == "recompute"


def test_what_a_broken_off_update_left_behind_moves_no_learned_number(make_bench) -> None:
    found = []
    for left_behind in (None, torch.tensor([1e3], dtype=torch.float64)):
        bench = make_bench(policy_loss="lambda_grpo", loss_options={"lambda_learning_rate": 0.1})
        numbers = learned_numbers(actor_of(bench.worker))
        numbers.parameters.grad = left_behind
        bench.train()
        found.append(numbers.parameters.item())
    assert found[0] == found[1] != 0.0


def test_a_step_without_tokens_in_the_loss_moves_no_learned_number(make_trainer) -> None:
    """Adam's momentum would."""
    calls: list[int] = []

    def first_only(completion_ids, trainer_state, **_: Any) -> list[float | None]:
        calls.append(trainer_state.global_step)
        scored = trainer_state.global_step == 1
        return [float(len(ids)) * index if scored else None for index, ids in enumerate(completion_ids)]

    trainer = make_trainer(
        reward_funcs=first_only,
        policy_loss="lambda_grpo",
        loss_options={"lambda_learning_rate": 0.1},
        score_by="group",
        num_generations=4,
        max_reward_failure_share=1.0,
    )
    first, second = (step.metrics["policy_loss/parameter_0"] for step in trainer.steps())
    assert second == first != 0.0 and set(calls) == {1, 2}
