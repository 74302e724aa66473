"""Evaluation during a run: named sets, votes, samples that are kept, rows given for once."""

import json
import math

import pytest

from hybrid_rl import Callback
from hybrid_rl.data.prompts import PromptEncoder
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.rewards import exact_match
from hybrid_rl.run import evaluator
from hybrid_rl.run.evaluation import load_sets
from tests.support.tiny import build_tokenizer, sums

SAMPLED = {"eval_temperature": 1.0, "num_generations_eval": 4}


def odd(completion_ids, log_extra=None, **_):
    """Right if the first token is odd; the answer is that token, so that answers have votes."""
    log_extra("extracted_answer", [str(ids[0]) for ids in completion_ids])
    return [float(ids[0] % 2) for ids in completion_ids]


def length(completion_ids, **_):
    return [len(ids) / 10 for ids in completion_ids]


def test_sets_by_name(make_trainer, records):
    """Each set has all metrics under its name, and those of a set alone do not depend on the others."""
    both = make_trainer(reward_funcs=[odd, length], eval_dataset={"a": sums(6), "b.2": sums(9)[6:]}, **SAMPLED)
    metrics = both.fit()
    assert {name.split("/")[1] for name in metrics if name.startswith("eval/")} == {"a", "b.2"}
    for name in ("accuracy", "accuracy_low", "accuracy_high", "pass@2", "pass@4", "maj@4", "reward"):
        assert f"eval/a/{name}" in metrics and f"eval/b.2/{name}" in metrics
    assert metrics["eval/a/accuracy_low"] < metrics["eval/a/accuracy"] < metrics["eval/a/accuracy_high"]
    assert records(both)[-1]["eval/a/accuracy"] == metrics["eval/a/accuracy"]
    alone = make_trainer(reward_funcs=[odd, length], eval_dataset={"a": sums(6)}, **SAMPLED).fit()
    same = {name: value for name, value in alone.items() if name.startswith("eval/a/") and "timing" not in name}
    assert same and same.items() <= metrics.items()
    assert [len(both.evaluations[name].prompts) for name in ("a", "b.2")] == [6, 3]


def test_the_numbers_are_those_of_the_samples(make_trainer):
    """pass@k and the votes from the kept samples, counted again by hand."""
    trainer = make_trainer(reward_funcs=odd, eval_dataset=sums(5), **SAMPLED)
    metrics = trainer.evaluate()
    lines = [json.loads(line) for line in (trainer.run_folder / "eval-samples.jsonl").read_text().splitlines()]
    assert len(lines) == 20 and {line["set"] for line in lines} == {""} and {line["step"] for line in lines} == {0}
    groups = [[line for line in lines if line["group"] == number] for number in range(5)]
    right = [sum(line["rewards"]["odd"] for line in group) for group in groups]
    assert metrics["eval/accuracy"] == pytest.approx(sum(right) / 20)
    assert metrics["eval/pass@4"] == pytest.approx(sum(count > 0 for count in right) / 5)
    pairs = [1 - math.comb(4 - int(count), 2) / 6 for count in right]
    assert metrics["eval/pass@2"] == pytest.approx(sum(pairs) / 5)
    voted = []
    for group in groups:
        answers = [line["extra"]["extracted_answer"] for line in group]
        most = max(map(answers.count, answers))
        winners = {answer for answer in answers if answers.count(answer) == most}
        voted.append(sum(int(answer) % 2 for answer in winners) / len(winners))
    assert metrics["eval/maj@4"] == pytest.approx(sum(voted) / 5)
    assert metrics["eval/accuracy"] == trainer.evaluations[""].estimates()["accuracy"].value
    curve = trainer.evaluations[""].within([1, 5])
    assert curve[5].value == metrics["eval/accuracy"] >= curve[1].value


def test_rows_given_for_once(make_trainer):
    seen = []

    class Seen(Callback):
        def on_evaluate(self, trainer, step, metrics):
            seen.append(metrics)

    trainer = make_trainer(reward_funcs=exact_match, callbacks=[Seen()])
    found = trainer.evaluate({"given": sums(3)})
    assert found == seen[0] and "eval/given/accuracy" in found
    assert trainer.evaluate(sums(3))["eval/reward"] == found["eval/given/reward"]  # greedy, so the same samples
    with pytest.raises(ConfigError, match="no evaluation data.*evaluate.rows"):
        trainer.evaluate()
    with pytest.raises(DataError, match="row 1 of the data has 9 tokens.*at most 5; set max_prompt_length"):
        trainer.evaluate([sums(1)[0], {"prompt": "123456789", "answer": "1"}])
    with pytest.raises(DataError, match="the dataset is empty"):
        trainer.evaluate([])


def test_sets_that_cannot_be_used_are_refused(make_trainer):
    encoder = PromptEncoder(build_tokenizer(), max_prompt_length=None)
    letters = "eval_dataset has a set named .*letters, digits"
    for given, error, message in [
        *(({name: sums(2)}, ConfigError, letters) for name in ("a/b", "", "two words", 3, "..", "a" * 101)),
        ({"rewards": sums(2)}, ConfigError, "set named 'rewards', which other metrics begin with"),
        ({"a": sums(2), "b": []}, DataError, r"eval_dataset\['b'\]: the dataset is empty"),
        ({}, DataError, "empty mapping"),
    ]:
        with pytest.raises(error, match=message):
            load_sets(given, encoder)
    with pytest.raises(ConfigError, match="success_functions names 'odd', but the reward functions are 'spread'"):
        make_trainer(eval_dataset=sums(2), success_functions=["odd"])


def test_sets_from_files(make_trainer, tmp_path):
    """As a key of the configuration, and as an argument; both are recorded."""
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("first", "second")}
    for path in paths.values():
        with open(path, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in sums(3))
    by_key = make_trainer(eval_path=paths)
    by_argument = make_trainer(eval_dataset=paths)
    assert by_key.config.data.eval_path == paths == by_argument.config.data.eval_path
    assert by_key.evaluate().keys() >= {"eval/first/reward", "eval/second/reward"}


def test_each_set_may_have_its_own_function(make_trainer):
    """The functions return None for rows that are not theirs; what is right is said by the first that does not."""

    def sums_only(completions, answer, **_):
        return [None if gold is None else 0.0 for gold in answer]

    def words_only(completions, word, **_):
        return [None if gold is None else 1.0 for gold in word]

    sets = {
        "sums": [{"prompt": "1+1=", "answer": "2", "word": None}],
        "words": [{"prompt": "ab", "answer": None, "word": "abc"}],
    }
    keys = {"reward_funcs": [sums_only, words_only, length], "train_dataset": sets["sums"] * 12, "eval_dataset": sets}
    metrics = make_trainer(**keys, success_functions=["sums_only", "words_only"]).evaluate()
    assert (metrics["eval/sums/accuracy"], metrics["eval/words/accuracy"]) == (0.0, 1.0)
    first = make_trainer(**keys).evaluate()  # without the key, the first function alone
    assert first["eval/sums/accuracy"] == 0.0 and "eval/words/accuracy" not in first


def test_kept_samples_are_bounded_and_of_whole_groups(make_trainer, monkeypatch):
    monkeypatch.setattr(evaluator.Evaluator.evaluate, "__defaults__", (9,))
    trainer = make_trainer(reward_funcs=odd, eval_dataset=sums(5), **SAMPLED)
    trainer.fit()
    lines = [json.loads(line) for line in (trainer.run_folder / "eval-samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["group"]) for line in lines] == [(s, g) for s in (0, 2) for g in (0,) * 4 + (1,) * 4]


def test_a_resumed_run_keeps_its_eval_samples_and_evaluating_changes_nothing(make_trainer):
    keys = {"reward_funcs": exact_match, "eval_dataset": sums(3), "eval_steps": 1, "save_steps": 2, "max_steps": 3}
    run = make_trainer(**keys)
    run.fit()
    path = run.run_folder / "eval-samples.jsonl"
    straight = path.read_text()
    run.close()
    resumed = make_trainer(**keys, resume=str(run.run_folder / "checkpoint-2"))
    before = {file: file.stat().st_mtime_ns for file in run.run_folder.rglob("*")}
    resumed.evaluate()
    assert before == {file: file.stat().st_mtime_ns for file in run.run_folder.rglob("*")}
    resumed.fit()
    assert path.read_text() == straight
