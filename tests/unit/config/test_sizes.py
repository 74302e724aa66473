"""Sizes of memory as users write them."""

import pytest

from hybrid_rl.config import load_config, resolve
from hybrid_rl.config.sizes import memory_bytes
from hybrid_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GB", 80 * 10**9), ("80G", 80 * 10**9), (" 1.5 gib\n", 3 * 2**29), ("9007199254740993B", 2**53 + 1), ("1B", 1)],
)
def test_a_size_is_read_to_the_byte(text: str, expected: int) -> None:
    assert memory_bytes(text, "it") == expected


@pytest.mark.parametrize(
    "text",
    ["", "0B", "0.5B", "-5GB", "1e9", "nan", "80 000", "9" * 400 + "B", "9" * 400 + ".0B", "1G\u0131B", "\u0668GB"],
)
@pytest.mark.parametrize("key", ["device_memory", "host_memory"])
def test_what_is_no_size_is_refused_wherever_it_is_given(text: str, key: str) -> None:
    """Also if nothing of the run would read it: on a CPU whose residents stay."""
    loaded, given = load_config({f"memory.{key}": text})
    with pytest.raises(ConfigError, match=rf"memory\.{key}='.* is not a size of memory"):
        resolve(loaded, given)


@pytest.mark.parametrize("value", ["80", 60, "1.5 "])
def test_a_number_without_a_unit_is_refused(value: str | int) -> None:
    """80 bytes is not what anybody means by it."""
    loaded, given = load_config({"memory.device_memory": value})
    with pytest.raises(ConfigError, match=rf"device_memory='{value}' has no unit; write {str(value).strip()}GB"):
        resolve(loaded, given)
