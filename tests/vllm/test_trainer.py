"""The whole Trainer over a vLLM of this process, and whatever can go wrong with its weights: caught before a sample."""

from dataclasses import replace

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.errors import EngineStateError, HandoffError
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.inside.vllm import wrap_plan, writer_of
from tests.support.inside.workers import engine_of, module_of, side_of
from tests.support.tiny import build_model, build_tokenizer, spread, sums

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
KEYS = {
    "handoff.probe_steps": 1,
    "engine": "vllm",
    "engine_args.enforce_eager": True,
    "rollout.engine_args.block_size": 32,  # any argument of vLLM is a key
    "kv_cache_memory_bytes": 2**22,
    "engine_args.per_request_seeds": True,
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "max_steps": 20,
    "handoff.probe_tolerance": 1e-5,
    "handoff.verify_steps": 1,
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    model = build_model(**SHAPE, tie_word_embeddings=False)
    with Trainer(model, spread, sums(12), tokenizer=build_tokenizer(), output_dir=str(folder), **KEYS) as trainer:
        yield trainer


@pytest.fixture
def writer(worker):
    return writer_of(engine_of(worker))


def refused(trainer, publish, match):
    """Publishing fails, and nothing can be generated then."""
    with pytest.raises(HandoffError, match=match) as caught:
        publish()
    with pytest.raises(EngineStateError, match="never given any"):
        trainer.generate("1+2=")
    return str(caught.value)


def test_twenty_steps_and_every_logprob_is_the_trainers(trainer):
    trainer.fit()
    lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
    assert len(lines) == 20
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-5
        assert line["handoff/probe_gap"] < 1e-5
        assert line["handoff/bytes"] > 1e5 and line["timing/verify"] > 0


def test_generating_is_free_to_truncate_and_repeats_itself(trainer):
    calls = [trainer.generate(["1+2=", "3+4="], num_generations=3, seed=5, top_k=4) for _ in range(2)]
    texts = [[generation.completion for generation in call] for call in calls]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_one_corrupted_byte(trainer, publish, writer, monkeypatch):
    whole = writer.write

    def corrupted(source, version, model_config):
        delivered = whole(source, version, model_config)
        names = [spec.name for spec in writer.weights.trace.destinations]
        fused = writer.weights.destinations[names.index("model.layers.1.self_attn.qkv_proj.weight")]
        fused.view(torch.uint8)[70, 3] ^= 1  # a row of the keys
        return delivered

    monkeypatch.setattr(writer, "write", corrupted)
    refused(trainer, publish, r"in model\.layers\.1\.self_attn\.k_proj\.weight\.")
    monkeypatch.undo()


def test_a_parameter_that_the_plan_leaves_out(trainer, publish, worker, writer, monkeypatch):
    edit_plan(writer, monkeypatch, lambda pieces, number: pieces.select(pieces.source != number["model.norm.weight"]))
    move(worker, 1e-2)
    refused(trainer, publish, r"in model\.norm\.weight\.")
    monkeypatch.undo()


def test_a_publish_that_does_nothing_after_a_step_at_1e_6(trainer, publish, worker, writer, monkeypatch):
    edit_plan(writer, monkeypatch, lambda pieces, _: pieces.select(slice(0)))
    move(worker, 1e-6)
    with monkeypatch.context() as unproven:
        unproven.setattr(side_of(worker), "verify", lambda version: {})
        assert publish()["handoff/probe_gap"] < 1e-4  # so little moves no logprob: the probe alone may let it pass
    move(worker, 1e-6)
    refused(trainer, publish, "engines do not hold the trainer's weights")
    monkeypatch.undo()


def test_a_plan_that_is_wrong_but_fits(trainer, publish, writer, monkeypatch):
    """Gate for up and up for gate: of one shape, each element written once, from where the plan says."""

    def swapped(pieces, number):
        gate, up = (number[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        source = pieces.source.copy()
        source[pieces.source == gate], source[pieces.source == up] = up, gate
        return replace(pieces, source=source)

    edit_plan(writer, monkeypatch, swapped)
    message = refused(trainer, publish, "engines do not hold")
    assert "mlp.gate_proj.weight" in message and "mlp.up_proj.weight" in message
    monkeypatch.undo()


def test_a_parameter_that_was_rebound_is_taken_from_where_it_is(trainer, publish, worker):
    weight = module_of(worker).model.norm.weight
    before = weight.data
    weight.data = before * 1.5
    assert publish()["handoff/probe_gap"] < 1e-5
    weight.data = before


def move(worker, size):
    """A step of the optimizer: every weight moves by this share of itself."""
    with torch.no_grad():
        for parameter in module_of(worker).parameters():
            parameter.mul_(1 + size)


def edit_plan(writer, monkeypatch, edit):
    """Change the pieces of the plan. edit: gets them and the numbers of the sources by name."""

    def edited(plan, source):
        number = {tensor.spec.name: i for i, tensor in enumerate(source.layout().tensors)}
        buckets = tuple(replace(bucket, pieces=edit(bucket.pieces, number)) for bucket in plan.buckets)
        return replace(plan, buckets=buckets)

    wrap_plan(monkeypatch, writer, edited)
