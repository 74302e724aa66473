"""Loading of a configuration: from keywords, YAML and command line to one frozen `TrainerConfig`."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import logging
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_rl.algos.options import range_error
from hybrid_rl.config.choices import CHOICES, Choice
from hybrid_rl.config.leaves import Leaf, by_path, fields_of, leaf_names, members, visible_leaves
from hybrid_rl.config.presets import PRESETS
from hybrid_rl.config.problems import Problems
from hybrid_rl.config.schema import TrainerConfig
from hybrid_rl.config.unknown import unknown
from hybrid_rl.errors import ConfigError
from hybrid_rl.process.hooks import extra

logger = logging.getLogger("hybrid_rl")
# Ends of the names of keys that are files and folders.
OF_FILES = re.compile(r"(path|_dir|resume)$")
# Numbers of steps that transformers also takes as shares of a run.
SHARES = frozenset({"warmup_steps", "save_steps", "eval_steps"})


def load_config(
    config: TrainerConfig | Mapping[str, Any] | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
) -> tuple[TrainerConfig, frozenset[str]]:
    """Merge a base (YAML file, mapping or config), keyword overrides and `key=value` arguments; later ones win.

    `args=` among the keywords may be TRL's GRPOConfig. What differs from its defaults counts as given before the other
    keywords; its defaults replace ours where they differ, and a warning names those.

    Returns the config and the paths that were given explicitly. Raises one ConfigError for everything that is wrong:
    unknown keys (with their names here), keys that would do nothing, values of the wrong type or out of range.
    """
    args, keywords = extra("split_args")(overrides or {})
    layers = [args.taken, as_mapping(config), args.given, keywords, key_values(arguments)]
    for layer in (args.given, keywords):
        _check_names(layer)
    problems, name = Problems(), None
    with problems.about("algorithm"):
        name = _tag("algorithm", CHOICES["algorithm"], layers)[0]
    preset = dict(PRESETS[name or CHOICES["algorithm"].default].settings)
    tags, of_preset = _tags([preset, *layers], problems), _tags([preset], problems)
    members_are_known = not problems
    leaves = visible_leaves(tags)
    # A preset has values for the members that it chose; a user who chooses another member gets none of them.
    others = {section for section in CHOICES if section != "algorithm" and tags[section] != of_preset[section]}
    places = _Places.of(leaves)
    ours = [leaf for leaf in leaves.values() if leaf.path.partition(".")[0] not in others]
    flat = {leaf.path: preset[leaf.name] for leaf in ours if leaf.name in preset}
    explicit: set[str] = set()
    asked, line, answered = by_path(layers), dict[str, Any](), set[str]()
    for place, layer in enumerate(layers):
        settings = dict[str, Any]()
        for path, value, problem in _flatten(layer, leaves, tags, places):
            answer = extra("translate_setting")(path, value, asked) if problem else None
            if answer is not None:
                problem = f"unknown key {path!r}: {answer.advice}"
                answered.add(path)
                line |= answer.settings
            elif not problem and place > 1:  # neither what args take over nor a file
                line[path] = value
            if problem and (members_are_known or path.rpartition(".")[2] not in leaf_names()):
                problems.add(path, problem)
            elif path in settings and not problem:
                problems.add(path, f"{path} is given twice, as a leaf name and as a path; give it once")
            elif not problem:
                settings[path] = value
        for path in settings.keys() & flat.keys():
            if leaves[path].metadata["takes_rest"]:  # separate keys, each of which is overridden by itself
                settings[path] = {**flat[path], **settings[path]}
        flat.update(settings)
        if place == 1 and isinstance(config, TrainerConfig):  # it has every key; what is as it was nobody gave
            explicit.update(path for path, value in settings.items() if value != leaves[path].default)
        else:
            explicit.update(settings if place else ())  # nobody gave the defaults of another library
    flat |= {f"{section}.{CHOICES[section].tag}": member for section, member in tags.items() if CHOICES[section].tag}
    values = {}
    for path, value in flat.items():
        with problems.about(path):
            values[path] = _convert(path, leaves[path].type, value, leaves[path].metadata)
    line = {key: value for key, value in line.items() if key in answered or key not in problems}
    lacks_reward = "data.train_files" in answered and "reward" not in line
    reward = (
        "\nverl chooses rewards by data_source: add reward=FILE.py:FUNCTION, in Python reward_funcs=" * lacks_reward
    )
    if problems and "report_to" in values:  # looked at when keys are in order, but said in the same round
        with problems.about("report_to"):
            extra("check_trackers")(values["report_to"])
    problems.check(
        f"{reward}\nWhat is clear, in one line:\n  {extra('as_arguments')(line)}" if answered and line else ""
    )
    if notice := args.notice([name for layer in (layers[1], *layers[3:]) for name in layer]):
        logger.warning(notice)
    return typing.cast(TrainerConfig, _build(TrainerConfig, "", tags, values)), frozenset(explicit)


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested plain containers, every key present."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value, within = getattr(config, item.name), item.metadata.get("within")
        home = values.setdefault(within, {}) if within else values
        home[item.name] = to_dict(value) if dataclasses.is_dataclass(value) else copy.deepcopy(value)
    return values


def to_yaml(config: Any) -> str:
    """Return a config as YAML; `load_config` reads it back."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes what OmegaConf reads: it takes 1e5 for a number, which YAML 1.1 does not. Not by its own way, which makes
    a node of every key first: that takes eight times as long."""


def _quoted(dumper: Any, text: str) -> Any:
    style = "'" if text[:1] in "+-.0123456789" else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def as_mapping(config: Any) -> dict[str, Any]:
    """Return the content of a YAML file, a mapping or a config, whether its keys are known or not. Raises
    ConfigError."""
    if config is None:
        return {}
    if isinstance(config, TrainerConfig):
        return to_dict(config)
    try:
        if isinstance(config, (str, Path)):
            file = Path(os.path.expanduser(config))
            if not file.is_file():
                raise ConfigError(f"config file {str(config)!r} does not exist")
            config = OmegaConf.load(file)
        if OmegaConf.is_config(config):
            config = OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        why = str(error)
        if "key type" in why:  # null as a key; the rest of OmegaConf's text is about its own classes
            why = f"{why.partition(chr(10))[0]}: keys are text"
        raise ConfigError(f"cannot read config: {why}") from error
    except Exception as error:  # yaml errors have no common public base outside the yaml package
        raise ConfigError(f"cannot parse config: {error}") from error
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"config must be a mapping of keys, a YAML file of one, or a TrainerConfig, not {config!r}")
    _check_names(config)
    return dict(config)


def _check_names(layer: Any, prefix: str = "", outer: tuple[int, ...] = ()) -> None:
    """Raise ConfigError for a key that is no text, as YAML makes of 1, on and null, and for a mapping in itself."""
    if id(layer) in outer:
        raise ConfigError(f"{prefix.rstrip('.')} contains itself; give plain values")
    if isinstance(layer, Sequence) and not isinstance(layer, str | bytes):
        for index, value in enumerate(layer):
            if isinstance(value, Mapping | list | tuple):
                _check_names(value, f"{prefix.rstrip('.')}[{index}].", (*outer, id(layer)))
    if not isinstance(layer, Mapping):
        return
    for name, value in layer.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"the key {prefix}{name!r} is of type {type(name).__name__}; keys are text, and YAML takes words such "
                "as on, off, yes, no and null, and numbers, for values: put quotes around one that is meant as a name"
            )
        if isinstance(value, Mapping | list | tuple):
            _check_names(value, f"{prefix}{name}.", (*outer, id(layer)))


def key_values(arguments: Sequence[str]) -> dict[str, Any]:
    """Read arguments of the form key=value. Raises ConfigError for others."""
    parsed: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if argument.startswith("~") and not equals:  # Hydra's way to delete a key
            parsed[argument] = None
            continue
        if not equals or not name:
            raise ConfigError(f"argument {argument!r} is not of the form key=value")
        try:
            # One argument at a time, so that dots in a value or a list are only YAML.
            value: Any = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=True)
            parsed[name] = value["value"]
        except Exception as error:  # yaml errors have no common public base outside the yaml package
            raise ConfigError(f"argument {argument!r} has a value that is not YAML: {error}") from error
    return parsed


def _tags(layers: Sequence[Mapping[str, Any]], problems: Problems) -> dict[str, str]:
    """Find the chosen member of every choice. `algorithm: grpo` and `algorithm: {name: grpo}` mean the same. The first
    layer is a preset."""
    named: dict[str, str] = {}
    for section, choice in CHOICES.items():
        value, layer = None, -1
        with problems.about(section):
            value, layer = _tag(section, choice, layers)
        if value is None:
            continue
        named[section] = value
        # A later layer may ask for more than a default that was written down, or for less than a preset.
        inferred = choice.infer(_given(layers[layer + 1 :]), named)
        if inferred is not None and choice.default in (value, inferred if layer == 0 else value):
            named[section] = inferred
    return members(_given(layers), named)


def _tag(section: str, choice: Choice, layers: Sequence[Mapping[str, Any]]) -> tuple[str | None, int]:
    """Return the member chosen by the last layer that chooses one, and the place of that layer; None if none does.
    Raises ConfigError for one that is unknown."""
    value: Any = None
    place = -1
    for index, layer in enumerate(layers):
        entry = layer.get(section)
        member: Any = None
        if choice.tag is not None:
            member = layer.get(choice.tag) if choice.tag != "name" else None
            member = layer.get(f"{section}.{choice.tag}", member)
            member = entry.get(choice.tag, member) if isinstance(entry, Mapping) else member
        if entry is not None and not isinstance(entry, Mapping):
            member = entry
        if member is not None:
            value, place = member, index
    if value is None:
        return None, place
    if choice.tag is None:
        meant = f"; did you mean model.path={value}?" if section == "model" else ""
        raise ConfigError(f"{section} is a section of keys, not a value: {value!r}{meant}")
    if not isinstance(value, str) or value not in choice.members:
        near = difflib.get_close_matches(str(value).lower(), choice.members, n=1)
        raise ConfigError(
            f"{section}.{choice.tag}={value!r} is unknown; use one of {', '.join(choice.members)}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    return value, place


def _given(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of all layers, by leaf name; the last one wins."""
    values: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            values |= _given([value]) if isinstance(value, Mapping) else {name.rsplit(".", 1)[-1]: value}
    return values


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where keys may stand: found once for all layers of a config, which takes longer than to go through these.

    by_name: paths by leaf name. sections: paths above those of keys. mappings: keys that are mappings. rests: by
    section, the key that takes what is no other key of it.
    """

    by_name: dict[str, str]
    sections: set[str]
    mappings: list[str]
    rests: dict[str, str]

    @classmethod
    def of(cls, leaves: Mapping[str, Leaf]) -> _Places:
        return cls(
            # `name` alone could be a key of anything.
            by_name={leaf.key.name: leaf.key.path for leaf in leaves.values() if leaf.path != "algorithm.name"},
            sections={path.rsplit(".", depth)[0] for path in leaves for depth in range(1, path.count(".") + 1)},
            mappings=[path for path, leaf in leaves.items() if takes_mapping(leaf.type)],
            rests={path.rpartition(".")[0]: path for path, leaf in leaves.items() if leaf.metadata["takes_rest"]},
        )


def _flatten(
    layer: Mapping[str, Any], leaves: Mapping[str, Leaf], tags: Mapping[str, str], places: _Places, prefix: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """Yield path, value and "" for every key of a layer; for one that cannot be used, its name and what is wrong."""
    by_name, sections, mappings, rests = places.by_name, places.sections, places.mappings, places.rests
    entries: dict[str, dict[str, Any]] = {}  # of keys that are mappings, given one by one
    for name, value in layer.items():
        start, dot, rest = name.partition(".")
        short = f"{by_name[start]}{dot}{rest}" if not prefix and start in by_name and start not in sections else name
        path = f"{prefix}{short}"
        mapping = next((leaf for leaf in mappings if path.startswith(leaf + ".")), None)
        if path in mappings and isinstance(value, Mapping):
            entries.setdefault(path, {}).update(value)
        elif path in leaves:
            yield path, value, ""
        elif mapping is not None:
            entries.setdefault(mapping, {})[path.removeprefix(mapping + ".")] = value
        elif path in (*sections, *CHOICES) and isinstance(value, Mapping):
            yield from _flatten(value, leaves, tags, places, path + ".")
        elif path in CHOICES and CHOICES[path].tag is not None and isinstance(value, str):
            yield f"{path}.{CHOICES[path].tag}", value, ""
        elif path.rpartition(".")[0] in rests:
            entries.setdefault(rests[path.rpartition(".")[0]], {})[name.rpartition(".")[2]] = value
        elif path in sections:
            yield path, value, f"{path} is a section of keys, not a value: {value!r}"
        elif isinstance(value, Mapping) and _is_foreign(path):
            yield from _flatten(value, leaves, tags, places, path + ".")
        else:
            yield path, value, unknown(path, value, leaves, tags)
    yield from ((path, value, "") for path, value in entries.items())


def _is_foreign(path: str) -> bool:
    """Return whether the keys of a section that does not exist here are answered one by one."""
    return path not in extra("foreign_names")() and path.rpartition(".")[2] not in leaf_names()


def takes_mapping(expected: Any) -> bool:
    """Return whether a key of this type takes a mapping, perhaps besides other values."""
    return dict in (typing.get_origin(expected), *map(typing.get_origin, typing.get_args(expected)))


def _build(cls: type, prefix: str, tags: Mapping[str, str], values: Mapping[str, Any]) -> Any:
    arguments: dict[str, Any] = {}
    for item, path, kind in fields_of(cls, prefix, tags):
        if dataclasses.is_dataclass(kind):
            arguments[item.name] = _build(typing.cast(type, kind), path + ".", tags, values)
        elif path in values:
            arguments[item.name] = values[path]
    return cls(**arguments)


def _convert(path: str, expected: Any, value: Any, metadata: Mapping[str, Any]) -> Any:
    converted = _typed(path, expected, _with_home(value) if OF_FILES.search(path) else value)
    problem = range_error(converted, metadata)
    if problem and not metadata["remedy"] and type(None) in typing.get_args(expected):
        # In other libraries -1 or 0 may mean what None means here.
        meaning = re.search(r"None = ([^;]+)", metadata["doc"])
        problem += f", or None{f' ({meaning[1]})' if meaning else ''}"
    if problem:
        raise ConfigError(f"{path}={value!r} {problem}")
    return converted


def _with_home(value: Any) -> Any:
    """Return a path, or paths by name, with the user's folder in place of ~. No shell expands it in a file or after
    `key=`, and a folder named ~ would be made."""
    if isinstance(value, Mapping):
        return {name: _with_home(path) for name, path in value.items()}
    return os.path.expanduser(value) if isinstance(value, str) else value


def _typed(path: str, expected: Any, value: Any) -> Any:
    origin = typing.get_origin(expected)
    options = typing.get_args(expected)
    if isinstance(value, (torch.dtype, torch.device)):
        value = str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):  # transformers has enums for some names
        value = value.value
    if isinstance(value, str | bool) and (advice := extra("value_advice")(path, value)) is not None:
        raise ConfigError(f"{path}={value!r} is not a valid choice: {advice}")
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        words = [word for option in options if typing.get_origin(option) is Literal for word in typing.get_args(option)]
        if isinstance(value, str) and value in words:
            return value
        if isinstance(value, Mapping) and takes_mapping(expected):
            return dict(value)
        first = next(option for option in options if option is not type(None))
        if isinstance(value, str) and str in options and typing.get_origin(first) is list:
            _check_brackets(path, value)
            return value
        try:
            return _typed(path, first, value)
        except ConfigError as error:
            if isinstance(value, str) and str in options:
                return value
            raise ConfigError(f"{error}{f' or {words[0]}' if words else ''}") from error
    if origin is Literal:
        if isinstance(value, bool) and {"group", "none"} <= set(options):
            value = "group" if value else "none"  # scale_rewards was a bool in earlier versions of TRL
        if value not in options:
            near = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
            raise ConfigError(
                f"{path}={value!r} must be one of {', '.join(map(str, options))}"
                + (f" (did you mean {near[0]!r}?)" if near else "")
            )
        return value
    if origin is list:
        value = [] if value is None else value
        if isinstance(value, str) and typing.get_origin(options[0]) is Literal:
            _check_brackets(path, value)
        if isinstance(value, str) or not isinstance(value, Sequence):
            value = [value]
        return [_typed(f"{path}[{index}]", options[0], item) for index, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}={value!r} must be a mapping")
        return dict(value)
    return _scalar(path, expected, value)


def _check_brackets(path: str, value: str) -> None:
    """Raise ConfigError for a text that is a list without its brackets."""
    if re.fullmatch(r"\w+(,\s*\w+)+", value):
        raise ConfigError(f"{path}={value!r} is one text; write a list as {path}=[{value}]")


def _scalar(path: str, expected: type, value: Any) -> Any:
    """Take numbers by value, because YAML reads 1e-6 as text and users pass numpy numbers; coerce nothing else."""
    try:
        if expected is bool and isinstance(value, bool):
            return value
        if expected is str and isinstance(value, (str, Path, int)) and not isinstance(value, bool):
            return str(value)  # YAML reads run_name=7 as a number
        if expected is int and not isinstance(value, bool) and float(value) == int(float(value)):
            return int(value) if not isinstance(value, str) else int(float(value))
        if expected is float and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    if expected is float and isinstance(value, float):
        raise ConfigError(f"{path}={value!r} must be finite")
    if isinstance(value, float) and 0 < value < 1 and path.rpartition(".")[2] in SHARES:
        raise ConfigError(f"{path}={value!r} is a share of the run; give a whole number of steps")
    raise ConfigError(f"{path}={value!r} must be of type {expected.__name__}")
