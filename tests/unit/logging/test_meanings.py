"""What metrics mean is text, said once for each pattern, and no pattern hides one that comes after it."""

from pathlib import Path

from hybrid_rl.logging import meanings as module
from hybrid_rl.logging.meanings import meaning_of, meanings


def test_every_pattern_counts() -> None:
    assert all(isinstance(part, str) for entry in meanings().items() for part in entry)
    hidden = [pattern for pattern, text in meanings().items() if meaning_of(pattern.replace("*", "x")) != text]
    assert hidden == []


def test_no_pattern_stands_twice() -> None:
    """A reader of YAML would take the last of two."""
    lines = Path(module.__file__).with_suffix(".yaml").read_text().splitlines()
    assert len([line for line in lines if line and not line.startswith("#")]) == len(meanings())


def test_the_first_pattern_that_fits_counts() -> None:
    assert meaning_of("timing/step") == meaning_of("step_time") == "seconds of the whole training step"
    assert meaning_of("timing/anything") == "seconds"
    assert meaning_of("eval/math/pass@1") == "share of samples that satisfy the first reward function"
    assert meaning_of("qwertz") == ""
