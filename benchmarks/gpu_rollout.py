"""Completion tokens per second of the embedded engine against `model.generate`, on one GPU.

A random model of Qwen2-0.5B's shape. Heavy tail: every position ends a completion with the same probability, so most
are short and `generate` waits for the longest; equal: all have the same length. Engine and `generate` take turns with
the same prompts, and both sample from the full distribution. One line of JSON per work, with CUDA graphs and without.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from benchmarks.workload import EOS_ID  # noqa: E402
from hybrid_rl.config.engine_keys import InPlaceArgs  # noqa: E402
from hybrid_rl.config.schema import InPlaceRolloutConfig  # noqa: E402
from hybrid_rl.engines.base import (  # noqa: E402
    TAGS,  # noqa: E402
    RolloutRequest,
    SamplingParams,
)
from hybrid_rl.engines.engine_client import EngineClient  # noqa: E402
from hybrid_rl.engines.inplace.engine import InPlaceEngine  # noqa: E402
from hybrid_rl.models import CausalLM  # noqa: E402
from hybrid_rl.resharding.handoff.tensor import TensorSource  # noqa: E402


@dataclass(frozen=True)
class Tally:
    """Tokens up to and with EOS, and seconds, of several rollouts."""

    tokens: int = 0
    seconds: float = 0.0

    def plus(self, tokens: int, seconds: float) -> Tally:
        """One rollout more."""
        return Tally(self.tokens + tokens, self.seconds + seconds)

    @property
    def rate(self) -> float:
        """Tokens per second over all of them."""
        return self.tokens / self.seconds


def arguments() -> Namespace:
    """The command line."""
    parser = device.parser_of(__doc__, repeats=3)
    parser.add_argument("--work", choices=("all", "heavy-tail", "equal"), default="all")
    parser.add_argument("--prompts", type=report.positive, nargs="+", default=[16, 32])
    parser.add_argument("--num-generations", type=report.positive, default=8)
    parser.add_argument("--prompt-tokens", type=report.positive, default=64)
    parser.add_argument("--max-tokens", type=report.positive, default=512, help="limit of a completion")
    parser.add_argument("--mean-tokens", type=report.positive, default=64, help="of a heavy tail without the limit")
    parser.add_argument("--equal-tokens", type=report.positive, default=256, help="of every completion where equal")
    options = device.parse(parser)
    if options.tiny:
        options.prompts, options.num_generations, options.repeats = [2], 2, 1
        options.prompt_tokens, options.max_tokens, options.mean_tokens, options.equal_tokens = 5, 12, 4, 6
    return options


def main() -> None:
    """Every work with every number of prompts."""
    options = arguments()
    for work in ("heavy-tail", "equal") if options.work == "all" else (options.work,):
        ends = 1 / options.mean_tokens if work == "heavy-tail" else None
        limit = options.max_tokens if work == "heavy-tail" else options.equal_tokens
        module = device.model_of(options, max_positions=options.prompt_tokens + options.max_tokens, ends=ends)
        for num_prompts in options.prompts:
            measure(options, module, work, num_prompts, limit)


def measure(given: Namespace, module: Any, work: str, num_prompts: int, limit: int) -> None:
    """All sides in turns, and a line for each of ours."""
    prompts = torch.randint(2, module.config.vocab_size, (num_prompts, given.prompt_tokens))
    graphs = [False, True] if torch.device(given.device).type == "cuda" else [False]
    engines = {graph: engine_of(given, module, num_prompts, limit, graph) for graph in graphs}
    sides: dict[Any, Callable[[int], int]] = {"peer": peer_rollout(given, module, prompts, limit)}
    sides |= {graph: our_rollout(given, engine, prompts, limit) for graph, engine in engines.items()}
    tallies = dict.fromkeys(sides, Tally())
    for repeat in range(given.repeats + 1):
        for side, rollout in sides.items():
            seconds, tokens = device.seconds_of(partial(rollout, repeat), given.device)
            report.progress(f"{work} {num_prompts} {side}: {tokens} tokens in {seconds:.2f} s")
            if repeat > 0:  # the first compiles, captures, fills caches
                tallies[side] = tallies[side].plus(tokens, seconds)
    peer = tallies["peer"]
    num_samples = given.repeats * num_prompts * given.num_generations
    for graph, engine in engines.items():
        mine = tallies[graph]
        report.print_line(
            f"gpu_rollout {work} {num_prompts}x{given.num_generations}{' graphs' if graph else ''}",
            ours=mine.rate,
            peer=peer.rate,
            ratio=mine.rate / peer.rate,
            unit="completion tokens/s",
            hardware=device.hardware(given.device),
            settings=report.settings(given, cuda_graphs=graph),
            details={
                "peer": "model.generate",
                "mean_tokens": mine.tokens / num_samples,
                "peer_mean_tokens": peer.tokens / num_samples,
                "kv_cache_bytes": engine.stats().kv_cache_bytes,
            },
        )
        engine.sleep(TAGS)


def engine_of(given: Namespace, module: Any, num_prompts: int, limit: int, graph: bool) -> InPlaceEngine:
    """An engine that decodes from the module, ready at version 1."""
    num_sequences = num_prompts * given.num_generations
    config = InPlaceRolloutConfig(max_num_seqs=num_sequences, engine_args=InPlaceArgs(cuda_graphs=graph))
    engine = InPlaceEngine(CausalLM(module), config, max_length=given.prompt_tokens + limit)
    engine.wake(TAGS)
    engine.update_weights(TensorSource.of(module), 1)
    return engine


def our_rollout(given: Namespace, engine: InPlaceEngine, prompts: torch.Tensor, limit: int) -> Callable[[int], int]:
    """A rollout by the engine, from a seed to its number of tokens."""
    rows = [tuple(row) for row in prompts.tolist()]

    def rollout(seed: int) -> int:
        requests = [
            RolloutRequest(
                id=index,
                prompt_ids=rows[index // given.num_generations],
                params=SamplingParams(limit, stop_token_ids=(EOS_ID,), seed=1_000_003 * seed + index),
                group=index // given.num_generations,
            )
            for index in range(len(rows) * given.num_generations)
        ]
        return sum(len(sample.completion_ids) for sample in EngineClient(engine).generate(requests, 1))

    return rollout


def peer_rollout(given: Namespace, module: Any, prompts: torch.Tensor, limit: int) -> Callable[[int], int]:
    """The same by `model.generate`."""
    prompt_ids = prompts.to(given.device).repeat_interleave(given.num_generations, 0)

    def rollout(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = module.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                max_new_tokens=limit,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
        ended = (out[:, given.prompt_tokens :] == EOS_ID).cumsum(1)
        return int((ended - (out[:, given.prompt_tokens :] == EOS_ID).long() == 0).sum())

    return rollout


if __name__ == "__main__":
    main()
