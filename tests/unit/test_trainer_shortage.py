"""Memory that runs out in one phase of a step costs a pass, and changes nothing."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl.errors import WorkerError
from hybrid_rl.memory.shortage import Halvings
from hybrid_rl.run import restarts
from tests.support.inside.wrapping import wrap
from tests.support.memory.small_memory import SmallMemory
from tests.support.tiny import build_model

# An update that is proportional to the gradient: Adam's own would make noise of the smallest ones as large as the rest.
KEYS = {"learning_rate": 0.1, "adam_epsilon": 1.0, "max_grad_norm": 1e6, "max_steps": 2, "num_generations": 4}


def trained(make_trainer, **keys):
    model = build_model()
    trainer = make_trainer(model, **{**KEYS, **keys})
    results = [trainer.step() for _ in range(2)]
    return model, results


@pytest.mark.parametrize(
    ("phase", "at_end", "keys"),
    [
        ("update", False, {}),
        ("update", True, {}),
        ("update", True, {"gradient_checkpointing": True}),
        ("update", True, {"algorithm": "gspo"}),
        ("update", False, {"top_entropy_quantile": 0.5}),
        ("scoring", False, {"old_logprobs": "recompute", "beta": 0.1}),
        ("scoring", False, {"algorithm": "ppo"}),
        ("update", True, {"algorithm": "ppo"}),
        ("rollout", False, {}),
        ("rollout", False, {"rollout": {"engine": "hf"}}),
    ],
    ids=str,
)
def test_a_shortage_in_a_phase_costs_a_pass_and_changes_nothing(phase, at_end, keys, make_trainer, monkeypatch, caplog):
    expected, results = trained(make_trainer, **keys)
    memory = SmallMemory(phase, 40 if phase != "rollout" else 12, at_end=at_end)
    memory.install(monkeypatch)
    model, mine = trained(make_trainer, **keys)
    assert memory.number >= 1 and "memory ran out in a pass" in caplog.text
    for result, other in zip(mine, results, strict=True):
        assert torch.equal(result.batch["completion_ids"].values, other.batch["completion_ids"].values)
        for name in ("loss", "grad_norm", "entropy"):
            assert result.metrics[name] == pytest.approx(other.metrics[name], rel=1e-5, abs=1e-6)
    for (name, parameter), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, theirs, rtol=0, atol=1e-6, msg=name)


def test_what_fits_in_no_way_ends_the_run_with_what_to_do(make_trainer, monkeypatch):
    SmallMemory("update", 3).install(monkeypatch)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        trained(make_trainer)
    assert any("not even a single sample of" in note for note in raised.value.__notes__)


# ------------------------------------------------------------------------------------- a rank among others, here alone

KEY = "optimizer.tokens_per_micro_batch"


@pytest.fixture
def among_others(monkeypatch):
    """The rank of this process leaves shortages to the driver, as one that others wait for."""
    wrap(monkeypatch, Halvings, "__init__", lambda own, self, **_: own(self, is_alone=False))
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.0)


def test_a_run_goes_on_with_half_the_micro_batch_as_often_as_it_must(
    make_trainer, model_folder, among_others, monkeypatch, caplog
):
    keys = KEYS | {"save_steps": 1, "run_name": "run"}
    expected = make_trainer(str(model_folder), **keys | {"run_name": "straight"})
    expected.fit()
    SmallMemory("update", 25).install(monkeypatch)
    trainer = make_trainer(str(model_folder), **keys, max_restarts=3)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        metrics = trainer.fit()
    lines = [line for line in caplog.messages if KEY in line]
    caps = [int(re.search(rf"{KEY}=(\d+)", line)[1]) for line in lines]
    assert len(caps) >= 2 and all(later <= earlier / 2 for earlier, later in zip(caps, caps[1:], strict=False)), caps
    assert metrics["restarts"] == len(caps) == sum("Restart" in line for line in caplog.messages)
    assert metrics["set/tokens_per_micro_batch"] == trainer.config.optimizer.tokens_per_micro_batch == caps[-1]
    text = (trainer.run_folder / "config.yaml").read_text()
    assert f"tokens_per_micro_batch: {caps[-1]}\n" in text and f"# after step 0: {KEY} None -> {caps[0]}\n" in text
    mine, theirs = (load_file(run.run_folder / "checkpoint-2" / "model.safetensors") for run in (trainer, expected))
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=0, atol=1e-6, msg=name)


def test_a_resumed_run_begins_with_what_restarts_came_to(make_trainer, model_folder, among_others, monkeypatch, caplog):
    keys = KEYS | {"save_steps": 1, "run_name": "run", "resume": "auto"}
    SmallMemory("update", 50).install(monkeypatch)
    with make_trainer(str(model_folder), **keys | {"max_restarts": 1}) as trainer:
        trainer.fit()
        tokens = trainer.config.optimizer.tokens_per_micro_batch
    caplog.clear()
    trainer = make_trainer(str(model_folder), **keys | {"max_steps": 3})
    assert trainer.config.optimizer.tokens_per_micro_batch == tokens is not None
    trainer.fit()
    assert trainer.global_step == 3 and "memory ran out" not in caplog.text


@pytest.mark.parametrize("method", ["fit", "step"])
def test_without_restarts_the_error_says_what_to_set(method, make_trainer, among_others, monkeypatch):
    trainer = make_trainer(**KEYS)
    SmallMemory("update", 50).install(monkeypatch)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        getattr(trainer, method)()
    tokens = re.search(r"the largest of this rank had (\d+) tokens", raised.value.__notes__[0])[1]
    advice = f"set {KEY}={int(tokens) // 2}: passes are smaller then"
    assert any(note.startswith(advice) for note in raised.value.__notes__)


def test_micro_batches_never_become_too_small_for_a_sample(make_trainer, model_folder, among_others, monkeypatch):
    """The longest one is of the evaluation, which may be of the training set too, for what the driver knows."""
    longest = {"eval_dataset": [{"prompt": "1+2+3=" * 9, "answer": "6"}]}
    trainer = make_trainer(str(model_folder), **KEYS, **longest, save_steps=1, max_restarts=3)
    SmallMemory("update", 10).install(monkeypatch)
    with pytest.raises(WorkerError, match="with the same error again") as raised:
        trainer.fit()
    assert f"{KEY} cannot be lower: a sample may take 59 tokens" in str(raised.value)
