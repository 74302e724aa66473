"""Values as checkpoints have them in JSON, read as the types of Python say, or refused by the name of their key."""

from __future__ import annotations

import dataclasses
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from hybrid_rl.algos.options import field_types
from hybrid_rl.data.prompts import shorten
from hybrid_rl.errors import CheckpointError, ConfigError

T = TypeVar("T")

# What a value of one of these types is called, and whether a value is one. JSON has other numbers, and truths.
SIMPLE: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda found: type(found) is int),
    float: ("a finite number", lambda found: type(found) in (int, float) and math.isfinite(found)),
    str: ("text", lambda found: type(found) is str),
    bool: ("true or false", lambda found: type(found) is bool),
    NoneType: ("null", lambda found: found is None),
}


def read(kind: Any, found: Any, key: str) -> Any:
    """Return a value of JSON as one of this type: a dataclass, whose fields are the names of a dict; a list, tuple,
    dict, Literal, union or simple type; Any is not looked at. key: where it is. Raises CheckpointError for another."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return found
    if kind in SIMPLE:
        name, is_one = SIMPLE[kind]
        return found if is_one(found) else _refuse(key, found, name)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return read_fields(kind, found, key)
    if origin is np.ndarray:
        return _read_array(found, key)
    if origin is Literal:
        return found if found in arguments else _refuse(key, found, f"one of {', '.join(map(str, arguments))}")
    if origin in (Union, UnionType):
        return _read_union(arguments, found, key)
    if origin in (tuple, list):
        if not isinstance(found, list | tuple):  # JSON makes lists of both
            return _refuse(key, found, "a list")
        item = arguments[0]
        if item in SIMPLE and all(map(SIMPLE[item][1], found)):  # thousands of tokens
            return origin(found)
        return origin(read(item, element, f"{key}[{place}]") for place, element in enumerate(found))
    if type(found) is not dict:
        return _refuse(key, found, "an object with keys")
    of_key, of_value = arguments
    return {_read_key(of_key, name, key): read(of_value, value, f"{key}.{name}") for name, value in found.items()}


def plain(value: Any) -> Any:
    """Return a value with the arguments of each dataclass in it as a dict: what `read` makes one of."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, np.ndarray):
        return {"shape": value.shape, "int16": b64encode(value.astype("<i2").tobytes()).decode()}
    return {name: plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def read_fields(kind: type[T], found: Any, key: str) -> T:
    """Return the dataclass whose fields an object of JSON has. Raises CheckpointError if one is missing or unknown, or
    is another value."""
    if type(found) is not dict:
        return _refuse(key, found, "an object with keys")
    fields: Any = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    for name in found:
        if name not in fields:
            raise CheckpointError(f"{_path(key, name)} is no key of it")
    for name, field in fields.items():
        if name not in found and field.default is field.default_factory is dataclasses.MISSING:
            raise CheckpointError(f"{_path(key, name)} is missing")
    types = field_types(kind)  # type: ignore[arg-type]
    values = {name: read(types[name], value, _path(key, name)) for name, value in found.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise CheckpointError(f"{key}: {error}") from error


def check(holds: bool, key: str, found: Any, expected: str) -> None:
    """Raise CheckpointError for a value unless something holds for it, which `expected` describes."""
    if not holds:
        _refuse(key, found, expected)


def _read_array(found: Any, key: str) -> Any:
    try:
        return np.frombuffer(b64decode(found["int16"], validate=True), "<i2").reshape(found["shape"]).astype(np.int16)
    except (KeyError, TypeError, ValueError):
        return _refuse(key, found, "an array of 16-bit numbers")


def _read_union(kinds: tuple[Any, ...], found: Any, key: str) -> Any:
    names, others = [], []
    for kind in kinds:
        if kind not in SIMPLE:
            others.append(kind)
            continue
        name, is_one = SIMPLE[kind]
        if is_one(found):
            return found
        names.append(name)
    assert len(others) <= 1, "whose error would it be?"
    return read(others[0], found, key) if others else _refuse(key, found, " or ".join(names))


def _read_key(kind: Any, name: str, key: str) -> Any:
    if kind is str:
        return name
    try:
        return int(name)
    except ValueError:
        return _refuse(f"a key of {key}", name, "a whole number")


def _refuse(key: str, found: Any, expected: str) -> Any:
    raise CheckpointError(f"{key or 'it'} is {shorten(found)}, not {expected}")


def _path(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
