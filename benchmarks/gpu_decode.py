"""Completion tokens per second of both engines and of plain vLLM, on the same requests, one side after the other.

A random Qwen2 of 0.5B's shape in bfloat16; every request has a length of its own and ends there, so that all sides make
equally many tokens: heavy tail (exponential, cut at the longest) and equal. Each side has a process of its own, since
vLLM owns its process; plain vLLM is `LLM.generate` with its defaults, asked for no logprobs. Two lines of JSON per
work, for the in-place engine and for vLLM in the trainer's process; bars 0.6 and 0.95 of plain vLLM, aims 0.9 and 1.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402

SIDES = ("plain", "vllm", "inplace")
BARS = {"inplace": (0.6, 0.9), "vllm": (0.95, 1.0)}
GROUP = 8  # samples of one prompt
Rollout = Callable[[list[list[int]], list[int], int], int]


def arguments() -> Namespace:
    """The command line."""
    parser = device.parser_of(__doc__, repeats=3)
    parser.add_argument("--side", choices=SIDES, help="one side by itself, in this process")
    parser.add_argument("--samples", type=report.positive, default=256)
    parser.add_argument("--prompt-tokens", type=report.positive, default=128)
    parser.add_argument("--mean-tokens", type=report.positive, default=200, help="of the heavy tail before its cut")
    parser.add_argument("--max-tokens", type=report.positive, default=1024)
    parser.add_argument("--cache-gib", type=report.positive, default=16, help="of every side's KV cache")
    options = device.parse(parser)
    if options.tiny:
        options.samples, options.repeats = 16, 1
        options.prompt_tokens, options.mean_tokens, options.max_tokens = 5, 4, 12
    return options


def main() -> None:
    """The sides, then the lines."""
    options = arguments()
    if options.side is not None:
        measure(options)
        return
    if importlib.util.find_spec("vllm") is None:
        left_out = {"left_out": "vllm is not installed"}
        device.print_line(options, "gpu_decode", ours=None, peer=None, ratio=None, unit="", details=left_out)
        return
    results = {side: run_side(side) for side in SIDES}
    for work in results["plain"]:
        for side, (bar, aim) in BARS.items():
            ours, peer = median(results[side][work]["rates"]), median(results["plain"][work]["rates"])
            details = {name: sides[work] for name, sides in results.items()}
            details |= {"bar": bar, "aim": aim, "bar_met": ours / peer >= bar}
            device.print_line(
                options,
                f"gpu_decode {work} {side}",
                ours=ours,
                peer=peer,
                ratio=ours / peer,
                unit="completion tokens/s",
                details=details,
            )


def run_side(side: str) -> dict[str, Any]:
    """A side in a process of its own, with these arguments. Ends the script with its output if it fails."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    report.progress(f"{side} ...")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"heavy-tail"')]
    if done.returncode or not lines:
        raise SystemExit(f"{side} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    results: dict[str, Any] = json.loads(lines[-1])
    return results


def measure(given: Namespace) -> None:
    """All works on one side; one line of JSON with its rates."""
    lengths = lengths_of(given)
    rollout = {"plain": plain_side, "vllm": vllm_side, "inplace": inplace_side}[given.side](given)
    results: dict[str, dict[str, Any]] = {}
    for work, tokens in lengths.items():
        rates = []
        for repeat in range(given.repeats + 1):
            seconds, made = device.seconds_of(
                lambda tokens=tokens, repeat=repeat: rollout(prompts_of(given, repeat), tokens, repeat), given.device
            )
            if made != sum(tokens):
                raise SystemExit(f"{given.side} made {made} tokens of {sum(tokens)}")
            rates.append(made / seconds)
        results[work] = {
            "rates": rates[1:],
            "first_rate": rates[0],
            "tokens": sum(tokens),
        }  # the first compiles, captures
    print(json.dumps(results), flush=True)


def lengths_of(given: Namespace) -> dict[str, list[int]]:
    """Tokens of every completion, by work."""
    generator = torch.Generator().manual_seed(given.seed)
    tail = torch.empty(given.samples).exponential_(1 / given.mean_tokens, generator=generator)
    return {
        "heavy-tail": (1 + tail).long().clamp_(max=given.max_tokens).tolist(),
        "equal": [min(2 * given.mean_tokens, given.max_tokens)] * given.samples,
    }


def prompts_of(given: Namespace, seed: int) -> list[list[int]]:
    """Token ids of one prompt per group; different for every rollout, because a cache would remember them."""
    generator = torch.Generator().manual_seed(1000 + seed)
    size = (given.samples // GROUP, given.prompt_tokens)
    return torch.randint(2, shape_of(given).vocab_size, size, generator=generator).tolist()


def shape_of(given: Namespace) -> device.Shape:
    """Of the model."""
    return device.TINY_FOR_VLLM if given.tiny else device.SHAPES["0.5B"]


def max_length(given: Namespace) -> int:
    """Longest prompt and completion."""
    return given.prompt_tokens + given.max_tokens


def model_for(given: Namespace) -> Any:
    """The same weights on every side."""
    return device.plain_model(given, shape_of(given), max_length(given), device.DTYPES[given.dtype])


def cache_bytes(given: Namespace) -> int:
    """Of every side's KV cache."""
    return 64 << 20 if given.tiny else given.cache_gib << 30


def plain_side(given: Namespace) -> Rollout:
    """vLLM by itself, as its users call it."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model_for(given).save_pretrained(folder)
        engine = LLM(
            model=folder,
            dtype=given.dtype,
            seed=given.seed,
            max_model_len=max_length(given),
            max_num_seqs=given.samples,
            kv_cache_memory_bytes=cache_bytes(given),
            skip_tokenizer_init=True,
            enforce_eager=given.tiny,
        )

    def rollout(prompts: list[list[int]], tokens: list[int], seed: int) -> int:
        params = [SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False) for count in tokens]
        asked = [{"prompt_token_ids": prompts[index // GROUP]} for index in range(len(tokens))]
        outputs = engine.generate(asked, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return rollout


def vllm_side(given: Namespace) -> Rollout:
    """vLLM in this process, weights from a trainer's module."""
    from hybrid_rl.config.engine_keys import VLLMArgs
    from hybrid_rl.config.schema import VLLMRolloutConfig
    from hybrid_rl.vllm.library import VLLMEngine

    module = model_for(given)
    settings = VLLMRolloutConfig(
        max_num_seqs=given.samples,
        kv_cache_memory_bytes=cache_bytes(given),
        engine_args=VLLMArgs(enforce_eager=True if given.tiny else None),
    )
    engine = VLLMEngine(
        module,
        settings,
        dtype=device.DTYPES[given.dtype],
        device=torch.device(given.device),
        max_length=max_length(given),
    )
    return ours(engine, module)


def inplace_side(given: Namespace) -> Rollout:
    """The embedded engine."""
    from hybrid_rl.config.schema import InPlaceRolloutConfig
    from hybrid_rl.engines.inplace.engine import InPlaceEngine
    from hybrid_rl.models import CausalLM

    module = model_for(given)
    settings = InPlaceRolloutConfig(max_num_seqs=given.samples, kv_cache_memory_bytes=cache_bytes(given))
    return ours(InPlaceEngine(CausalLM(module), settings, max_length=max_length(given)), module)


def ours(engine: Any, module: Any) -> Rollout:
    """A rollout of an engine of ours, from prompts, lengths and a seed to the number of tokens."""
    from hybrid_rl.engines.base import KV_CACHE, WEIGHTS, RolloutRequest, SamplingParams
    from hybrid_rl.engines.engine_client import EngineClient
    from hybrid_rl.resharding.handoff.tensor import TensorSource

    engine.wake({WEIGHTS})
    engine.update_weights(TensorSource.of(module), 1)
    engine.wake({KV_CACHE})

    def rollout(prompts: list[list[int]], tokens: list[int], seed: int) -> int:
        requests = [
            RolloutRequest(
                id=index,
                prompt_ids=tuple(prompts[index // GROUP]),
                params=SamplingParams(count, seed=1_000_003 * seed + index),
                group=index // GROUP,
            )
            for index, count in enumerate(tokens)
        ]
        return sum(len(sample.completion_ids) for sample in EngineClient(engine).generate(requests, 1))

    return rollout


if __name__ == "__main__":
    main()
