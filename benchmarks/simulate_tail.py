"""Engine steps of a rollout with a heavy tail: in the order of prompts, longest first, and with the longest dropped.

`python benchmarks/simulate_tail.py` prints two tables; nothing sleeps and no model is loaded. An engine makes a token
of each of its sequences per step, so that a rollout takes as many steps as its fullest place. Prompts are dealt to
ranks and ordered by hybrid_rl/rollout/task_split.py, from the lengths of one earlier visit. Lengths are log-normal:
`between` is the sigma of the prompts' medians, `within` that of the samples of a prompt; the mean is about a tenth of
the limit.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Sequence

import numpy as np

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.lengths import rounded_mean
from hybrid_rl.rollout.task_split import TaskList

LIMIT = 8192
Lengths = Sequence[Sequence[int]]  # by prompt and generation


def ends(lengths: Lengths, order: Sequence[int], slots: int) -> dict[int, int]:
    """Return the engine step at which each prompt is whole. order: in which prompts start; all samples of a prompt wait
    together, and whoever ends makes room for the first that waits."""
    places, end_steps = [0] * slots, dict[int, int]()
    for prompt in order:
        for length in lengths[prompt]:
            end = heapq.heappop(places) + length
            heapq.heappush(places, end)
            end_steps[prompt] = max(end_steps.get(prompt, 0), end)
    return end_steps


def dealt(expected: Sequence[int | None], generations: int, ranks: int) -> list[list[int]]:
    """Return the prompts of each rank in the order in which they start. expected: lengths, None = not known."""
    call = RolloutCall(generations, SamplingParams(LIMIT), 0, TrainerState(1, 1, 0.0), "train/1", 0)
    tasks = [RolloutTask(place, PromptRow(place, "", (1,), {}), length) for place, length in enumerate(expected)]
    return [[task.place for task in part] for part in TaskList(tasks, call, {}).dealt(ranks)]


def draw(rng: np.random.Generator, prompts: int, generations: int, between: float, within: float) -> list[Lengths]:
    """Return the lengths of two visits to the same prompts."""
    medians = 500 * np.exp(rng.normal(0, between, (prompts, 1)))
    visits = (medians * np.exp(rng.normal(0, within, (prompts, generations))) for _ in range(2))
    return [np.clip(visit, 1, LIMIT).astype(int).tolist() for visit in visits]


def order_table(args: argparse.Namespace) -> None:
    """Print engine steps relative to the least that any order needs."""
    print("| samples per place | between | within | by prompt, dealt by counts | longest first, dealt by tokens |")
    print("|---|---|---|---|---|")
    for prompts in (32, 64, 128):
        for between, within in ((1.0, 0.4), (0.8, 0.6), (0.4, 0.8)):
            rng, ratios = np.random.default_rng(0), list[tuple[float, float]]()
            for _ in range(args.rounds):
                before, now = draw(rng, prompts, args.generations, between, within)
                total = sum(map(sum, now))
                least = max(*map(max, now), total / (args.slots * args.ranks))
                known = [rounded_mean(sum(lengths), len(lengths)) for lengths in before]
                parts = [dealt(guess, args.generations, args.ranks) for guess in ([None] * prompts, known)]
                steps = [max(max(ends(now, part, args.slots).values()) for part in ranks) for ranks in parts]
                ratios.append((steps[0] / least, steps[1] / least))
            mine = [statistics.fmean(column) for column in zip(*ratios, strict=True)]
            each = prompts * args.generations / (args.slots * args.ranks)
            print(f"| {each:g} | {between} | {within} | {mine[0]:.2f} | {mine[1]:.2f} |")


def drop_table(args: argparse.Namespace) -> None:
    """Print what dropping saves and whom it prefers, with room for all sequences at once."""
    print("| oversample | engine steps | tokens dropped | mean length in the batch | the longest tenth in the batch |")
    print("|---|---|---|---|---|")
    size, first = 64, 0.0
    for extra in (0, 4, 8, 16, 32, 64):
        rng, rows = np.random.default_rng(0), list[tuple[float, ...]]()
        for _ in range(args.rounds):
            _, now = draw(rng, size + extra, args.generations, 0.8, 0.6)
            whole = ends(now, range(size + extra), (size + extra) * args.generations)
            taken = sorted(whole, key=lambda prompt: (whole[prompt], prompt))[:size]
            end = whole[taken[-1]]
            mean = [statistics.fmean(lengths) for lengths in now]
            longest = {*sorted(whole, key=lambda prompt: -mean[prompt])[: (size + extra) // 10]}
            kept = sum(sum(now[prompt]) for prompt in taken)
            made = sum(min(length, end) for lengths in now for length in lengths)
            rows.append(
                (
                    end,
                    1 - kept / made,
                    statistics.fmean(mean[prompt] for prompt in taken) / statistics.fmean(mean),
                    len(longest & {*taken}) / size / (len(longest) / (size + extra)),
                )
            )
        steps, wasted, length, share = (statistics.fmean(column) for column in zip(*rows, strict=True))
        first = first or steps
        print(f"| {extra} of {size} | {steps / first:.2f} | {wasted:.0%} | {length:.0%} | {share:.0%} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slots", type=int, default=32, help="sequences that a rank decodes together")
    args = parser.parse_args()
    order_table(args)
    print()
    drop_table(args)


if __name__ == "__main__":
    main()
