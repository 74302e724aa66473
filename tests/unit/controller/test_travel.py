from __future__ import annotations

import os
import pickle
import sys
import threading
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from hybrid_rl.controller.travel import Driver, pack, unpack
from hybrid_rl.errors import ConfigError
from tests.support.kills.forked import Forked


class Handle:
    def __reduce__(self) -> Any:
        raise AssertionError("handles travel beside the bytes")


def is_handle(value: Any) -> bool:
    return isinstance(value, Handle)


@dataclass
class Setup:
    decode: Any
    limit: int = 3


def test_functions_and_closures_travel() -> None:
    factor = 7
    data, handles = pack({"f": lambda x: x * factor}, is_handle, "setup")
    assert handles == [] and unpack(data, handles)["f"](6) == 42


def test_handles_travel_beside_the_bytes_once_each() -> None:
    one, two = Handle(), Handle()
    data, handles = pack([one, {"two": (two, one)}], is_handle, "setup")
    assert handles == [one, two]
    assert unpack(data, ["a", "b"]) == ["a", {"two": ("b", "a")}]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(2.5),
        torch.zeros(0, dtype=torch.int32),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
    ],
)
def test_tensors_keep_what_they_are(tensor: torch.Tensor) -> None:
    found = unpack(*pack([tensor], is_handle, "setup"))[0]
    assert found.dtype == tensor.dtype and torch.equal(found, tensor) and found.requires_grad == tensor.requires_grad
    with torch.no_grad():
        found += 1
        assert not found.numel() or not torch.equal(found, tensor), "writable, and its own"


def test_a_view_leaves_its_storage_behind() -> None:
    assert len(pack(torch.zeros(1_000_000)[:2], is_handle, "setup")[0]) < 1000


GUARD = threading.Lock()


class Holder:
    def __init__(self) -> None:
        self.guard = threading.Lock()

    def method(self) -> None: ...


class Given:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Setup(threading.Lock()), "setup.decode: a lock cannot be sent"),
        ({"a": [1, threading.Lock()]}, "setup['a'][1]: a lock cannot be sent"),
        (partial(print, Setup(Holder())), "decode.guard: a lock cannot be sent"),
        (Holder().method, "setup.__self__.guard: a lock cannot be sent"),
        (lambda lock=GUARD: lock, "setup (function <lambda>) -> lock: a lock cannot be sent"),
        (partial(lambda a: GUARD, 1), "setup.func (function <lambda>) -> GUARD: a lock cannot be sent"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pack(value, is_handle, "setup")
    assert str(caught.value).startswith(f"{told} to another process (cannot pickle ")
    remedy = "make it inside the function" if "->" in told else "make it where it is used"
    assert str(caught.value).endswith(f"); {remedy}"), "nobody can define __reduce__ for a lock"


def test_classes_of_the_user_may_define_how_they_travel() -> None:
    given = Given()
    given.lock = None
    with pytest.raises(ConfigError, match="a Given cannot .* used, or define __reduce__ for Given"):
        pack(given, is_handle, "setup")


def test_modules_of_the_driver_are_found(forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it can import, from wherever; after what this process finds already."""
    (tmp_path / "only_there.py").write_text("import sys\nASKED = list(sys.argv)\n")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(tmp_path / "gone")])
    monkeypatch.setattr(sys, "argv", ["train.py", "fast"])
    monkeypatch.chdir(tmp_path)
    driver = Driver.here()
    assert driver == Driver((str(tmp_path),), ("train.py", "fast"))
    code = (
        "import sys; from hybrid_rl.controller.travel import Driver; before = list(sys.path)\n"
        f"for _ in range(2): {driver!r}.adopt()\n"
        f"assert sys.path == [*before, {str(tmp_path)!r}]\n"
        "import only_there; print(only_there.ASKED)"
    )
    answer = forked.run("-c", code, environment=os.environ)
    assert answer.stdout == "['train.py', 'fast']\n", answer.stderr


def test_a_module_that_is_missing_is_named() -> None:
    data = pickle.dumps(os.path.join).replace(b"posixpath", b"nopathful")
    with pytest.raises(ConfigError, match="No module named 'nopathful', which .*: install it on all nodes"):
        unpack(data, [])


def test_classes_of_a_script_in_a_spawned_process_take_their_code_along(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__mp_main__")
    exec("class Reward:\n    def __call__(self):\n        return 7", vars(script))
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    try:
        data, handles = pack(script.Reward(), lambda part: False, "reward")
    finally:
        cloudpickle.unregister_pickle_by_value(script)
    monkeypatch.delitem(sys.modules, "__mp_main__")
    assert unpack(data, handles)() == 7
