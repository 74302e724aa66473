"""The hook that looks at the subject of a commit, as pre-commit's pygrep applies its pattern."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("message", "is_right"),
    [
        ("rollout: replace groups that teach nothing", True),
        ("run, config: say four things sooner\n\nA closed Trainer is a sentence.\n", True),
        ("ci: x" + 67 * "y", True),
        ("ci: x" + 68 * "y", False),
        ("Replace groups", False),
        ("rollout: Replace groups", False),
        ("rollout: replace groups\nwithout an empty line", False),
    ],
)
def test_a_subject_names_its_room_and_is_short(message: str, is_right: bool) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (hook,) = (hook for repo in config["repos"] for hook in repo["hooks"] if hook["id"] == "commit-subject")
    assert hook["args"] == ["--negate", "--multiline"] and hook["stages"] == ["commit-msg"]
    assert bool(re.search(hook["entry"], message, re.MULTILINE | re.DOTALL)) == is_right
