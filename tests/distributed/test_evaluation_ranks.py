"""Two ranks evaluate as one process does, and keep best step and patience alike."""

import json
from pathlib import Path

import pytest

from hybrid_rl import Trainer
from hybrid_rl.extras.evaluations.checkpoints import evaluate_checkpoint
from tests.support.tiny import build_model, build_tokenizer, sums

pytestmark = pytest.mark.slow  # processes are started


def odd(completion_ids, log_extra=None, **_):
    log_extra("extracted_answer", [str(ids[0]) for ids in completion_ids])
    return [float(ids[0] % 2) for ids in completion_ids]


def samples_of(folder: Path) -> list[dict]:
    lines = [line for path in folder.glob("eval-samples*.jsonl") for line in path.read_text().splitlines()]
    return sorted(
        (json.loads(line) for line in lines), key=lambda line: (line["step"], line["set"], line["trajectory"])
    )


@pytest.mark.sweep
def test_two_ranks_evaluate_as_one_process(tmp_path: Path, forked_ranks) -> None:
    keys = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "max_steps": 2, "eval_steps": 1}
    keys |= {"eval_temperature": 1.0, "num_generations_eval": 4, "metric_for_best_model": "eval/b/pass@4"}
    keys |= {"save_steps": 9, "load_best_model_at_end": True, "learning_rate": 1e-2, "output_dir": str(tmp_path)}
    found = {}
    for num_ranks in (1, 2):
        given = {"num_ranks": num_ranks, "tokenizer": build_tokenizer(), "run_name": f"ranks-{num_ranks}"}
        with Trainer(build_model(), odd, sums(8), {"a": sums(5), "b": sums(3)}, **keys, **given) as trainer:
            trainer.fit()
            after = trainer.evaluate(sums(6))
            best = json.loads((trainer.run_folder / "best.json").read_text())
            folder, evaluations = trainer.run_folder, trainer.evaluations
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        metrics = [{n: v for n, v in line.items() if n.startswith("eval/") and "timing" not in n} for line in lines]
        after = {n: v for n, v in after.items() if "timing" not in n}
        found[num_ranks] = (metrics, after, best, samples_of(folder), evaluations)
    one, two = found[1], found[2]
    assert {"eval/a/maj@4", "eval/b/accuracy_low"} <= one[0][0].keys() and len(one[3]) == 3 * 8 * 4 + 6 * 4
    for part in range(len(one)):
        assert one[part] == two[part]


def test_a_checkpoint_is_evaluated_on_two_ranks(tmp_path: Path, forked_ranks) -> None:
    build_model().save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    keys = {"max_completion_length": 5, "eval_temperature": 1.0, "num_generations_eval": 3}
    one, two = (
        evaluate_checkpoint(tmp_path / "model", {"a": sums(5)}, odd, folder=tmp_path / f"of-{n}", num_ranks=n, **keys)
        for n in (1, 2)
    )
    assert one.sets == two.sets and one.settings == two.settings
    assert samples_of(tmp_path / "of-1") == samples_of(tmp_path / "of-2")
