"""Completion tokens per second of a rollout: this library's embedded engine against another generator.

`generate` is transformers' model.generate on a left-padded batch, `continuous-batching` its generate_batch; both use
the same module in the same process. `vllm` runs in a process of its own, if it is installed. `no-drafts` is this engine
itself, against rollout.speculation=auto: every round has the same prompts, and weights that have changed a little. The
two take turns, rollout by rollout. Prints one line of JSON per work and number of threads.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import levels, peers, report  # noqa: E402
from benchmarks.side import Job  # noqa: E402
from benchmarks.workload import EOS_ID, PAD_ID, WORKS, Work, continuous_batching, load, rows, save_fitted  # noqa: E402
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

ALL = ("heavy-tail", "heavy-tail-256x8", "equal", "equal-256x8")
PEERS = ("generate", "continuous-batching", "vllm", "no-drafts")
NUDGE = 1e-4  # standard deviation of what every weight changes by between two epochs

Prompts = Sequence[Sequence[int]]
Generator = Callable[[Prompts, int], list[int]]


class Rollout(NamedTuple):
    """One rollout. lengths: tokens of every completion, EOS counted."""

    wall_seconds: float
    cpu_seconds: float
    lengths: list[int]

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens by wall seconds."""
        return sum(self.lengths) / self.wall_seconds


def arguments() -> Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    levels.add_argument(parser)
    parser.add_argument("--work", choices=("all", *WORKS), default="heavy-tail")
    parser.add_argument("--compare", choices=PEERS, default="generate")
    parser.add_argument("--rounds", type=report.positive, default=15, help="rollouts of each side that count")
    parser.add_argument("--warmup", type=report.positive, default=2, help="rollouts before those")
    return parser.parse_args()


def main() -> None:
    """Measure every work with every number of threads."""
    options = arguments()
    levels.enter(options.cpu_level)
    for name in ALL if options.work == "all" else (options.work,):
        for threads in options.threads:
            torch.set_num_threads(threads)
            with tempfile.TemporaryDirectory() as folder:
                measure(WORKS[name], threads, options, Path(folder))


def measure(work: Work, threads: int, given: Namespace, folder: Path) -> None:
    """Run both in turns and print the line."""
    report.progress(f"{work.name}, {threads} threads: fitting the model")
    save_fitted(work, folder / "model", given.seed)
    model, tokenizer = load(folder / "model")
    settings = report.settings(given, work=work.name, threads=threads, shape=vars(work))
    unit = "completion tokens per second"
    if given.compare == "vllm" and importlib.util.find_spec("vllm") is None:
        machine = report.hardware(threads, {})
        notes = {"vllm": "not installed"}
        report.print_line(
            "rollout", ours=None, peer=None, ratio=None, unit=unit, hardware=machine, settings=settings, details=notes
        )
        return
    job = Job(work, str(folder / "model"), str(folder), given.warmup + given.rounds, threads, given.seed, 0.0)
    with peer_of(given.compare, model, job) as peer:
        if given.compare == "no-drafts":
            ours, theirs = take_turns(our_engine(model, work, "auto"), peer, tokenizer, job, given.warmup, nudged=model)
        else:
            ours, theirs = take_turns(our_engine(model, work), peer, tokenizer, job, given.warmup)
    name = "vllm" if given.compare == "vllm" else "transformers"
    clocks = ("wall_seconds",) if given.compare == "vllm" else ("wall_seconds", "cpu_seconds")  # of this process
    details = {
        "hybrid_rl": summary(ours, clocks),
        given.compare: summary(theirs, clocks),
        **compare(ours, theirs, clocks),
    }
    report.print_line(
        "rollout",
        ours=details["hybrid_rl"]["tokens_per_second"]["median"],
        peer=details[given.compare]["tokens_per_second"]["median"],
        ratio=details["rate_ratio"],
        unit=unit,
        hardware=report.hardware(threads, {name: importlib.metadata.version(name)}),
        settings=settings,
        details=details,
    )


def take_turns(
    ours: Generator,
    peer: Generator,
    tokenizer: PreTrainedTokenizerFast,
    job: Job,
    warmup: int,
    nudged: Qwen2ForCausalLM | None = None,
) -> tuple[list[Rollout], list[Rollout]]:
    """The rollouts of both sides that count; every round has new prompts, the same for both. nudged: a model whose
    weights change a little before every round; prompts are those of the first round then."""
    work = job.work
    texts = [row["prompt"] for row in rows(work, work.prompts_per_step * job.num_steps, job.seed + 1)]
    rollouts: tuple[list[Rollout], list[Rollout]] = ([], [])
    for number in range(job.num_steps):
        mine = texts[0 if nudged else number * work.prompts_per_step :][: work.prompts_per_step]
        prompts = [tokenizer.encode(text) for text in mine]
        if nudged is not None:
            nudge(nudged, number)
        sides = [*zip((ours, peer), rollouts, strict=True)]
        for generator, done in sides if number % 2 else reversed(sides):
            done.append(timed(generator, prompts, number))
        rates = [done[-1].tokens_per_second for done in rollouts]
        report.progress(f"round {number + 1} of {job.num_steps}: ours {rates[0]:.0f}, peer {rates[1]:.0f} tokens/s")
    return rollouts[0][warmup:], rollouts[1][warmup:]


def timed(generator: Generator, prompts: Prompts, number: int) -> Rollout:
    """Run one rollout."""
    wall, cpu = time.perf_counter(), time.process_time()
    lengths = generator(prompts, number)
    return Rollout(time.perf_counter() - wall, time.process_time() - cpu, lengths)


@torch.no_grad()
def nudge(model: Qwen2ForCausalLM, seed: int) -> None:
    """Change every weight a little, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(NUDGE * torch.randn(parameter.shape, generator=generator))


def our_engine(model: Qwen2ForCausalLM, work: Work, speculation: Literal["off", "auto"] = "off") -> Generator:
    """The embedded engine. As in training every rollout has a new policy version, so that no prefix outlives one."""
    engine = InPlaceEngine(
        CausalLM(model), InPlaceRolloutConfig(speculation=speculation), max_length=work.longest_tokens
    )
    engine.wake(TAGS)

    def run(prompts: Prompts, number: int) -> list[int]:
        engine.update_weights(TensorSource.of(model), number)
        requests = [
            RolloutRequest(
                id=place,
                prompt_ids=tuple(prompts[place // work.num_generations]),
                params=SamplingParams(
                    work.max_completion_length, stop_token_ids=(EOS_ID,), seed=number * work.num_samples + place
                ),
                group=place // work.num_generations,
            )
            for place in range(work.num_samples)
        ]
        return [len(sample.completion_ids) for sample in EngineClient(engine).generate(requests, number)]

    return run


@contextmanager
def peer_of(name: str, model: Qwen2ForCausalLM, job: Job) -> Iterator[Generator]:
    """The generator that we compare with."""
    if name == "generate":
        yield padded(model, job.work)
    elif name == "no-drafts":
        yield our_engine(model, job.work)
    elif name == "continuous-batching":
        yield continuous(copy.deepcopy(model), job.work)  # it changes the attention of the module for good
    else:
        with peers.Side("vllm", sys.executable, "benchmarks.side_vllm", job) as side:
            side.wait_ready()
            yield lambda prompts, number: side.rollout(prompts)


def generation_config(work: Work) -> GenerationConfig:
    """Sampling from the whole distribution at temperature 1; transformers' own default keeps the best 50 tokens."""
    return GenerationConfig(
        max_new_tokens=work.max_completion_length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def padded(model: Any, work: Work) -> Generator:
    """model.generate on all samples at once, prompts padded on the left."""
    config = generation_config(work)

    def run(prompts: Prompts, number: int) -> list[int]:
        torch.manual_seed(number)
        width = max(map(len, prompts))
        every = [prompt for prompt in prompts for _ in range(work.num_generations)]
        token_ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + list(prompt) for prompt in every])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in every])
        output = model.generate(input_ids=token_ids, attention_mask=mask, generation_config=config)
        return lengths_of(output[:, width:])

    return run


def lengths_of(completions: torch.Tensor) -> list[int]:
    """Tokens up to and including the first EOS, or all, of int64 [N, T]."""
    ended = completions == EOS_ID
    first = ended.int().argmax(1) + 1
    return torch.where(ended.any(1), first, completions.shape[1]).tolist()


def continuous(model: Any, work: Work) -> Generator:
    """transformers' continuous batching."""
    config, sizes = generation_config(work), continuous_batching(work)

    def run(prompts: Prompts, number: int) -> list[int]:
        torch.manual_seed(number)
        every = [list(prompt) for prompt in prompts for _ in range(work.num_generations)]
        answers = model.generate_batch(
            every,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(**sizes),
            progress_bar=False,
        )
        if len(answers) != len(every):
            raise peers.SideFailed(f"generate_batch answered {len(answers)} of {len(every)} requests")
        return [len(sample.generated_tokens) for sample in answers.values()]

    return run


def summary(rollouts: list[Rollout], clocks: tuple[str, ...]) -> dict[str, Any]:
    """What one side did."""
    columns = ("tokens_per_second", *clocks)
    return {
        **{name: report.spread([getattr(rollout, name) for rollout in rollouts]) for name in columns},
        "num_tokens": fmean(sum(rollout.lengths) for rollout in rollouts),
        "longest_tokens": fmean(max(rollout.lengths) for rollout in rollouts),
    }


def compare(ours: list[Rollout], peer: list[Rollout], clocks: tuple[str, ...]) -> dict[str, Any]:
    """Ours by the peer's in tokens per second, the peer's by ours in seconds: above 1, we are better."""
    rates = [[rollout.tokens_per_second for rollout in rollouts] for rollouts in (ours, peer)]
    return {
        "rate_ratio": report.ratio_of_medians(*rates),
        **{
            f"{name}_ratio": report.ratio_of_medians([getattr(r, name) for r in peer], [getattr(r, name) for r in ours])
            for name in clocks
        },
        "ratio_of_pairs": report.spread([a / b for a, b in zip(*rates, strict=True)]),
    }


if __name__ == "__main__":
    peers.run_script(main)
