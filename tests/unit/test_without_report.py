"""A run, and the commands around it, where nothing of the extra `report` is installed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.kills.forked import Forked
from tests.support.tiny import sums

REWARD = "def lengths(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"
PROGRAM = """
import sys
from pathlib import Path

names = ("matplotlib", "plotly", "pandas")
assert not sys.modules.keys() & set(names), "imported with the library"
sys.modules.update(dict.fromkeys(names))
import pytest
from hybrid_rl import Trainer
from hybrid_rl.cli import main
from tests.support.scores import spread
from tests.support.tiny import build_model, build_tokenizer, sums

given = sys.argv[1:]
for command in (["keys"], ["doctor"], ["plan", *given], ["train", *given, "run_name=first"]):
    assert main(command) == 0, command
assert main(["report", "runs/first"]) == 1
keys = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "max_steps": 2, "run_name": "second"}
with Trainer(build_model(), spread, sums(8), tokenizer=build_tokenizer(), **keys) as trainer:
    for result in trainer.steps():
        assert len(result.batch.samples()) == 4
    with pytest.raises(ValueError, match="needs pandas, which is not installed: pip install .hybrid_rl.report"):
        result.batch.to_pandas()
    assert trainer.generate(["1+2="])
    with pytest.raises(ValueError, match="needs plotly"):
        trainer.report()
"""


@pytest.mark.slow
def test_all_but_pictures_report_and_tables_works(tmp_path: Path, model_folder: Path, forked: Forked) -> None:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(8)))
    (tmp_path / "score.py").write_text(REWARD)
    given = [f"model.path={model_folder}", "data.train_path=data.jsonl", "reward=score.py:lengths"]
    given += ["prompts_per_step=2", "num_generations=2", "max_completion_length=4", "max_steps=2", "device=cpu"]
    environment = {**os.environ, "COLUMNS": "300"}
    done = forked.run("-c", PROGRAM, *given, folder=tmp_path, environment=environment, draws=True)
    assert done.returncode == 0, done.stderr
    missing = 'for matplotlib is not installed: pip install "hybrid_rl[report]"'
    assert (done.stdout + done.stderr).count(missing) == 2  # one line of each run
    assert 'the report needs plotly, which is not installed: pip install "hybrid_rl[report]"' in done.stderr
    for name in ("first", "second"):
        run = tmp_path / "runs" / name
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
        assert not list(run.glob("*.png"))
    assert json.loads((tmp_path / "runs" / "first" / "memory.json").read_text())["step"] == 2
