"""The gradient of each optimizer step of a `Trained`, written out: samples from its columns, what losses want of the
whole mini-batch, and the references of estimators and losses put together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.unit.training.combination_case import (
    REFERENCE,
    START,
    TEMPERATURE,
    TOP_EXPERTS,
    VERSION,
    Trained,
    V,
    router_scores,
)
from tests.unit.training.written_estimators import Sample, Token, add_kl_rewards, advantages
from tests.unit.training.written_losses import Case, gradient


def logs_of(table: Tensor) -> list[list[float]]:
    """ln p of the next token by the token before, rounded as the model gives it."""
    found: list[list[float]] = (table / TEMPERATURE).log_softmax(1).float().double().tolist()
    return found


def samples_of(trained: Trained, table: Tensor, *, with_advantages: bool = True) -> list[Sample]:
    """The samples as they are before the optimizer step that starts from this table."""
    batch, config = trained.batch, trained.config
    now, start, reference = logs_of(table), logs_of(START), logs_of(REFERENCE)
    names = ("completion_mask", "rollout_logprobs", "policy_version", "teacher_logprobs", "values", "token_rewards")
    columns = {name: batch.get(name) for name in names}
    from_engine = config.algorithm.old_logprobs == "rollout"
    samples = []
    for row in range(batch.num_samples):
        ids = batch["completion_ids"][row].tolist()
        before = [batch["prompt_ids"][row].tolist()[-1], *ids[:-1]]
        own = {name: [0.0] * len(ids) if column is None else column[row].tolist() for name, column in columns.items()}
        tokens = [
            Token(
                id=ids[place],
                before=before[place],
                made=bool(own["completion_mask"][place]),
                old=own["rollout_logprobs"][place] if from_engine else start[before[place]][ids[place]],
                rollout=own["rollout_logprobs"][place],
                ref=reference[before[place]][ids[place]],
                teacher=own["teacher_logprobs"][place],
                value=own["values"][place],
                dense=own["token_rewards"][place],
                version=int(own["policy_version"][place]),
                logs=now[before[place]],
                old_logs=start[before[place]],
                ref_logs=reference[before[place]],
            )
            for place in range(len(ids))
        ]
        is_cut = batch["finish_reason"][row] == "length"
        sample = Sample(
            tokens,
            float(batch["rewards"][row]),
            float(batch["baseline_rewards"][row]),
            int(batch["group"][row]),
            is_cut,
            batch["function_rewards"][row],
        )
        for token in sample.steps:
            token.kept = sample.is_scored and not (is_cut and config.algorithm.mask_truncated_completions)
        samples.append(sample)
    if with_advantages:
        _give_advantages(trained, table, samples)
    return samples


def _give_advantages(trained: Trained, table: Tensor, samples: Sequence[Sample]) -> None:
    """They are of the state before the first update, with a KL in the reward that belongs to no other reward."""
    config = trained.config
    scoring = samples_of(trained, table, with_advantages=False)
    if config.kl.in_reward:
        add_kl_rewards(scoring, config.kl.beta, config.kl.kl_estimator)  # type: ignore[attr-defined]
    rows = advantages(config.advantage, scoring)
    for sample, row in zip(samples, rows, strict=True):
        for token, value in zip(sample.steps, row, strict=True):
            token.advantage = value


def expected_gradient(trained: Trained, step: int) -> Tensor:
    """By the table, before this optimizer step: float64 [V, V]."""
    config, table = trained.config, trained.tables[step]
    samples = samples_of(trained, table)
    tokens = [token for sample in samples for token in sample.tokens if token.kept]
    objective = config.policy_loss.objective  # type: ignore[attr-defined]
    beta = getattr(config.kl, "beta", 0.0)
    case = Case(config, VERSION, beta, selected=set(), factors={}, shifts={})
    if objective in ("kl_cov", "clip_cov"):
        case.selected = _selected(trained, samples, tokens)
    elif objective == "lambda_grpo":
        case.factors = _length_factors(config.policy_loss, samples, trained.learned[step])
    elif objective == "rspo":
        case.shifts = _router_shifts(config.policy_loss, tokens, table)
    return torch.tensor(gradient(samples, case, V, TEMPERATURE), dtype=torch.float64)


def _covariances(tokens: Sequence[Token]) -> dict[int, float]:
    log, advantage = (statistics.fmean(values) for values in zip(*((t.old, t.advantage) for t in tokens), strict=True))
    return {id(token): (token.old - log) * (token.advantage - advantage) for token in tokens}


def _selected(trained: Trained, samples: Sequence[Sample], tokens: Sequence[Token]) -> set[int]:
    """The tokens that were chosen, by lot (clip_cov) or by lot among equals (kl_cov): as many as the share says, where
    there are so many, and none that another should have been chosen for."""
    record: Any = trained.config.policy_loss
    flags = trained.batch["prepared"].values.tolist()
    everything = [token for sample in samples for token in sample.tokens]
    chosen = {id(token) for token, flag in zip(everything, flags, strict=True) if flag}
    covariances = _covariances(tokens)
    low, high, share = -math.inf, math.inf, getattr(record, "kl_cov_ratio", None)
    if share is None:
        low, high, share = record.clip_cov_lb, record.clip_cov_ub, record.clip_cov_ratio
    candidates = {name: value for name, value in covariances.items() if low < value < high}
    assert chosen <= candidates.keys() and len(chosen) == min(max(1, int(share * len(tokens))), len(candidates))
    if record.objective == "kl_cov":
        others = [value for name, value in candidates.items() if name not in chosen]
        assert min(candidates[name] for name in chosen) > max(others, default=-math.inf) - 1e-6
    return chosen


def _length_factors(record: Any, samples: Sequence[Sample], exponent: float) -> dict[int, float]:
    """n e^(h^lambda) / sum of e^(h^lambda), h from lengths in the loss, of completions that have any."""
    lengths = {id(sample): sum(token.kept for token in sample.tokens) for sample in samples}
    found = {}
    for sample in samples:
        members = [id(other) for other in samples if other.group == sample.group and lengths[id(other)]]
        own = [lengths[name] for name in members]
        if id(sample) not in members:
            continue
        deviation = statistics.pstdev(own)
        bases = [
            1 + record.lambda_length_scale * ((length - statistics.fmean(own)) / deviation if deviation else 0.0)
            for length in own
        ]
        powers = {name: math.exp(base**exponent) for name, base in zip(members, bases, strict=True)}
        found[id(sample)] = len(members) * powers[id(sample)] / sum(powers.values())
    return found


def _router_shifts(record: Any, tokens: Sequence[Token], table: Tensor) -> dict[int, float]:
    """ln of max(floor, exp(-mean |change of ln of the share|)) over the experts that were chosen at first."""
    then, now = router_scores(START).tolist(), router_scores(table).tolist()
    found = {}
    for token in tokens:
        best = sorted(range(len(then[0])), key=lambda expert: -then[token.before][expert])[:TOP_EXPERTS]
        moved = statistics.fmean(abs(now[token.before][expert] - then[token.before][expert]) for expert in best)
        found[id(token)] = math.log(max(record.router_shift_floor, math.exp(-moved)))
    return found
