"""What a policy loss prepares of whole mini-batches, through the Trainer: the column fits whatever a step holds."""

from __future__ import annotations

from typing import Any

import torch


def test_a_loss_that_sees_whole_mini_batches_gets_them_with_one_update_too(make_trainer) -> None:
    result = make_trainer(policy_loss="lambda_grpo", max_steps=1).step()
    assert result.metrics["grad_norm"] > 0 and "old_logprobs" in result.batch


def test_mini_batches_with_unlike_numbers_of_scored_samples_share_a_column(make_trainer) -> None:
    """One group is scored whole, of the other only two samples."""
    calls: list[int] = []

    def some(completion_ids, **_: Any) -> list[float | None]:
        calls.append(len(completion_ids))
        scores = [float(place) for place in range(len(completion_ids))]
        return [*scores] if len(calls) == 1 else [*scores[:2], None, None]

    trainer = make_trainer(
        reward_funcs=some,
        score_by="group",
        policy_loss="lambda_grpo",
        prompts_per_step=2,
        prompts_per_mini_batch=1,
        num_generations=4,
        max_reward_failure_share=1.0,
        max_steps=1,
    )
    result = trainer.step()
    assert calls == [4, 4] and int(result.batch["rewards"].isnan().sum()) == 2
    assert result.metrics["skipped_updates"] == 0 and result.metrics["grad_norm"] > 0


def test_what_a_broken_off_update_left_behind_moves_no_learned_number(make_bench) -> None:
    found = []
    for left_behind in (None, torch.tensor([1e3], dtype=torch.float64)):
        bench = make_bench(policy_loss="lambda_grpo", lambda_learning_rate=0.1)
        numbers = bench.worker._actor._numbers
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
        lambda_learning_rate=0.1,
        score_by="group",
        num_generations=4,
        max_reward_failure_share=1.0,
    )
    first, second = (step.metrics["policy_loss/parameter_0"] for step in trainer.steps())
    assert second == first != 0.0 and set(calls) == {1, 2}
