"""A retrieval environment: questions about an invented world, whose answers must be searched for."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from hybrid_rl.errors import DataError

_NAMES = {
    "first": "Ada Bram Celia Dario Elin Farid Greta Hugo Ines Jonas Kaja Leon Mira Nils Olga Pavel Rosa Silas Tove",
    "last": "Almgren Bexley Corvane Dunmore Estrel Farrow Gildane Hollis Ivarsen Joubert Kestrel Lorne",
    "town": "Aldervik Brackenholm Cindermoor Dovrefell Eastmarch Fallowmere Greyhaven Hartsund Ilverton Juniper "
    "Kelbrook Lanthe Morrowby Northwick Ostrava Pellworth",
    "river": "Ansel Brine Corrow Dell Esk Fenn Garrow Hathe",
    "country": "Avelon Borland Cairnia Drumland",
}
_FIRST, _LAST, _TOWNS, _RIVERS, _COUNTRIES = (names.split() for names in _NAMES.values())
_CRAFTS = {
    "a clockmaker": "the double escapement",
    "a botanist": "the blue alder",
    "a bridge engineer": "the hanging span",
    "a violin maker": "the wide bow",
    "a glass blower": "the clear lens",
    "a cartographer": "the tidal chart",
}
_FOODS = ("smoked eel pie", "barley dumplings", "plum bread", "salted cheese", "chestnut soup", "honey cake")

NUM_FOUND = 5
_B, _K1 = 0.75, 1.5  # BM25's usual constants


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[a-z0-9]+", text.lower())


class Index:
    """Documents ranked by BM25 (Robertson and Zaragoza, 2009).

    documents: texts. Documents with equal scores keep their order.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = tuple(documents)
        self._counts = [Counter(words_of(text)) for text in self.documents]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean = sum(self._lengths) / max(1, len(self._lengths))
        self._spread = Counter(word for counts in self._counts for word in counts)

    def scores(self, query: str) -> list[float]:
        """Return a score for each document."""
        scores = [0.0] * len(self.documents)
        for word in words_of(query):
            num = self._spread[word]
            weight = math.log(1 + (len(self.documents) - num + 0.5) / (num + 0.5))
            for place, counts in enumerate(self._counts):
                count = counts[word]
                length = 1 - _B + _B * self._lengths[place] / self._mean
                scores[place] += weight * count * (_K1 + 1) / (count + _K1 * length)
        return scores

    def search(self, query: str, num_found: int = NUM_FOUND) -> list[int]:
        """Return the places of the best documents that have a word of the query, best first."""
        scores = self.scores(query)
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[:num_found]
        return [place for place in best if scores[place] > 0]


@cache
def _world() -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]], Index]:
    """Return people and towns by name, and the documents about them; always the same."""
    draw = random.Random(0)
    towns = {
        name: {
            "river": draw.choice(_RIVERS),
            "country": draw.choice(_COUNTRIES),
            "food": draw.choice(_FOODS),
            "year": str(draw.randrange(1050, 1650)),
        }
        for name in _TOWNS
    }
    names = draw.sample([f"{first} {last}" for first in _FIRST for last in _LAST], 60)
    people = {}
    for name in names:
        craft = draw.choice(list(_CRAFTS))
        people[name] = {
            "town": draw.choice(_TOWNS),
            "craft": craft,
            "thing": _CRAFTS[craft],
            "born": str(draw.randrange(1700, 1900)),
            "teacher": draw.choice([other for other in names if other != name]),
        }
    documents = [
        f"{name}: {fact['craft']}, born in {fact['born']} in {fact['town']}. Learned the craft from {fact['teacher']}, "
        f"and is remembered for {fact['thing']}."
        for name, fact in people.items()
    ] + [
        f"{name}: a town in {fact['country']} on the river {fact['river']}, founded in {fact['year']}. Its dish is "
        f"{fact['food']}."
        for name, fact in towns.items()
    ]
    return people, towns, Index(documents)


class Library:
    """The environment: `environment_factory=Library`. A row gives a `question` and the `expected` answer.

    The reward is 1 for the right answer, 0 for another one or none.
    """

    def __init__(self) -> None:
        self._index = _world()[2]
        self._expected = ""
        self.answered: str | None = None
        self.num_searches = 0

    def reset(self, question: str, expected: str, **row: Any) -> str:
        """Return the question and what to do."""
        if not words_of(str(expected)):
            raise DataError(f"a row of Library needs the answer in its column `expected`; it has {expected!r}")
        self._expected, self.answered, self.num_searches = str(expected), None, 0
        return f"Search the library, then call answer with a few words.\n\nQuestion: {question}"

    def search(self, query: str) -> str:
        """Search the library. Returns the best entries, one per line.

        Args:
            query: Words that the entry should have.
        """
        self.num_searches += 1
        places = self._index.search(query)
        return "\n".join(self._index.documents[place] for place in places) or "Nothing found."

    def answer(self, text: str) -> str:
        """Answer the question. Only the first answer counts.

        Args:
            text: The answer, without a sentence around it.
        """
        if self.answered is not None:
            raise ValueError("the question was answered already")
        self.answered = text
        return "Noted."

    @property
    def is_right(self) -> bool:
        """Whether the answer says what was expected, letter case and an article aside."""
        return self.answered is not None and _plain(self.answered) == _plain(self._expected)

    def get_reward(self) -> float:
        """Return 1 for the right answer, else 0."""
        return float(self.is_right)


def _plain(text: str) -> list[str]:
    return [word for word in words_of(text) if word not in ("a", "an", "the", "river")]


def library_rows(num_rows: int, seed: int = 0, hops: int = 2) -> list[dict[str, Any]]:
    """Return rows for `Dataset.from_list` with `question` and `expected`. hops: entries that an answer needs, 1 to 3.

    Raises DataError for other numbers of hops.
    """
    if hops not in (1, 2, 3):
        raise DataError(f"library_rows(hops={hops!r}): an answer needs 1, 2 or 3 entries")
    people, towns, _ = _world()
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        name = draw.choice(list(people))
        person, who = people[name], name
        if hops == 3:
            person, who = people[person["teacher"]], f"the teacher of {name}"
        if hops == 1:
            asked = {
                f"In which town was {who} born?": person["town"],
                f"In which year was {who} born?": person["born"],
                f"From whom did {who} learn the craft?": person["teacher"],
            }
        else:
            town = towns[person["town"]]
            asked = {
                f"On which river is the town where {who} was born?": town["river"],
                f"In which country is the town where {who} was born?": town["country"],
                f"In which year was the town founded where {who} was born?": town["year"],
                f"What is the dish of the town where {who} was born?": town["food"],
            }
        question, expected = draw.choice(list(asked.items()))
        rows.append({"question": question, "expected": expected})
    return rows
