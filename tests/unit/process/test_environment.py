from __future__ import annotations

import os

import pytest

from hybrid_rl.process.environment import environment_kept


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    with pytest.raises(KeyError), environment_kept({"KEPT": "inside", "NEW": "1"}):
        os.environ["LATER"] = "by a library"
        assert os.environ["KEPT"] == "inside" and os.environ["NEW"] == "1"
        raise KeyError
    assert os.environ["KEPT"] == "before" and "NEW" not in os.environ and "LATER" not in os.environ
