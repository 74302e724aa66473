"""Seconds of the forward and backward pass of a micro-batch whose prompts begin alike, with and without sharing that.

With --different the completions of a prompt are that many different ones, and the peer is a micro-batch of the same
lengths whose completions all differ. Prints one line of JSON per number of threads. Without --model the weights are
random.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from hybrid_rl.batch import Jagged  # noqa: E402
from hybrid_rl.models import CausalLM, PackedRow, load_model  # noqa: E402

NEVER = 2.0  # the part of a row that no prefix saves


def arguments() -> Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--model", help="folder of a model; left out = random weights of --hidden and --layers")
    parser.add_argument("--hidden", type=report.positive, default=256)
    parser.add_argument("--layers", type=report.positive, default=8)
    parser.add_argument("--prefix", type=report.positive, default=256, help="tokens that all prompts begin with")
    parser.add_argument("--question", type=report.positive, default=32, help="tokens of a prompt after those")
    parser.add_argument("--completion", type=report.positive, default=32, help="longest; lengths are drawn up to it")
    parser.add_argument("--prompts", type=report.positive, default=8)
    parser.add_argument("--generations", type=report.positive, default=8)
    parser.add_argument("--different", type=report.positive, help="different completions of a prompt; left out = all")
    parser.add_argument("--repeats", type=report.positive, default=5)
    return parser.parse_args()


def main() -> None:
    """Measure with every number of threads."""
    options = arguments()
    model = CausalLM(load_model(options.model, dtype="float32") if options.model else random_model(options))
    for threads in options.threads:
        torch.set_num_threads(threads)
        measure(model, options, threads)


def measure(model: CausalLM, given: Namespace, threads: int) -> None:
    """Take turns, and print the line."""
    prompts, repeated, different = samples(given, model.vocab_size)
    alike = given.different is not None
    sides = {"ours": (repeated, None), "peer": (different, None) if alike else (repeated, NEVER)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    num_tokens = {}
    for turn in range(given.repeats + 1):
        for side, (answers, least_saved) in sides.items():
            row = PackedRow.of(prompts, answers, model.device, least_saved)
            num_tokens[side] = row.layout.num_tokens
            start = time.perf_counter()
            model.row_logprobs(row, 1.0)[0].sum().backward()
            if turn:
                seconds[side].append(time.perf_counter() - start)
            model.module.zero_grad()
    report.print_line(
        "prefix",
        ours=float(np.median(seconds["ours"])),
        peer=float(np.median(seconds["peer"])),
        ratio=report.ratio_of_medians(seconds["peer"], seconds["ours"]),
        unit="seconds",
        hardware=report.hardware(threads, {}),
        settings=report.settings(given, model=Path(given.model).name if given.model else None),
        details={
            "num_tokens": num_tokens,
            "seconds": {side: report.spread(values) for side, values in seconds.items()},
        },
    )


def random_model(given: Namespace) -> Qwen2ForCausalLM:
    """A random Qwen2 of this size."""
    torch.manual_seed(given.seed)
    sizes = {"hidden_size": given.hidden, "intermediate_size": 4 * given.hidden, "num_hidden_layers": given.layers}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=1024, num_attention_heads=4, num_key_value_heads=2, **sizes))


def samples(given: Namespace, vocab_size: int) -> tuple[Jagged, Jagged, Jagged]:
    """Random tokens: prompts, the completions of each, of lengths from one to the longest and repeated as asked for,
    and others of the same lengths, none repeated."""
    generator = torch.Generator().manual_seed(given.seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocab_size, (count,), generator=generator).tolist()

    prefix = tokens(given.prefix)
    prompts = [[*prefix, *tokens(given.question)] for _ in range(given.prompts)]
    number = given.different or given.generations
    lengths = torch.randint(1, given.completion + 1, (given.prompts, number), generator=generator).tolist()
    groups = [[tokens(length) for length in own] for own in lengths]
    repeated = [group[place % number] for group in groups for place in range(given.generations)]
    different = [tokens(len(completion)) for completion in repeated]
    rows = [prompt for prompt in prompts for _ in range(given.generations)]
    batches = [Jagged.from_rows(part, torch.int64) for part in (rows, repeated, different)]
    return batches[0], batches[1], batches[2]


if __name__ == "__main__":
    main()
