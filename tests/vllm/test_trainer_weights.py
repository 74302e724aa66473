"""Other ways in which vLLM holds its weights: packed by the platform, and in the trainer's own memory."""

from dataclasses import replace

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.errors import ConfigError, EngineStateError, HandoffError, HybridRLError
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.inside.models import set_head_options
from tests.support.inside.vllm import load_with, writer_of
from tests.support.inside.workers import actor_of, engine_of, module_of, worker_of
from tests.support.tiny import VOCABULARY, build_model, build_tokenizer, spread, sums
from tests.unit.frames import recording
from tests.vllm.rigs import tiny
from tests.vllm.test_trainer import KEYS, SHAPE

pytestmark = pytest.mark.slow


@pytest.fixture
def train(tmp_path):
    made = []

    def make(model=None, **keys):
        keys = {**KEYS, "max_steps": 3, "output_dir": str(tmp_path), **keys}
        made.append(Trainer(model or build_model(**SHAPE), spread, sums(12), tokenizer=build_tokenizer(), **keys))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def gaps(trainer):
    lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
    return [max(line["handoff/probe_gap"], line["sampling/sampling_logp_difference/max"]) for line in lines]


def test_what_the_platform_packs_is_loaded_anew_and_a_stale_head_is_caught(train, monkeypatch):
    """A tied head: vLLM computes with a packed copy of the embedding, which no write to the embedding reaches."""
    model = tiny("llama", **SHAPE, vocab_size=len(VOCABULARY), tie_word_embeddings=True)
    trainer = train(model, engine_args={"plain_weights": False})
    trainer.fit()
    assert len(gaps(trainer)) == 3 and max(gaps(trainer)) < 1e-5
    worker = worker_of(trainer)
    loaded = engine_of(worker).weights
    assert loaded.derived.copies == ("lm_head",)
    blind = replace(loaded, derived=replace(loaded.derived, copies=()))
    load_with(monkeypatch, writer_of(engine_of(worker)), blind)
    with torch.no_grad():
        module_of(worker).get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(HandoffError, match=r"probe prompt .* bytes that it derives from them, which may be stale"):
        trainer.generating.update_weights(4)
    with pytest.raises(EngineStateError, match="never given any"):
        trainer.generate("1+2=")


def test_a_trainer_that_computes_otherwise_with_weights_that_are_equal(train):
    """What an architecture is like that vLLM computes by code of its own: the bytes are right, the logprobs are not."""
    trainer, frames = train(**{"handoff.verify_steps": 5}), {}
    with recording(frames, "vllm"):
        trainer.fit()
    assert len(frames["the handoff's write"]) == 12, frames
    worker = worker_of(trainer)
    set_head_options(actor_of(worker).model, scale=3.0)
    why = "the engine computes this architecture differently .*; its weights were compared .* byte by byte"
    with pytest.raises(HandoffError, match=f"policy version 5: .*: {why}"):
        trainer.generating.update_weights(5)
    with pytest.raises(HandoffError, match="policy version 6: .*: the engine does not hold the trainer's weights"):
        trainer.generating.update_weights(6)


def test_adopted_weights_are_one_memory_and_a_handoff_writes_nothing(train):
    model = build_model(**SHAPE)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    trainer = train(model, handoff={"adopt_weights": True})
    worker = worker_of(trainer)
    loaded = engine_of(worker).weights
    engine = dict(zip((spec.name for spec in loaded.trace.destinations), loaded.destinations, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    keys = model.model.layers[1].self_attn.k_proj.weight
    fused = engine["model.layers.1.self_attn.qkv_proj.weight"]
    assert keys.data_ptr() == fused[64:].data_ptr()
    trainer.fit()
    lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
    assert [line["handoff/bytes"] for line in lines] == [0, 0, 0]
    assert max(gaps(trainer)) < 1e-5
    assert torch.equal(keys, fused[64:128]) and not torch.equal(keys, before["model.layers.1.self_attn.k_proj.weight"])
    keys.data = keys.data.clone()
    with pytest.raises(HandoffError, match=r"k_proj\.weight' is not in the memory that trainer and engine share"):
        trainer.generating.update_weights(4)


def test_memory_that_cannot_be_shared_is_refused(train, caplog):
    with pytest.raises(HandoffError, match="rearranges .* set engine_args.plain_weights=true"):
        train(handoff={"adopt_weights": True}, engine_args={"plain_weights": False})
    with pytest.raises(ConfigError, match="shares one rank's memory"):
        train(handoff={"adopt_weights": True}, num_ranks=2)
    trainer = train(max_steps=1)
    trainer.fit()
    assert max(gaps(trainer)) < 1e-5
    # A cell that is run again: the Trainer of its first run is still there, and vLLM can live once in a process.
    again = train(max_steps=1)
    assert (
        f"closing the Trainer of {trainer.run_folder} because a new Trainer in this process needs the vllm"
        in caplog.text
    )
    with pytest.raises(HybridRLError, match="is closed: a later one of this process needed the vllm engine"):
        trainer.generate("1+2=")
    assert again.generate("1+2=")
