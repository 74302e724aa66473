"""A recorded step, trained once more: every number of it is that of the run."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

import hybrid_rl
from hybrid_rl.cli.app import main
from hybrid_rl.errors import CheckpointError, ConfigError, DataError
from tests.support.agents.callers import build_policy
from tests.support.tiny import build_model, build_tokenizer, ids_of, spread, sums

METRICS = ("loss", "grad_norm", "entropy", "kl", "critic/value_loss")
COLUMNS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "policy_version")


def run_of(make_trainer, *, steps=3, **keys):
    """A run that keeps its samples: its folder, the module that it began with, and the results of its steps."""
    keys = {
        "save_rollouts": True,
        "run_name": "recorded",
        **({} if "num_train_epochs" in keys else {"max_steps": 4}),
        **keys,
    }
    trainer = make_trainer(build_model(), **keys)
    results = [trainer.step() for _ in range(steps)]
    trainer.close()
    return trainer.run_folder, results


def again(folder: Path, step: int, **changes):
    return hybrid_rl.replay(folder, step, build_model(), train_dataset=sums(12), tokenizer=build_tokenizer(), **changes)


def same(mine, theirs) -> None:
    batch = theirs.batch.load()
    for name in METRICS:
        assert (name in mine.metrics) == (name in theirs.metrics), name
        if name not in theirs.metrics:
            continue
        assert mine.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-6, abs=1e-9), name
    for name in COLUMNS:
        assert (name in mine.batch) == (name in batch), name
        if name in batch:
            torch.testing.assert_close(mine.batch[name].values, batch[name].values, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"beta": 0.1, "old_logprobs": "recompute", "num_iterations": 2},
        {"algorithm": "ppo"},
        {"async_level": 1},
        {"num_train_epochs": 2, "lr_scheduler_type": "cosine"},
        *(
            pytest.param(keys, marks=pytest.mark.sweep)
            for keys in (
                {"algorithm": "gspo", "prompts_per_mini_batch": 2},
                {"lora.r": 2, "lora_alpha": 8},
                {"lr_scheduler_type": "linear", "partial": True},
                {"rollout": {"engine": "hf"}},
                {"reward_weights": [2.0], "rewards.overlong_buffer": 2},
            )
        ),
    ],
    ids=str,
)
def test_every_step_is_that_of_the_run(keys, make_trainer) -> None:
    folder, results = run_of(make_trainer, **keys)
    for step, result in enumerate(results, 1):
        same(again(folder, step), result)


def test_agents_are_read_and_not_asked(tmp_path) -> None:
    """Trajectories of many turns, of which the rollout function is not given."""

    async def walk(rows, client, num_generations):
        trajectories = [client.trajectory(row) for row in rows]
        for row, trajectory in zip(rows, trajectories, strict=True):
            ids = ids_of(row["prompt"])
            for turn_number in range(2):
                turn = await client.generate(ids, trajectory, max_tokens=4)
                ids = [*ids, *turn.token_ids, *ids_of(f"{turn_number}+")]
            trajectory.add_reward(sum(turn.token_ids) % 7 / 7)
        return trajectories

    keys = {"prompts_per_step": 2, "num_generations": 3, "max_completion_length": 24, "learning_rate": 1e-2}
    keys |= {"max_steps": 2, "output_dir": str(tmp_path), "save_rollouts": True, "tokenizer": build_tokenizer()}
    with hybrid_rl.Trainer(build_model(), None, sums(12), rollout_func=walk, **keys) as trainer:
        results = list(trainer.steps())
    for step, result in enumerate(results, 1):
        replayed = again(trainer.run_folder, step)
        same(replayed, result)
        assert {token.is_policy for token in replayed.tokens(0)} == {True, False}
        assert all(token.loss_weight == 0 for token in replayed.tokens(0) if not token.is_policy)


def test_a_replay_begins_with_the_last_checkpoint_before_the_step(make_trainer) -> None:
    folder, results = run_of(make_trainer, save_steps=2)
    (folder / "rollouts" / "step-000001-rank-0000-of-0001.safetensors").unlink()
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    same(again(folder, 3), results[2])
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
    with pytest.raises(CheckpointError, match="the samples of step 1 are missing"):
        again(folder, 2)
    with pytest.raises(DataError, match=r"has no samples of step 4; it has steps \[2, 3\]"):
        again(folder, 4)


def test_what_the_update_did_with_each_token(make_trainer) -> None:
    """By hand: GRPO without a KL, one optimizer step, loss_type=dapo: each token weighs 1/T, its ratio is 1, and the
    slope in its ln p is that times its advantage."""
    folder, _ = run_of(make_trainer, loss_type="dapo", beta=0.0, num_iterations=1, old_logprobs="detach")
    replayed = again(folder, 2)
    batch = replayed.batch
    weight, advantage = batch["loss_weight"].values, batch["advantages"].values
    assert torch.equal(batch["ratio"].values, torch.ones(len(weight))) and not batch["clipped"].values.any()
    torch.testing.assert_close(weight, torch.full_like(weight, 1 / len(weight)))
    torch.testing.assert_close(batch["gradient_share"].values, advantage.abs() / advantage.abs().sum())
    (token, *_) = replayed.tokens(1)
    assert (token.ratio, token.clipped, token.loss_weight) == (1.0, False, pytest.approx(1 / len(weight)))
    assert token.gradient_share == pytest.approx(float(batch["gradient_share"][1][0]))
    html = replayed.show("gradient_share").html()
    assert "gradient_share" in html and "share of the gradient" in html
    with pytest.raises(DataError, match="step 2 has 8 samples, from 0"):
        replayed.tokens(8)


def test_ratios_and_clips_of_a_second_pass(make_trainer) -> None:
    keys = {"num_iterations": 2, "old_logprobs": "recompute", "epsilon": 0.01, "learning_rate": 0.05}
    folder, results = run_of(make_trainer, **keys)
    replayed = again(folder, 1)
    same(replayed, results[0])
    ratio, clipped, share = (replayed.batch[name].values for name in ("ratio", "clipped", "gradient_share"))
    up = replayed.batch["advantages"].values > 0
    assert torch.equal(clipped, torch.where(up, ratio > 1.01, ratio < 0.99)) and 0 < int(clipped.sum()) < len(clipped)
    assert not share[clipped].any() and float(share.sum()) == pytest.approx(1.0)


def test_another_model_than_that_of_the_run_is_told(make_trainer, caplog) -> None:
    folder, _ = run_of(make_trainer, beta=0.5, save_steps=1)
    again(folder, 3)
    assert "is not what the run logged" not in caplog.text
    hybrid_rl.replay(folder, 3, build_model(seed=1), train_dataset=sums(12), tokenizer=build_tokenizer())
    assert "step 3 of" in caplog.text and "is not what the run logged: loss" in caplog.text


def test_other_keys_hold_for_the_step_alone(make_trainer) -> None:
    folder, results = run_of(make_trainer)
    other = again(folder, 3, learning_rate=1.0)  # which matters only after the step
    same(other, results[2])


def test_a_step_that_trains_only_the_critic_is_refused(make_trainer) -> None:
    folder, results = run_of(make_trainer, algorithm="ppo", critic_warmup_steps=1)
    with pytest.raises(DataError, match="did not train the policy, only its critic"):
        again(folder, 1)
    same(again(folder, 2), results[1])


def test_other_keys_and_other_rewards(make_trainer) -> None:
    folder, results = run_of(make_trainer)
    plain, other = again(folder, 2), again(folder, 2, epsilon=0.05, beta=0.2)
    assert other.changes == {"epsilon": 0.05, "beta": 0.2} and "kl" in other.metrics and "kl" not in plain.metrics
    rescored = again(folder, 2, rescore=lambda sample: float(len(sample.tokens)))
    lengths = results[1].batch["completion_length"]
    assert (
        torch.equal(rescored.batch["rewards"], lengths.double())
        and rescored.metrics["reward"] == lengths.double().mean()
    )
    nobody = again(folder, 2, rescore=lambda sample: float(len(sample.tokens)) if len(sample.tokens) > 2 else None)
    assert torch.equal(nobody.batch["rewards"].isnan(), lengths <= 2)
    text = plain.compare(rescored)
    assert "grad_norm" in text and "sample " in text and repr(plain).count("in the run") >= 2


@pytest.mark.parametrize(
    "key", ["temperature", "rollout.max_completion_length", "num_ranks", "max_steps", "seed", "save_steps"]
)
def test_keys_that_would_change_nothing_are_refused(key, make_trainer) -> None:
    folder, _ = run_of(make_trainer)
    with pytest.raises(ConfigError, match=rf"replay\({key.rpartition('.')[2]}=...\) would change nothing"):
        again(folder, 1, **{key: 2})


def test_rows_whose_prompts_an_environment_made_need_no_environment(tmp_path) -> None:
    """Its reward is one of the recorded ones."""

    class Game:
        def reset(self, start: int) -> str:
            self.start = start
            return f"from {start}"

        def get_reward(self) -> float:
            return self.start / 4

    model, tokenizer = build_policy([], favour={"k": 3.0})
    rows = [{"start": start} for start in range(8)]
    keys = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 24, "learning_rate": 1e-2}
    keys |= {"max_steps": 2, "output_dir": str(tmp_path), "save_rollouts": True}
    first = copy.deepcopy(model)
    arguments = {"tokenizer": tokenizer, "environment_factory": Game, "max_prompt_length": 40}
    with hybrid_rl.Trainer(model, spread, rows, **arguments, **keys) as trainer:
        results = list(trainer.steps())
    for step, result in enumerate(results, 1):
        same(hybrid_rl.replay(trainer.run_folder, step, first, train_dataset=rows, tokenizer=tokenizer), result)


def test_the_command_replays_a_run_that_was_given_by_paths(make_trainer, tmp_path, capsys) -> None:
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    build_model().save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    data.write_text("".join(json.dumps(row) + "\n" for row in sums(12)))
    paths = {"model.path": str(model), "data.train_path": str(data)}
    trainer = make_trainer(None, spread, None, save_rollouts=True, **paths)
    result = trainer.step()
    trainer.close()
    assert main(["replay", str(trainer.run_folder), "1", "--sample", "0"]) == 0
    shown = capsys.readouterr().out
    assert f"loss                     {result.metrics['loss']:.3g}"[:30] in shown and "gradient_share" in shown
    assert main(["replay", str(trainer.run_folder), "1", "beta=0.5"]) == 0
    assert "beta=0.5" in capsys.readouterr().out
