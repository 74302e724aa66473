"""Records what the functions of trl.rewards give: `python record_trl_rewards.py` where TRL and math-verify are
installed (see README.md). The cases are chosen for the branches of each function."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

SOLUTIONS = [r"$\frac{1}{3}$", "42", r"\boxed{42}", "$x^2+1$", "no answer", "0.5", r"$5\text{ cm}$", r"$\{1,2\}$"]
ANSWERS = [
    *(r"My answer is \boxed{\frac{1}{3}}", "42", "The answer is $42$.", r"\boxed{41} and $42$", r"$41$ but \boxed{42}"),
    *("$1+x^2$", "", r"$0.50$", r"\boxed{\{2,1\}}", r"\boxed{\frac{}{}", r"\boxed{5\text{ cm}}", r"\(\frac13\)"),
    *(r"<think>a</think> \boxed{42}", r"<think>\boxed{42}", "<think>x<think>y</think>z", "<think>\nr\n</think>\nans"),
    *(" <think>r</think>", "a\n<think>r</think>b", "<think>a</think>b</think> $42$"),
]
LENGTHS = [0, 1, 2, 3, 5, 20, 80, 81, 99, 100, 101, 150]


def cases() -> tuple[list[str], list[str], list[list[int]]]:
    """Texts, solutions and token ids of all samples."""
    pairs = list(itertools.product(SOLUTIONS, ANSWERS))
    chance = random.Random(0)
    ids = [[chance.randrange(3) for _ in range(LENGTHS[place % len(LENGTHS)])] for place in range(len(pairs))]
    return [answer for _, answer in pairs], [solution for solution, _ in pairs], ids


def values(library: Any) -> dict[str, list[float | None]]:
    """What the functions of a library with TRL's names give for all samples."""
    texts, solutions, ids = cases()
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    ends = {"reasoning_delimiters": ["end", "</think>", "$"]}
    return {
        "accuracy": library.accuracy_reward(completions, solutions),
        "reasoning": library.reasoning_accuracy_reward(completions, solutions),
        "other end": library.reasoning_accuracy_reward(completions, solutions, **ends),
        "cosine": library.get_cosine_scaled_reward(100)(completions, solutions, ids),
        "other cosine": library.get_cosine_scaled_reward(80, -3.0, -1.0, 0.1, 2.0)(completions, solutions, ids),
        "think": library.think_format_reward(completions),
        "repetition": library.get_repetition_penalty_reward()(ids),
        "repetition of 1": library.get_repetition_penalty_reward(1, -2.0)(ids),
        "overlong": library.get_soft_overlong_punishment(100, 20)(ids),
        "overlong at once": library.get_soft_overlong_punishment(100, 0)(ids),
    }


if __name__ == "__main__":
    import trl
    from trl import rewards

    found = {"trl": trl.__version__, "values": values(rewards)}
    Path(__file__).with_name("trl_rewards.json").write_text(json.dumps(found) + "\n")
