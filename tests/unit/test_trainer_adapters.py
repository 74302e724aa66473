"""Adapters over the life of a run: saved as peft reads them, merged, resumed, continued, evaluated, given back."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybrid_rl.errors import CheckpointError, ConfigError, ModelError
from hybrid_rl.extras.evaluations.checkpoints import evaluate_checkpoint
from hybrid_rl.extras.plan.request import Machine
from hybrid_rl.extras.plan.run_planning import plan_words
from hybrid_rl.run.adapters import tokenizer_place
from hybrid_rl.weights.plain import is_adapted
from tests.support.inside.trainers import best_of
from tests.support.scores import exact
from tests.support.tiny import build_model, build_tokenizer, ids_of, sums

pytestmark = pytest.mark.slow  # the file as a whole

IDS = torch.tensor([ids_of("3+4=7")])
KEYS: dict[str, Any] = {"lora.r": 4, "lora.target_modules": ["q_proj", "v_proj", "down_proj"]}
SETTINGS = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def logits_of(module: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(IDS).logits
    return found


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same(one: Path, other: Path) -> bool:
    mine, theirs = adapter_of(one), adapter_of(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    build_model().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_is_saved_merged_resumed_and_continued(make_trainer, records, tmp_path: Path, dtype) -> None:
    """The model exists in memory only. Broken off after step 2 of 4 and resumed, the run is, bit for bit, the one that
    went straight through."""
    keys = {**KEYS, "beta": 0.1, "max_steps": 4, "save_steps": 2, "run_name": "run"}
    trainer = make_trainer(build_model(dtype=dtype), **keys)
    trainer.fit()
    run, last = trainer.run_folder, trainer.run_folder / "checkpoint-4"
    expected = logits_of(trainer.module)
    assert not torch.equal(expected, logits_of(build_model(dtype=dtype)))

    told = json.loads((last / "adapter_config.json").read_text())
    base = Path(told["base_model_name_or_path"])
    assert [base] == list(run.glob("base-*")) and not (last / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(build_model(dtype=dtype), str(last), autocast_adapter_dtype=False)
    assert torch.equal(logits_of(loaded), expected)
    gap = 1e-6 if dtype == torch.float32 else 2e-2  # of logits below 1; merged weights are rounded to 8 bits once more
    by_name = AutoModelForCausalLM.from_pretrained(last)  # of the base
    assert by_name.dtype == dtype and torch.allclose(logits_of(by_name), expected, atol=gap, rtol=0)
    merged = AutoModelForCausalLM.from_pretrained(trainer.save(merged=True))
    assert merged.dtype == dtype and torch.allclose(logits_of(merged), expected, atol=gap, rtol=0)
    with pytest.raises(CheckpointError, match="is not a checkpoint: it has no trainer_state.json"):
        make_trainer(build_model(dtype=dtype), **KEYS, resume=str(run / "merged-4"))

    broken = shutil.copytree(run, tmp_path / "broken" / "run", ignore=shutil.ignore_patterns(".lock", "checkpoint-4"))
    again = keys | {"output_dir": str(tmp_path / "broken"), "resume": "auto"}
    resumed = make_trainer(build_model(dtype=dtype), **again)
    assert resumed.global_step == 2 and resumed.run_folder == broken
    resumed.fit()
    assert same(last, broken / "checkpoint-4") and torch.equal(logits_of(resumed.module), expected)
    assert records(resumed, comparable=True)[-2:] == records(trainer, comparable=True)[-2:]
    assert len(list(broken.glob("base-*"))) == 1

    other = build_model(seed=1, dtype=dtype)
    with pytest.raises(
        CheckpointError, match="checkpoint-4 was trained on other weights than those of this base model"
    ):
        make_trainer(other, **again)
    assert not is_adapted(other) and all(parameter.requires_grad for parameter in other.parameters())
    with pytest.raises(CheckpointError, match="down_proj is of rank 4 and scaled by 16; in the checkpoint .* by 2"):
        make_trainer(build_model(dtype=dtype), **again, **{"lora.lora_alpha": 64})
    with pytest.raises(CheckpointError, match="this run trains all weights, and the run of .*checkpoint-4 did not"):
        make_trainer(build_model(dtype=dtype), **{name: value for name, value in again.items() if name not in KEYS})

    moved = run.rename(tmp_path / "moved")
    continued = make_trainer(str(moved / "checkpoint-4"), dtype=str(dtype).removeprefix("torch."), max_steps=1)
    assert continued.config.lora.r == 4 and sorted(continued.config.lora.target_modules) == sorted(
        SETTINGS["target_modules"]
    )
    start = continued.save()
    assert same(start, moved / "checkpoint-4")
    continued.fit()
    assert not same(continued.save(), moved / "checkpoint-4")


def test_modules_with_adapters_are_trained_and_given_back(make_trainer, tmp_path: Path, caplog) -> None:
    """peft loads adapters frozen unless told otherwise, and keeps those of a bfloat16 model in float32."""
    start = peft.get_peft_model(build_model(dtype=torch.bfloat16), peft.LoraConfig(**SETTINGS))
    with torch.no_grad():
        for name, parameter in start.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.01)
    start.save_pretrained(str(tmp_path / "start"))
    model = peft.PeftModel.from_pretrained(build_model(dtype=torch.bfloat16), str(tmp_path / "start"))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    before = logits_of(model)

    with caplog.at_level(logging.WARNING):
        first = make_trainer(model, beta=0.1, max_steps=1)
    assert "the reference of this run is the base model, without the adapter that it begins with" in caplog.text
    assert first.module is model.get_base_model() and first.config.lora.r == 4
    adapter = adapter_of(first.save())
    assert adapter.keys() == adapter_of(tmp_path / "start").keys()
    assert {tensor.dtype for tensor in adapter.values()} == {torch.bfloat16}
    with pytest.raises(
        ConfigError, match="down_proj is of rank 8 and scaled by 1; in the model it is of rank 4 and scaled by 2"
    ):
        make_trainer(model, **KEYS | {"lora.r": 8})
    with pytest.raises(ConfigError, match="by the keys, .*down_proj is without an adapter; in the model it is of"):
        make_trainer(first.module, peft_config=peft.LoraConfig(**SETTINGS | {"target_modules": ["k_proj", "q_proj"]}))
    with pytest.raises(ConfigError, match="down_proj is of rank 4 and scaled by 4; in the model it is"):
        make_trainer(model, **KEYS, **{"lora.lora_alpha": 16})
    first.fit()
    learned = adapter_of(first.save())
    assert any(not torch.equal(learned[name], adapter[name]) for name in adapter)
    first.close()
    assert is_adapted(first.module) and not torch.equal(logits_of(model), before)

    with caplog.at_level(logging.WARNING):  # the cell of a notebook, run again
        second = make_trainer(first.module, peft_config=peft.LoraConfig(**SETTINGS | {"lora_alpha": 8}), max_steps=1)
    assert "the module was trained before, 1 step" in caplog.text
    assert all(torch.equal(learned[name], tensor) for name, tensor in adapter_of(second.save()).items())
    second.close()
    after = logits_of(first.module)
    first.module.save_pretrained(tmp_path / "by transformers")  # which writes the adapter alone
    again = peft.PeftModel.from_pretrained(
        build_model(dtype=torch.bfloat16), str(tmp_path / "by transformers"), autocast_adapter_dtype=False
    )
    assert torch.equal(logits_of(again), after)


def test_a_module_is_as_it_was_if_nothing_was_learned(make_trainer, tmp_path: Path) -> None:
    module = build_model()
    module.model.norm.weight.requires_grad_(False)
    names, expected = list(module.state_dict()), logits_of(module)

    def as_it_was() -> bool:
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        kept = not hasattr(module, "peft_config") and frozen == ["model.norm.weight"]
        return kept and list(module.state_dict()) == names and torch.equal(logits_of(module), expected)

    make_trainer(module, **KEYS).close()
    assert as_it_was()
    with pytest.raises(ConfigError, match="KV cache holds"):
        make_trainer(module, **KEYS, kv_cache_memory_bytes=4096, max_completion_length=50)
    assert as_it_was()
    older = make_trainer(module, **KEYS)
    newer = make_trainer(module, **KEYS)  # a notebook closes the older one once this one exists
    older.close()
    newer.fit()
    assert is_adapted(module) and not torch.equal(logits_of(module), expected)
    tuned = peft.get_peft_model(build_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match="PromptTuningConfig learns tokens in front of the prompt"):
        make_trainer(tuned)
    thawed = peft.get_peft_model(build_model(), peft.LoraConfig(**SETTINGS))
    thawed.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match="1 parameters besides the adapters require a gradient .model.norm.weight"):
        make_trainer(thawed)
    with pytest.raises(ConfigError, match="merged=True: this run has no adapters"):
        make_trainer(build_model()).save(merged=True)


def test_checkpoints_are_evaluated_compared_kept_and_the_best_is_loaded(make_trainer, base_folder: Path) -> None:
    keys: dict[str, Any] = {**KEYS, "eval_dataset": sums(4), "eval_steps": 1, "metric_for_best_model": "reward"}
    keys |= {"greater_is_better": False, "load_best_model_at_end": True, "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(str(base_folder), **keys, max_steps=3)
    trainer.fit()
    left = [path.name for path in trainer.run_folder.glob("*-*") if path.is_dir()]
    best = trainer.run_folder / f"checkpoint-{best_of(trainer).step}"
    assert best.name in left and len(left) <= 2  # a base with a name is not written
    assert same(trainer.save(trainer.run_folder.parent / "loaded"), best)
    told = json.loads((best / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(base_folder)

    limits = {"max_completion_length": 5, "eval_temperature": 1.0}
    found, merged, plain = (
        evaluate_checkpoint(model, sums(8), exact, output_dir=str(base_folder.parent / "evals"), **limits)
        for model in (best, trainer.save(merged=True), base_folder)
    )
    (mine,), (theirs,), (start,) = (list(one.sets.values()) for one in (found, merged, plain))
    assert found.step == best_of(trainer).step and merged.step is None
    assert mine.lengths == theirs.lengths  # the same noise, and logits to rounding
    assert not [test for test in found.against(plain).values() if test is None]

    keys = ["grpo", f"model.path={best}", "device=cpu", "max_completion_length=5"]
    plan = plan_words(keys, Machine())  # 2 layers of 3 adapters: q 16x16, v 16x8, down 32x16
    trained = 2 * 4 * ((16 + 16) + (16 + 8) + (32 + 16))
    assert f"{trained:,} trained" in str(plan)
    for algorithm, key in (("ppo", "critic_path"), ("distillation", "teacher_path")):
        with pytest.raises(ModelError, match="is an adapter, and only the policy can begin with one"):
            make_trainer(str(base_folder), algorithm=algorithm, **{key: str(best)})
    for path in best.glob("tokenizer*"):
        path.unlink()
    assert tokenizer_place(str(best)) == str(base_folder)

    state = json.loads((best / "trainer_state.json").read_text())
    state["base"]["hashes"] = dict.fromkeys(state["base"]["hashes"], "0" * 32)
    (best / "trainer_state.json").write_text(json.dumps(state))
    (best / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="trained on other weights"):
        make_trainer(str(best))
    shutil.rmtree(base_folder)
    with pytest.raises(ModelError, match="belongs to the model .*base, which is not there"):
        make_trainer(str(best))
