"""Decoded tokens per second from weights of 8 bits, against the same engine in float32 and in bfloat16.

All three engines decode the same prompts in turns, in one process; a ratio is the median of those of the rounds, of
seconds by the clock and of processor time, which other work on the machine disturbs less. The line says as well how
many bytes the rounded weights take, how long a handoff does, and how far the logprobs of random tokens are moved:
KL(full || rounded) per token, of bfloat16 beside it. Prints one line of JSON per batch size and number of threads.
--model: a folder, SmolLM2-135M for instance; left out = random weights of the shape of Qwen2.5-0.5B.
"""

from __future__ import annotations

import copy
import sys
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from hybrid_rl.config.schema import InPlaceRolloutConfig  # noqa: E402
from hybrid_rl.engines.base import TAGS, RolloutRequest, SamplingParams  # noqa: E402
from hybrid_rl.engines.engine_client import EngineClient  # noqa: E402
from hybrid_rl.engines.inplace.engine import InPlaceEngine, RoundedEngine  # noqa: E402
from hybrid_rl.models import CausalLM, PackedRow, load_model  # noqa: E402
from hybrid_rl.models.int8.int8_model import Int8CausalLM  # noqa: E402
from hybrid_rl.models.row import Layout  # noqa: E402
from hybrid_rl.resharding.handoff.tensor import TensorSource  # noqa: E402

SIDES = ("float32", "bfloat16", "int8")


def arguments() -> Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--model", help="folder of a model; left out = random weights of Qwen2.5-0.5B's shape")
    parser.add_argument("--batches", nargs="+", type=report.positive, default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=report.positive, default=32, help="tokens of every completion")
    parser.add_argument("--rounds", type=report.positive, default=7, help="rollouts of each side that count")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    return parser.parse_args()


def main() -> None:
    """Measure all batch sizes with every number of threads."""
    options = arguments()
    module = load_model(options.model, dtype="float32") if options.model else random_model(options.seed)
    models = {"float32": CausalLM(module)}
    if "bfloat16" in options.sides:
        models["bfloat16"] = CausalLM(copy.deepcopy(module).bfloat16())
    models["int8"] = Int8CausalLM(module, models["float32"].attention.name, dtype=torch.float32)
    for threads in options.threads:
        torch.set_num_threads(threads)
        length = 16 + options.tokens
        engines = {name: engine_of(models[name], max(options.batches), length) for name in options.sides}
        start = time.perf_counter()
        for name, engine in engines.items():
            engine.at_rest().wake(TAGS)
            start = time.perf_counter()
            engine.at_rest().update_weights(TensorSource.of(models[name if name != "int8" else "float32"].module), 1)
            seconds = time.perf_counter() - start
        details = {"handoff_seconds": seconds, **sizes(models["int8"], module), **distances(models)}
        for batch in options.batches:
            measure(engines, batch, threads, options, details)


def measure(engines: dict[str, EngineClient], batch: int, threads: int, given: Namespace, details: Any) -> None:
    """Take turns, and print the line."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(given.rounds + 1):
        for name, engine in engines.items():
            params = [SamplingParams(max_tokens=given.tokens, seed=number * batch + place) for place in range(batch)]
            requests = [RolloutRequest(n, tuple(range(n, n + 16)), its) for n, its in enumerate(params)]
            start, cpu_start = time.perf_counter(), time.process_time()
            samples = engine.generate(requests, 1)
            if number:
                cpu_seconds[name].append(time.process_time() - cpu_start)
                count = sum(len(sample.completion_ids) for sample in samples)
                rates[name].append(count / (time.perf_counter() - start))
    ratios = {
        f"ratio_to_{name}": median(ours / theirs for ours, theirs in zip(rates["int8"], its, strict=True))
        for name, its in rates.items()
    }
    ratios |= {
        f"cpu_ratio_to_{name}": median(theirs / ours for ours, theirs in zip(cpu_seconds["int8"], its, strict=True))
        for name, its in cpu_seconds.items()
    }
    report.print_line(
        "int8",
        ours=median(rates["int8"]),
        peer=median(rates["float32"]),
        ratio=ratios["ratio_to_float32"],
        unit="completion tokens per second",
        hardware=report.hardware(threads, {}),
        settings=report.settings(given, batch=batch, model=Path(given.model).name if given.model else None),
        details={**details, **ratios, "rates": {name: report.spread(values) for name, values in rates.items()}},
    )


def engine_of(model: CausalLM, batch: int, length: int) -> EngineClient:
    """Make the engine over a model."""
    kind: Any = RoundedEngine if isinstance(model, Int8CausalLM) else InPlaceEngine
    return EngineClient(kind(model, InPlaceRolloutConfig(max_num_seqs=batch), max_length=length))


def sizes(rounded: Any, module: Any) -> dict[str, int]:
    """Return the bytes of the rounded weights, of the same in float32, of what is not rounded, and of the model."""
    own = sum(module.get_parameter(name).nbytes for name in rounded.rounded_names)
    whole = sum(parameter.nbytes for parameter in module.parameters())
    return {"int8_bytes": rounded.num_rounded_bytes, "same_in_float32": own, "rest": whole - own, "model": whole}


@torch.no_grad()
def distances(models: dict[str, CausalLM]) -> dict[str, float]:
    """Return KL(float32 || side) per token of a text of random tokens, once the weights have been rounded."""
    ids = torch.randint(models["float32"].vocab_size, (128,), generator=torch.Generator().manual_seed(0))
    row = PackedRow(ids, torch.arange(128), ids[1:], torch.arange(127), Layout((128,)))
    logprobs = {name: model.row_distribution(row, 1.0).double() for name, model in models.items()}
    full = logprobs.pop("float32")
    return {f"kl_to_{name}": float((full.exp() * (full - its)).sum(1).mean()) for name, its in logprobs.items()}


def random_model(seed: int) -> Qwen2ForCausalLM:
    """A random model of the shape of Qwen2.5-0.5B."""
    torch.manual_seed(seed)
    sizes: Any = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    return Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, vocab_size=151936, **sizes))


if __name__ == "__main__":
    main()
