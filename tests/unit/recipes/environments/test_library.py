"""The library: BM25 against its formula, questions that can be answered by searching."""

from __future__ import annotations

import math

import pytest

from hybrid_rl.agents.environments import EnvironmentKind
from hybrid_rl.errors import DataError
from recipes.environments.library import Index, Library, library_rows


def test_scores_by_hand() -> None:
    index = Index(["red fox red", "blue fox", "blue bird sings"])
    # "red" is in 1 of 3 documents, twice in the first one, which has 3 words where the mean is 8/3.
    weight = math.log(1 + 2.5 / 1.5)
    expected = weight * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 3 / (8 / 3)))
    assert index.scores("Red!") == pytest.approx([expected, 0, 0])
    assert index.search("blue fox") == [1, 0, 2] and index.search("green") == []


def test_two_searches_answer_a_question() -> None:
    library, right = Library(), 0
    for row in library_rows(40, hops=2):
        observation = library.reset(**row)
        assert row["question"] in observation
        name = row["question"].split(" where ")[1].removesuffix(" was born?")
        entries = [line for line in library.search(name).splitlines() if line.startswith(name)]
        town = entries[0].split(" in ")[2].split(".")[0] if entries else "?"
        found = library.search(f"{town}, a town on a river").splitlines()
        right += any(row["expected"] in line for line in found if line.startswith(town))
    assert right == 40


def test_a_question_from_start_to_end() -> None:
    library = Library()
    library.reset(question="?", expected="Dell", prompt=None)
    assert library.get_reward() == 0
    assert len(library.search("town on the river Dell").splitlines()) == 5
    assert library.search("xyzzy") == "Nothing found."
    library.answer("The River DELL.")
    assert library.get_reward() == 1
    with pytest.raises(ValueError, match="already"):
        library.answer("Esk")
    library.reset(question="?", expected="Esk")
    library.answer("Dell")
    assert library.get_reward() == 0
    with pytest.raises(DataError, match="expected"):
        library.reset(question="?", expected="")


def test_rows_repeat_and_need_several_entries() -> None:
    assert library_rows(20) == library_rows(20) != library_rows(20, seed=1)
    assert all("the teacher of" in row["question"] for row in library_rows(5, hops=3))
    with pytest.raises(DataError, match="hops"):
        library_rows(1, hops=4)


def test_its_tools() -> None:
    kind = EnvironmentKind(None, Library)
    kind.look_at(Library())
    assert sorted(kind.schemas) == ["answer", "search"] and kind.has_reward
