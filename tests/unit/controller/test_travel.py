from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from hybrid_rl.controller.travel import pack, unpack
from hybrid_rl.errors import ConfigError


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


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Setup(threading.Lock()), "setup.decode (lock)"),
        ({"a": [1, threading.Lock()]}, "setup['a'][1] (lock)"),
        (partial(print, Setup(Holder())), "setup.args[0].decode.guard (lock)"),
        (Holder().method, "setup.__self__.guard (lock)"),
        (lambda lock=GUARD: lock, "setup -> lock (lock)"),
        (partial(lambda a: GUARD, 1), "setup.func -> GUARD (lock)"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pack(value, is_handle, "setup")
    assert str(caught.value).startswith(f"{path} cannot be sent to another process: ")
    assert "cannot pickle" in str(caught.value)
