"""Seconds of training steps on 8 to 1,024 GPUs, simulated: synchronous, partial, one step off, and separate pools.

`python benchmarks/simulate_time.py` prints a table; nothing sleeps and no model is loaded. A GPU, or a replica of a
few, decodes a token of each of its sequences in `step_seconds + token_seconds * batch`; training takes `train_seconds`
per token, divided over the GPUs that train; a handoff takes `handoff_seconds`. What a step takes and what it holds
follows the rules of hybrid_rl/rollout/held.py: groups that are whole are counted, tokens have a bounded age.

Where the numbers come from: a 7B model in bfloat16 reads 15 GB in a decode step, 4.6 ms at the 3.35 TB/s of an H100
(NVIDIA's data sheet); with two thirds of that rate 7 ms. Each further sequence reads keys and values of 2,000 tokens,
0.02 ms. Training takes 8 FLOPs per parameter and token (2 of them for old logprobs), 0.14 ms at 40 % of 989 TFLOP/s.
Lengths are log-normal: solutions of GSM8K have a sigma of 0.55 (of the log of their words, 1,000 rows of the training
set); sigma 1 with a mean of an eighth of the limit stands for long reasoning. All of these are options.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Setting:
    """What is simulated. prompts, generations: of a step; mean, sigma, limit: of completions, in tokens; slots:
    sequences that a GPU decodes at a time; reward_seconds, reward_sigma: log-normal latency of a group's reward;
    generating: GPUs that only generate, of separate pools, 0 = all do both."""

    gpus: int = 8
    prompts: int = 64
    generations: int = 8
    mean: float = 4000.0
    sigma: float = 1.0
    limit: int = 32768
    slots: int = 256
    step_seconds: float = 7e-3
    token_seconds: float = 2e-5
    train_seconds: float = 1.4e-4
    handoff_seconds: float = 2.0
    reward_seconds: float = 0.0
    reward_sigma: float = 1.0
    oversample: int = 0
    max_staleness: int = 0
    ahead: int = 0
    generating: int = 0
    seed: int = 0

    def lengths(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw lengths of completions."""
        normal = rng.standard_normal(count)
        drawn = self.mean * np.exp(self.sigma * normal - self.sigma**2 / 2)
        return np.clip(np.rint(drawn), 1, self.limit).astype(int).tolist()

    def decode_seconds(self, batch: int) -> float:
        """Seconds of a decode step."""
        return self.step_seconds + self.token_seconds * batch


@dataclass(eq=False)
class Group:
    """A group under way. born: its step, from 0; left: unfinished samples; oldest: version of its oldest token, None
    before it has one; scored_at: when its reward is there."""

    born: int
    lengths: list[int]
    reward_seconds: float
    left: int
    oldest: int | None = None
    scored_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all of its samples."""
        return sum(self.lengths)


@dataclass(eq=False)
class Replica:
    """A GPU that decodes. running: (tokens at which it ends, order, group), counted in decode steps of the replica;
    waiting: (tokens left, group), in order."""

    setting: Setting
    clock: float = 0.0
    done: int = 0  # decode steps so far
    running: list[tuple[int, int, Group]] = field(default_factory=list)
    waiting: deque[tuple[int, Group]] = field(default_factory=deque)
    order: int = 0

    def admit(self, version: int) -> None:
        """Start what waits, as far as there are slots."""
        while self.waiting and len(self.running) < self.setting.slots:
            tokens, group = self.waiting.popleft()
            group.oldest = version if group.oldest is None else group.oldest
            heapq.heappush(self.running, (self.done + tokens, self.order, group))
            self.order += 1

    def next_end(self) -> float:
        """Return when the next sequence ends; infinity if none runs."""
        if not self.running:
            return math.inf
        return self.clock + (self.running[0][0] - self.done) * self.setting.decode_seconds(len(self.running))

    def advance(self, until: float, version: int) -> list[Group]:
        """Decode until then; return the groups of sequences that ended, one entry each."""
        ended: list[Group] = []
        while self.running and self.next_end() <= until + 1e-12:
            self.clock = self.next_end()
            self.done = self.running[0][0]
            while self.running and self.running[0][0] <= self.done:
                ended.append(heapq.heappop(self.running)[2])
            self.admit(version)
        if self.running and math.isfinite(until):
            steps = int((until - self.clock) / self.setting.decode_seconds(len(self.running)) + 1e-9)
            self.done += steps
        self.clock = max(self.clock, until) if math.isfinite(until) else self.clock
        return ended

    def hold(self) -> list[tuple[int, Group]]:
        """Break off what runs; return the tokens that are left of each sequence, what waits last."""
        held = [(end - self.done, group) for end, _, group in sorted(self.running, key=lambda sequence: sequence[1])]
        held += self.waiting
        self.running, self.waiting = [], deque()
        return held


@dataclass
class Result:
    """seconds: of the steps after the buffer has filled; busy: share of its time in which a slot of a generating GPU
    was decoding; ages: share of tokens by age."""

    seconds: list[float]
    decode_steps: list[int]
    ages: dict[int, float]

    @property
    def mean(self) -> float:
        """Mean seconds of a step."""
        return statistics.fmean(self.seconds)


def simulate(setting: Setting, steps: int = 12, skipped: int = 4) -> Result:
    """Simulate training steps. The first `skipped`, in which a buffer fills, are not counted."""
    rng = np.random.default_rng(setting.seed)
    pools = setting.generating > 0
    num_generating = setting.generating if pools else setting.gpus
    num_training = setting.gpus - setting.generating if pools else setting.gpus
    replicas = [Replica(setting) for _ in range(num_generating)]
    held: list[tuple[int, Group]] = []
    open_groups: list[Group] = []
    clock, trained_at, seconds, decoded = 0.0, 0.0, list[float](), list[int]()
    ages: dict[int, int] = {}
    for step in range(skipped + steps):
        begun = clock
        under_way = setting.prompts + setting.ahead + setting.oversample - len(open_groups)
        for _ in range(under_way):
            lengths = setting.lengths(rng, setting.generations)
            wait = setting.reward_seconds * math.exp(
                setting.reward_sigma * rng.standard_normal() - setting.reward_sigma**2 / 2
            )
            group = Group(step, lengths, wait, len(lengths))
            open_groups.append(group)
            held += [(length, group) for length in lengths]
        for replica in replicas:
            replica.clock = clock
        for place, sequence in enumerate(held):  # dealt out in turn, as the controller does
            replicas[place % len(replicas)].waiting.append(sequence)
        before = max(replica.done for replica in replicas)
        for replica in replicas:
            replica.admit(step)
        clock = generate(setting, replicas, open_groups, step)
        decoded.append(max(replica.done for replica in replicas) - before)
        held = [sequence for replica in replicas for sequence in replica.hold()]
        whole = [group for group in open_groups if not group.left]
        whole.sort(key=lambda group: (not must_end(setting, group, step), group.born))
        taken = set(whole[: setting.prompts])
        for group in taken:
            age = step - (step if group.oldest is None else group.oldest)
            ages[age] = ages.get(age, 0) + group.num_tokens
        open_groups = [group for group in open_groups if group not in taken]
        scored = max(group.scored_at for group in taken)
        training = sum(group.num_tokens for group in taken) * setting.train_seconds / num_training
        if pools:
            # The next batch is generated while this one is trained on; weights are handed over when both are done.
            trained_at = max(scored, trained_at) + training
            clock = max(clock, trained_at - training) + setting.handoff_seconds
            seconds.append(max(clock - begun, training + setting.handoff_seconds))
            clock = begun + seconds[-1]
        else:
            clock = max(clock, scored) + training + setting.handoff_seconds
            seconds.append(clock - begun)
    total = sum(ages.values())
    return Result(seconds[skipped:], decoded[skipped:], {age: count / total for age, count in sorted(ages.items())})


def must_end(setting: Setting, group: Group, step: int) -> bool:
    """Whether a group would be too old in the next step."""
    return group.oldest is not None and step + 1 - group.oldest > setting.max_staleness


def generate(setting: Setting, replicas: Sequence[Replica], groups: Sequence[Group], step: int) -> float:
    """Decode on all replicas until enough groups are whole; return when that is."""
    queue = [(replica.next_end(), place) for place, replica in enumerate(replicas)]
    heapq.heapify(queue)
    num_whole = sum(not group.left for group in groups)
    due = {group for group in groups if group.left and must_end(setting, group, step)}
    wanted = min(setting.prompts + setting.ahead, len(groups))
    now = max(replica.clock for replica in replicas)
    while num_whole < wanted or due:
        now, place = heapq.heappop(queue)
        if not math.isfinite(now):
            break
        for group in replicas[place].advance(now, step):
            group.left -= 1
            if not group.left:
                num_whole += 1
                due.discard(group)
                group.scored_at = now + group.reward_seconds
        heapq.heappush(queue, (replicas[place].next_end(), place))
    for replica in replicas:
        for group in replica.advance(now, step):
            group.left -= 1
            if not group.left:
                group.scored_at = now + group.reward_seconds
    return now


def variants(setting: Setting) -> dict[str, Setting]:
    """Return the ways of training that are compared, for one setting: with the library's own defaults, and with less
    or more that is held. Pools have the split that is fastest; partial ones go on with what is unfinished after
    weights have arrived in the middle of it, as AReaL's do."""
    half, whole = max(1, setting.prompts // 2), setting.prompts
    splits = sorted({max(1, round(setting.gpus * share)) for share in SPLITS} - {setting.gpus})
    pools = [replace(setting, generating=split, ahead=setting.prompts, max_staleness=1) for split in splits]
    partial_pools = [replace(pool, oversample=whole, max_staleness=4) for pool in pools]
    settings = {
        "synchronous": setting,
        "partial, less": replace(setting, oversample=half, max_staleness=1),
        "partial": replace(setting, oversample=whole, max_staleness=3),
        "partial, more": replace(setting, oversample=2 * whole, max_staleness=6),
        "one step off": replace(setting, ahead=whole, max_staleness=1),
        "both": replace(setting, ahead=whole, oversample=whole, max_staleness=4),
        "both, more": replace(setting, ahead=whole, oversample=2 * whole, max_staleness=7),
    }
    for name, its in (("separate pools", pools), ("separate pools, partial", partial_pools)):
        if its:
            settings[name] = min(its, key=lambda pool: simulate(smaller(pool), 6, 3).mean)
    return settings


def smaller(setting: Setting, gpus: int = 64) -> Setting:
    """Return the same work for each GPU on at most so many GPUs, in which the best split is found sooner."""
    times = max(1, setting.gpus // gpus)
    whole = {name: getattr(setting, name) // times for name in ("gpus", "prompts", "oversample", "ahead", "generating")}
    return replace(setting, **whole)


SPLITS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # shares of the GPUs of separate pools that generate
WORKS = {
    "gsm8k": {"mean": 250.0, "sigma": 0.55, "limit": 1024},
    "reasoning": {"mean": 4000.0, "sigma": 1.0, "limit": 32768},
    "reasoning, slow rewards": {"mean": 4000.0, "sigma": 1.0, "limit": 32768, "reward_seconds": 30.0},
}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of lines of JSON: how many times as fast as the synchronous step each variant is, with the GPUs
    that generate in brackets. Numbers of GPUs with the same values share a row, with their mean of seconds."""
    names = [name for name in rows[0] if name not in ("work", "gpus", "synchronous_seconds", "generating")]
    head = ["work", "GPUs", "synchronous, s", *names]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        values = [f"{row[name]:.1f}" for name in names]
        for place, name in enumerate(names):
            if name in row["generating"]:
                values[place] += f" ({row['generating'][name] / row['gpus']:.0%})"
        groups.setdefault((row["work"], *values), []).append(row)
    lines = [head, ["---"] * len(head)]
    for (work, *values), alike in groups.items():
        sizes = " to ".join(dict.fromkeys(f"{row['gpus']:,}" for row in (alike[0], alike[-1])))
        seconds = statistics.fmean(row["synchronous_seconds"] for row in alike)
        lines.append([work, sizes, f"{seconds:.0f}", *values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print a table: seconds of a synchronous step, and how many times as fast the others are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--prompts-per-gpu", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--markdown", metavar="FILE", help="print the table of what --json has printed, and simulate nothing"
    )
    options = parser.parse_args()
    if options.markdown:
        print(markdown([json.loads(line) for line in Path(options.markdown).read_text().splitlines()]))
        return
    for work, its in WORKS.items():
        for gpus in options.gpus:
            setting = Setting(gpus=gpus, prompts=options.prompts_per_gpu * gpus, **its)
            settings = variants(setting)
            results = {name: simulate(variant, options.steps) for name, variant in settings.items()}
            base = results["synchronous"].mean
            row = {"work": work, "gpus": gpus, "synchronous_seconds": round(base, 1)}
            row |= {name: round(base / result.mean, 2) for name, result in results.items() if name != "synchronous"}
            row["generating"] = {name: variant.generating for name, variant in settings.items() if variant.generating}
            text = json.dumps(row) if options.json else "  ".join(f"{name} {value}" for name, value in row.items())
            print(text, flush=True)


if __name__ == "__main__":
    main()
