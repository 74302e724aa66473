"""The quickstart's GRPO on the device in bfloat16, compared with the one recorded on a CPU in float32.

One line of JSON: `ours` is the held-out accuracy at the end, `peer` the one recorded on a CPU (recipes/curves) from the
same warm start. In the details both curves and the seconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import device, report  # noqa: E402
from hybrid_rl.extras.quickstart.model import build_model, build_tokenizer  # noqa: E402
from hybrid_rl.extras.quickstart.task import build_task  # noqa: E402
from hybrid_rl.extras.quickstart.warm_start import SupervisedReport  # noqa: E402
from recipes.record_curves import CURVES, Start  # noqa: E402

SEED = 42


def main() -> None:
    """One line."""
    arguments = device.parse(device.parser_of(__doc__, repeats=1))
    torch.set_num_threads(1)
    start = untrained() if arguments.tiny else Start.of(SEED)
    report.progress(f"warm start: {start.warm.accuracy:.1%}")
    start.model.to(arguments.device, device.DTYPES[arguments.dtype])
    changes: dict[str, Any] = {"dtype": arguments.dtype}
    if arguments.tiny:
        changes |= {"max_steps": 2, "warmup_steps": 1, "eval_steps": 2, "prompts_per_step": 4}
    with tempfile.TemporaryDirectory() as folder:
        outcome = start.run("grpo", Path(folder), **changes)
    recorded = json.loads((CURVES / "grpo.json").read_text())["accuracy"][str(SEED)]
    peer = recorded[max(recorded, key=int)]
    details = {
        "curve": dict(outcome.curve),
        "recorded": recorded,
        "seconds": outcome.seconds,
        "warm_start": start.warm.accuracy,
    }
    ours = None if arguments.tiny else outcome.accuracy
    device.print_line(
        arguments,
        "gpu_quickstart accuracy",
        ours=ours,
        peer=peer,
        ratio=None if ours is None else ours / peer,
        unit="share",
        details=details,
    )


def untrained() -> Start:
    """Make a start without its warm start, to see that the script runs, not that anything is learned."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, SEED)
    return Start(SEED, build_task(SEED), tokenizer, model, SupervisedReport(accuracy=0.0, steps=0, seconds=0.0))


if __name__ == "__main__":
    main()
