"""Several datasets by name: who is drawn when, weights that change, and what a checkpoint keeps."""

import json
from typing import Any

import pytest

from hybrid_rl.data.mixture import MixedSampler, MixedSource, load_sources, sampler_of
from hybrid_rl.data.prompts import PromptEncoder
from hybrid_rl.errors import ConfigError, DataError

EASY = [{"prompt": f"{n}", "answer": n} for n in range(4)]
HARD = [{"prompt": f"{n}+{n}", "level": n} for n in range(2)]


@pytest.fixture
def source(tokenizer: Any) -> MixedSource:
    made = load_sources({"easy": EASY, "hard": HARD}, PromptEncoder(tokenizer, max_prompt_length=None))
    assert isinstance(made, MixedSource)
    return made


def sampler(source: MixedSource, weights: Any = None, **options: Any) -> MixedSampler:
    made = sampler_of(source, **{"shuffle": None, "seed": 3, "weights": weights, **options})
    assert isinstance(made, MixedSampler)
    return made


def names(rows: Any) -> str:
    return "".join(row.columns["dataset"][0] for row in rows)


def test_rows_have_the_columns_of_all(source: MixedSource) -> None:
    assert source.column_names == ("prompt", "answer", "level", "dataset") and len(source) == 6
    assert source[3].columns == {"answer": 3, "level": None, "dataset": "easy"}
    assert source[5].columns == {"answer": None, "level": 1, "dataset": "hard"} and source[5].index == 1
    assert list(source.values("level")) == [None] * 4 + [0, 1]
    assert list(source.values("dataset")) == ["easy"] * 4 + ["hard"] * 2
    assert source.max_length == 3


def test_draws_by_hand(source: MixedSource) -> None:
    # Credits after each draw, of 3/4 and 1/4: (-1/4, 1/4), (-1/2, 1/2) as of equals the first, (1/4, -1/4), (0, 0).
    assert names(sampler(source, {"easy": 3, "hard": 1}).take(8)) == "eeheeehe"
    assert names(sampler(source, {"easy": 1.5e308, "hard": 0.5e308}).take(8)) == "eeheeehe"  # beyond floats in sum
    assert names(sampler(source).take(6)) == "eheehe"  # by size: 2/3 and 1/3
    assert names(sampler(source, {"easy": 0, "hard": 1}).take(3)) == "hhh"


def test_no_dataset_is_drawn_more_than_once_too_often(source: MixedSource) -> None:
    drawn = names(sampler(source, {"easy": 0.37, "hard": 0.63}).take(500))
    for count in range(1, 501):
        part = drawn[:count]
        assert part.count("e") < 0.37 * count + 1 and part.count("h") < 0.63 * count + 1


def test_the_order_of_a_dataset_does_not_depend_on_weights_or_on_request_sizes(source: MixedSource) -> None:
    def of_easy(rows: Any) -> list[Any]:
        return [row.prompt for row in rows if row.columns["dataset"] == "easy"]

    few, many = sampler(source, {"easy": 1, "hard": 9}), sampler(source, {"easy": 9, "hard": 1})
    together = of_easy(few.take(100))
    assert together == of_easy(many.take(40))[: len(together)]
    one_by_one = sampler(source, {"easy": 1, "hard": 9})
    assert of_easy([one_by_one.take(1)[0] for _ in range(100)]) == together


def test_weights_change_while_a_run_goes_on_and_a_resume_repeats_it(source: MixedSource) -> None:
    first = sampler(source, {"easy": 1, "hard": 1})
    first.take(3)
    first.weights = {"easy": 1, "hard": 3}
    assert dict(first.weights) == {"easy": 0.25, "hard": 0.75}
    first.take(5)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = sampler(source, {"easy": 1, "hard": 1})
    resumed.load_state_dict(state)
    expected = first.take(20)
    assert resumed.take(20) == expected and names(expected).count("h") == 15
    changed = sampler(source, {"easy": 1, "hard": 0})  # a new configuration wins
    changed.load_state_dict(state)
    assert names(changed.take(4)) == "eeee" and changed.epoch == pytest.approx(12 / 6)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"easy": 1}, "leave out 'hard'; give one for each of easy, hard"),
        ({"easy": 1, "hard": 1, "odd": 1}, "name 'odd', which is no dataset"),
        ({"easy": -1, "hard": 1}, "easy=-1 must be a finite number"),
        ({"easy": float("nan"), "hard": 1}, "easy=nan must be"),
        ({"easy": 0, "hard": 0}, "are all 0"),
        ([1, 2], "must be a mapping such as"),
    ],
)
def test_bad_weights(source: MixedSource, weights: Any, message: str) -> None:
    made = sampler(source)
    with pytest.raises(ConfigError, match=message):
        made.weights = weights
    with pytest.raises(TypeError):
        made.weights["easy"] = 1  # type: ignore[index]


def test_what_cannot_be_mixed(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, max_prompt_length=None)
    with pytest.raises(DataError, match="dataset 'b': row 0: the prompt ' ' is empty"):
        load_sources({"a": EASY, "b": [{"prompt": " "}]}, encoder)
    with pytest.raises(DataError, match="dataset 'b' is a stream"):
        load_sources({"a": EASY, "b": lambda: iter(HARD)}, encoder)
    with pytest.raises(DataError, match="dataset 'a' has a column 'dataset'"):
        load_sources({"a": [{"prompt": "1", "dataset": "x"}]}, encoder)
    one = sampler_of(load_sources(EASY, encoder), shuffle=None, seed=0)
    with pytest.raises(ConfigError, match="there is one dataset without a name"):
        one.weights = {"easy": 1}
    with pytest.raises(ConfigError, match="there is one dataset without a name"):
        sampler_of(load_sources(EASY, encoder), shuffle=None, seed=0, weights={"a": 1})


@pytest.mark.parametrize("name", ["", " ", "b\n", "a/b", "n" * 101])
def test_a_name_that_no_metric_can_have(tokenizer: Any, name: str) -> None:
    encoder = PromptEncoder(tokenizer, max_prompt_length=None)
    with pytest.raises(DataError, match="a dataset is named .*metrics are named data/<name>/reward"):
        load_sources({"a": [{"prompt": "1"}], name: [{"prompt": "2"}]}, encoder)
