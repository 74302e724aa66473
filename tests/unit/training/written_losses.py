"""The gradient of a whole loss by the logits, from the papers' formulas: policy losses, corrections, KL and entropy
terms and aggregation as loops over tokens, in Python's floats. Nothing here is shared with hybrid_rl.algos.

A policy loss, here or as `written` in the test of its module, is given as what it adds to the gradient of each ln p;
`Slopes` takes that to the logits.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.unit.training.written_estimators import Sample, Samples, Token


class Slopes:
    """What the loss adds to the gradient of ln p, by token and entry of the vocabulary."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows: dict[int, tuple[Token, list[float]]] = {}

    def add(self, token: Token, value: float, entry: int | None = None) -> None:
        row = self._rows.setdefault(id(token), (token, [0.0] * self._size))[1]
        row[token.id if entry is None else entry] += value

    def of_logits(self, temperature: float) -> list[list[float]]:
        """d ln p_i / d z_j = [i = j] - p_j, over the temperature; by the token before."""
        found = [[0.0] * self._size for _ in range(self._size)]
        for token, row in self._rows.values():
            total = sum(row)
            for j, slope in enumerate(row):
                found[token.before][j] += (slope - math.exp(token.logs[j]) * total) / temperature
        return found


@dataclass
class Case:
    """What losses know beside the tokens. selected: tokens that a loss chose of the whole mini-batch, by identity;
    factors: of completions (lambda_grpo), and logs of shifts of tokens (rspo), by identity."""

    config: Any
    version: int
    beta: float
    selected: set[int]
    factors: dict[int, float]
    shifts: dict[int, float]


# Weight of a token in the gradient of the ratio that a KL is multiplied with: value, and slopes by token.
Ratio = tuple[float, list[tuple[Token, float]]]
Loss = Callable[[Any, Sample, list[Token], list[float], Slopes, Case], list[Ratio]]


def gradient(samples: Samples, case: Case, size: int, temperature: float) -> list[list[float]]:
    """Of the loss of a mini-batch by the table of logits."""
    config, slopes = case.config, Slopes(size)
    algorithm = config.algorithm
    kept = [[token for token in sample.tokens if token.kept] for sample in samples]
    num_tokens, num_samples = sum(map(len, kept)), sum(sample.is_scored for sample in samples)
    positive = [token for sample, own in zip(samples, kept, strict=True) if sample.reward > 0 for token in own]
    least = least_entropy([token for own in kept for token in own], algorithm.top_entropy_quantile)
    for sample, tokens in zip(samples, kept, strict=True):
        if not tokens:
            continue
        weight = {
            "dapo": 1 / num_tokens,
            "grpo": 1 / (num_samples * len(tokens)),
            "dr_grpo": 1 / (num_samples * config.rollout.max_completion_length),
            "sequence_sum": 1 / num_samples,
        }[algorithm.loss_type]
        corrections = correction(config.correction, tokens, case)
        upstream = [weight * factor for factor in corrections]
        limit = algorithm.off_policy_mask_threshold
        if limit is not None and statistics.fmean(token.rollout - token.now for token in tokens) > limit:
            upstream = [0.0 if token.advantage < 0 else up for token, up in zip(tokens, upstream, strict=True)]
        is_high = [entropy_of(token) >= least for token in tokens]
        upstream = [up * high for up, high in zip(upstream, is_high, strict=True)]
        objective = config.policy_loss
        ratios = written(objective)(objective, sample, tokens, upstream, slopes, case)
        for token, ratio, high in zip(tokens, ratios, is_high, strict=True):
            if config.kl.in_loss:
                _kl(config.kl, token, ratio, weight * case.beta, slopes)
            for entry, log in enumerate(token.logs):
                slopes.add(token, weight * high * algorithm.entropy_coef * math.exp(log) * (log + 1), entry)
    for token in positive:
        slopes.add(token, -algorithm.positive_nll_coef / len(positive))
    return slopes.of_logits(temperature)


def entropy_of(token: Token) -> float:
    return -sum(math.exp(log) * log for log in token.logs)


def least_entropy(tokens: Sequence[Token], share: float) -> float:
    """The quantile 1 - share."""
    ordered = sorted(map(entropy_of, tokens))
    place = (1 - share) * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def _kl(record: Any, token: Token, ratio: Ratio, weight: float, slopes: Slopes) -> None:
    if record.kl_estimator == "exact":
        for entry, (log, ref) in enumerate(zip(token.logs, token.ref_logs, strict=True)):
            slopes.add(token, weight * math.exp(log) * (log - ref + 1), entry)
        return
    x = token.ref - token.now
    value = {"k2": x * x / 2, "k3": math.exp(x) - 1 - x, "abs": abs(x)}[record.kl_estimator]
    slope = {"k2": -x, "k3": 1 - math.exp(x), "abs": -math.copysign(1, x)}[record.kl_estimator]
    if not record.use_bias_correction_kl:
        slopes.add(token, weight * slope)
        return
    slopes.add(token, weight * slope * ratio[0])
    for other, of_ratio in ratio[1]:
        slopes.add(other, weight * value * of_ratio)


def correction(record: Any, tokens: Sequence[Token], case: Case) -> list[float]:
    """Weights of the tokens of a completion, from p_old / p_rollout."""
    logs = [_old(token, case) - token.rollout for token in tokens]
    by_level = {
        "token": [math.exp(log) for log in logs],
        "sequence": [math.exp(sum(logs))] * len(logs),
        "geometric": [math.exp(statistics.fmean(logs))] * len(logs),
    }
    ratios = by_level[getattr(record, "correction_level", "token")]
    mode = record.correction_mode
    if mode == "none":
        return [1.0] * len(tokens)
    if mode == "tis":
        found = [min(max(ratio, record.correction_low), record.correction_high) for ratio in ratios]
    elif mode in ("mis", "icepop"):
        found = [ratio if record.correction_low <= ratio <= record.correction_high else 0.0 for ratio in ratios]
    else:
        # The engine sampled: x = ln(trainer / engine).
        each = {"k1": lambda x: -x, "k3": lambda x: math.exp(x) - 1 - x, "abs": abs}[record.correction_estimator]
        is_near = abs(statistics.fmean(each(log) for log in logs)) <= record.correction_threshold
        cap = record.correction_high
        found = [(1.0 if cap is None else min(ratio, cap)) if is_near else 0.0 for ratio in by_level["token"]]
    veto = getattr(record, "correction_veto", None)
    if veto is not None and min(by_level["token"]) < veto:
        found = [0.0] * len(tokens)
    ages = [max(case.version - token.version, 0) if token.version >= 0 else 0 for token in tokens]
    return [weight * record.staleness_decay**age for weight, age in zip(found, ages, strict=True)]


def _old(token: Token, case: Case) -> float:
    """The policy that ratios compare with: `old` holds what old_logprobs says, the present one where that is detach."""
    return token.now if case.config.algorithm.old_logprobs == "detach" else token.old


def _high(record: Any) -> float:
    return float(record.epsilon if record.epsilon_high is None else record.epsilon_high)


def is_open(record: Any, ratio: float, advantage: float) -> bool:
    """Whether PPO's minimum is the unclipped term, and that below the bounds of two-sided and dual clip."""
    if advantage >= 0:
        return ratio <= 1 + _high(record)
    bounds = [getattr(record, name, None) for name in ("delta", "dual_clip")]
    return ratio >= 1 - record.epsilon and all(bound is None or ratio <= bound for bound in bounds)


def own(tokens: Sequence[Token], ratios: Sequence[float]) -> list[Ratio]:
    """Each token's ratio, with a gradient through its own ln p."""
    return [(ratio, [(token, ratio)]) for token, ratio in zip(tokens, ratios, strict=True)]


def token_ratios(tokens: Sequence[Token], case: Case) -> list[float]:
    return [math.exp(token.now - _old(token, case)) for token in tokens]


def clip(record: Any, _: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
    level = getattr(record, "importance_sampling_level", "token")
    ratios = token_ratios(tokens, case)
    if level != "token":
        ratios = [_mean_ratio(ratios)] * len(tokens)
    for token, ratio, weight in zip(tokens, ratios, up, strict=True):
        if id(token) in case.selected or not is_open(record, ratio, token.advantage):
            continue
        reached = tokens if level == "sequence" else [token]
        for other in reached:
            slopes.add(other, -weight * token.advantage * ratio / len(reached))
    if level == "sequence":
        return _of_completion(tokens, ratios[0])
    return own(tokens, ratios)


def lambda_grpo(record: Any, sample: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> Any:
    return clip(record, sample, tokens, [case.factors[id(sample)] * weight for weight in up], slopes, case)


def _around(proximal: Callable[[Token, Case], float]) -> Loss:
    def loss(record: Any, _: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
        for token, weight in zip(tokens, up, strict=True):
            near = proximal(token, case)
            ratio, behavior = math.exp(token.now - near), math.exp(near - token.rollout)
            if is_open(record, ratio, token.advantage):
                slopes.add(token, -weight * behavior * token.advantage * ratio)
        return own(tokens, [math.exp(token.now - token.rollout) for token in tokens])

    return loss


def _log_linear(token: Token, case: Case) -> float:
    age = case.version - token.version if token.version >= 0 else 0
    share = 1 - 1 / age if age >= 1 else 0.0
    return token.rollout + share * (token.now - token.rollout)


def _mean_ratio(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _of_completion(tokens: Sequence[Token], ratio: float) -> list[Ratio]:
    """One ratio, with a gradient through all of its tokens."""
    return [(ratio, [(other, ratio / len(tokens)) for other in tokens])] * len(tokens)


def cispo(record: Any, _: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
    ratios = token_ratios(tokens, case)
    is_whole = record.importance_sampling_level == "sequence"
    if is_whole:
        ratios = [_mean_ratio(ratios)] * len(tokens)
    low = 0.0 if record.epsilon is None else 1 - record.epsilon
    for token, ratio, weight in zip(tokens, ratios, up, strict=True):
        slopes.add(token, -weight * token.advantage * min(max(ratio, low), 1 + record.epsilon_high))
    return _of_completion(tokens, ratios[0]) if is_whole else own(tokens, ratios)


def sapo(record: Any, _: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
    ratios, level = token_ratios(tokens, case), record.importance_sampling_level
    if level != "token":
        ratios = [_mean_ratio(ratios)] * len(tokens)
    for token, ratio, weight in zip(tokens, ratios, up, strict=True):
        tau = record.sapo_temperature_pos if token.advantage > 0 else record.sapo_temperature_neg
        slope = -weight * token.advantage * ratio / math.cosh(tau * (ratio - 1) / 2) ** 2
        reached = tokens if level == "sequence" else [token]
        for other in reached:
            slopes.add(other, slope / len(reached))
    return _of_completion(tokens, ratios[0]) if level == "sequence" else own(tokens, ratios)


def gmpo(record: Any, _: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
    logs = [token.now - _old(token, case) + case.shifts.get(id(token), 0.0) for token in tokens]
    cut = [
        min(log, _high(record)) if token.advantage > 0 else max(log, -record.epsilon)
        for log, token in zip(logs, tokens, strict=True)
    ]
    value, plain = math.exp(statistics.fmean(cut)), math.exp(statistics.fmean(logs))
    total = sum(-weight * token.advantage * value for weight, token in zip(up, tokens, strict=True))
    for token, log, bounded in zip(tokens, logs, cut, strict=True):
        if log == bounded:
            slopes.add(token, total / len(tokens))
    return _of_completion(tokens, plain)


def reinforce(_: Any, __: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
    for token, weight in zip(tokens, up, strict=True):
        slopes.add(token, -weight * token.advantage)
    return own(tokens, token_ratios(tokens, case))


def vespo(record: Any, _: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
    ratios = token_ratios(tokens, case)
    whole = math.prod(ratios)
    for token, weight in zip(tokens, up, strict=True):
        sign = "pos" if token.advantage >= 0 else "neg"
        k, decay = getattr(record, f"vespo_k_{sign}"), getattr(record, f"vespo_lambda_{sign}")
        slopes.add(token, -weight * token.advantage * whole**k * math.exp(decay * (1 - whole)))
    return own(tokens, ratios)


def dppo(record: Any, _: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
    scope, kind = record.divergence_type.split("_")
    olds = [token.rollout if scope == "binary" else _old(token, case) for token in tokens]
    ratios = [math.exp(token.now - old) for token, old in zip(tokens, olds, strict=True)]
    limit = record.divergence_threshold or {"tv": 0.15, "kl": 0.05}[kind]
    for token, old, ratio, weight in zip(tokens, olds, ratios, up, strict=True):
        best = sorted(range(len(token.logs)), key=lambda i: -token.old_logs[i])[: record.num_top]
        known = {entry: token.old_logs[entry] for entry in best} if scope == "topk" else {}
        known.setdefault(token.id, old)
        before = [math.exp(log) for log in known.values()]
        after = [math.exp(token.logs[entry]) for entry in known]
        before, after = ([*events, max(1 - sum(events), 1e-12)] for events in (before, after))
        pairs = list(zip(before, after, strict=True))
        distance = sum(abs(p - q) for p, q in pairs) / 2 if kind == "tv" else sum(p * math.log(p / q) for p, q in pairs)
        leaves = (token.advantage > 0 and ratio > 1) or (token.advantage < 0 and ratio < 1)
        if not (leaves and distance > limit):
            bounded = ratio if record.clip_ratio_c is None else min(ratio, record.clip_ratio_c)
            slopes.add(token, -weight * token.advantage * bounded)
    return own(tokens, ratios)


def kl_cov(record: Any, _: Sample, tokens: list[Token], up: list[float], slopes: Slopes, case: Case) -> list[Ratio]:
    ratios = token_ratios(tokens, case)
    for token, ratio, weight in zip(tokens, ratios, up, strict=True):
        slopes.add(token, -weight * token.advantage * ratio)
        if id(token) in case.selected and ratio != 1:
            slopes.add(token, weight * record.kl_cov_coef * math.copysign(1, math.log(ratio)))
    return own(tokens, ratios)


LOSSES: dict[str, Loss] = {
    **{one.__name__: one for one in (clip, lambda_grpo, cispo, sapo, gmpo, reinforce, vespo, dppo, kl_cov)},
    "decoupled": _around(_old),
    "a3po": _around(_log_linear),
    "rspo": gmpo,
    "clip_cov": clip,
}


def written(record: Any) -> Loss:
    """The loss of a record: the function `written` of the test of its module, else one of those above."""
    if record.objective in LOSSES:
        return LOSSES[record.objective]
    folder, _, module = type(record).__module__.removeprefix("hybrid_rl.").rpartition(".")
    found: Loss = importlib.import_module(f"tests.unit.{folder}.test_{module}").written
    return found
