"""Writes the page of each recipe in this folder: `python recipes/real/plans.py [NAME ...]`. Nothing but config.json of
each model is read, and nothing is measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from hybrid_rl.extras.plan.request import Machine
from hybrid_rl.extras.plan.run_plan import RunPlan
from hybrid_rl.extras.plan.run_planning import plan_words

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
MODELS, LAYOUTS = "docs/plans/models", "benchmarks/layouts"


@dataclass(frozen=True)
class Recipe:
    """A recipe of this folder. name: of its YAML file; model: folder of its config.json; num_gpus: H100s of 80 GB."""

    name: str
    title: str
    model: str
    num_gpus: int

    @property
    def command(self) -> str:
        """The command that prints the plan."""
        return (
            f"hybrid-rl plan recipes/real/{self.name}.yaml model.path={MODELS}/{self.model} --gpus {self.num_gpus} "
            f"--gpu-memory 80GB --gpu H100 --host-memory 1TB --layouts {LAYOUTS}"
        )

    def plan(self) -> RunPlan:
        """Plan the recipe."""
        words = [str(FOLDER / f"{self.name}.yaml"), f"model.path={ROOT / MODELS / self.model}"]
        return plan_words(words, Machine(self.num_gpus, "80GB", "H100", "1TB"), layouts=ROOT / LAYOUTS)


RECIPES = (
    Recipe("gsm8k_grpo_0.5b", "GRPO on GSM8K, Qwen2.5-0.5B-Instruct, one GPU", "qwen2.5-0.5b", 1),
    Recipe("gsm8k_lora_0.5b", "GRPO through adapters on GSM8K, Qwen2.5-0.5B-Instruct, one GPU", "qwen2.5-0.5b", 1),
    Recipe("math_dapo_7b", "DAPO on MATH, Qwen2.5-7B, eight GPUs", "qwen2.5-7b", 8),
    Recipe("gsm8k_ppo_7b", "PPO on GSM8K, Qwen2.5-7B-Instruct, eight GPUs", "qwen2.5-7b", 8),
    Recipe("dapo17k_gspo_30b_a3b", "GSPO on DAPO-Math-17k, Qwen3-30B-A3B, eight GPUs", "qwen3-30b-a3b", 8),
)


def page(recipe: Recipe, plan: RunPlan) -> str:
    """Return the page of a recipe."""
    return "\n".join(
        (
            f"# {recipe.title}",
            "",
            f"Settings: [{recipe.name}.yaml]({recipe.name}.yaml). What was and was not run: [README](README.md).",
            "",
            "```sh",
            f"hybrid-rl train config=recipes/real/{recipe.name}.yaml reward=math_reward",
            "```",
            "",
            "Expected memory and shares of step time, as the planner predicts them. No part of it was measured.",
            "",
            "```sh",
            recipe.command,
            "```",
            "",
            "```text",
            plan.text(),
            "```",
            "",
        )
    )


def main(names: list[str]) -> None:
    """Write the pages of these recipes, or of all."""
    unknown = set(names) - {recipe.name for recipe in RECIPES}
    if unknown:
        sys.exit(f"no such recipes: {', '.join(sorted(unknown))}; they are {', '.join(r.name for r in RECIPES)}")
    for recipe in RECIPES:
        if not names or recipe.name in names:
            (FOLDER / f"{recipe.name}.md").write_text(page(recipe, recipe.plan()))


if __name__ == "__main__":
    main(sys.argv[1:])
