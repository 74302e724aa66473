"""The command line: what is printed where, and the exit status."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_rl
from hybrid_rl import cli
from hybrid_rl.cli import doctor, main, running
from hybrid_rl.errors import DataError
from hybrid_rl.extras.plan import run_planning
from hybrid_rl.extras.plan.request import Machine, planned_config
from hybrid_rl.extras.plan.run_plan import RunPlan
from tests.support.inside.commands import wrap_probes
from tests.unit.planning.made import memory as made_memory
from tests.unit.planning.made import plan as made_plan


def test_without_a_command_the_usage_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["key"], ["version", "torch"], ["keys", "a", "b"]):
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert out == "" and "Usage: hybrid-rl " in err
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use_peft", "--lora_r", "16"], "lora.r=16 lora_alpha=32"),
        (["--learning-rate", "1e-5", "max_steps=1"], "Write learning_rate=1e-5 max_steps=1"),
        (["reward=a.py:f", "--lora.r=8"], "Write reward=a.py:f lora.r=8"),
        (["-lr", "1"], "set learning_rate"),
    ],
)
def test_a_setting_written_as_an_option_is_understood(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "settings are KEY=VALUE" in err and said in err


def test_keys_that_are_given_as_options_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for command, told in (
        (["plan", "--lora.r=8"], "Keys have no dashes: lora.r=VALUE"),
        (["version", "--lora_r"], "No such option: --lora_r "),
    ):
        assert main(command) == 2
        assert told in capsys.readouterr().err


def test_help_and_lists_import_neither_torch_nor_transformers() -> None:
    """Each of them takes seconds to import."""
    commands = [["--help"], ["version"], ["keys"], ["algorithms"], ["train", "--help"], ["plan", "--help"]]
    program = f"""
import sys
from hybrid_rl.cli import main
assert {{main(command) for command in {commands}}} == {{0}}
heavy = [name for name in ("torch._C", "torch.nn", "transformers", "ray", "datasets") if name in sys.modules]
assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    for name, version in (("hybrid_rl", hybrid_rl.__version__), ("torch", torch.__version__)):
        assert re.search(rf"^{name} +{re.escape(version)}( |$)", out, re.MULTILINE)


def test_keys_one_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "watchdog"]) in (0, 1)
    capsys.readouterr()
    assert main(["keys", "learning_rate"]) == 0
    assert re.search(r"^optimizer\.learning_rate +\S+ +\w", capsys.readouterr().out, re.MULTILINE)
    assert main(["keys", "no such word"]) == 1
    assert "no key contains 'no such word'" in capsys.readouterr().err


def test_a_word_of_an_entry_shows_that_entry_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "num_top"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        *("key", "policy_loss.loss_options", "policy_loss.loss_options.num_top")
    ]
    assert main(["keys", "loss_options"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 20


@pytest.mark.parametrize("command", ["keys", "algorithms"])
def test_what_is_piped_ends_where_its_text_ends(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and [line for line in lines if line != line.rstrip()] == []


def test_without_an_output_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `hybrid-rl version >&- 2>&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["version"]) == 0


@pytest.mark.parametrize("fault", [errno.EFBIG, errno.EDQUOT, errno.EIO])
def test_an_output_that_cannot_be_written_is_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    class Limited(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(sys, "stdout", Limited())
    assert main(["version"]) == 1
    assert capsys.readouterr().err == f"cannot write the output: {os.strerror(fault)}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("command", ["version", "keys"])
def test_a_full_disk_is_one_message(capsys: pytest.CaptureFixture[str], monkeypatch, command: str) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert main([command]) == 1
    assert capsys.readouterr().err == "cannot write the output: No space left on device\n"


def test_a_name_that_is_looked_up_is_said_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    running.say_lookup(str(tmp_path))
    running.say_lookup(None)
    assert capsys.readouterr().err == ""
    running.say_lookup("nope")
    assert capsys.readouterr().err == "nope is no folder here: looking it up in the Hugging Face hub ...\n"


def test_doctor_describes_machine_and_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "not there" / "yet"
    assert main(["doctor", f"output_dir={folder}"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    for name in ("python", "torch", "ray", "compiled extension", "accelerators", "cores", "memory"):
        assert sum(line.startswith(f"{name}  ") for line in lines) == 1, name
    assert re.search(rf"^disk of {re.escape(str(folder))} +[\d.]+ GiB free", out, re.MULTILINE)
    assert re.search(r"^rank +host +device +threads +a matrix product +a copy", out, re.MULTILINE)
    assert re.search(rf"^0 +.* +(cpu|cuda).* +{torch.get_num_threads()} +[\d.]+ ms +[\d.]+ ms", out, re.MULTILINE)
    assert lines[-1] == "no problems found" and err == ""
    assert not folder.parent.exists()


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: (version, use) for name, version, use in doctor.optional_parts()}
    assert {"ray", "vllm", "tensorboard", "wandb", "trackio", "mlflow", "math-verify", "libnuma"} <= found.keys()
    monkeypatch.setattr(doctor, "version_of", lambda name: "not installed")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    found = {name: (version, use) for name, version, use in doctor.optional_parts()}
    assert found["wandb"] == ("not installed", "report_to=wandb; pip install wandb")
    assert "apt install libnuma1" in found["libnuma"][1]
    assert "1024 x 1024, float32" in doctor.what_is_normal("cpu") and "ms" in doctor.what_is_normal("cuda")


def test_doctor_names_problems_and_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def one_odd(probe_ranks: Any, config: object) -> list[object]:
        (probe,) = probe_ranks(config)
        return [probe, replace(probe, rank=1, versions={**probe.versions, "numpy": "1.0"})]

    wrap_probes(monkeypatch, one_odd)
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("problem: numpy is 1.0 on rank 1 ") and "no problems" not in out


def test_doctor_refuses_what_a_run_refuses_after_it_has_shown_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argument, message, has_looked in (
        ("num_rank=2", "unknown key 'num_rank'; did you mean 'num_ranks'", False),
        ("num_ranks=0", "num_ranks=0", False),
        ("device=cuda", "device=cuda", True),
        ("attention=varlen", ".*attention=varlen", True),
    ):
        assert main(["doctor", argument]) == 1
        out, err = capsys.readouterr()
        assert re.match(f"ConfigError: {message}", err) and ("\naccelerators " in out) == has_looked


def test_doctor_says_what_ranks_need(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor", "num_ranks=2"]) == 1
    assert "controller.backend=ray need Ray, which is not installed: pip install ray" in capsys.readouterr().err


def test_a_recipe_ends_with_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: list[str]) -> None:
        raise DataError("the dataset is empty")

    def interrupt(_: list[str]) -> None:
        raise KeyboardInterrupt

    for run, status, said in ((fail, 1, "DataError: the dataset is empty\n"), (interrupt, 130, "")):
        with pytest.raises(SystemExit) as stopped:
            cli.run_recipe(run)
        assert (stopped.value.code, capsys.readouterr().err) == (status, said)


def plans(monkeypatch: pytest.MonkeyPatch, made: RunPlan) -> list[tuple[list[str], Machine, Path | None]]:
    """Have every request answered with this plan. Returns the list of requests."""
    asked: list[tuple[list[str], Machine, Path | None]] = []

    def answer(words: list[str], machine: Machine, *, layouts: Path | None) -> RunPlan:
        asked.append((words, machine, layouts))
        return made

    monkeypatch.setattr(run_planning, "plan_words", answer)
    return asked


def test_plan_prints_tables_and_tells_by_its_status_whether_the_run_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plans(monkeypatch, made_plan())
    options = ["--gpus", "4", "--gpu-memory=40GB", "--host-memory", "1TB", "--layouts", "folder"]
    assert main(["plan", "grpo", *options, "seed=1", "reward=mine.py:score"]) == 0  # as of a train command
    out, err = capsys.readouterr()
    assert out.splitlines()[3].startswith("fits: peak 32.0 GB of 40.0 GB") and "^ peak" in out and err == ""
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    assert asked == [(["grpo", "seed=1"], Machine(4, "40GB", host_memory="1TB"), Path("folder"))]
    plans(monkeypatch, made_plan(made_memory(30.0)))
    assert main(["plan", "grpo", "--gpus", "4"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["plan", "grpo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_plan_refuses_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for command, status, message in (
        (["--gpus", "eight"], 2, "Invalid value for '--gpus'"),
        (["--gpu"], 2, "requires an argument"),
        (["model.path=m", "--gpus=0"], 1, "ConfigError: --gpus 0 must be at least 1"),
        (["model.path=./not/there", "--gpus=1", "--gpu=H100"], 1, "ModelError: model folder './not/there' does not"),
    ):
        assert main(["plan", *command]) == status
        out, err = capsys.readouterr()
        assert out == "" and message in err
    assert main(["plan", "--help"]) == 0
    assert "hybrid-rl plan grpo model.path=" in capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command that fails says, on one line."""
    assert main([str(word) for word in words]) == 1
    return " ".join(capsys.readouterr().err.split())


def test_what_is_named_in_the_place_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    assert "file' is a file; name the folder that has" in told(capsys, "generate", tmp_path / "file", "--prompt", "1")
    run, data = tmp_path / "run", tmp_path / "d.jsonl"
    for step in (9, 10):
        (run / f"checkpoint-{step}").mkdir(parents=True)
    data.write_text('{"prompt": "1", "answer": "1"}')
    shown = told(capsys, "data", data, f"model.path={run}")
    assert "is the folder of a run, not of a model; name a checkpoint in it" in shown and "checkpoint-10" in shown
    (run / "checkpoint-10" / "config.json").write_text("{}")
    assert "run/checkpoint-10' has no tokenizer" in told(capsys, "eval", run, data, "reward=exact_match")
    assert "model, data and reward= as at its start" in told(capsys, "train", "resume=auto", "run_name=run")


def test_what_cannot_be_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "eval.json").write_text("{}")
    shown = told(capsys, "eval", tmp_path / "e", "--against", tmp_path / "e" / "eval.json")
    assert "itself, so there is nothing to compare" in shown
    shown = told(capsys, "eval", "some/model", "--against", tmp_path / "e")
    assert "reward=FILE.py:FUNCTION is missing" in shown and "e is only read, but some/model has to be" in shown


def test_a_key_with_a_letter_wrong_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no key contains 'learnin_rate'; did you mean learning_rate?" in told(capsys, "keys", "learnin_rate")
    assert told(capsys, "keys", "save_model") == "no key contains 'save_model'; `hybrid-rl keys` lists all"
    assert told(capsys, "keys", "qqqqqq") == "no key contains 'qqqqqq'; `hybrid-rl keys` lists all"


def test_the_folder_of_a_run_can_be_planned(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: m, device: cpu}\nmax_steps: 7\n")
    assert planned_config([str(tmp_path), "seed=3"], Machine()).max_steps == 7
