"""The table of keys itself: unique names, documented, few, and every one of them really read."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import hybrid_rl
from hybrid_rl.config import TrainerConfig, load_config, visible_leaves
from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.presets import PRESETS
from hybrid_rl.errors import ConfigError

PLACES = [{"rollout": engine, "controller": backend} for engine in ("inplace", "vllm") for backend in ("local", "ray")]
PLACES.append({"rollout": "hf", "controller": "local"})


def members(given: dict[str, Any]) -> dict[str, str]:
    """The member of every section of what is given; of a section without a tag, inferred."""
    config = load_config(given)[0]
    of_class = {section: {cls: name for name, cls in choice.members.items()} for section, choice in CHOICES.items()}
    found = {
        section: of_class[section][type(getattr(config, section))] for section in CHOICES if section != "algorithm"
    }
    return {"algorithm": config.algorithm.name, **found}


# What a user may give, and what he then sees: every algorithm by name at every place, and every member of a section.
ALGORITHMS = [{"algorithm": name, **place} for name in PRESETS for place in PLACES]
SECTIONS = [section for section, choice in CHOICES.items() if choice.tag and section != "algorithm"]
CHOSEN: list[dict[str, Any]] = [{section: name} for section in SECTIONS for name in CHOICES[section].members]
CHOSEN += [{"eval_temperature": 0.5}, {"entropy_target": 0.2}, {"dtype": "bfloat16"}]
GIVEN = [{}, *CHOSEN, *ALGORITHMS]
SEEN = [visible_leaves(members(given)) for given in GIVEN]
# Every key, and the first choice in which it exists.
LEAVES = {path: leaf for seen in reversed(SEEN) for path, leaf in seen.items()}
NEEDS = {path: given for given, seen in zip(reversed(GIVEN), reversed(SEEN), strict=True) for path in seen}
PACKAGE = Path(hybrid_rl.__file__).parent
TAGS = {f"{section}.{choice.tag}" for section, choice in CHOICES.items() if choice.tag}
# Names under which code holds the config or one of its sections.
HOLDERS = {path.split(".")[-2] for path in LEAVES if "." in path} | {
    "args",
    "config",
    "_config",
    "settings",
    "options",
    "_options",
    "_term",
}
BOUNDS = ("minimum", "maximum", "above", "below")


def leaf_name(path: str) -> str:
    return path.rsplit(".", 1)[-1]


# Tables of hundreds of rows are gone through in one test each, which tells all rows that are wrong.


def test_leaf_names_are_unique() -> None:
    repeated = [
        (given, name)
        for given, seen in zip(GIVEN, SEEN, strict=True)
        for name, count in Counter(map(leaf_name, seen)).items()
        if count > 1
    ]
    assert not repeated


def test_few_keys() -> None:
    """Fewer than 138 where one process does everything; many ranks and vLLM bring keys of their own.

    One process has nothing to shard: keys of fsdp are errors there, and are counted with those of many ranks."""
    many = {}
    for given in ALGORITHMS:
        is_alone = given["rollout"] != "vllm" and given["controller"] == "local"
        leaves = [path for path in visible_leaves(members(given)) if not (is_alone and path.startswith("fsdp."))]
        if not 0 < len(leaves) < (138 if is_alone else 158):
            many[str(given)] = len(leaves)
    assert not many


@pytest.mark.parametrize("given", CHOSEN, ids=str)
def test_every_member_can_be_chosen(given: dict[str, Any]) -> None:
    config, _ = load_config(given)
    for section, name in given.items():
        if section in CHOICES:
            chosen, choice = getattr(config, section), CHOICES[section]
            assert type(chosen) is choice.members[name] and getattr(chosen, choice.tag or "") == name


def test_every_key_is_documented() -> None:
    wrong = [
        leaf.path for leaf in LEAVES.values() if len(leaf.doc) <= 5 or leaf.doc.endswith(".") or leaf.path in leaf.doc
    ]
    assert not wrong


def _read_names() -> set[str]:
    """Leaf names read from something that holds a config, outside the code that loads and checks it, and the options
    that algorithms take by name."""
    names = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        if file.parent.name == "config":
            if file.name not in ("validate.py", "algorithm.py"):
                continue
            # Checking a value is not using it; these functions compute with it, or tell others.
            users = {
                "num_training_steps",
                "optimizer_steps_per_training_step",
                "critic_path",
                "steps_ahead",
                "is_rounded",
            }
            tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in users]
        for node in ast.walk(tree):
            # A record reads its own options.
            if isinstance(node, ast.Attribute):
                holder = leaf_name(ast.unparse(node.value))
                if holder in HOLDERS or ("algos" in file.parts and holder == "self"):
                    names.add(node.attr)
    return names


def test_every_key_is_read_somewhere() -> None:
    """Tags are read by choosing a class, and rollout.partial by choosing the section `buffer`, which then says what a
    step holds."""
    names = _read_names()
    unread = {path for path in LEAVES if leaf_name(path) not in names} - TAGS - {"rollout.partial"}
    assert not unread


def test_defaults_pass_their_own_checks() -> None:
    """Giving a default by hand changes nothing, not even its type."""
    for leaf in LEAVES.values():
        base = load_config(NEEDS[leaf.path])[0]
        config, given = load_config(NEEDS[leaf.path], {leaf.path: leaf.default})
        assert config == base and leaf.path in given
        value: Any = config
        for part in leaf.path.split("."):
            value = getattr(value, part)
        assert type(value) is type(leaf.default), leaf.path


def test_defaults_are_not_shared() -> None:
    one, two = TrainerConfig(), TrainerConfig()
    assert one.data.chat_template_kwargs is not two.data.chat_template_kwargs
    assert one.rollout.stop_token_ids is not two.rollout.stop_token_ids


def _bounded() -> list[tuple[str, str, float]]:
    return [
        (leaf.path, bound, leaf.metadata[bound])
        for leaf in LEAVES.values()
        for bound in BOUNDS
        # A beta above 0 is not out of range: it brings the section of the KL.
        if leaf.metadata[bound] is not None and (leaf.path, bound) != ("kl.beta", "maximum")
    ]


@pytest.mark.parametrize(("path", "bound", "limit"), _bounded())
def test_bounds(path: str, bound: str, limit: float) -> None:
    """minimum and maximum are allowed themselves, `above` and `below` are not; one step outside never is."""
    outside = limit + (1 if bound in ("maximum", "below") else -1)
    refused = [outside] if bound in ("minimum", "maximum") else [outside, limit]
    for value in refused:
        with pytest.raises(ConfigError, match=rf"{path}={value!r} must be "):
            load_config(NEEDS[path], {path: value})
    if bound in ("minimum", "maximum"):
        load_config(NEEDS[path], {path: limit})


def test_numbers_have_bounds() -> None:
    """Any number is right where it is a reward or a covariance; everywhere else zero, a negative or a huge value can be
    wrong."""
    bounded = {path for path, _, _ in _bounded()}
    numbers = {
        leaf.path
        for leaf in LEAVES.values()
        if {int, float} & {leaf.type, *typing.get_args(leaf.type)} and typing.get_origin(leaf.type) is not list
    }
    rewards = {"eval.success_reward", "advantage.reward_threshold", "advantage.success_threshold"}
    assert numbers - bounded - {"data.dataset_weights"} == rewards | {
        "policy_loss.loss_options.clip_cov_lb",
        "policy_loss.loss_options.clip_cov_ub",
    }


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainerConfig().optimizer.learning_rate = 1.0  # type: ignore[misc]
