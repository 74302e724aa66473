"""Seconds of a training step of GRPO on one GPU by phase: rollout, rewards, update and handoff, at Qwen2.5's shapes.

One line of JSON per work and attention backend; `peer` is the same step with attention=sdpa. MFU counts the arithmetic
of the plain algorithm (every sample with its own prompt, forward and backward), whatever was shared or recomputed, over
the dense bf16 peak of the device, and beside it over a plain product measured in the same run. Bar of the update: 35 %
of the peak, aim 50 %. A model that does not fit whole with its optimizer has fewer layers, of the same shape.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from benchmarks.gpu_limits import product_rate  # noqa: E402
from benchmarks.workload import CHARACTERS, build_tokenizer, spread  # noqa: E402
from hybrid_rl import Trainer  # noqa: E402

TIMINGS = ("timing/rollout", "timing/reward", "timing/logprobs", "timing/update", "timing/handoff")


@dataclass(frozen=True)
class Work:
    """prompt_tokens of every prompt; mean_tokens and max_tokens of its completions."""

    prompt_tokens: int
    mean_tokens: int
    max_tokens: int


WORKS = {
    "heavy-tail": Work(prompt_tokens=128, mean_tokens=200, max_tokens=1024),
    "shared-prompt": Work(prompt_tokens=2048, mean_tokens=64, max_tokens=512),
}
# Weights, fp32 masters, Adam's moments and gradients are 18 bytes a parameter; the rest is activations and cache.
FITTING_LAYERS = {"7B": 8, "3B": 20}
BAR, AIM = 0.35, 0.5
TINY = {"heavy-tail": Work(5, 3, 12), "shared-prompt": Work(40, 3, 8)}


def arguments() -> Namespace:
    """The command line."""
    parser = device.parser_of(__doc__, repeats=3)
    parser.add_argument("--work", choices=("all", *WORKS), default="all")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "auto"], help="backends in turn; sdpa is the peer")
    parser.add_argument("--prompts", type=report.positive, default=16)
    parser.add_argument("--num-generations", type=report.positive, default=8)
    parser.add_argument("--tokens-per-micro-batch", type=report.positive, default=32768)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--shape", choices=tuple(device.SHAPES), default="0.5B")
    parser.add_argument("--layers", type=report.positive, help="default: all, or as many as fit 80 GB")
    options = device.parse(parser)
    if options.tiny:
        options.prompts, options.num_generations, options.repeats = 2, 2, 1
    return options


def main() -> None:
    """Every work with every backend."""
    options = arguments()
    options.layers = options.layers or FITTING_LAYERS.get(options.shape)
    product = product_rate(options)
    for name in WORKS if options.work == "all" else (options.work,):
        work = (TINY if options.tiny else WORKS)[name]
        sdpa: float | None = None
        for attention in options.attention:
            medians = measure(options, work, attention, product)
            sdpa = medians["seconds"] if attention == "sdpa" else sdpa
            device.print_line(
                options,
                f"gpu_step {options.shape} {name} {attention}",
                ours=medians["seconds"],
                peer=sdpa,
                ratio=None if sdpa is None else sdpa / medians["seconds"],
                unit="s/step",
                details=medians | {"bar": BAR, "aim": AIM},
                work=vars(work),
            )


def measure(given: Namespace, work: Work, attention: str, product: float) -> dict[str, Any]:
    """Train some steps; medians over those that count. product: FLOP/s of a plain product."""
    model = device.model_of(
        given,
        max_positions=work.prompt_tokens + work.max_tokens,
        ends=1 / work.mean_tokens,
        shape=device.shape_of(given.shape, layers=given.layers),
    )
    shape = flops_shape(model)
    generator = random.Random(given.seed)
    num_steps = given.repeats + (0 if given.tiny else 2)
    rows = [
        {"prompt": "".join(generator.choices(CHARACTERS.strip(), k=work.prompt_tokens))}
        for _ in range(given.prompts * num_steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            spread,
            rows,
            tokenizer=build_tokenizer(),
            max_steps=num_steps,
            prompts_per_step=given.prompts,
            num_generations=given.num_generations,
            max_completion_length=work.max_tokens,
            tokens_per_micro_batch=given.tokens_per_micro_batch,
            gradient_checkpointing=given.gradient_checkpointing,
            learning_rate=1e-6,
            dtype=given.dtype,
            output_dir=folder,
            attention=attention,
        )
        with trainer:
            steps = [one_step(trainer, given, shape, product) for _ in range(num_steps)][-given.repeats :]
    del trainer, model
    gc.collect()
    if torch.device(given.device).type == "cuda":
        torch.cuda.empty_cache()
    return {key: median(f[key] for f in steps) if steps[0][key] is not None else None for key in steps[0]}


def one_step(trainer: Trainer, given: Namespace, shape: tuple[int, int], product: float) -> dict[str, Any]:
    """Seconds and what was done in them."""
    device.reset_peak(given.device)
    seconds, (batch, metrics) = device.seconds_of(trainer.step, given.device)
    prompts, completions = (batch[name].lengths.tolist() for name in ("prompt_ids", "completion_ids"))
    forward = sum(forward_flops(p + c, shape) for p, c in zip(prompts, completions, strict=True))
    peak = device.peaks(given.device)[0]
    update = metrics["timing/update"]
    measures: dict[str, Any] = {
        "seconds": seconds,
        "completion_tokens_per_second": sum(completions) / seconds,
        "tokens_per_second": (sum(prompts) + sum(completions)) / seconds,
        "mean_completion_tokens": sum(completions) / len(completions),
        "peak_memory_bytes": device.peak_memory_bytes(given.device),
        "update_mfu": None if peak is None else 3 * forward / update / peak,
        "update_of_product": 3 * forward / update / product,
        "step_mfu": None if peak is None else 4 * forward / seconds / peak,
        "mismatch_prob_difference": metrics["mismatch/prob_difference_mean"],
    }
    return measures | {name: metrics[name] for name in TIMINGS}


def flops_shape(model: Any) -> tuple[int, int]:
    """Weights that every token is multiplied with, head included; and width of all heads times layers."""
    config = model.config
    linear = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name)
    head = model.lm_head.weight.numel() if config.tie_word_embeddings else 0
    return linear + head, config.hidden_size * config.num_hidden_layers


def forward_flops(num_tokens: int, shape: tuple[int, int]) -> int:
    """Of one sequence: 2 per weight and token; 4 per head element and pair of tokens, half of the pairs."""
    weights, width = shape
    return 2 * weights * num_tokens + 2 * width * num_tokens * num_tokens


if __name__ == "__main__":
    main()
