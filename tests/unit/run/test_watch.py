"""Updates that are skipped: one is warned of, a few training steps of nothing else are an error that says why."""

import logging
import re

import pytest
import torch

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig, load_config
from hybrid_rl.errors import DivergedError
from hybrid_rl.run.causes import Scoring
from hybrid_rl.run.watch import LearningWatch, SignalWatch
from hybrid_rl.training.skipped import SkippedUpdate, columns_not_finite
from tests.support.inside.trainers import crew_of
from tests.support.inside.workers import critic_of, module_of, worker_of
from tests.support.tiny import build_model, build_tokenizer, spread, sums

FIRST = "model.layers.0.mlp.up_proj.weight"


def watch_of(*skipped: dict[str, float], updates: int = 2) -> tuple[list[str], LearningWatch]:
    """The errors of a run with these metrics, empty texts for none."""
    cause = SkippedUpdate(float("nan"), 1.0, ["a"], [], 3)
    watch = LearningWatch(updates)
    found = [
        watch.look(step, metrics, lambda: {"policy": cause, "critic": cause}) for step, metrics in enumerate(skipped)
    ]
    return [str(error or "") for error in found], watch


def policy(count: int) -> dict[str, float]:
    return {"skipped_updates": float(count)}


@pytest.mark.parametrize(
    ("steps", "has_error"),
    [
        ([policy(2)] * 3, True),
        ([policy(2), policy(2), policy(1), policy(2), policy(2)], False),  # something was learned in between
        ([policy(2), policy(2), policy(0), policy(2)], False),
        ([policy(1)] * 9, False),  # half of the updates went through each time
        ([policy(2), {}, policy(2), {}, policy(2)], True),  # the policy rests while the critic warms up
        ([{"critic/skipped_updates": 2.0, **policy(0)}] * 3, True),
        ([policy(0)] * 5, False),
    ],
)
def test_three_training_steps_without_an_update(steps: list[dict[str, float]], has_error: bool) -> None:
    errors, _ = watch_of(*steps)
    assert not any(errors[:-1]) and bool(errors[-1]) == has_error
    if has_error:
        who = "critic" if "critic/skipped_updates" in steps[0] else "policy"
        assert f"the {who} has not changed in the last 3 training steps, up to step {len(steps) - 1}" in errors[-1]
        assert "all of their updates (6)" in errors[-1]


def test_the_first_of_a_row_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        watch_of(policy(1), policy(1), policy(0), policy(1))
    assert [record.args[:3] for record in caplog.records] == [(0, 1, 2), (3, 1, 2)]


def test_of_all_ranks() -> None:
    """In the order of the model, whichever rank holds what; counts and losses add up."""
    parts = [
        SkippedUpdate(7.0, 1.0, ["c"], [], 3, {"advantages": (1, 4)}),
        SkippedUpdate(7.0, 2.0, ["b", "c"], ["b"], 3, {"advantages": (2, 5), "values": (1, 5)}),
    ]
    joined = SkippedUpdate.joined(parts, ["a", "b", "c"])
    assert (joined.norm, joined.loss, joined.gradients, joined.weights) == (7.0, 3.0, ["b", "c"], ["b"])
    assert joined.columns == {"advantages": (3, 9), "values": (1, 5)}
    assert "1 of 3 weights are not finite, first b; 3 of 9 tokens have advantages that are not finite" in str(joined)
    assert "the gradients of 2 of 3 parameters are not finite, first that of b" in str(joined)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"weights": ["a"]}, "earlier checkpoint"),
        ({"columns": {"advantages": (1, 2)}}, "look at the rewards"),
        ({"columns": {"ref_logprobs": (1, 2)}}, "look at the models that gave those"),
        ({"loss": float("inf")}, "a KL term may overflow"),
        ({}, "lower learning_rate"),
    ],
)
def test_what_to_do(changes: dict, remedy: str) -> None:
    cause = {"norm": 1.0, "loss": 1.0, "gradients": [], "weights": [], "num_parameters": 3}
    assert remedy in SkippedUpdate(**(cause | changes)).remedy


def test_columns_are_looked_at_where_they_count() -> None:
    ids = Jagged.from_rows([[1, 2], [3]], torch.int64)
    nan, inf = float("nan"), float("inf")
    columns = {"advantages": [nan, 1.0, inf], "old_logprobs": [1.0, -inf, 0.0], "values": [0.0, 0.0, 0.0]}
    batch = Batch({"completion_ids": ids, **{n: ids.with_values(torch.tensor(v)) for n, v in columns.items()}})
    assert columns_not_finite(batch, torch.tensor([True, False, True])) == {"advantages": (2, 2)}


SKIPPED = {"skipped_updates": 0.0}
MUTE = SKIPPED | {"advantages/zero_share": 1.0}
TAUGHT = SKIPPED | {"advantages/zero_share": 0.99}


@pytest.mark.parametrize(
    ("steps", "warned_at"),
    [
        ([MUTE] * 9, 3),  # once
        ([MUTE, MUTE, TAUGHT, MUTE, MUTE, TAUGHT], None),
        ([MUTE, TAUGHT, MUTE, MUTE, MUTE], 5),
        ([SKIPPED] * 3, 3),  # no token in the loss, so no metric of it
        ([{}] * 9, None),  # the critic warms up
        ([MUTE, {}, MUTE, {}, MUTE], 5),
    ],
)
def test_steps_in_which_the_rewards_teach_nothing(steps, warned_at, caplog) -> None:
    watch = SignalWatch(TrainerConfig())
    for step, metrics in enumerate(steps, 1):
        watch.look(step, metrics)
    expected = [] if warned_at is None else [f"the last 3 training steps, up to step {warned_at}, taught nothing"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == expected


SCORED = MUTE | {"reward": 0.25, "reward_std": 0.5, "frac_reward_zero_std": 0.5}


@pytest.mark.parametrize(
    ("keys", "metrics", "reason"),
    [
        (
            {"mask_truncated_completions": True},
            SCORED | {"completions/clipped_ratio": 1.0},
            "All .* truncated, and mask",
        ),
        ({}, SCORED | {"reward": float("nan")}, "No completion had a reward"),
        ({}, SCORED | {"agents/turns_mean": 0.0}, "The policy was never asked"),
        ({}, SCORED | {"reward_std": 0.0, "frac_reward_zero_std": 1.0}, r"All rewards were 0\.25"),
        ({}, SCORED | {"frac_reward_zero_std": 1.0}, r"each prompt had equal rewards \(their mean was 0\.25\)"),
        (
            {"advantage": "rejection", "reward_threshold": 9},
            SCORED,
            "advantage=rejection counts only those from reward_threshold=9 upwards: set it between",
        ),
        ({}, SCORED | {"completions/clipped_ratio": 1.0}, "advantage=grpo gave 0 for all"),
    ],
)
def test_why_the_rewards_teach_nothing(keys, metrics, reason, caplog) -> None:
    watch = SignalWatch(load_config(None, keys)[0])
    for step in range(3):
        watch.look(step, metrics)
    assert re.search(reason, caplog.text)


def test_a_step_of_which_all_trajectories_ran_out_of_time_is_warned_of(caplog) -> None:
    watch = SignalWatch(load_config(None, {"trajectory_timeout_seconds": 7})[0])
    for step, share in enumerate((0.0, 0.9, 1.0, 1.0), 1):
        watch.look(step, TAUGHT | {"agents/ended_time": share})
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "step 3: all trajectories were ended by trajectory_timeout_seconds=7.0"
    ]


def test_a_step_in_which_no_answer_called_a_tool_is_told_of(caplog) -> None:
    """Also if rewards differ, so that the step teaches something."""
    for has_tools in (False, True):
        watch = SignalWatch(TrainerConfig(), Scoring(has_tools=has_tools))
        for step, calls in enumerate((0.5, 0.0, 0.0), 1):
            watch.look(step, TAUGHT | {"tools/call_frequency": calls})
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == ["step 2: No answer called a tool"]


# --------------------------------------------------------------------------------------------------------- in a Trainer


def poison(trainer) -> None:
    """From now on the gradient of a parameter is not finite."""
    parameter = dict(module_of(trainer).named_parameters())[FIRST]
    parameter.register_hook(lambda gradient: gradient * float("nan"))


def test_a_run_that_does_not_learn_any_more_ends(make_trainer, records, caplog) -> None:
    trainer = make_trainer(max_steps=9, save_steps=9, prompts_per_mini_batch=2)
    trainer.step()
    poison(trainer)
    before = {n: p.detach().clone() for n, p in trainer.module.named_parameters()}
    with pytest.raises(DivergedError) as caught:
        trainer.fit()
    told = str(caught.value)
    for part in (
        *("the policy has not changed in the last 3 training steps, up to step 4", "updates (6) were skipped"),
        *("the gradient norm was nan; the loss was ", "the gradients of 1 of 26 parameters are not finite", FIRST),
        *("What to do: lower learning_rate", "The weights are those of the last good update"),
    ):
        assert part in told, told
    assert all(torch.equal(before[name], value) for name, value in trainer.module.named_parameters())
    assert caplog.text.count("training step 2: 2 of 2 updates of the policy were skipped") == 1
    assert [line.get("skipped_updates") for line in records(trainer)] == [0, 2, 2, 2]
    assert (trainer.run_folder / "checkpoint-4").is_dir()  # what was learned so far
    trainer.close()
    assert make_trainer(max_steps=9, resume=str(trainer.run_folder / "checkpoint-4"), save_steps=9).step()


def test_huge_advantages_are_named(make_trainer, monkeypatch) -> None:
    """Whatever made them: here one that is put into the batch."""
    trainer = make_trainer(max_steps=4)
    worker = worker_of(trainer)
    compute = worker.advantages

    def broken(batch):
        batch = compute(batch)
        batch["advantages"].values[3] = float("inf")
        return batch

    monkeypatch.setattr(worker, "advantages", broken)
    with pytest.raises(
        DivergedError, match="1 of .* tokens have advantages that are not finite; .* look at the rewards"
    ):
        trainer.fit()
    assert trainer.global_step == 3


def test_weights_that_are_broken_are_not_saved(make_trainer, caplog) -> None:
    """A checkpoint of them would be the newest: resume=auto would go on from it instead of a good one."""
    trainer = make_trainer(max_steps=9, save_steps=1)
    trainer.step()
    look = crew_of(trainer).watch.look
    cause = SkippedUpdate(float("nan"), float("nan"), [], [FIRST], 26)
    crew_of(trainer).watch.look = lambda step, metrics, why: look(
        step, metrics | {"skipped_updates": 1}, lambda: {"policy": cause}
    )
    trainer.step()
    assert "step 2 is not saved: its weights are not finite" in caplog.text
    assert [path.name for path in trainer.run_folder.glob("checkpoint-*")] == ["checkpoint-1"]


def test_the_critic_is_watched_too(make_trainer) -> None:
    trainer = make_trainer(advantage="gae", critic_learning_rate=1e-3, max_steps=5, train_dataset=sums(12))
    critic = critic_of(trainer).model.module
    name, parameter = next((n, p) for n, p in critic.named_parameters() if n.endswith("up_proj.weight"))
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(DivergedError, match=f"the critic has not changed in the last 3 .* first that of {name}"):
        trainer.fit()


def texts(completions, **_):
    return [float(completion.count("1")) for completion in completions]  # of a list: 0 for ever


def constant(completions, **_):
    return [0.5] * len(completions)


@pytest.mark.parametrize(
    ("reward", "keys", "cause"),
    [
        (constant, {}, r"All rewards were 0.5\. All completions were cut off by a limit .*length=5\)\. Check"),
        (
            texts,
            {"is_chat": True},
            r"All rewards were 0\. .* Check the completions .*your own gets chat completions as lists.*content",
        ),
        (constant, {"algorithm": "ppo"}, "constant gave every completion the same reward .0.5., from which nothing"),
        (
            [texts, spread],
            {"is_chat": True},
            'up to step 3, texts gave every completion the same reward .0.*use completion.-1.."content".',
        ),
    ],
)
def test_a_run_without_a_gradient_is_told_of_within_three_steps(make_trainer, reward, keys, cause, caplog) -> None:
    keys = dict(keys)
    if is_chat := keys.pop("is_chat", False):
        keys["tokenizer"] = build_tokenizer(chat=True)
    make_trainer(build_model(), reward, sums(12, chat=is_chat), max_steps=3, **keys).fit()
    told = [record.getMessage() for record in caplog.records if "step 3" in record.getMessage()]
    assert len(told) == 1 and re.search(cause, told[0]), caplog.text


def test_a_function_that_became_the_same_for_all_is_not_told_of(caplog) -> None:
    watch = SignalWatch(TrainerConfig())
    for step, std in enumerate([0.1, 0.0, 0.0, 0.0, 0.0], 1):
        watch.look(step, TAUGHT | {"rewards/form/mean": 1.0, "rewards/form/std": std})
    assert not caplog.records


def test_a_gradient_of_zero_is_told_of(caplog) -> None:
    watch = SignalWatch(TrainerConfig())
    for step in range(1, 6):
        watch.look(step, TAUGHT | {"grad_norm": 0.0})
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "the gradient was 0 in the last 3 training steps"
    ]


@pytest.mark.parametrize(
    ("steps", "begun", "expected"),
    [
        ([MUTE], 0, ["training step 1 taught nothing"]),
        ([TAUGHT, MUTE, MUTE], 1, ["training steps 2 to 3 taught nothing"]),
        ([MUTE, MUTE, MUTE], 0, []),  # the warning of the third step says it
        ([MUTE, TAUGHT], 0, []),
        ([TAUGHT, MUTE], 0, []),
        ([MUTE], 1, []),  # no step
    ],
)
def test_the_end_of_a_short_run_in_which_nothing_was_taught(steps, begun, expected, caplog) -> None:
    watch = SignalWatch(TrainerConfig())
    for step, metrics in enumerate(steps, 1):
        watch.look(step, metrics)
    caplog.clear()
    watch.end(begun)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == expected


def test_a_run_of_one_step_says_what_it_missed(make_trainer, caplog, capsys) -> None:
    def same(completions, **_) -> list[float]:
        return [0.5] * len(completions)

    trainer = make_trainer(reward_funcs=same, train_dataset=sums(5), max_steps=None)
    told = "1 of 5 prompts are never used: num_train_epochs=1 makes 1 step of prompts_per_step=4; raise"
    assert told in capsys.readouterr().err
    trainer.fit()
    assert "training step 1 taught nothing" in caplog.text and "All rewards were 0.5" in caplog.text


def test_a_learning_rate_that_ruins_a_model_is_told_of(make_trainer, caplog) -> None:
    make_trainer(learning_rate=1e6)
    assert "learning_rate=1e+06: AdamW moves each weight by about this much" in caplog.text
