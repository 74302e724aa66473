"""Parts of a run by themselves: rollouts without training, training on saved rollouts; and starts that fail."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.batch.rollout_files import load_rollout, rollout_steps, save_rollout
from hybrid_rl.errors import CheckpointError, ConfigError, DataError, HandoffError, StorageError
from hybrid_rl.rewards import RewardRunner
from tests.support.agents.turns import cut_in_turns
from tests.support.tiny import build_model, sums


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------------- rollout


def test_rollout_mode_saves_rollouts_and_trains_nothing(make_trainer, records) -> None:
    model = build_model()
    before = weights(model)
    trainer = make_trainer(model, mode="rollout", max_steps=3, log_completions=1)
    batches = [batch for batch, _ in trainer.steps()]
    trainer.fit()
    assert same_weights(weights(model), before)
    folder = trainer.run_folder / "rollouts"
    assert rollout_steps(folder) == [1, 2, 3]
    for step, batch in enumerate(batches, 1):
        saved = load_rollout(folder, step)
        assert set(saved) == set(batch)
        assert torch.equal(saved["completion_ids"].values, batch["completion_ids"].values)
        assert torch.equal(saved["rewards"], batch["rewards"])
        assert saved["policy_version"].values.unique().tolist() == [0]  # nothing was published
    lines = records(trainer)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert {"reward", "completions/mean_length", "num_tokens", "epoch", "step_time"} <= line.keys()
        assert not {"loss", "grad_norm", "learning_rate", "timing/update", "timing/logprobs"} & line.keys()
    assert len(records(trainer, name="samples.jsonl")) == 24


def test_rollout_mode_makes_the_first_rollout_of_a_full_run(make_trainer) -> None:
    full, only = make_trainer(save_rollouts=True), make_trainer(mode="rollout")
    full.step()
    only.step()
    first, second = (load_rollout(trainer.run_folder / "rollouts", 1) for trainer in (full, only))
    assert set(first) == set(second)
    assert torch.equal(first["completion_ids"].values, second["completion_ids"].values)
    assert torch.equal(first["rollout_logprobs"].values, second["rollout_logprobs"].values)
    assert first["completion"] == second["completion"]


# --------------------------------------------------------------------------------------------------------------- train


def without_engine(lines: list[dict]) -> list[dict]:
    """Metrics without those of the engine, which makes nothing while saved rollouts are trained on."""
    return [{name: value for name, value in line.items() if not name.startswith("engine/")} for line in lines]


@pytest.mark.parametrize(
    "keys",
    [
        {"num_iterations": 2, "prompts_per_mini_batch": 2, "lr_scheduler_type": "linear"},
        {"old_logprobs": "rollout", "beta": 0.1, "num_train_epochs": 1.0},
    ],
    ids=["mini-batches", "reference, epoch"],
)
def test_training_on_saved_rollouts_is_the_run_that_saved_them(make_trainer, records, keys: dict) -> None:
    """Bit for bit: losses, gradient norms, every other metric and the weights."""
    keys = keys if "num_train_epochs" in keys else {"max_steps": 3} | keys
    recorded_model, replayed_model = build_model(), build_model()
    initial = weights(recorded_model)
    recorded = make_trainer(recorded_model, save_rollouts=True, **keys)
    recorded.fit()
    assert recorded.max_steps == 3
    folder = recorded.run_folder / "rollouts"
    before = files(folder)
    replayed = make_trainer(replayed_model, mode="train", rollouts_path=str(folder), **keys)
    replayed.fit()
    mine, theirs = records(replayed, comparable=True), records(recorded, comparable=True)
    assert mine == without_engine(theirs)
    assert {"loss", "grad_norm", "entropy", "reward", "num_tokens", "epoch"} <= mine[-1].keys()
    assert same_weights(weights(replayed_model), weights(recorded_model))
    assert not same_weights(weights(replayed_model), initial)
    assert records(replayed, name="samples.jsonl") == records(recorded, name="samples.jsonl")
    assert files(folder) == before and not (replayed.run_folder / "rollouts").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"prompts_per_mini_batch": 2, "old_logprobs": "recompute", "beta": 0.1},
        {"beta": 0.1, "kl_estimator": "exact", "use_bias_correction_kl": False, "tokens_per_micro_batch": 24},
        {"advantage": "rloo", "kl": "reward", "beta": 0.1},
    ],
    ids=["mini-batches", "exact KL", "KL in the reward"],
)
def test_saved_rollouts_are_trained_on_at_the_temperature_that_they_were_made_at(
    make_trainer, records, keys: dict
) -> None:
    """Bit for bit, though the configuration says another one by now: logprobs, KL, gaps, losses and weights."""
    recorded_model, replayed_model = build_model(), build_model()
    recorded = make_trainer(recorded_model, save_rollouts=True, temperature=0.7, **keys)
    recorded.fit()
    path = str(recorded.run_folder / "rollouts")
    replayed = make_trainer(replayed_model, mode="train", rollouts_path=path, temperature=1.0, **keys)
    replayed.fit()
    mine = records(replayed, comparable=True)
    assert mine == without_engine(records(recorded, comparable=True))
    # The engine sampled at 0.7, and so does the trainer compute.
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-5 for line in mine if "loss" in line)
    assert same_weights(weights(replayed_model), weights(recorded_model))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_a_trajectory_teaches_the_same_in_one_turn_and_in_two(make_trainer, records, tmp_path, loss_type) -> None:
    """Turns of a trajectory are in several micro-batches; a KL and mini-batches take part."""
    keys = {
        "max_steps": 1,
        "prompts_per_mini_batch": 2,
        "tokens_per_micro_batch": 24,
        "beta": 0.1,
        "loss_type": loss_type,
    }
    whole_model, cut_model = build_model(), build_model()
    initial = weights(whole_model)
    whole = make_trainer(whole_model, save_rollouts=True, **keys)
    whole.fit()
    made = load_rollout(whole.run_folder / "rollouts", 1)
    cut = cut_in_turns(made)
    assert cut.num_samples > made.num_samples
    save_rollout(tmp_path, 1, 0, 1, cut)
    replayed = make_trainer(cut_model, mode="train", rollouts_path=str(tmp_path), **keys)
    replayed.fit()
    mine, theirs = records(replayed, comparable=True)[-1], records(whole, comparable=True)[-1]
    for name in ("reward", "reward_std", "frac_reward_zero_std", "rewards/num_failed"):
        assert mine[name] == theirs[name]
    for name in ("loss", "grad_norm", "kl", "entropy"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
    moved = {name: value - initial[name] for name, value in weights(whole_model).items()}
    for name, value in weights(cut_model).items():
        torch.testing.assert_close(value - initial[name], moved[name], rtol=1e-2, atol=1e-7)
    assert len(records(replayed, name="samples.jsonl")) == cut.num_samples


def test_training_mode_generates_nothing_but_probes(make_trainer, monkeypatch, records) -> None:
    recorded = make_trainer(save_rollouts=True)
    recorded.fit()
    path = str(recorded.run_folder / "rollouts")

    def refuses(completion_ids, **_):
        raise AssertionError("a saved rollout was scored again")

    replayed = make_trainer(reward_funcs=refuses, mode="train", rollouts_path=path, loss_type="grpo")
    monkeypatch.setattr(replayed.collector, "rollout", refuses)
    replayed.fit()
    mine, theirs = records(replayed), records(recorded)  # what they are for: one change, on the same samples
    assert [line["reward"] for line in mine[1:]] == [line["reward"] for line in theirs[1:]]
    assert mine[1]["loss"] != theirs[1]["loss"]


def test_a_rollout_of_other_size_or_a_missing_one_is_refused(make_trainer) -> None:
    recorded = make_trainer(save_rollouts=True)
    recorded.fit()
    path = recorded.run_folder / "rollouts"
    with pytest.raises(DataError, match="the rollout of step 1 has 4 prompts, but prompts_per_step=2; set it to 4"):
        make_trainer(mode="train", rollouts_path=str(path), prompts_per_step=2).fit()
    with pytest.raises(DataError, match="lacks 2 of the steps 1 to 4, the first is step 3; lower max_steps"):
        make_trainer(mode="train", rollouts_path=str(path), max_steps=4)
    next(path.glob("step-000001-*")).unlink()
    with pytest.raises(DataError, match="lacks 1 of the steps 1 to 2, the first is step 1"):
        make_trainer(mode="train", rollouts_path=str(path))
    with pytest.raises(DataError, match="the folder of rollouts .* does not exist"):
        make_trainer(mode="train", rollouts_path=str(path / "nowhere"))


def test_a_full_disk_ends_only_a_run_that_makes_nothing_else(make_trainer, monkeypatch, caplog) -> None:
    def full(folder, step, rank, num_ranks, batch):
        raise StorageError("No space left on device")

    monkeypatch.setattr("hybrid_rl.workers.hybrid.save_rollout", full)
    trainer = make_trainer(save_rollouts=True)
    trainer.fit()
    assert trainer.global_step == 2 and caplog.text.count("is not saved, nor are those that follow") == 1
    with pytest.raises(StorageError):
        make_trainer(mode="rollout").fit()


def test_a_resumed_run_makes_the_rollouts_of_later_steps_again(make_trainer) -> None:
    first = make_trainer(save_rollouts=True, save_steps=1, run_name="run", max_steps=3)
    first.fit()
    for step in (2, 3):
        shutil.rmtree(first.run_folder / f"checkpoint-{step}")
    kept = first.run_folder / "rollouts" / "step-000003-rank-0000-of-0001.safetensors"
    kept.rename(kept.with_name("step-000003-rank-0000-of-0002.safetensors"))  # as two ranks would have left it
    again = make_trainer(save_rollouts=True, run_name="run", resume="auto", max_steps=3)
    again.fit()
    assert rollout_steps(again.run_folder / "rollouts") == [1, 2, 3]
    load_rollout(again.run_folder / "rollouts", 3)


def test_a_column_that_no_file_can_hold_is_named(make_trainer) -> None:
    data = [dict(row, tag=object()) for row in sums(8)]
    trainer = make_trainer(train_dataset=data, save_rollouts=True)
    with pytest.raises(DataError, match=r"column 'row', sample 0\['tag'\] is of type object"):
        trainer.step()
    assert trainer.global_step == 0


# ------------------------------------------------------------------------------------------------- starts that fail

TOO_SMALL = {"kv_cache_memory_bytes": 4096, "max_completion_length": 50}


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_start_that_fails_leaves_no_run_folder(make_trainer, tmp_path, monkeypatch, resume) -> None:
    """Whether it fails for want of memory or at its first handoff; reward threads and processes end with it."""
    closed = []
    close = RewardRunner.close
    monkeypatch.setattr(RewardRunner, "close", lambda runner: (closed.append(runner), close(runner)))
    with pytest.raises(ConfigError, match="the KV cache holds 16 tokens"):
        make_trainer(run_name="run", resume=resume, **TOO_SMALL)
    assert list((tmp_path / "runs").iterdir()) == []
    num_closed = len(closed)
    with pytest.raises(HandoffError, match="policy version 0"):
        make_trainer(run_name="run", resume=resume, handoff={"probe_tolerance": 1e-30})
    assert list((tmp_path / "runs").iterdir()) == []
    assert len(closed) >= num_closed + 2  # the one of the checks, and the worker's
    with pytest.raises(ConfigError, match="nothing to train"):
        make_trainer(build_model().requires_grad_(False), run_name="run", resume=resume)
    assert list((tmp_path / "runs").iterdir()) == []
    make_trainer(run_name="run").step()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def test_a_resumed_start_that_fails_leaves_the_records_untouched(make_trainer, records) -> None:
    """The records of steps after the checkpoint go when the run really goes on, and no sooner."""
    keys = {"run_name": "run", "max_steps": 4, "save_steps": 2}
    first = make_trainer(**keys)
    for _ in range(3):
        first.step()
    first.close()
    optimizer = next((first.run_folder / "checkpoint-2").rglob("optimizer*/*.safetensors"))
    whole = optimizer.read_bytes()
    optimizer.write_bytes(whole[:100])
    damaged = files(first.run_folder)
    for resume in ("auto", str(first.run_folder / "checkpoint-2")):
        with pytest.raises(CheckpointError):
            make_trainer(resume=resume, **keys)
        assert files(first.run_folder) == damaged
    optimizer.write_bytes(whole)
    before = files(first.run_folder)
    for resume in ("auto", str(first.run_folder / "checkpoint-2")):
        with pytest.raises(ConfigError):
            make_trainer(resume=resume, **keys | TOO_SMALL)
        assert files(first.run_folder) == before
    resumed = make_trainer(resume="auto", **keys)
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        assert (resumed.run_folder / name).read_bytes() == before[name]
    resumed.fit()
    assert [line["step"] for line in records(resumed)] == [1, 2, 3, 4]
    assert {line["step"] for line in records(resumed, name="samples.jsonl")} == {1, 2, 3, 4}


def test_evaluation_makes_several_completions(make_trainer) -> None:
    """The accuracy is the share of all samples, pass@3 that of prompts with a success among theirs."""
    seen: list[list[float]] = []

    def odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append([float(len(ids) % 2) for ids in completion_ids])
        return seen[-1]

    keys = {"eval_temperature": 1.0, "num_generations_eval": 3, "score_by": "group"}
    trainer = make_trainer(reward_funcs=odd, eval_dataset=sums(5), **keys)
    metrics = trainer.evaluate()
    assert [len(one) for one in seen] == [3] * 5
    successes = [value for one in seen for value in one]
    assert 0 < sum(successes) < 15
    assert metrics["eval/accuracy"] == pytest.approx(sum(successes) / 15)
    assert metrics["eval/pass@3"] == pytest.approx(sum(max(one) for one in seen) / 5)
