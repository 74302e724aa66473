"""Adapters in vLLM's own LoRA slot: every logprob is the trainer's, and nothing is generated with an adapter that is
old, corrupted or not used at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.errors import ConfigError, EngineStateError, HandoffError
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.vllm.adapter_slots import AdapterSlot
from hybrid_rl.weights.plain import wrappers
from tests.support.inside.vllm import adapters_of, remove_adapters, writer_of
from tests.support.inside.workers import engine_of
from tests.support.tiny import VOCABULARY, build_model, build_tokenizer, spread, sums
from tests.vllm.test_trainer import KEYS, SHAPE

pytestmark = pytest.mark.slow

LORA = {
    **KEYS,
    "rollout.handoff.lora": "adapter",
    "lora.r": 3,
    "lora_alpha": 7,
    "peft.rank_pattern": {"q_proj": 5},
    "peft.exclude_modules": r".*layers\.1\.self_attn\.o_proj",
    "learning_rate": 1e-2,
    "handoff.verify_steps": 5,
}
# Numbers of an adapter: rank * (in + out), in float32; 64 dims, two heads of 32, 32 dims between; layer 1 lacks o_proj.
LAYER = 5 * (64 + 64) + 2 * 3 * (64 + 64) + 2 * 3 * (64 + 32) + 3 * (32 + 64)
ADAPTER_BYTES = 4 * (2 * LAYER + 3 * (64 + 64))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    model = build_model(**SHAPE, tie_word_embeddings=False)
    with Trainer(model, spread, sums(12), tokenizer=build_tokenizer(), output_dir=folder, **LORA) as trainer:
        yield trainer


@pytest.fixture
def writer(worker):
    return writer_of(engine_of(worker))


def check_steps(trainer, num_steps, base_bytes, adapter_bytes):
    """The base is handed over once, and every logprob of the run is the trainer's."""
    lines = read_jsonl(trainer.run_folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(num_steps + 1))
    assert lines[0]["handoff/bytes"] == base_bytes + adapter_bytes
    padding = 2 * 4 * (64 - len(VOCABULARY)) * 64  # of vLLM's embedding and head
    for line in lines[1:]:
        assert line["sampling/sampling_logp_difference/max"] < 1e-5
        assert line["handoff/probe_gap"] < 1e-5
        assert line["handoff/bytes"] == line["handoff/minimum_bytes"] == line["handoff/adapter_bytes"] == adapter_bytes
        assert line["timing/verify"] > 0
        assert line["handoff/unproven_bytes"] == (base_bytes + padding if line["step"] % 5 else 0)
    return lines


def test_twenty_steps_and_every_logprob_is_the_trainers(trainer, worker, writer):
    trainer.fit()
    base_bytes = sum(p.nbytes for n, p in trainer.module.named_parameters() if ".lora_" not in n)
    check_steps(trainer, 20, base_bytes, ADAPTER_BYTES)
    # What vLLM adds, from the numbers in its slot, is what peft adds.
    layers = adapters_of(writer.slot)
    deltas = {}
    for name, wrapper in layers.items():
        parts = [b[0, 0] @ a[0, 0] for a, b in zip(wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True)]
        deltas[name.replace("qkv_proj", "q_proj|k_proj|v_proj").replace("gate_up_proj", "gate_proj|up_proj")] = parts
    paths = {id(module): path for path, module in trainer.module.named_modules()}
    theirs = {paths[id(wrapper)]: wrapper.get_delta_weight("default") for _, _, wrapper in wrappers(trainer.module)}
    assert len(theirs) == 13
    for names, parts in deltas.items():
        prefix, _, leaves = names.rpartition(".")
        for leaf, part in zip(leaves.split("|"), parts, strict=True):
            wanted = theirs.get(f"{prefix}.{leaf}", torch.zeros_like(part))
            torch.testing.assert_close(part, wanted, rtol=1e-6, atol=1e-7)
            assert (part != 0).any() == (f"{prefix}.{leaf}" in theirs)


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        ("old", r"does not hold the trainer's adapter of model\.layers\.0\..*old or corrupted"),
        ("corrupted", r"adapter of model\.layers\.1\.self_attn\.k_proj\.weight: it is old or corrupted"),
        ("padding", r"adapter of model\.layers\.0\.mlp\.down_proj\.weight: it is old"),
        ("no adapter", r"adapter of model\.layers\.1\.self_attn\.o_proj, which has no adapter: it is old"),
        ("unused", r"has the adapters \[None\] in its slots, and not \[1\]"),
    ],
)
def test_another_adapter_than_the_trainers_is_caught_before_a_token(
    trainer, publish, writer, monkeypatch, break_it, match
):
    layers, whole = adapters_of(writer.slot), AdapterSlot.write

    def broken(slot, changes):
        if break_it == "old":
            return  # a publication that does nothing
        whole(slot, changes)
        if break_it == "corrupted":
            layers["model.layers.1.self_attn.qkv_proj"].lora_a_stacked[1][0, 0, 2, 63] += 1e-7
        elif break_it == "padding":
            layers["model.layers.0.mlp.down_proj"].lora_b_stacked[0][0, 0, 5, 7] = 1e-7
        elif break_it == "no adapter":
            layers["model.layers.1.self_attn.o_proj"].lora_b_stacked[0][0, 0, 5, 2] = 1e-7
        else:
            remove_adapters(slot)

    with torch.no_grad():
        next(p for n, p in trainer.module.named_parameters() if ".lora_B." in n).mul_(1.5)
    with monkeypatch.context() as patch:
        patch.setattr(AdapterSlot, "write", broken)
        with pytest.raises(HandoffError, match=match):
            publish()
    with pytest.raises(EngineStateError, match="never given any"):
        trainer.generate("1+2=")
    # An engine that failed a check gets its base again.
    assert publish()["handoff/local_bytes"] > ADAPTER_BYTES
    assert "handoff/local_bytes" not in publish()
    trainer.generate("1+2=")


def test_a_base_that_changed_is_caught_when_it_is_due(trainer, publish):
    """Nothing hands it over again: the trainer must not change it, and an engine may not either."""
    base = next(p for n, p in trainer.module.named_parameters() if "k_proj.base_layer.weight" in n)
    kept = base.detach().clone()
    while trainer.policy_version % 5 != 4:
        publish()
    with torch.no_grad():
        base[3, 5] += 0.01
    with pytest.raises(HandoffError, match=r"do not hold the trainer's weights .* model\.layers\.0\.self_attn\.k_proj"):
        publish()
    with torch.no_grad():
        base.copy_(kept)


def test_adapters_without_a_place_are_refused(worker, writer):
    trace, model = writer.weights.whole_trace, writer.weights.model
    for name, why in {
        "lm_head.weight": "lm_head is no linear layer that vLLM gives a slot",
        "model.layers.0.self_attn.q_proj.bias": "is no linear layer",
        "model.layers.7.mlp.up_proj.weight": "the model has no such weight",
    }.items():
        with pytest.raises(ConfigError, match=f"no place for 1 of 1 adapters.*{why}.*handoff.lora=merged"):
            AdapterSlot(model, trace, {name: 3})


@pytest.fixture
def short_folder():
    """Temporary files of the ranks; the path of a socket may not be long."""
    with tempfile.TemporaryDirectory(prefix="t", dir=Path(tempfile.gettempdir()).anchor + "tmp") as folder:
        yield Path(folder)


@pytest.mark.timeout(900)
@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["tensor parallel", "two replicas"])
def test_two_ranks(layout, tmp_path, short_folder):
    """Tensor parallel, each rank has its part of A or of B, and all of the other."""
    size = 2 if layout == "tensor parallel" else 1
    keys = {**LORA, "num_ranks": 2, "tensor_parallel_size": size, "output_dir": str(tmp_path)}
    keys |= {"ray.env_vars": {"TMPDIR": str(short_folder)}}
    with Trainer(build_model(**SHAPE), spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
        trainer.fit()
        lines = read_jsonl(trainer.run_folder / "metrics.jsonl")
    half = 5 * (64 + 32) + 2 * 3 * (64 + 32) + 2 * 3 * (64 + 16) + 3 * (16 + 64)
    adapter_bytes = ADAPTER_BYTES if size == 1 else 4 * (2 * half + 3 * (32 + 64))
    assert len(lines) == 21
    for line in lines[1:]:
        assert line["sampling/sampling_logp_difference/max"] < 1e-5 and line["handoff/probe_gap"] < 1e-5
        assert line["handoff/bytes"] == line["handoff/adapter_bytes"] == adapter_bytes
