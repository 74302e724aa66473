"""Frames of the package between `Trainer.fit` and the lines where the work is done.

python -m tests.unit.frames prints them for a tiny model on one rank; --engine vllm over vLLM.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hybrid_rl
from hybrid_rl import Trainer
from tests.support.tiny import build_model, build_tokenizer, spread, sums

PACKAGE = Path(hybrid_rl.__file__).parent
FIRST = "fit"
# What is done -> the file that does it, and the function, "" for any. Of several calls the deepest one counts.
LOSS = {"the loss": ("algos/policy_losses/clip.py", "loss")}
WORK = {
    "inplace": LOSS
    | {
        "decode attention": ("engines/inplace/paged_attention.py", "attend"),
        "the handoff": ("engines/embedded.py", "update_weights"),
    },
    "vllm": LOSS | {"the handoff's write": ("resharding/execute.py", "_launch")},
}
VLLM = {
    "engine": "vllm",
    "engine_args.enforce_eager": True,
    "rollout.engine_args.block_size": 32,
    "kv_cache_memory_bytes": 2**22,
}


@contextmanager
def recording(found: dict[str, list[str]], engine: str) -> Iterator[None]:
    """Keep, by what is done in the block, the names of the package's frames from `fit` to the deepest call."""
    places = {str(PACKAGE / path): (work, name) for work, (path, name) in WORK[engine].items()}

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        work, name = places.get(frame.f_code.co_filename, ("", ""))
        if event != "call" or not work or name not in ("", frame.f_code.co_name):
            return
        stack = list(_frames(frame))
        if len(stack) > len(found.get(work, [])) and FIRST in {name.split(":")[1] for name in stack}:
            found[work] = stack

    sys.setprofile(on_call)
    try:
        yield
    finally:
        sys.setprofile(None)


def _frames(frame: FrameType | None) -> list[str]:
    """file:function of the package's frames, the outermost first, from `fit` on."""
    stack: list[str] = []
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if path.is_relative_to(PACKAGE) and name[0] != "<":  # a comprehension is no call of its own
            stack.append(f"{path.relative_to(PACKAGE)}:{name}")
            if name == FIRST:
                return stack[::-1]
        frame = frame.f_back
    return []


def frames_of_a_run(make_trainer: Callable[..., Trainer], engine: str = "inplace") -> dict[str, list[str]]:
    """By what is done, the frames that lead to it in a run of one step over an engine."""
    found: dict[str, list[str]] = {}
    trainer = make_trainer(max_steps=1, **(VLLM if engine == "vllm" else {}))
    with recording(found, engine):
        trainer.fit()
    return found


def main() -> None:
    """Print the frames of a run of one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=[*WORK], default="inplace")
    engine = parser.parse_args().engine
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2} if engine == "vllm" else {}
    with tempfile.TemporaryDirectory() as folder:

        def make(**keys: Any) -> Trainer:
            settings = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "output_dir": folder}
            return Trainer(build_model(**shape), spread, sums(12), tokenizer=build_tokenizer(), **settings, **keys)

        for work, stack in frames_of_a_run(make, engine).items():
            print(f"{work}: {len(stack)} frames", *stack, sep="\n  ")


if __name__ == "__main__":
    main()
