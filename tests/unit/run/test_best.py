"""The best step of a run by a metric of its evaluations, and when to stop early; without a run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import EvalConfig, load_config, resolve
from hybrid_rl.config.eval_keys import EarlyStopping
from hybrid_rl.errors import CheckpointError, ConfigError
from hybrid_rl.run.best import BestStep, check_metric
from tests.support.inside.trainers import prefers_larger

VALUES = (0.5, 0.2, 0.6, 0.55, 0.61, 0.3, 0.3, 0.3, 0.9)  # before the first step, and after each


def best_of(folder: Path, patience: int | None = None, threshold: float = 0.0, **keys: Any) -> BestStep:
    stopping = EarlyStopping(patience=patience, threshold=threshold)
    return BestStep(EvalConfig(**{"metric_for_best_model": "reward", **keys}, early_stopping=stopping), folder)


def look(best: BestStep, *values: float) -> list[bool]:
    """Take in evaluations from step 0 on, until it is time to stop."""
    found = []
    for step, value in enumerate(values):
        found.append(best.look(step, {"eval/reward": value}))
        if best.is_over:
            break
    return found


@pytest.mark.parametrize(
    ("patience", "threshold", "last", "step"), [(1, 0.0, 3, 2), (3, 0.0, 7, 4), (3, 0.02, 5, 4), (None, 0.0, 8, 8)]
)
def test_when_to_stop(tmp_path: Path, patience: int | None, threshold: float, last: int, step: int) -> None:
    """With a threshold of 0.02, 0.61 does not count as better than 0.6 and 3, 4 and 5 are bad, though 4 is still the
    best."""
    best = best_of(tmp_path, patience, threshold)
    assert len(look(best, *VALUES)) - 1 == last and best.step == step and best.before == 0.5


def test_less_may_be_better(tmp_path: Path) -> None:
    assert not prefers_larger(best_of(tmp_path, metric_for_best_model="completions/mean_length"))
    best = best_of(tmp_path, greater_is_better=False)
    look(best, *VALUES[:6])
    assert (best.step, best.num_worse) == (1, 4)


def test_an_evaluation_that_is_no_number_is_never_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NaN before training and after steps 1 and 4, else 1 and 2: step 3 is the best, and patience is not used up."""
    best = best_of(tmp_path, patience=1)
    assert look(best, math.nan, math.nan, 1.0, 2.0, math.inf) == [False, False, True, True, False]
    best.write()
    record = json.loads((tmp_path / "best.json").read_text(), parse_constant=pytest.fail)
    assert (record["step"], record["value"], record["before_training"]) == (3, 2.0, None)
    assert not best.is_over and "eval/reward is nan after step 1, so that does not count" in caplog.text


def test_an_evaluation_without_the_metric_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best = best_of(tmp_path)
    look(best, 0.4, 0.5)
    assert not best.look(2, {"eval/accuracy": 1.0}) and (best.step, best.num_worse) == (1, 0)
    assert "the evaluation after step 2 has no eval/reward" in caplog.text


def test_what_is_said_at_the_end(tmp_path: Path) -> None:
    """Of weights that are not loaded: there are none that are better, or they are lost."""
    keys: dict[str, Any] = {"load_best_model_at_end": True}
    best = best_of(tmp_path, **keys)
    assert best.load(0, pytest.fail) is None  # nothing was evaluated
    look(best, math.nan, math.nan, math.nan)
    assert best.load(2, pytest.fail) == (
        "there is no best step: eval/reward was not a number in any of 2 evaluations, so the weights of the last step "
        "stay; see eval/rewards/num_failed"
    )
    best = best_of(tmp_path, **keys)
    look(best, 0.5, 0.2)
    told = best.load(1, pytest.fail) or ""
    assert told.endswith("is 1 (0.2), which is not better than before training (0.5), the last one")
    with pytest.raises(CheckpointError, match="checkpoint-1 is missing, so its weights cannot be loaded"):
        best.load(2, pytest.fail)


def test_the_last_best_checkpoint_stays_until_the_next_is_there(tmp_path: Path) -> None:
    """It may be written yet, or have failed on a full disk."""
    best = best_of(tmp_path)
    assert best.kept is None
    for step in (1, 2):
        assert best.look(step, {"eval/reward": float(step)})
        assert best.kept == (None if step == 1 else tmp_path / "checkpoint-1")
        (tmp_path / f"checkpoint-{step}").mkdir()
        assert best.kept == tmp_path / f"checkpoint-{step}"


def test_another_metric_begins_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, other = best_of(tmp_path), best_of(tmp_path, metric_for_best_model="accuracy")
    look(first, *VALUES[:3])
    other.load_state_dict(first.state_dict())
    assert other.step is None
    assert "is eval/accuracy now, and was eval/reward: the best step so far is forgotten" in caplog.text


@pytest.mark.parametrize(
    ("name", "sets", "hint"),
    [
        ("eval/rewards/scriptd/mean", ("",), "have .*eval/rewards/scripted/mean"),
        ("eval_loss", ("",), "is no metric of the evaluations"),
        ("pass@8", ("",), "only up to num_generations_eval"),
        ("gsm8k/accuracy", ("",), "have eval/accuracy"),
        ("accuracy", ("a", "b"), "which have eval/b/accuracy, eval/a/accuracy"),
        *(("eval_pass@6", ("",), ""), ("eval/a/maj@4", ("a", "b"), ""), ("a/agents/turns_mean", ("a",), "")),
    ],
)
def test_a_metric_that_cannot_exist_is_refused(tmp_path: Path, name: str, sets: tuple[str, ...], hint: str) -> None:
    keys = {"metric_for_best_model": name, "eval_temperature": 1.0, "num_generations_eval": 6}
    config = load_config(None, keys)[0].eval
    if not hint:
        check_metric(config, sets, ["scripted"])
        return
    with pytest.raises(ConfigError, match=f"metric_for_best_model='eval/.*{hint}"):
        check_metric(config, sets, ["scripted"])


def test_whether_there_is_an_accuracy_is_known_once_rewards_are_seen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval/accuracy.*; there is an accuracy only if the first reward function"):
        best_of(tmp_path, metric_for_best_model="accuracy").look(0, {"eval/reward": 0.5})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"early_stopping.patience": 2, "metric_for_best_model": None}, "set metric_for_best_model"),
        ({"early_stopping.patience": 2, "eval_steps": None}, "set eval_steps"),
        ({"load_best_model_at_end": True}, "set save_steps"),
        ({"early_stopping.threshold": 0.1}, "set early_stopping.patience"),
        ({"has_eval": False, "eval_steps": None}, "no eval_dataset"),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, Any], message: str) -> None:
    has_eval = keys.pop("has_eval", True)
    with pytest.raises(ConfigError, match=f"would do nothing: .*{message}"):
        resolve(*load_config(None, {"metric_for_best_model": "reward", "eval_steps": 1, **keys}), has_eval=has_eval)
