"""Numbers of whole mini-batches that a policy loss prepares, through the Trainer: the column fits any step."""

from __future__ import annotations

from typing import Any


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
