"""The whole Trainer on 1, 2 and 4 real ranks: the same samples, losses and gradients, checkpoints for any of them."""

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl import Trainer
from hybrid_rl.batch import BatchRef
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.tiny import build_model, build_tokenizer, spread, sums

pytestmark = pytest.mark.slow  # processes are started

# Two optimizer steps per batch, a KL term, completions of different lengths, micro-batches of a few samples: whatever
# may depend on how a batch was cut or split.
KEYS = {
    "prompts_per_step": 6,
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "beta": 0.05,
    "prompts_per_mini_batch": 3,
    "tokens_per_micro_batch": 48,
}
NUM_STEPS = 10


@pytest.fixture
def train(tmp_path: Path, forked_ranks):
    """A Trainer of so many ranks over a model of random weights, always the same."""
    made = []

    def make(num_ranks: int, model=None, **keys) -> Trainer:
        keys = {**KEYS, "max_steps": NUM_STEPS, "output_dir": str(tmp_path / "runs"), **keys}
        if model is None:
            model = build_model(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
        if not isinstance(model, Path):
            keys["tokenizer"] = build_tokenizer()
        made.append(Trainer(model, spread, sums(12), num_ranks=num_ranks, **keys))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def metrics_of(trainer: Trainer) -> list[dict[str, float]]:
    return [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]


def loaded(batch):
    return batch.load() if isinstance(batch, BatchRef) else batch


def no_block(batch):
    raise AssertionError("the driver fetched samples in a step")


@pytest.mark.parametrize("num_steps", [2, pytest.param(NUM_STEPS, marks=pytest.mark.sweep)])
def test_replayed_steps_and_the_first_samples_are_the_same_on_1_2_and_4_ranks(train, monkeypatch, capfd, num_steps):
    """Two updates of the weights per step."""
    recorder = train(1, save_rollouts=True, max_steps=num_steps)
    first = recorder.step().batch
    recorder.fit()
    recorded, folder = metrics_of(recorder), recorder.run_folder / "rollouts"
    assert len(recorded) == num_steps
    assert len({tuple(ids.tolist()) for ids in first["completion_ids"]}) > 12  # nothing trivial is compared
    # A part: what two ranks learn from what one has sampled, and what four sample and learn in a step.
    everything = num_steps == NUM_STEPS
    for num_ranks in (1, 2, 4) if everything else (2,):
        replayed = train(num_ranks, mode="train", rollouts_path=str(folder), max_steps=num_steps)
        replayed.fit()
        for mine, theirs in zip(metrics_of(replayed), recorded, strict=True):
            for name in ("loss", "grad_norm", "kl", "entropy", "reward", "reward_std", "clip_ratio/region_mean"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), (num_ranks, mine["step"], name)
        replayed.close()
    for num_ranks in (2, 4) if everything else (4,):
        sampler = train(num_ranks, max_steps=1, log_completions=2)
        with monkeypatch.context() as patched:
            patched.setattr(BatchRef, "load", no_block)
            result = sampler.step()
        err = capfd.readouterr().err
        assert all(text in err for text in first["completion"][:2])
        mine = loaded(result.batch)
        assert isinstance(result.batch, BatchRef)
        for column in ("prompt_ids", "completion_ids", "policy_version"):
            assert torch.equal(mine[column].values, first[column].values), column
            assert torch.equal(mine[column].offsets, first[column].offsets), column
        for column in ("group", "trajectory", "rewards"):
            assert torch.equal(mine[column], first[column]), column
        for column in ("prompt", "completion", "row", "finish_reason", "function_rewards"):
            assert mine[column] == first[column], column
        gap = (mine["rollout_logprobs"].values - first["rollout_logprobs"].values).abs().max()
        assert gap < 1e-5
        assert result.metrics["grad_norm"] == pytest.approx(recorded[0]["grad_norm"], rel=1e-5)
        lines = [read_jsonl(sampler.run_folder / f"samples-rank{rank}.jsonl") for rank in range(num_ranks)]
        assert sorted(line["completion"] for part in lines for line in part) == sorted(first["completion"])
        sampler.close()
        gc.collect()


def test_ppo_with_its_critic_is_the_same_on_two_ranks(train):
    """Values, whitened advantages over all ranks, a KL in the reward, a correction, two models with an optimizer each;
    then a checkpoint of two ranks that one goes on from."""
    keys = {"algorithm": "ppo", "whiten_advantages": True, "correction": "mis", "critic_learning_rate": 1e-3}
    keys |= {"max_steps": 3, "old_logprobs": "recompute"}
    recorder = train(1, save_rollouts=True, **keys)
    recorder.fit()
    recorded = metrics_of(recorder)
    replay = {**keys, "mode": "train", "rollouts_path": str(recorder.run_folder / "rollouts"), "run_name": "replay"}
    replayed = train(2, save_steps=2, **replay)
    replayed.fit()
    names = ["loss", "grad_norm", "kl", "critic/value_loss", "critic/grad_norm", "critic/explained_variance"]
    names += ["critic/return_mean", "mismatch/ess_corrected", "mismatch/ratio_p99", "mismatch/mean_weight"]
    for mine, theirs in zip(metrics_of(replayed), recorded, strict=True):
        for name in names:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), (mine["step"], name)
    resumed = train(1, **replay, resume=str(replayed.run_folder / "checkpoint-2"))
    last = resumed.step().metrics
    for name in names:
        assert last[name] == pytest.approx(recorded[-1][name], rel=1e-5, abs=1e-6), name


def test_a_run_goes_on_at_another_number_of_ranks(train, tmp_path):
    """Saved by two ranks, resumed by one, three and two: those go on as the run that was not interrupted."""
    keys = {"max_steps": 3, "save_steps": 2, "run_name": "whole"}
    whole = train(2, **keys)
    whole.fit()
    expected = metrics_of(whole)[-1]
    folder = whole.run_folder
    weights = load_file(folder / "checkpoint-3" / "model.safetensors")
    whole.close()
    for num_ranks in (1, 2, 3):
        # A checkpoint inside a run folder continues that run: copied out of it, it begins one of its own.
        start = tmp_path / f"start-{num_ranks}"
        start.mkdir()
        (folder / "checkpoint-2").rename(start / "checkpoint-2")
        resumed = train(num_ranks, max_steps=3, save_steps=1, resume=str(start / "checkpoint-2"))
        assert resumed.global_step == 2
        resumed.fit()
        found = metrics_of(resumed)[-1]
        for name in ("loss", "grad_norm", "kl", "reward"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (num_ranks, name)
        mine = load_file(resumed.run_folder / "checkpoint-3" / "model.safetensors")
        assert mine.keys() == weights.keys()
        for name, tensor in mine.items():
            # Adam divides by the root of what may be tiny: 1 % of a step of 1e-3.
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5)
            if num_ranks == 2:
                assert torch.equal(tensor, weights[name]), name
        (start / "checkpoint-2").rename(folder / "checkpoint-2")
        resumed.close()


def test_bfloat16_keeps_its_masters_over_a_change_of_ranks(train, tmp_path):
    """With a learning rate far below the spacing of bfloat16 the saved weights do not change, but the masters do."""
    model = build_model(dtype=torch.bfloat16)
    keys = {"learning_rate": 1e-6, "save_steps": 1, "max_steps": 2, "beta": 0.0}
    one = train(1, model, **keys)
    one.fit()
    checkpoint = one.run_folder / "checkpoint-1"
    start = tmp_path / "start"
    start.mkdir()
    checkpoint.rename(start / "checkpoint-1")
    two = train(2, build_model(dtype=torch.bfloat16), **keys, resume=str(start / "checkpoint-1"))
    two.fit()
    from tests.support.optimizer_state import read_optimizer

    states = [read_optimizer(t.run_folder / "checkpoint-2") for t in (one, two)]
    begun = read_optimizer(start / "checkpoint-1")
    assert states[0]["master"].keys() == states[1]["master"].keys() == begun["master"].keys()
    for name, master in states[0]["master"].items():
        assert master.dtype == torch.float32
        torch.testing.assert_close(states[1]["master"][name], master, rtol=0, atol=3e-6)
    assert any(not torch.equal(states[1]["master"][name], begun["master"][name]) for name in begun["master"])


@pytest.mark.sweep
def test_a_model_folder_a_pool_for_the_reference_and_hybrid_sharding_change_nothing(train, tmp_path):
    module = build_model()
    module.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    expected = train(1, build_model(), max_steps=1).fit()  # two updates
    settings = {"sync_every_micro_batch": True, "reshard_after_forward": False, "on_host": ["activations"]}
    for keys in (
        {"num_ranks": 2, "model": tmp_path / "model", "reference_ranks": 2, **settings},
        {"num_ranks": 4, "dp_replicate": 2, "gradient_checkpointing": True},
    ):
        keys.setdefault("model", build_model())
        trainer = train(**keys, max_steps=1)
        found = trainer.fit()
        for name in ("loss", "grad_norm", "kl", "reward"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (keys, name)
        trainer.close()


@pytest.mark.sweep
def test_more_ranks_than_prompts_in_a_mini_batch(train):
    """Ranks without a prompt run micro-batches of weight zero, and generate nothing."""
    keys = {"prompts_per_step": 2, "prompts_per_mini_batch": 1, "max_steps": 2}
    expected = train(1, **keys).fit()
    trainer = train(3, **keys)
    found = trainer.fit()
    for name in ("loss", "grad_norm", "kl", "reward", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
