"""What adapters (LoRA) save and cost: handoffs into vLLM, memory of a training step, decoding in place.

A random Qwen2 of 0.5B's shape, adapters of rank 16 on all linear layers but the head. One line of JSON for every
measurement, and a short table at the end.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, peers, report  # noqa: E402
from benchmarks.side import Job  # noqa: E402
from benchmarks.workload import MAX_POSITIONS, Work, save_model  # noqa: E402
from hybrid_rl.config.schema import InPlaceRolloutConfig  # noqa: E402
from hybrid_rl.engines.base import TAGS, RolloutRequest, SamplingParams  # noqa: E402
from hybrid_rl.engines.engine_client import EngineClient  # noqa: E402
from hybrid_rl.engines.inplace.engine import InPlaceEngine  # noqa: E402
from hybrid_rl.models import CausalLM  # noqa: E402
from hybrid_rl.models.lora.factors import low_rank_changes  # noqa: E402
from hybrid_rl.models.lora.inject import init_adapters, inject  # noqa: E402
from hybrid_rl.models.lora.peft_config import peft_config_of  # noqa: E402
from hybrid_rl.resharding.handoff.tensor import TensorSource  # noqa: E402
from hybrid_rl.weights.plain import plain  # noqa: E402

LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
VLLM = {
    "engine": "vllm",
    "engine_args.enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "max_num_seqs": 8,
    "handoff.verify_steps": 1,
}
BETA = 0.05  # so that full fine-tuning has a reference
SPREAD = 0.02  # of the adapters' B, which start at zero
PARTS = ("handoff", "memory", "decode")
# Completions are short where only memory counts, or only the handoff: steps of 0.5B take long on a CPU.
MEMORY_WORK = Work("0.5B", mean_length=None, max_completion_length=16, prompts_per_step=2, num_generations=4)
HANDOFF_WORK = Work("0.5B", mean_length=None, max_completion_length=2, prompts_per_step=1, num_generations=2)


@dataclass(frozen=True)
class Decoding:
    """A shape to decode with, and how: sequences at a time, tokens of each, rounds of each side."""

    shape: device.Shape
    dtype: str
    batches: tuple[int, ...]
    num_tokens: int


DECODINGS = {
    "0.5B": Decoding(device.SHAPES["0.5B"], "bfloat16", (1, 8, 64), 12),
    "0.5B fp32": Decoding(device.SHAPES["0.5B"], "float32", (8,), 12),
    "128x4": Decoding(device.Shape(128, 512, 4, 4, 2, 18), "float32", (1, 8, 64), 64),
}


def main() -> None:
    """Measure the parts one after the other, each in processes of its own."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=report.positive, default=3, help="of each handoff, after one; for memory 2")
    parser.add_argument("--rounds", type=report.positive, default=5, help="of decoding, each side, after one")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: to see that it runs")
    parser.add_argument("--trl-python", type=Path, help="interpreter with TRL and peft; default: one made here")
    arguments = parser.parse_args()
    lines: list[str] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as folder:
            if "handoff" in arguments.parts:
                lines += measure_handoff(arguments, threads, Path(folder))
            if "memory" in arguments.parts:
                lines += measure_memory(arguments, threads, Path(folder))
        if "decode" in arguments.parts:
            lines += measure_decode(arguments, threads)
    report.progress("\n" + "\n".join(lines))


# ----------------------------------------------------------------------------------------------- training steps


def shape_of(given: Namespace) -> device.Shape:
    """The model of handoffs and training steps."""
    return device.TINY_FOR_VLLM if given.tiny else device.SHAPES["0.5B"]


def random_model(shape: device.Shape, dtype: str, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 whose completions do not end by themselves: EOS is one of many tokens that are all alike, or nearly."""
    return device.plain_model(Namespace(device="cpu", seed=seed), shape, MAX_POSITIONS, getattr(torch, dtype))


def settings_of(given: Namespace, threads: int) -> dict[str, Any]:
    """The arguments and the shape of the model."""
    return report.settings(given, threads=threads, shape=vars(shape_of(given)))


def saved_model(given: Namespace, folder: Path, dtype: str) -> Path:
    """The folder of the model, written once."""
    place = folder / dtype
    if not place.exists():
        report.progress(f"making the model in {dtype}")
        save_model(random_model(shape_of(given), dtype, given.seed), place)
    return place


def job_of(given: Namespace, threads: int, folder: Path, work: Work, dtype: str) -> Job:
    """What all variants have in common."""
    return Job(
        work=work,
        folder=str(saved_model(given, folder, dtype)),
        output=str(folder / "output"),
        num_steps=1 + given.steps,
        threads=threads,
        seed=given.seed,
        learning_rate=1e-6,
        dtype=dtype,
    )


class Variant:
    """The steps of one side, in a process of its own. error: what went wrong, None if nothing did."""

    def __init__(self, name: str, start: Callable[[Job], peers.Side], job: Job) -> None:
        self.name, self.job = name, job
        self.ready: dict[str, Any] = {"versions": {}}
        self.steps: list[dict[str, Any]] = []
        self.error: str | None = None
        try:
            with start(job) as side:
                side.wait_ready()
                self.ready = side.ready
                for number in range(job.num_steps):
                    self.steps.append(side.step())
                    seconds, peak = self.steps[-1]["wall_seconds"], self.steps[-1]["peak_rss_bytes"]
                    said = f"step {number + 1} of {job.num_steps}: {seconds:.2f} s, peak {peak / 1e9:.2f} GB"
                    report.progress(f"{name}, {said}")
        except peers.SideFailed as error:
            report.progress(str(error))
            self.error = str(error).strip().splitlines()[-1]

    @property
    def peak_bytes(self) -> int | None:
        """The most memory beside what the imports take; None if it failed."""
        return None if self.error else self.steps[-1]["peak_rss_bytes"] - self.ready["imports_rss_bytes"]

    def counted(self, key: str) -> list[float]:
        """A number of every step but the first."""
        return [step[key] for step in self.steps[1:]]

    def handoff(self, key: str) -> list[float]:
        """A number of every handoff but the first that has it."""
        return [step["handoff"][key] for step in self.steps[1:] if key in step["handoff"]]

    @property
    def summary(self) -> dict[str, Any]:
        """What a line says of it."""
        if self.error:
            return {"error": self.error}
        return {
            "peak_bytes": self.peak_bytes,
            "peak_rss_bytes": self.steps[-1]["peak_rss_bytes"],
            "imports_rss_bytes": self.ready["imports_rss_bytes"],
            **{key: report.spread(self.counted(key)) for key in ("wall_seconds", "update_seconds")},
            "num_tokens": self.steps[-1]["num_tokens"],
        }


def print_pair(
    name: str, ours: float | None, peer: float | None, unit: str, variant: Variant, given: Namespace, details: Any
) -> None:
    """A line in which less is better."""
    job = variant.job
    kept = {"work": vars(job.work), "dtype": job.dtype, "beta": job.beta, "lora": job.lora, "keys": job.keys}
    report.print_line(
        f"lora {name}",
        ours=ours,
        peer=peer,
        ratio=peer / ours if ours and peer else None,
        unit=unit,
        hardware=report.hardware(job.threads, variant.ready["versions"]),
        settings={**settings_of(given, job.threads), **kept},
        details=details,
    )


def measure_handoff(given: Namespace, threads: int, folder: Path) -> Iterator[str]:
    """Seconds and bytes of a handoff into vLLM on one rank: of all weights, of merged ones, of adapters alone."""
    if importlib.util.find_spec("vllm") is None:
        yield "handoff: needs vLLM (make vllm)"
        return
    base = job_of(given, threads, folder, HANDOFF_WORK, "float32" if given.tiny else "bfloat16")
    jobs = {
        "full": replace(base, keys=VLLM),
        "merged": replace(base, lora=LORA, keys={**VLLM, "handoff.lora": "merged"}),
        "adapter": replace(base, lora=LORA, keys={**VLLM, "handoff.lora": "adapter"}),
    }
    yield f"{'handoff into vLLM':20}{'bytes':>16}{'seconds':>10}{'verified':>10}"
    full: float | None = None
    for name, job in jobs.items():
        variant = Variant(f"handoff {name}", peers.ours, job)
        seconds = verified = num_bytes = None
        if not variant.error:
            seconds = median(variant.handoff("timing/handoff"))
            verified = median(variant.handoff("timing/verify") or [float("nan")])
            num_bytes = variant.handoff("handoff/bytes")[-1]
        full = seconds if name == "full" else full
        details = {
            "handoff_bytes": num_bytes,
            "verify_seconds": verified,
            "seconds": report.spread(variant.handoff("timing/handoff")) if seconds else None,
            "probe_gap": max(variant.handoff("handoff/probe_gap"), default=None),
            **variant.summary,
        }
        print_pair(variant.name, seconds, full, "seconds", variant, given, details)
        if seconds is None:
            yield f"{name:20}{'failed':>16}"
        else:
            yield f"{name:20}{int(num_bytes or 0):>16,}{seconds:>10.3f}{verified:>10.3f}"


def measure_memory(given: Namespace, threads: int, folder: Path) -> Iterator[str]:
    """The most memory of a training step with a reference, in place: all weights or adapters, ours and TRL's."""
    base = job_of(given, threads, folder, MEMORY_WORK, "float32")
    base = replace(base, beta=BETA, num_steps=min(base.num_steps, 3))  # memory is at its most in the second
    python = peers.trl_python(given.trl_python)
    yield f"{'memory of a step':20}{'peak GB':>16}{'seconds':>10}{'update':>10}"
    variants: dict[str, Variant] = {}
    for library, start in (("ours", peers.ours), ("trl", lambda job: peers.trl(job, python))):
        for kind, lora in (("full", None), ("lora", LORA)):
            name = f"{library} {kind}"
            variants[name] = variant = Variant(f"memory {name}", start, replace(base, lora=lora))
            if variant.peak_bytes is None:
                yield f"{name:20}{'failed':>16}"
                continue
            wall, update = (median(variant.counted(f"{key}_seconds")) for key in ("wall", "update"))
            yield f"{name:20}{variant.peak_bytes / 1e9:>16.2f}{wall:>10.2f}{update:>10.2f}"
    pairs = {
        "memory lora against full": ("ours lora", "ours full"),
        "memory lora against trl": ("ours lora", "trl lora"),
        "memory full against trl": ("ours full", "trl full"),
    }
    for name, sides in pairs.items():
        ours, peer = (variants[side] for side in sides)
        details = {side: variants[side].summary for side in sides}
        print_pair(name, ours.peak_bytes, peer.peak_bytes, "bytes above imports", ours, given, details)


# ----------------------------------------------------------------------------------------------- decoding in place


def measure_decode(given: Namespace, threads: int) -> Iterator[str]:
    """Tokens per second of the in-place engine through the adapters, against merged weights; rounds take turns."""
    yield f"{'decode, tokens/s':20}{'batch':>8}{'adapter':>10}{'merged':>10}{'base':>10}{'ratio':>8}{'merging s':>11}"
    for name, decoding in DECODINGS.items():
        if given.tiny and name != "128x4":
            continue
        report.progress(f"decode {name}: making the models")
        adapted, merged, seconds, num_bytes = decoders(decoding, given.seed)
        for batch in decoding.batches:
            sides = {"adapter": adapted, "merged": merged}
            with ExitStack() as stack:
                speeds = rates(sides, batch, decoding.num_tokens, given.rounds)
                stack.enter_context(plain(adapted, trained=False))
                speeds |= rates({"base": adapted}, batch, decoding.num_tokens, max(1, given.rounds // 2))
            middle = {side: median(values) for side, values in speeds.items()}
            pairs = [a / b for a, b in zip(speeds["adapter"], speeds["merged"], strict=True)]
            report.print_line(
                f"lora decode {name} batch {batch}",
                ours=middle["adapter"],
                peer=middle["merged"],
                ratio=middle["adapter"] / middle["merged"],
                unit="tokens per second",
                hardware=report.hardware(threads, {}),
                settings=report.settings(given, threads=threads, shape=vars(decoding.shape), dtype=decoding.dtype),
                details={
                    **{side: report.spread(values) for side, values in speeds.items()},
                    "ratio_of_pairs": report.spread(pairs),
                    "merging_seconds": seconds,
                    "twin_bytes": num_bytes,
                },
            )
            yield (
                f"{name:20}{batch:>8}{middle['adapter']:>10.1f}{middle['merged']:>10.1f}{middle['base']:>10.1f}"
                f"{median(pairs):>8.2f}{seconds:>11.2f}"
            )
        del adapted, merged
        gc.collect()


def decoders(decoding: Decoding, seed: int) -> tuple[Qwen2ForCausalLM, Qwen2ForCausalLM, float, int]:
    """A model with adapters that do something, one with the same weights merged, the seconds that merging took by
    matrix products, and the bytes of what was merged."""
    dtype = getattr(torch, decoding.dtype)
    adapted = random_model(decoding.shape, decoding.dtype, seed)
    merged = copy.deepcopy(adapted)
    inject(adapted, peft_config_of(LORA))
    init_adapters(adapted, seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, SPREAD)
    changes = low_rank_changes(adapted, dtype)
    start, num_bytes = time.perf_counter(), 0
    with torch.no_grad():
        for name, change in changes.items():
            weight = merged.get_parameter(name)
            weight.copy_(torch.addmm(weight.float(), change.b, change.a, alpha=change.scale))
            num_bytes += weight.nbytes
    return adapted.eval(), merged.eval(), time.perf_counter() - start, num_bytes


def rates(models: dict[str, nn.Module], batch: int, num_tokens: int, num_rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each model in every round but the first, in turns."""
    engines = {}
    for name, model in models.items():
        packed = CausalLM(model)  # type: ignore[arg-type]
        engines[name] = InPlaceEngine(packed, InPlaceRolloutConfig(max_num_seqs=batch), max_length=8 + num_tokens)
        engines[name].wake(TAGS)
    speeds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(1 + num_rounds):
        for name, engine in engines.items():
            engine.update_weights(TensorSource.of(models[name]), number)
            start = time.perf_counter()
            count = sum(len(sample.completion_ids) for sample in generated(engine, batch, num_tokens, number))
            if number:
                speeds[name].append(count / (time.perf_counter() - start))
    for engine in engines.values():
        engine.close()
    return speeds


def generated(engine: InPlaceEngine, batch: int, num_tokens: int, number: int) -> Sequence[Any]:
    """One rollout of completions that do not end by themselves; all prompts are different."""
    requests = [
        RolloutRequest(
            id=place,
            prompt_ids=(3, 3 + place % 10, 3 + place // 10 % 10, 3 + number % 10),
            params=SamplingParams(num_tokens, seed=number * batch + place),
            group=place,
        )
        for place in range(batch)
    ]
    return EngineClient(engine).generate(requests, number)


if __name__ == "__main__":
    peers.run_script(main)
