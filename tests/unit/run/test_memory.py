"""The plan of memory at the start of a run."""

import contextlib
import dataclasses
import types

import pytest

from hybrid_rl import Trainer
from hybrid_rl.config.hardware import Hardware
from hybrid_rl.errors import ConfigError
from hybrid_rl.memory.cycle import ACTOR, OPTIMIZER
from hybrid_rl.planning.activations import CannotCount
from hybrid_rl.planning.ledger import Budget
from hybrid_rl.run import memory_plan as memory
from hybrid_rl.run.memory_plan import budget_of, planned
from hybrid_rl.run.prepare import Run, prepare
from tests.support.tiny import build_model, build_tokenizer, exact, sums

SETTINGS = {"max_completion_length": 8, "prompts_per_step": 4, "num_generations": 4, "max_num_seqs": 8, "max_steps": 1}


def prepared(**overrides) -> Run:
    model, tokenizer = build_model(), build_tokenizer()
    with contextlib.ExitStack() as closing:
        arguments = (model, tokenizer, exact, sums(8), None, None)
        return prepare(*arguments, SETTINGS | overrides, closing=closing)


def test_nothing_is_planned_on_a_cpu_without_a_budget(monkeypatch):
    monkeypatch.delattr(memory, "plan_memory")
    run = prepared()
    assert planned(run) is run and run.plan is None


def test_choices_reach_the_configuration_of_the_workers():
    run = planned(prepared(device_memory="1GB"))
    assert run.plan is not None and run.plan.fits and run.plan.budget.device_bytes == 10**9
    # A sample of at most 13 tokens is one block of 16, a token takes 192 B.
    assert run.config.rollout.kv_cache_memory_bytes == 8 * 16 * 192
    assert run.config.memory.offload == [] and run.config.memory.on_host == []
    assert run.plan.resident_bytes(ACTOR) == 5472 * 4
    given = planned(prepared(device_memory="1GB", offload=["optimizer"], kv_cache_memory_bytes=10**6))
    assert given.config.memory.offload == [OPTIMIZER] and given.memory.offload == {OPTIMIZER}
    assert given.config.rollout.kv_cache_memory_bytes == 10**6


def test_run_that_cannot_fit_is_refused_before_workers_start(tmp_path, monkeypatch):
    monkeypatch.setattr("hybrid_rl.run.crew.start_workers", lambda *_: pytest.fail("workers were started"))
    with pytest.raises(
        ConfigError, match=r"(?s)does not fit into memory: phase .*actor +21\.9 kB +5,472 parameters x 4 B"
    ):
        Trainer(
            build_model(), exact, sums(8), tokenizer=build_tokenizer(), device_memory="30kB", output_dir=str(tmp_path),
            **SETTINGS,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_counted_run_without_a_plan_unless_a_budget_is_given(monkeypatch, caplog):
    def fail(*_, **__):
        raise CannotCount("its code reads numbers")

    run = prepared(device_memory="1GB")
    monkeypatch.setattr(memory, "plan_memory", fail)
    with pytest.raises(CannotCount, match="reads numbers"):
        planned(run)
    monkeypatch.setattr(memory, "budget_of", lambda *_: Budget(10**9, None, 1))
    free = dataclasses.replace(run.config, memory=dataclasses.replace(run.config.memory, device_memory=None))
    run = dataclasses.replace(run, config=free)
    assert planned(run) is run
    assert "there is no plan of memory" in caplog.text and "reads numbers" in caplog.text


def test_budget_is_what_keys_or_the_gpu_say():
    config = prepared(device_memory="80GB", host_memory="1TB").config
    budget = budget_of(config, Hardware())
    assert budget is not None and (budget.device_bytes, budget.host_bytes) == (80 * 10**9, 10**12)
    without = dataclasses.replace(config, memory=dataclasses.replace(config.memory, device_memory=None))
    assert budget_of(without, Hardware()) is None
    on_gpus = dataclasses.replace(without, model=dataclasses.replace(config.model, device="cuda"))
    assert budget_of(on_gpus, Hardware(8, is_here=False)) is None


def test_a_run_may_not_take_more_than_its_gpu_has(monkeypatch):
    config = prepared(device_memory="80GB").config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, device="cuda"))
    sizes = iter([79 * 10**9, 80 * 10**9])
    monkeypatch.setattr(memory.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        memory.torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=next(sizes))
    )
    with pytest.raises(ConfigError, match=r"memory.device_memory=80GB is more than the 79.0 GB of an H100"):
        budget_of(config, Hardware(8, "an H100"))
    assert budget_of(config, Hardware(8, "an H100")).device_bytes == 80 * 10**9
