"""Adapters of attention and of fused experts, merged into a live vLLM's weights in every step; what goes wrong with
them is caught before a sample."""

import copy

import pytest
import torch
from peft import LoraConfig

from hybrid_rl import Trainer
from hybrid_rl.errors import ConfigError
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.resharding.handoff.merged import merge
from hybrid_rl.weights.plain import plain
from hybrid_rl.weights.sources import named_weights
from tests.support.inside.workers import engine_of, module_of, opened_source, side_of
from tests.support.tiny import VOCABULARY, build_model, build_tokenizer, spread, sums
from tests.vllm.rigs import tiny
from tests.vllm.test_trainer import KEYS, SHAPE, refused
from tests.vllm.test_trainer_ranks import LAYOUTS, short_folder  # noqa: F401

pytestmark = pytest.mark.slow

ADAPTERS = {
    "r": 4,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "v_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "rank_pattern": {"o_proj": 3},
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    model = tiny("qwen3-moe", **SHAPE, vocab_size=len(VOCABULARY), head_dim=32)
    keys = {**KEYS, "output_dir": str(tmp_path_factory.mktemp("runs")), "peft_config": LoraConfig(**ADAPTERS)}
    with Trainer(model, spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
        yield trainer


def test_in_every_step_every_logprob_is_the_trainers(trainer, worker):
    module = module_of(worker)
    with plain(module):
        before = {name: tensor.clone() for name, tensor in named_weights(module).items()}
    trainer.fit()
    lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
    assert len(lines) == 20
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-5
        assert line["handoff/probe_gap"] < 1e-5 and line["timing/verify"] > 0
        assert 0 < line["handoff/merged_bytes"] == line["handoff/bytes"] - line["handoff/minimum_bytes"]
    loaded = engine_of(worker).weights
    engine = dict(zip((spec.name for spec in loaded.trace.destinations), loaded.destinations, strict=True))
    with plain(module):  # the base has not moved, and the engine's weights have
        assert all(torch.equal(tensor, before[name]) for name, tensor in named_weights(module).items())
    name = "model.layers.1.self_attn.o_proj.weight"
    assert not torch.allclose(engine[name], before[name], atol=1e-4)


def test_adapters_that_were_not_merged(trainer, publish, worker, monkeypatch):
    monkeypatch.setattr("hybrid_rl.vllm.weights.merge", lambda trace, destinations, changes: 0)
    message = refused(trainer, publish, "engines do not hold the trainer's weights")
    assert "mlp.experts.down_proj" in message and "q_proj" in message
    with monkeypatch.context() as unproven:
        unproven.setattr(side_of(worker), "verify", lambda version: {})
        refused(trainer, publish, "differ by .* in the logprobs of the probe prompt")
    monkeypatch.undo()


def test_adapters_of_the_step_before(trainer, publish, worker, monkeypatch):
    """A step at 1e-6: no probe would see it."""
    with opened_source(worker, trainer.policy_version) as source:
        stale = copy.deepcopy(source.changes)
    place = "hybrid_rl.vllm.weights.merge"
    monkeypatch.setattr(place, lambda trace, destinations, changes: merge(trace, destinations, stale))
    with torch.no_grad():
        for name, parameter in module_of(worker).named_parameters():
            if ".lora_A." in name and ".v_proj." in name:
                parameter.mul_(1 + 1e-6)
    message = refused(trainer, publish, "engines do not hold the trainer's weights")
    assert "v_proj" in message and "q_proj" not in message
    monkeypatch.undo()


def test_memory_of_the_engine_cannot_be_the_bases(tmp_path):
    with pytest.raises(ConfigError, match=r"the base would be lost; leave adopt_weights out"):
        Trainer(
            tiny("qwen2", **SHAPE, vocab_size=len(VOCABULARY)),
            spread,
            sums(12),
            tokenizer=build_tokenizer(),
            peft_config=LoraConfig(r=4),
            handoff={"adopt_weights": True},
            output_dir=str(tmp_path),
            **KEYS,
        )


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_two_ranks(layout, tmp_path, short_folder):  # noqa: F811
    """Sharded base and adapters, into the halves of a tensor-parallel vLLM and into two replicas."""
    keys = {**KEYS, **LAYOUTS[layout], "num_ranks": 2, "output_dir": str(tmp_path)}
    keys["ray.env_vars"] = {"TMPDIR": str(short_folder)}
    model, adapters = build_model(**SHAPE), LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    with Trainer(model, spread, sums(12), tokenizer=build_tokenizer(), peft_config=adapters, **keys) as trainer:
        trainer.fit()
        lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
    assert len(lines) == 20
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-5
        assert line["handoff/probe_gap"] < 1e-5 and line["timing/verify"] > 0 and line["handoff/merged_bytes"] > 0
