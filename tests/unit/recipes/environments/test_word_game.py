"""The word game: marks counted by hand, rules kept, the same word for the same row."""

from __future__ import annotations

import pytest

from hybrid_rl.agents.environments import EnvironmentKind
from hybrid_rl.errors import ConfigError, DataError
from recipes.environments.word_game import WORDS, WordGame, feedback, word_game_rows


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("plate", "crane", "--G-G"),
        ("otter", "motor", "Y-G-G"),  # the word's only t is in its place
        ("allow", "level", "-YY--"),
        ("level", "allow", "Y---Y"),
        ("speed", "eerie", "--YY-"),
        ("eerie", "speed", "YY---"),
    ],
)
def test_marks(guess: str, secret: str, marks: str) -> None:
    assert feedback(guess, secret) == marks


def test_a_game_from_start_to_end() -> None:
    game = WordGame()
    assert "5 letters" in game.reset(secret="crane", prompt=[])
    for wrong in ("cranes", "cr4ne", "zzzzz", "straße"):
        with pytest.raises(ValueError, match="does not count"):
            game.guess(wrong)
    assert game.guess(" Plate ") == "P L A T E\n- - G - G\nGuesses left: 5."
    assert game.get_reward() == pytest.approx(0.3 * 2 / 5)
    assert game.guess("crane").endswith("You found the word in 2 guesses.")
    assert game.is_solved and game.get_reward() == pytest.approx(0.9)
    with pytest.raises(ValueError, match="over"):
        game.guess("crane")
    game.reset(secret="zebra")
    assert game.guesses == [] and game.get_reward() == 0
    for number in range(6):
        last = game.guess("quick" if number % 2 else "mouth")
    assert last.endswith("The word was ZEBRA.") and game.get_reward() == 0


def test_rows_draw_their_word() -> None:
    rows = word_game_rows(50)
    assert rows == word_game_rows(50) != word_game_rows(50, seed=1)
    games = [WordGame() for _ in range(2)]
    words = []
    for row in rows:
        for game in games:
            game.reset(**row)
        assert games[0].secret == games[1].secret
        words.append(games[0].secret)
    assert len(set(words)) > 40 and set(words) <= set(WORDS)
    for bad in ({}, {"secret": "zzzzz"}):
        with pytest.raises(DataError):
            games[0].reset(**bad)
    with pytest.raises(ConfigError, match="one length"):
        WordGame(words=("one", "three"))


def test_guess_is_its_only_tool() -> None:
    kind = EnvironmentKind(None, WordGame)
    kind.look_at(WordGame())
    assert list(kind.schemas) == ["guess"] and kind.has_reward
