"""A script written for TRL does after `train()` what it does there, and loses nothing because of a name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybrid_rl.errors import ConfigError, RewardError
from tests.support.tiny import sums


def test_the_lines_after_train_of_trls_own_script(make_trainer, tmp_path: Path, capsys) -> None:
    """trl/scripts/grpo.py, with the lines that transformers' examples have between."""
    trainer = make_trainer(max_steps=1, eval_dataset=sums(4), eval_on_start=False)
    result = trainer.train(resume_from_checkpoint=None)
    for name, where in (("global_step", "trainer.global_step"), ("training_loss", r"metrics\.jsonl")):
        with pytest.raises(AttributeError, match=where):
            getattr(result, name)
    trainer.accelerator.print("completed")
    metrics = result.metrics
    metrics["train_samples"] = 12.0
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    saved = trainer.save_model(tmp_path / "final")
    assert trainer.evaluate(eval_dataset=sums(2), metric_key_prefix=None)["eval/reward"] >= 0
    if trainer.is_world_process_zero() and not trainer.is_fsdp_enabled:
        trainer.processing_class.save_pretrained(tmp_path / "tokenizer")
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(tmp_path / "module")
    folder, output = trainer.run_folder, trainer.args.output_dir
    assert output == str(tmp_path / "runs") and saved == tmp_path / "final"
    of_checkpoint, of_module = (AutoModelForCausalLM.from_pretrained(p) for p in (saved, tmp_path / "module"))
    for left, right in zip(of_checkpoint.parameters(), of_module.parameters(), strict=True):
        assert torch.equal(left, right)
    assert json.loads((folder / "train_results.json").read_text())["train_samples"] == 12
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"]) == (1, 1)
    assert [record["step"] for record in state["log_history"]] == [0, 1] and "reward" in trainer.state.log_history[-1]
    with pytest.raises(ConfigError, match=rf"hf upload USER/NAME {tmp_path / 'final'}"):
        trainer.push_to_hub(dataset_name="mine")
    assert not (folder / "checkpoint-1").exists()  # it was saved already
    assert "completed" in capsys.readouterr().out
    trainer.end()


def test_a_module_with_adapters_saves_them_by_itself(make_trainer, tmp_path: Path) -> None:
    """Without the names that peft's wrappers give the weights, of which a model cannot be loaded."""
    trainer = make_trainer(max_steps=1, lora={"r": 2, "target_modules": ["q_proj"]})
    trainer.train()
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(tmp_path / "module")
    assert not (tmp_path / "module" / "model.safetensors").exists()
    saved = trainer.save_model(tmp_path / "saved", _internal_call=True)
    theirs, ours = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "module", saved))
    assert theirs and theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_a_folder_with_other_files_gets_the_checkpoint_inside(make_trainer, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    assert trainer.save_model(str(tmp_path / "notes")) == tmp_path / "notes" / "checkpoint-1"
    assert trainer.save_model(trainer.args.output_dir) == tmp_path / "runs" / "checkpoint-1"
    assert trainer.save_model() == trainer.run_folder / "checkpoint-1"
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_a_misspelled_name_does_not_cost_what_was_trained(make_trainer) -> None:
    with pytest.raises(AttributeError, match="sav_model"), make_trainer(max_steps=1) as trainer:
        trainer.train()
        trainer.sav_model("final")
    assert (trainer.run_folder / "checkpoint-1" / "model.safetensors").is_file()


def test_an_error_writes_no_checkpoint_that_is_not_needed(make_trainer, tmp_path: Path) -> None:
    with pytest.raises(NameError), make_trainer(max_steps=1) as saved:
        saved.train()
        saved.save(tmp_path / "mine")
        raise NameError
    with pytest.raises(NameError), make_trainer(max_steps=1) as untrained:
        raise NameError

    def fails(**_: object) -> list[float]:
        raise ZeroDivisionError

    with pytest.raises(RewardError), make_trainer(max_steps=1, reward_funcs=fails) as failed:
        failed.train()
    folders = (trainer.run_folder for trainer in (saved, untrained, failed))
    assert not [path for folder in folders for path in folder.glob("checkpoint-*")]


def test_a_program_without_a_with_block_keeps_it_too(make_trainer, monkeypatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _, error, __: shown.append(error))
    from hybrid_rl.run.rescue import _watch_script

    _watch_script.cache_clear()
    trainer, error = make_trainer(max_steps=1), NameError("pritn")
    trainer.train()
    assert not [*trainer.run_folder.glob("checkpoint-*")]
    sys.excepthook(NameError, error, None)
    assert shown == [error] and (trainer.run_folder / "checkpoint-1" / "model.safetensors").is_file()
    monkeypatch.undo()
    _watch_script.cache_clear()
