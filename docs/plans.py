"""Writes the plans of docs/plans: `python docs/plans.py [NAME ...]`. Nothing but config.json of each model is read."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from hybrid_rl.extras.plan.request import Machine
from hybrid_rl.extras.plan.run_plan import RunPlan
from hybrid_rl.extras.plan.run_planning import plan_words

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "plans"
MODELS, LAYOUTS = "docs/plans/models", "benchmarks/layouts"
LENGTHS = ("prompts_per_step=128", "max_prompt_length=1024", "max_completion_length=4096")


@dataclass(frozen=True)
class Case:
    """A plan that is kept. name: of its page; words: of the command besides the model; about: what it shows."""

    name: str
    model: str
    words: tuple[str, ...]
    num_gpus: int
    about: str
    host_memory: str = "1TB"

    @property
    def machine(self) -> Machine:
        """GPUs of the case."""
        return Machine(self.num_gpus, "80GB", "H100", self.host_memory)

    @property
    def command(self) -> str:
        """The command that prints the same."""
        machine = f"--gpus {self.num_gpus} --gpu-memory 80GB --gpu H100 --host-memory {self.host_memory}"
        words = ("grpo", f"model.path={MODELS}/{self.model}", *self.words, *LENGTHS)
        return f"hybrid-rl plan {shlex.join(words)} {machine} --layouts {LAYOUTS}"

    def plan(self) -> RunPlan:
        """Plan the case."""
        words = ["grpo", f"model.path={ROOT / MODELS / self.model}", *self.words, *LENGTHS]
        return plan_words(words, self.machine, layouts=ROOT / LAYOUTS)


def vllm(size: int = 1) -> tuple[str, ...]:
    """Keys of vLLM, with so many ranks to a replica."""
    return ("rollout.engine=vllm", *([f"tensor_parallel_size={size}"] if size > 1 else []))


CHECKPOINTED, OFFLOADED = "gradient_checkpointing=true", "on_host=[activations]"
CASES = (
    Case("qwen2.5-0.5b", "qwen2.5-0.5b", (), 1, "one GPU, the embedded engine: nothing is moved"),
    Case("qwen2.5-7b", "qwen2.5-7b", vllm(), 8, "a node, an engine of vLLM on every GPU"),
    Case("qwen2.5-7b-one-gpu", "qwen2.5-7b", (*vllm(), CHECKPOINTED), 1, "full fine-tuning on one GPU of 80 GB"),
    Case("qwen2.5-32b", "qwen2.5-32b", (*vllm(4), CHECKPOINTED, OFFLOADED), 8, "a node, engines on four GPUs each"),
    Case("qwen2.5-72b", "qwen2.5-72b", (*vllm(8), CHECKPOINTED), 8, "too large for a node as it is"),
    Case(
        "qwen2.5-72b-offloaded",
        "qwen2.5-72b",
        (*vllm(8), CHECKPOINTED, "on_host=[shards]"),
        8,
        "a node with shards, gradients and optimizer in host memory",
        "2TB",
    ),
    Case("qwen2.5-72b-64-gpus", "qwen2.5-72b", (*vllm(8), CHECKPOINTED), 64, "eight nodes, an engine on each"),
    Case("qwen3-30b-a3b", "qwen3-30b-a3b", (*vllm(4), CHECKPOINTED), 8, "a mixture of experts on a node"),
)


def page(case: Case, plan: RunPlan) -> str:
    """The page of a case."""
    return f"# {case.model}: {case.about}\n\n    {case.command}\n\n```text\n{plan.text()}\n```\n"


def index(verdicts: dict[str, str]) -> str:
    """The page that lists all others. verdicts: by name of the case."""
    rows = [f"| [{case.name}]({case.name}.md) | {case.about} | {verdicts[case.name]} |" for case in CASES]
    return "\n".join(
        (
            "# Plans",
            "",
            "What `hybrid-rl plan` says of GRPO on models of several sizes, on H100s of 80 GB: 128 prompts a step with",
            "8 completions each, prompts of up to 1,024 tokens, completions of up to 4,096. Models are known by their",
            "published config.json (`models/`), vLLM's loader by its traces (`benchmarks/layouts`). Written by",
            "`python docs/plans.py`. Times are estimates; no part of them was measured.",
            "",
            "| plan | what it shows | in a line |",
            "|---|---|---|",
            *rows,
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *(case.name for case in CASES),
            "```",
            "",
        )
    )


def verdict(page: str) -> str:
    """The line of a page that says whether the run fits."""
    return next(line for line in page.splitlines() if line.startswith(("fits", "does not fit")))


def main(names: list[str]) -> None:
    """Write the pages of these cases, or of all, and the index."""
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        sys.exit(f"no such plans: {', '.join(sorted(unknown))}; they are {', '.join(case.name for case in CASES)}")
    for case in CASES:
        if not names or case.name in names:
            (FOLDER / f"{case.name}.md").write_text(page(case, case.plan()))
    texts = {case.name: (FOLDER / f"{case.name}.md").read_text() for case in CASES}
    (FOLDER / "README.md").write_text(index({name: verdict(text) for name, text in texts.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
