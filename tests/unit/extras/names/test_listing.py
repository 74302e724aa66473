"""The listing of keys: all of them, each under what it depends on."""

from __future__ import annotations

import itertools
import re
import typing
from typing import Any, Literal

from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.load import visible_leaves
from hybrid_rl.extras.names.listing import all_keys, section_title

KEYS = {key.path: key for key in all_keys()}
LINES = [line for key in all_keys() for line in (key.entries or (key,))]


def test_every_key_of_every_choice_is_listed_once() -> None:
    expected = set(visible_leaves())
    for section, choice in CHOICES.items():
        for member in choice.members:
            expected |= set(visible_leaves({section: member}))
    assert {line.path for line in LINES} == expected and len(LINES) == len(expected) and len(all_keys()) == len(KEYS)


def test_keys_come_by_section_and_dependent_ones_in_one_block() -> None:
    groups = [group for group, _ in itertools.groupby(all_keys(), lambda key: (key.section, key.when))]
    assert len(groups) == len(set(groups))
    sections = [section for section, _ in itertools.groupby(section for section, _ in groups)]
    assert len(sections) == len(set(sections))
    assert all(section_title(section).endswith(".") for section in sections)


def test_values_defaults_and_conditions_are_in_words() -> None:
    assert KEYS["optimizer.lr_scheduler_type"].values == "one of constant, constant_with_warmup, linear, cosine"
    assert KEYS["num_ranks"].values == "whole number or auto, at least 1"
    assert KEYS["kl.beta"].values == "number, above 0"  # not that of kl=none, which takes 0 alone
    assert KEYS["advantage.estimator"].values.startswith("one of grpo, rloo, ")
    assert KEYS["eval.eval_on_start"].default == "true"
    assert KEYS["advantage.rho_clip"].when == "with advantage=vtrace"
    assert KEYS["kl.kl_horizon"].when == "unless kl=none"
    assert KEYS["policy_loss.epsilon"].when.startswith("with policy_loss=clip or ")
    assert KEYS["optimizer.learning_rate"].when == ""


def words_of(kind: Any) -> set[str]:
    """What stands in a type as a Literal."""
    if typing.get_origin(kind) is Literal:
        return set(map(str, typing.get_args(kind)))
    return set().union(*map(words_of, typing.get_args(kind)))


def test_every_word_that_a_key_takes_under_any_choice_is_listed() -> None:
    listed = {line.path: set(re.split(r"[ ,]+", line.values)) for line in LINES}
    for section, choice in CHOICES.items():
        for member in choice.members:
            for path, leaf in visible_leaves({section: member}).items():
                assert words_of(leaf.type) <= listed[path], (path, member)
    quantization = KEYS["rollout.quantization"]
    assert quantization.values == "one of none, int8, fp8, fp8_block, int4, nvfp4"
    assert "; with rollout=vllm (none, fp8, fp8_block, int4, nvfp4): hold the" in quantization.doc
    assert "with kl=reward (k1, k2, k3, abs): KL estimate in the reward" in KEYS["kl.kl_estimator"].doc


def test_keys_have_their_names_in_other_libraries() -> None:
    assert any("ppo_mini_batch_size" in names for names in KEYS["optimizer.prompts_per_mini_batch"].elsewhere)
    learning_rate = KEYS["optimizer.learning_rate"].elsewhere
    assert "TRL: the same" in learning_rate
    assert any(names.startswith("verl: ") and "optim.lr" in names for names in learning_rate)
    # What is answered by several keys is not a name of the first.
    assert "generation_kwargs" not in " ".join(KEYS["rollout.temperature"].elsewhere)
