"""Models that cannot be packed, trained from end to end with rollout.engine=hf."""

import logging

import pytest
import torch

from hybrid_rl.errors import ConfigError, ModelError
from tests.support.tiny import VOCABULARY, build_model, build_tokenizer, sums
from tests.unit.models.families import build
from tests.unit.models.hybrids import HYBRIDS, MORE, build_hybrid
from tests.unit.test_trainer_families import step

SWEPT = [name for name in (*HYBRIDS, *MORE) if name not in ("qwen3_next", "falcon_h1")]
FAMILIES = ["qwen3_next", "falcon_h1", *(pytest.param(name, marks=pytest.mark.sweep) for name in SWEPT)]


def small(name):
    """A vocabulary that the tokenizer of the tests can write out."""
    return build_hybrid(name, vocab_size=len(VOCABULARY))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_has_the_gradient_of_the_plain_model(name, make_trainer):
    """Prompts of two lengths, completions of several, micro-batches of one to five samples."""
    keys = {"engine": "hf", "tokens_per_micro_batch": 40, "max_completion_length": 9}
    metrics = step(make_trainer, small(name), rel=1e-4, **keys)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4  # engine and trainer, both fp32


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.sweep) for name in (*HYBRIDS, *MORE) if name != "mamba"), "mamba"]
)
def test_a_step_in_bfloat16_has_the_gradient_of_the_plain_model(name, make_trainer):
    """As near as 8 bits are: that of float32 is further off, for states that are multiplied token by token.

    The last states of a Mamba are float32 in any case."""
    model = build_hybrid(name, vocab_size=len(VOCABULARY), dtype=torch.bfloat16)
    metrics = step(make_trainer, model, rel=0.05, engine="hf", max_completion_length=9)
    assert metrics["sampling/sampling_logp_difference/mean"] < 0.05


@pytest.mark.parametrize("cap", [14, *(pytest.param(cap, marks=pytest.mark.sweep) for cap in (30, 200))])
def test_micro_batches_do_not_change_an_update(cap, make_trainer):
    def updated(**keys):
        trainer = make_trainer(small("qwen3_next"), engine="hf", max_completion_length=9, max_steps=1, **keys)
        return trainer.step().metrics

    mine, theirs = updated(tokens_per_micro_batch=cap), updated()
    for name in ("reward", "loss", "entropy", "grad_norm"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.sweep)])
def test_three_steps_and_the_same_three_after_a_break(name, make_trainer, tmp_path, records):
    keys = {"engine": "hf", "max_steps": 3, "run_name": "run", "save_steps": 1, "eval_dataset": sums(3)}
    straight = make_trainer(small(name), **keys, output_dir=str(tmp_path / "straight"))
    straight.fit()
    lines = records(straight, comparable=True)
    gaps = [line["handoff/probe_gap"] for line in records(straight) if "handoff/probe_gap" in line]
    assert len(gaps) == 3 and max(gaps) < 1e-4
    broken = make_trainer(small(name), **keys, output_dir=str(tmp_path / "broken"))
    broken.step()
    broken.close()
    resumed = make_trainer(small(name), **keys, output_dir=str(tmp_path / "broken"), resume="auto")
    resumed.fit()
    assert records(resumed, comparable=True)[-1] == lines[-1]
    weights = [(t.run_folder / "checkpoint-3" / "model.safetensors").read_bytes() for t in (straight, resumed)]
    assert weights[0] == weights[1]


def test_all_that_stands_beside_the_policy_runs_unpacked_too(make_trainer, records):
    """A critic over its backbone, a reference, activations that are recomputed, evaluation with truncation."""
    trainer = make_trainer(
        small("lfm2"),
        engine="hf",
        algorithm="ppo",
        kl="reward",
        beta=0.1,
        gradient_checkpointing=True,
        eval_dataset=sums(3),
        eval_temperature=0.8,
        eval_top_k=3,
        eval_repetition_penalty=1.2,
    )
    trainer.fit()
    metrics = records(trainer)[-1]
    assert metrics["critic/value_loss"] > 0
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4


def test_in_place_says_what_to_do_and_hf_says_what_it_does(make_trainer, caplog):
    with pytest.raises(ModelError, match=r"rollout.engine=hf \(Trainer\(engine=\"hf\"\)\)"):
        make_trainer(small("lfm2"))
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        make_trainer(small("lfm2"), engine="hf")
    assert sum("rollout.engine=hf: rollout and training run through" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"torch_compile": True}, "torch_compile=true compiles packed blocks"),
        ({"attention": "sdpa"}, "attention='sdpa' would do nothing: rollout.engine=hf"),
        ({"algorithm": "rspo"}, "reads the model's routers from packed rows"),
        ({"engine_args.block_size": 16}, "belongs to rollout.engine=inplace"),
        ({"engine_args.enable_prefix_caching": False}, "belongs to rollout.engine=inplace or vllm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_does_not_have_is_refused(keys, message, make_trainer):
    with pytest.raises(ConfigError, match=message):
        make_trainer(build_model(), engine="hf", **keys)


def test_a_model_that_can_be_packed_takes_the_same_steps(make_trainer, records):
    """Equal samples, losses and norms to fp32; only the forward differs."""
    lines = []
    for engine in ("inplace", "hf"):
        trainer = make_trainer(build("qwen2", vocab_size=len(VOCABULARY)), engine=engine, max_completion_length=9)
        trainer.fit()
        lines.append([line for line in records(trainer) if "grad_norm" in line])
    for mine, theirs in zip(*lines, strict=True):
        assert mine["reward"] == theirs["reward"]
        for name in ("loss", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5)


def test_capped_attention_runs_as_the_architecture_has_it(make_trainer, tmp_path, caplog):
    """Gemma-2 by folder, which transformers loads with SDPA, and that leaves the capping out."""
    model = build("gemma2", vocab_size=len(VOCABULARY), pad_token_id=0, eos_token_id=1, bos_token_id=None)
    folder = tmp_path / "gemma2"
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    metrics = step(make_trainer, str(folder), rel=1e-4, plain=model, engine="hf", gradient_checkpointing=True)
    assert "caps its attention at 2, which SDPA leaves out" in caplog.text
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
