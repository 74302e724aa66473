"""The plan of memory against training steps on a GPU: the most that the device held in every phase, every resident.

Two steps of GRPO with completions of full length and full micro-batches, as a plan assumes them. One line of JSON:
`ours` is the largest deviation of a phase's peak in percent, the bar is 5. The details have every phase and resident
with what was predicted and measured, and what the plan chose.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from benchmarks.workload import CHARACTERS, build_tokenizer, spread  # noqa: E402
from hybrid_rl.memory.comparison import PEAK, Deviation  # noqa: E402

BAR = 5.0


def main() -> None:
    """One line."""
    parser = device.parser_of(__doc__, repeats=2)
    parser.add_argument("--shape", choices=tuple(device.SHAPES), default="0.5B")
    parser.add_argument("--engine", choices=("inplace", "vllm"), default="inplace")
    parser.add_argument("--prompts", type=report.positive, default=16)
    parser.add_argument("--num-generations", type=report.positive, default=8)
    parser.add_argument("--completion-tokens", type=report.positive, default=512)
    arguments = device.parse(parser)
    if arguments.tiny:
        arguments.repeats, arguments.prompts, arguments.num_generations, arguments.completion_tokens = 1, 2, 2, 8
    name = f"gpu_memory_plan {arguments.shape} {arguments.engine}"
    if arguments.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        left_out = {"left_out": "vllm is not installed"}
        device.print_line(arguments, name, ours=None, peer=None, ratio=None, unit="percent", details=left_out)
        return
    deviations, details = train(arguments)
    for deviation in deviations:
        report.progress(
            f"{deviation.phase:18}{deviation.what:20}"
            f"{deviation.predicted:>16,}{deviation.measured:>16,}{deviation.share:>8.1%}"
        )
    peaks = [100 * deviation.share for deviation in deviations if deviation.what == PEAK]
    details["bar"], details["bar_met"] = BAR, bool(peaks) and max(peaks) <= BAR
    details["predictions"] = [asdict(deviation) for deviation in deviations]
    ours = max(peaks) if peaks else None
    device.print_line(arguments, name, ours=ours, peer=None, ratio=None, unit="percent", details=details)


def train(given: Namespace) -> tuple[list[Deviation], dict[str, Any]]:
    """The comparisons of the last step, and what the plan chose."""
    from hybrid_rl import Trainer

    prompt = CHARACTERS.strip()[:16]
    max_positions = len(prompt) + given.completion_tokens
    shape = device.TINY_FOR_VLLM if given.tiny else device.SHAPES[given.shape]
    model = device.plain_model(given, shape, max_positions, device.DTYPES[given.dtype])
    keys: dict[str, Any] = {"engine": "vllm"} if given.engine == "vllm" else {}
    if given.tiny:
        keys |= {"device_memory": "1GB"}  # a CPU has no plan of its own accord
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(
            model,
            spread,
            [{"prompt": prompt[index % 16 :] + prompt[: index % 16]} for index in range(given.prompts)],
            tokenizer=build_tokenizer(),
            max_steps=given.repeats,
            num_train_epochs=given.repeats,
            prompts_per_step=given.prompts,
            num_generations=given.num_generations,
            max_completion_length=given.completion_tokens,
            old_logprobs="recompute",
            output_dir=folder,
            **keys,
        ) as trainer,
    ):
        for _ in range(given.repeats):
            trainer.step()
        config = trainer.config
        chosen = {
            "offload": config.memory.offload,
            "on_host": config.memory.on_host,
            "tokens_per_micro_batch": config.optimizer.tokens_per_micro_batch,
        }
        return list(trainer.policy._backend._worker._comparison.latest.values()), {"chosen": chosen}


if __name__ == "__main__":
    main()
