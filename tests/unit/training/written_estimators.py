"""Advantages by loops over samples and tokens, from the papers' formulas: a reference for combinations of sections.

A sample is a `Sample` of `Token`s; its steps are the tokens that the policy made. Nothing here is shared with
hybrid_rl.algos.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Token:
    """made: by the policy; logs: ln p of the present policy over the vocabulary, old_logs of that before the update.
    The others: ln p of the token, or what the columns of its name hold."""

    id: int
    before: int
    made: bool
    old: float
    rollout: float
    ref: float
    teacher: float
    value: float
    dense: float
    version: int
    logs: list[float]
    old_logs: list[float]
    ref_logs: list[float]
    advantage: float = 0.0
    kept: bool = False  # in the loss

    @property
    def now(self) -> float:
        return self.logs[self.id]


@dataclass
class Sample:
    """reward: NaN = could not be scored; greedy: the reward of the greedy completion; parts: of reward functions, NaN
    where one says nothing."""

    tokens: list[Token]
    reward: float
    greedy: float
    group: int
    is_cut: bool
    parts: Sequence[float] = ()

    @property
    def steps(self) -> list[Token]:
        return [token for token in self.tokens if token.made]

    @property
    def is_scored(self) -> bool:
        return not math.isnan(self.reward)


Samples = Sequence[Sample]
Rows = list[list[float]]  # a number per step of each sample


def add_kl_rewards(samples: Samples, beta: float, estimator: str) -> None:
    """-beta times the estimate, at every token that the policy made."""
    for sample in samples:
        for token in sample.steps:
            x = token.ref - token.old
            estimate = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x, "abs": abs(x)}[estimator]
            token.dense -= beta * estimate
            sample.reward -= beta * estimate


def advantages(record: Any, samples: Samples) -> Rows:
    """Of each step of each sample; 0 if it was not scored."""
    rows: Rows = ESTIMATORS[record.estimator](record, samples)
    if record.estimator in ("sft", "distillation"):
        return rows  # they learn without rewards too
    return [row if sample.is_scored else [0.0] * len(row) for row, sample in zip(rows, samples, strict=True)]


def step_rewards(sample: Sample) -> list[float]:
    """Dense ones at their steps, the rest of the total at the last one."""
    earned = [token.dense for token in sample.steps]
    if earned and sample.is_scored:
        earned[-1] += sample.reward - sum(token.dense for token in sample.tokens)
    return earned


def ahead(sample: Sample, gamma: float = 1.0) -> list[float]:
    earned = step_rewards(sample)
    return [sum(gamma ** (s - t) * earned[s] for s in range(t, len(earned))) for t in range(len(earned))]


def spread(values: Sequence[float], samples: Samples) -> Rows:
    return [[value] * len(sample.steps) for value, sample in zip(values, samples, strict=True)]


def scored(samples: Samples) -> list[float]:
    return [sample.reward for sample in samples if sample.is_scored]


def of_group(sample: Sample, samples: Samples) -> list[float]:
    return [other.reward for other in samples if other.group == sample.group and other.is_scored]


def by_group(samples: Samples, one: Any) -> Rows:
    """one(reward, rewards of the group), 0 if they are all equal or the sample is not scored."""
    found = []
    for sample in samples:
        rewards = of_group(sample, samples)
        told_apart = sample.is_scored and len(set(rewards)) > 1
        found.append(one(sample.reward, rewards) if told_apart else 0.0)
    return spread(found, samples)


def scale(kind: str, rewards: list[float], everything: list[float]) -> float:
    if kind == "none":
        return 1.0
    if kind == "batch":
        return statistics.stdev(everything) + 1e-4
    if kind == "mad":
        middle = statistics.median(rewards)
        deviations = [abs(reward - middle) for reward in rewards]
        mad = statistics.median(deviations)
        return (1.4826 * mad if mad > 0 else 1.253314 * statistics.fmean(deviations)) + 1e-4
    return statistics.stdev(rewards) + 1e-4


def grpo(record: Any, samples: Samples) -> Rows:
    if record.token_level:
        return _process(record, samples)
    if record.multi_objective_aggregation == "normalize_then_sum":
        return _by_function(samples)
    everything = scored(samples)
    return by_group(samples, lambda r, rs: (r - statistics.fmean(rs)) / scale(record.scale_rewards, rs, everything))


def _by_function(samples: Samples) -> Rows:
    """Each function over the group, their sum over the batch."""
    sums = {}
    for sample in samples:
        if not sample.is_scored:
            continue
        found = []
        for place, value in enumerate(sample.parts):
            others = [other.parts[place] for other in samples if other.group == sample.group and other.is_scored]
            others = [other for other in others if not math.isnan(other)]
            if not math.isnan(value) and len(others) > 1:
                found.append((value - statistics.fmean(others)) / (statistics.stdev(others) + 1e-4))
        sums[id(sample)] = sum(found)
    mean, deviation = statistics.fmean(sums.values()), statistics.stdev(sums.values()) + 1e-4
    return spread([(sums.get(id(sample), mean) - mean) / deviation for sample in samples], samples)


def _process(record: Any, samples: Samples) -> Rows:
    """Every reward at a token is a step, the outcome one at the last token where any sample of the group has one."""
    terms: dict[int, list[tuple[int, int, float]]] = {}
    for group in sorted({sample.group for sample in samples}):
        members = [(i, s) for i, s in enumerate(samples) if s.group == group and s.is_scored]
        outcome = any(abs(s.reward - sum(t.dense for t in s.tokens)) > 1e-5 for _, s in members)
        found = terms.setdefault(group, [])
        for index, sample in members:
            for place, earned in enumerate(step_rewards(sample)):
                is_last = place == len(sample.steps) - 1
                if earned != 0 or is_last and outcome:
                    found.append((index, place, earned))
    everything = [value for found in terms.values() for _, _, value in found]
    normalised: Rows = [[0.0] * len(sample.steps) for sample in samples]
    for found in terms.values():
        values = [value for _, _, value in found]
        for index, place, value in found:
            if len(set(values)) > 1:
                size = scale(record.scale_rewards, values, everything)
                normalised[index][place] = (value - statistics.fmean(values)) / size
    return [[sum(row[t:]) for t in range(len(row))] for row in normalised]


def rloo(_: Any, samples: Samples) -> Rows:
    return by_group(samples, lambda r, rs: r - (sum(rs) - r) / (len(rs) - 1))


def gpg(record: Any, samples: Samples) -> Rows:
    everything = scored(samples)
    silent = sum(sample.is_scored and len(set(of_group(sample, samples))) < 2 for sample in samples)
    factor = len(everything) / (len(everything) - silent)
    return by_group(
        samples, lambda r, rs: factor * (r - statistics.fmean(rs)) / scale(record.scale_rewards, rs, everything)
    )


def maxrl(_: Any, samples: Samples) -> Rows:
    return by_group(samples, lambda r, rs: (r - statistics.fmean(rs)) / statistics.fmean(rs))


def opo(_: Any, samples: Samples) -> Rows:
    found = []
    for sample in samples:
        members = [other for other in samples if other.group == sample.group and other.is_scored]
        total = sum(len(other.steps) for other in members)
        told_apart = sample.is_scored and len({other.reward for other in members}) > 1 and total
        baseline = sum(len(other.steps) * other.reward for other in members) / total if told_apart else 0.0
        found.append(sample.reward - baseline if told_apart else 0.0)
    return spread(found, samples)


def remax(_: Any, samples: Samples) -> Rows:
    return [[value - sample.greedy for value in ahead(sample)] for sample in samples]


def whitened(rows: Rows, samples: Samples) -> Rows:
    values = [value for row, sample in zip(rows, samples, strict=True) if sample.is_scored for value in row]
    mean, deviation = statistics.fmean(values), math.sqrt(statistics.variance(values) + 1e-8)
    return [[(value - mean) / deviation for value in row] for row in rows]


def reinforce_plus_plus(record: Any, samples: Samples) -> Rows:
    return whitened([ahead(sample, record.gamma) for sample in samples], samples)


def reinforce_plus_plus_baseline(_: Any, samples: Samples) -> Rows:
    return whitened(by_group(samples, lambda r, rs: r - statistics.fmean(rs)), samples)


def optimal_token_baseline(_: Any, samples: Samples) -> Rows:
    returns = [ahead(sample) for sample in samples]
    energies = []
    for sample in samples:
        energy, path = 0.0, []
        for token in sample.steps:
            energy += 1 - 2 * math.exp(token.old) + sum(math.exp(2 * log) for log in token.old_logs)
            path.append(energy)
        energies.append(path)
    rows = []
    for index, sample in enumerate(samples):
        row = []
        for t in range(len(sample.steps)):
            reach = [
                i
                for i, other in enumerate(samples)
                if other.group == sample.group and other.is_scored and len(other.steps) > t
            ]
            earned = [returns[i][t] for i in reach]
            weights = [energies[i][t] + 1e-8 for i in reach]
            baseline = sum(g * w for g, w in zip(earned, weights, strict=True)) / max(sum(weights), 1e-30)
            row.append(returns[index][t] - baseline if len(set(earned)) > 1 else 0.0)
        rows.append(row)
    return rows


def pass_at_k(record: Any, samples: Samples) -> Rows:
    """GRPO's advantage of every subset of k, averaged over those that hold the sample."""
    found = []
    for sample in samples:
        members = [other for other in samples if other.group == sample.group and other.is_scored]
        total, count = 0.0, 0
        subsets = list(itertools.combinations(members, record.pass_k))
        worth = [float(any(one.reward >= record.success_threshold for one in subset)) for subset in subsets]
        deviation = statistics.pstdev(worth) if worth else 0.0
        for subset, value in zip(subsets, worth, strict=True):
            if any(one is sample for one in subset) and deviation > 0 and len(members) > record.pass_k:
                total, count = total + (value - statistics.fmean(worth)) / deviation, count + 1
        found.append(total / count if count else 0.0)
    return spread(found, samples)


def max_of_group(record: Any, samples: Samples) -> Rows:
    def one(reward: float, rewards: list[float]) -> float:
        best, second = sorted(rewards, reverse=True)[:2]
        return (best - second) / scale(record.scale_rewards, rewards, rewards) if reward == best > second else 0.0

    return by_group(samples, one)


def gae_of(sample: Sample, gamma: float, lam: float) -> list[float]:
    earned, values = step_rewards(sample), [token.value for token in sample.steps]
    nexts = [*values[1:], 0.0][: len(values)]
    errors = [r + gamma * after - v for r, v, after in zip(earned, values, nexts, strict=True)]
    return [sum((gamma * lam) ** (s - t) * errors[s] for s in range(t, len(errors))) for t in range(len(errors))]


def gae(record: Any, samples: Samples) -> Rows:
    rows = [gae_of(sample, record.gamma, record.lam) for sample in samples]
    return whitened(rows, samples) if record.whiten_advantages else rows


def vapo(record: Any, samples: Samples) -> Rows:
    lams = [max(0.0, 1 - 1 / (record.length_adaptive_alpha * max(len(sample.steps), 1))) for sample in samples]
    rows = [gae_of(sample, record.gamma, lam) for sample, lam in zip(samples, lams, strict=True)]
    return whitened(rows, samples) if record.whiten_advantages else rows


def vtrace(record: Any, samples: Samples) -> Rows:
    """v_t = V_t + sum over s >= t of gamma^(s-t) (product of c before s) rho_s d_s, the paper's eq. 1."""
    rows = []
    for sample in samples:
        steps, earned = sample.steps, step_rewards(sample)
        ratios = [math.exp(token.old - token.rollout) for token in steps]
        rho = [min(record.rho_clip, ratio) for ratio in ratios]
        c = [record.lam * min(record.c_clip, ratio) for ratio in ratios]
        values = [*(token.value for token in steps), 0.0]
        errors = [rho[t] * (earned[t] + record.gamma * values[t + 1] - values[t]) for t in range(len(steps))]
        targets = [
            values[t] + sum(record.gamma ** (s - t) * math.prod(c[t:s]) * errors[s] for s in range(t, len(steps)))
            for t in range(len(steps))
        ]
        targets.append(0.0)
        rows.append([rho[t] * (earned[t] + record.gamma * targets[t + 1] - values[t]) for t in range(len(steps))])
    return rows


def distillation(record: Any, samples: Samples) -> Rows:
    relative = by_group(samples, lambda r, rs: (r - statistics.fmean(rs)) / (statistics.stdev(rs) + 1e-4))
    return [
        [t.teacher - t.old + record.group_advantage_coef * value for t, value in zip(s.steps, row, strict=True)]
        for s, row in zip(samples, relative, strict=True)
    ]


def rejection(record: Any, samples: Samples) -> Rows:
    found = []
    for index, sample in enumerate(samples):
        better = [
            other
            for place, other in enumerate(samples)
            if other.group == sample.group
            and other.is_scored
            and (other.reward > sample.reward or other.reward == sample.reward and place < index)
        ]
        accepted = sample.is_scored and (record.num_best is None or len(better) < record.num_best)
        found.append(float(accepted and (record.reward_threshold is None or sample.reward >= record.reward_threshold)))
    return spread(found, samples)


def sft(_: Any, samples: Samples) -> Rows:
    return spread([1.0] * len(samples), samples)


ESTIMATORS = {
    one.__name__: one
    for one in (
        *(grpo, rloo, gpg, maxrl, opo, remax, reinforce_plus_plus, reinforce_plus_plus_baseline, gae, vapo, vtrace),
        *(optimal_token_baseline, pass_at_k, max_of_group, distillation, rejection, sft),
    )
}
