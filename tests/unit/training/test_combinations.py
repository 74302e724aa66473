"""Every combination of estimator, policy loss, correction, KL and old logprobs is refused with a reason, or trains a
step whose gradients are the written-out ones; and every option does something, or is refused."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from hybrid_rl.algos import ADVANTAGES, CORRECTIONS, KL_TERMS, POLICY_LOSSES
from hybrid_rl.algos.options import place as place_of
from hybrid_rl.config import TrainerConfig
from hybrid_rl.errors import ConfigError
from tests.unit.algos.variants import other_values, records
from tests.unit.training.combination_case import Trained, resolved, train
from tests.unit.training.written_out import expected_gradient

Keys = Mapping[str, Any]
# What is registered, with what makes another algorithm of it.
ESTIMATORS: dict[str, Keys] = {
    **{name: {"advantage": name} for name in records(ADVANTAGES)},
    "grpo by function": {"advantage": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
    "grpo by steps": {"advantage": "grpo", "token_level": True},
    "distillation and rewards": {"advantage": "distillation", "group_advantage_coef": 0.5},
}
LOSSES: dict[str, Keys] = {
    **{name: {"policy_loss": name} for name in records(POLICY_LOSSES)},
    "gspo": {"policy_loss": "clip", "importance_sampling_level": "sequence"},
    "gspo token": {"policy_loss": "clip", "importance_sampling_level": "sequence_token"},
    "cispo by completion": {"policy_loss": "cispo", "importance_sampling_level": "sequence"},
    "sapo by completion": {"policy_loss": "sapo", "importance_sampling_level": "sequence"},
    "dppo top-k": {
        "policy_loss": "dppo",
        "loss_options.divergence_type": "topk_tv",
        "loss_options.num_top": 3,
        "loss_options.divergence_threshold": 0.05,
    },
}
SECTIONS: dict[str, dict[str, Keys]] = {
    "estimator": ESTIMATORS,
    "loss": LOSSES,
    "correction": {
        **{name: {"correction": name} for name in records(CORRECTIONS)},
        "off-policy mask": {"off_policy_mask_threshold": 0.02},
        "top entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.1},
    },
    "kl": {
        "none": {},
        "loss": {"kl": "loss", "beta": 0.3},
        "exact": {"kl": "loss", "beta": 0.3, "kl_estimator": "exact", "use_bias_correction_kl": False},
        "reward": {"kl": "reward", "beta": 0.3},
    },
    "old": {
        "detach": {"old_logprobs": "detach"},
        "recompute": {"old_logprobs": "recompute", "num_iterations": 2},
        "rollout": {"old_logprobs": "rollout", "num_iterations": 2},
    },
}
NAMES = ("advantage=", "policy_loss=", "kl", "correction", "old_logprobs=")
TOLERANCE = 3e-6  # of the largest number: logprobs, advantages and losses are float32


def chosen(places: tuple[str, ...]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for section, place in zip(SECTIONS.values(), places, strict=True):
        keys |= section[place]
    return keys


def has_step_rewards(config: TrainerConfig) -> bool:
    """Rewards of single tokens, if they are allowed: else a reward function that gives any is refused."""
    return config.advantage.uses_step_rewards and not config.policy_loss.is_per_completion


def check(config: TrainerConfig, monkeypatch: pytest.MonkeyPatch) -> Trained:
    trained = train(config, monkeypatch, dense=has_step_rewards(config))
    assert len(trained.gradients) == config.algorithm.num_iterations and trained.metrics["skipped_updates"] == 0
    for step, gradient in enumerate(trained.gradients):
        expected = expected_gradient(trained, step)
        error = float((gradient - expected).abs().max())
        assert error <= TOLERANCE * max(float(expected.abs().max()), 1e-2), f"optimizer step {step}: off by {error}"
    return trained


def run(combinations: Iterator[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Train or refuse them; how many."""
    counts: collections.Counter[str] = collections.Counter()
    for places in combinations:
        try:
            config = resolved(chosen(places))
        except ConfigError as error:
            reason = str(error)
            assert any(name in reason for name in NAMES) and (";" in reason or ":" in reason), reason
            counts["refused"] += 1
            continue
        try:
            trained = check(config, monkeypatch)
        except Exception as error:
            raise AssertionError(f"{', '.join(places)}: {type(error).__name__}: {error}") from error
        counts["trained"] += 1
        counts["optimizer steps"] += len(trained.gradients)
    return counts


def pairs_of_all(seed: int) -> Iterator[tuple[str, ...]]:
    """Combinations in which every two places of two sections meet, unless they are refused: drawn at random, those that
    add no new pair left out."""
    draw = random.Random(seed)
    names = list(SECTIONS)
    wanted = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in SECTIONS[names[a]]
        for y in SECTIONS[names[b]]
    }
    tries = [tuple(draw.choice(list(section)) for section in SECTIONS.values()) for _ in range(2500)]
    for places in tries:
        pairs = {(a, places[a], b, places[b]) for a, b in itertools.combinations(range(len(places)), 2)}
        if wanted & pairs and is_accepted(places):
            wanted -= pairs
            yield places


def is_accepted(places: tuple[str, ...]) -> bool:
    try:
        resolved(chosen(places))
    except ConfigError:
        return False
    return True


def test_every_choice_of_a_section_has_the_written_gradient_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 100 combinations, with every choice of every section; the sweep has all."""
    met: set[tuple[int, str]] = set()
    num_choices = sum(map(len, SECTIONS.values()))
    first, others = [], []
    for places in pairs_of_all(seed=0):
        (others if met >= set(enumerate(places)) else first).append(places)
        met.update(enumerate(places))
        if len(met) == num_choices and len(first) + len(others) >= 100:
            break
    assert len(met) == num_choices and len(first) < 100
    counts = run(iter([*first, *others][:100]), monkeypatch)
    assert counts["trained"] == 100


@pytest.mark.sweep
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_combination_is_refused_or_has_the_written_gradient(
    estimator: str, monkeypatch: pytest.MonkeyPatch, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [list(section) for name, section in SECTIONS.items() if name != "estimator"]
    counts = run(((estimator, *places) for places in itertools.product(*others)), monkeypatch)
    for name, number in counts.items():
        record_property(name, number)
    with capsys.disabled():
        print(f"\n{estimator}: {', '.join(f'{number} {name}' for name, number in sorted(counts.items()))}")
    assert counts["trained"] and sum(counts.values()) - counts["optimizer steps"] == len(
        list(itertools.product(*others))
    )


# ----------------------------------------------------------------------------------------- every option does something

# Learning rate, optimizer steps and distance of the engine: what one leaves alone another reaches.
SETTINGS = ((0.3, 4, 0.3), (1.0, 4, 1.0), (0.1, 3, 0.1))
OWN = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "kl": KL_TERMS, "correction": CORRECTIONS}
# Beside which an option is looked at, where that is not its record alone, and the values that tell on a batch as small
# as this one.
COMPANY: dict[str, dict[str, Any]] = {
    "kl loss": {"kl": "loss", "beta": 0.3},
    "kl reward": {"kl": "reward", "beta": 0.3, "advantage": "rloo"},
    "policy_loss dppo loss_options.num_top": {**LOSSES["dppo top-k"], "loss_options.divergence_threshold": 0.02},
    "policy_loss clip_cov loss_options.clip_cov_lb": {"policy_loss": "clip_cov", "loss_options.clip_cov_ratio": 0.5},
}
VALUES: dict[str, list[Any]] = {
    "advantage vapo length_adaptive_alpha": [0.5, 1.0],  # nothing below 1 / alpha tokens
    "advantage rejection reward_threshold": [1.2],
    "policy_loss cispo epsilon": [0.5, 0.25],  # 1 is none
    "policy_loss dppo divergence_type": ["binary_kl"],  # the others stand in LOSSES
    "policy_loss dppo num_top": [1],
    "policy_loss clip_cov clip_cov_ratio": [0.2],
    "policy_loss clip_cov clip_cov_lb": [0.5],
    "policy_loss clip_cov clip_cov_ub": [1.2],
    "policy_loss clip_cov epsilon_high": [0.25],  # none is epsilon, 1
    "policy_loss kl_cov kl_cov_ratio": [0.2],
    "correction mis correction_veto": [0.9],
    "correction icepop correction_high": [2.5],
    "correction kl_rejection correction_veto": [0.9],
}
# What shows later than in one training step: tests/unit/test_trainer_algorithms.py.
LATER = {"reference_reset_steps", "ref_model_sync_steps", "ref_model_mixup_alpha", "teacher_path"}
ALGORITHM: dict[str, list[Any]] = {
    "loss_type": ["grpo", "dr_grpo", "sequence_sum"],
    "mask_truncated_completions": [True],
    "num_iterations": [2],
    "old_logprobs": ["rollout"],
    "entropy_coef": [0.1],
    "positive_nll_coef": [0.1],
    "off_policy_mask_threshold": [0.02, 0.2],
    "top_entropy_quantile": [0.2, 0.0],
}


def options() -> Iterator[tuple[str, str, Any]]:
    """Section and record, option, another value."""
    for section, home in OWN.items():
        for name, record in records(home).items():
            hints = typing.get_type_hints(record)
            for item in dataclasses.fields(record)[1:]:
                if item.name not in LATER:
                    values = VALUES.get(f"{section} {name} {item.name}", other_values(item, hints[item.name]))
                    yield from ((f"{section} {name}", place_of(item), value) for value in values)
    for name, values in ALGORITHM.items():
        yield from (("algorithm", name, value) for value in values)


class Fingerprints:
    """All numbers that result from a training step, by its keys and the distance of the engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._known: dict[str, list[torch.Tensor]] = {}

    def of(self, keys: Keys, engine_noise: float) -> list[torch.Tensor]:
        """Raises ConfigError for sections that do not go together."""
        name = f"{sorted(keys.items())} {engine_noise}"
        if name not in self._known:
            config = resolved(dict(keys))
            trained = train(config, self._monkeypatch, dense=has_step_rewards(config), engine_noise=engine_noise)
            columns = [trained.batch[name].values for name in ("advantages", "returns") if name in trained.batch]
            self._known[name] = [*trained.gradients, *columns, torch.tensor([*trained.learned, trained.beta])]
        return self._known[name]


def does_nothing(place: str, option: str, value: Any, prints: Fingerprints) -> bool:
    """Whether a training step is the same, bit for bit, with another value of an option, and none says so."""
    section, _, name = place.partition(" ")
    company = COMPANY.get(f"{place} {option}", COMPANY.get(place, {section: name} if name else {}))
    for learning_rate, num_iterations, engine_noise in SETTINGS:
        keys = {"learning_rate": learning_rate, "num_iterations": num_iterations} | company
        try:
            changed = prints.of(keys | {option: value}, engine_noise)
        except ConfigError:
            return False
        same = prints.of(keys, engine_noise)
        if len(changed) != len(same) or not all(map(torch.equal, changed, same)):
            return False
    return True


def test_every_option_does_something_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One value of each; the sweep has all."""
    first = {(place, option): value for place, option, value in reversed(list(options()))}
    prints = Fingerprints(monkeypatch)
    silent = [(*which, value) for which, value in first.items() if does_nothing(*which, value, prints)]
    assert not silent


@pytest.mark.sweep
def test_every_value_of_every_option_does_something_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = list(options())
    prints = Fingerprints(monkeypatch)
    silent = [which for which in everything if does_nothing(*which, prints)]
    with capsys.disabled():
        print(f"\n{len(everything)} values of options, {len(silent)} without effect")
    assert not silent
