"""A word game as an environment: find a word of five letters from what guesses tell about it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hybrid_rl.errors import ConfigError, DataError

# Common English words of five letters.
_LIST = """
    about above actor adopt after again agree alarm album alert alike alive allow alone along amber anger angle apple
    apply arena argue arise armor arrow aside asset avoid award aware bacon badge baker basic beach beard beast begin
    being below bench berry birth black blade blame blank blaze blend blind block blood bloom board boast bonus boost
    bound brain brand brave bread break brick bride brief bring broad brown brush build bunch cabin cable camel candy
    canoe cargo carry carve catch cause cedar chain chair chalk charm chart chase cheap check cheek cheer chess chest
    chief child chill choir civic claim clash class clean clear clerk click cliff climb clock close cloth cloud coach
    coast coral couch count court cover craft crane crash cream creek crisp cross crowd crown cruel crush curve cycle
    daily dairy dance daisy delay dense depth diary digit diner dodge doubt dozen draft drain drama dream dress drift
    drink drive eager eagle early earth eight elbow elder elect empty enemy enjoy enter equal error event every exact
    exist extra fable faith false fancy feast fence fever field fifth fight final flame flash fleet flesh float flood
    floor flour fluid focus force forge forth found frame fresh front frost fruit ghost giant given glass globe glory
    glove grace grade grain grand grant grape graph grass grave great green greet grief group guard guess guest guide
    habit happy harsh heart heavy hedge hello hobby honey honor horse hotel house human humor ideal image index inner
    input irony issue ivory jelly jewel joint judge juice knife knock label labor large laser later laugh layer learn
    lemon level light limit linen liver local logic loose lucky lunch magic major maple march marsh match mayor medal
    melon mercy merge merit metal meter minor model money month moral motor mount mouse mouth movie music naval nerve
    never night noble noise north novel nurse ocean offer olive onion opera orbit order other otter ought outer owner
    paint panel panic paper party patch pause peace peach pearl pedal phase phone photo piano piece pilot pinch pitch
    place plain plane plant plate plaza point polar porch pound power press price pride prime print prize proof proud
    pulse punch queen quest quick quiet quilt quite quote radio raise ranch range rapid ratio reach ready realm rebel
    relax reply rider ridge right rival river roast robin robot rough round route royal rugby ruler rural sadly salad
    sauce scale scene scent scope score scout sense serve seven shade shake shape share sharp sheep sheet shelf shell
    shift shine shirt shock shoot shore short shout sight silly since skill sleep slice slide slope smart smell smile
    smoke snake solid solve sound south space spare speak speed spice spike spine spoon sport stack staff stage stair
    stamp stand stare start state steam steel steep stick still stone store storm story stove straw style sugar sunny
    sweet swift swing sword table taste teach thank theme thick thing think third three throw thumb tiger tight toast
    today token tooth topic torch total touch tower trace track trade trail train treat trend trial tribe trick truck
    trust truth tulip twice twist uncle under union unity until upper urban usual valid value vapor video visit vital
    vivid voice wagon waist waste watch water whale wheat wheel where white whole width woman world worry worth wound
    wrist write yacht young youth zebra
"""
WORDS = tuple(_LIST.split())
MAX_GUESSES = 6
_MARKS = "G = right letter in the right place, Y = letter of the word in another place, - = letter not in the word"


def feedback(guess: str, secret: str) -> str:
    """Return a mark for each letter of a guess: G, Y or "-". A letter is marked as often as the word has it, in the
    right places first."""
    left = Counter(right for letter, right in zip(guess, secret, strict=True) if letter != right)
    marks = []
    for letter, right in zip(guess, secret, strict=True):
        if letter == right:
            marks.append("G")
        elif left[letter]:
            left[letter] -= 1
            marks.append("Y")
        else:
            marks.append("-")
    return "".join(marks)


class WordGame:
    """The environment: `environment_factory=WordGame`. A row gives the word by `secret`, or a `seed` that draws it.

    words: that are drawn and may be guessed, all of one length. The reward is 1 for a word found at the first guess,
    0.1 less for each further one; without it, up to 0.3 for letters known in their places.

    Raises ConfigError for words of several lengths.
    """

    def __init__(self, words: Sequence[str] = WORDS, max_guesses: int = MAX_GUESSES) -> None:
        if len({len(word) for word in words}) != 1 or max_guesses < 1:
            raise ConfigError(f"WordGame needs words of one length and a guess; got {len(words)} words, {max_guesses=}")
        self.words, self.max_guesses = tuple(words), max_guesses
        self._known = frozenset(words)
        self.secret = ""
        self.guesses: list[str] = []

    def reset(self, secret: str | None = None, seed: int | None = None, **row: Any) -> str:
        """Begin a game and return its rules. Raises DataError unless the row has a word of the game or a seed."""
        if secret is None and seed is None:
            raise DataError("a row of WordGame needs a column `secret` (the word) or `seed` (a number that draws it)")
        self.secret = random.Random(seed).choice(self.words) if secret is None else secret.lower()
        if self.secret not in self._known:
            raise DataError(f"secret={secret!r} is not among the {len(self.words)} words of this WordGame")
        self.guesses = []
        return (
            f"Find the secret English word of {len(self.secret)} letters. Call guess with a word. The answer marks "
            f"each letter: {_MARKS}. You have {self.max_guesses} guesses."
        )

    def guess(self, word: str) -> str:
        """Guess the secret word. The answer has a mark for each letter: G = right letter in the right place, Y = letter
        of the word in another place, - = letter not in the word.

        Args:
            word: An English word of five letters.
        """
        if self.is_over:
            raise ValueError("the game is over; answer without a tool call")
        guess = word.strip().lower()
        if len(guess) != len(self.secret) or not (guess.isascii() and guess.isalpha()):
            raise ValueError(f"{word!r} is no word of {len(self.secret)} letters; this guess does not count")
        if guess not in self._known:
            raise ValueError(f"{word!r} is not in the word list; this guess does not count")
        self.guesses.append(guess)
        marks = f"{' '.join(guess.upper())}\n{' '.join(feedback(guess, self.secret))}\n"
        if self.is_solved:
            return marks + f"You found the word in {len(self.guesses)} guesses."
        if self.is_over:
            return marks + f"You have no guess left. The word was {self.secret.upper()}."
        return marks + f"Guesses left: {self.max_guesses - len(self.guesses)}."

    @property
    def is_solved(self) -> bool:
        """Whether the word was found."""
        return bool(self.guesses) and self.guesses[-1] == self.secret

    @property
    def is_over(self) -> bool:
        """Whether no guess is taken any more."""
        return self.is_solved or len(self.guesses) >= self.max_guesses

    def get_reward(self) -> float:
        """Return the reward of the game, 0 to 1."""
        if self.is_solved:
            return max(0.4, 1.0 - 0.1 * (len(self.guesses) - 1))
        places = [any(guess[place] == letter for guess in self.guesses) for place, letter in enumerate(self.secret)]
        return 0.3 * sum(places) / max(1, len(places))


def word_game_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows for `Dataset.from_list`: prompts with a `seed` each that draws the word."""
    draw = random.Random(seed)
    task = "Play a word game. Think about which letters are left before you guess."
    return [
        {"prompt": [{"role": "user", "content": f"{task}\n\n"}], "seed": draw.randrange(2**31)} for _ in range(num_rows)
    ]
