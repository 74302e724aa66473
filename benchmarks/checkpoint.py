"""Seconds that training waits for a checkpoint: in the background, blocking, and as TRL (transformers.Trainer) saves.

One model, trained in fp32 with Adam by all of them: a checkpoint is three times its parameters. Each save of the
background variant has been written before the next is due, so that what is measured is the copy into host memory. The
checkpoints of this library are hashed and on the disk (fsync) when they appear, those of TRL are in the page cache.
Prints one line of JSON; `ratio` is blocking by background.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks import peers  # noqa: E402
from benchmarks.report import hardware, parser_of, positive, print_line, progress, settings, spread  # noqa: E402
from benchmarks.side import Job  # noqa: E402
from benchmarks.workload import Work, build_model, build_tokenizer, load, rows  # noqa: E402
from benchmarks.workload import spread as reward  # noqa: E402

FIRST = 1  # saves before any is counted: memory and caches
LOOK_SECONDS = 0.01
PATIENCE_SECONDS = 600.0


def measure(options: argparse.Namespace, threads: int) -> None:
    """Measure with so many threads, and print the line."""
    torch.set_num_threads(threads)
    work = Work(
        "checkpoint",
        hidden_size=options.hidden,
        num_layers=options.layers,
        mean_length=None,
        max_completion_length=options.tokens,
        prompts_per_step=2,
        num_generations=2,
    )
    with tempfile.TemporaryDirectory(prefix="hybrid-rl-checkpoint-", dir=options.folder) as name:
        root = Path(name)
        model = build_model(work, options.seed)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(root / "model")
        build_tokenizer().save_pretrained(root / "model")
        del model
        results = {
            name: ours(options, work, root, is_async=name == "background") for name in ("blocking", "background")
        }
        versions, trl = ({}, None) if options.compare != "trl" else theirs(options, work, root, threads)
    stalls = {name: its["stall_seconds"] for name, its in results.items()}
    medians = {name: statistics.median(its) for name, its in stalls.items()}
    details: dict[str, Any] = {
        name: {**its, "stall_seconds": spread(its["stall_seconds"])} for name, its in results.items()
    }
    if trl is not None:
        details["trl"] = {**trl, "stall_seconds": spread(trl["stall_seconds"])}
        details["trl_by_background"] = statistics.median(trl["stall_seconds"]) / medians["background"]
    print_line(
        "checkpoint",
        ours=medians["background"],
        peer=medians["blocking"],
        ratio=medians["blocking"] / medians["background"],
        unit="seconds that training waits for a checkpoint",
        hardware=hardware(threads, versions),
        settings=settings(options, threads=threads, parameters=num_parameters),
        details=details,
    )


def ours(options: argparse.Namespace, work: Work, root: Path, *, is_async: bool) -> dict[str, Any]:
    """Train and save after every other step. Returns seconds of stalls and of whole writes, of steps in which a
    checkpoint was written and of others, bytes of a checkpoint, and seconds to begin and to resume."""
    from hybrid_rl import Callback, Trainer

    stalls: list[float] = []
    writes: list[float] = []
    during: list[float] = []
    others: list[float] = []

    class Watch(Callback):
        """Reads what each step reports of the save before it, and waits until that is written."""

        def on_step_end(self, trainer: Any, step: int, batch: Any, metrics: dict[str, float]) -> None:
            if step > 2 and step % 2:
                stalls.append(metrics["timing/checkpoint"])
                during.append(metrics["timing/step"])
                _await(trainer.run_folder / f"checkpoint-{step - 1}")
            elif step > 2:
                others.append(metrics["timing/step"])
                writes.append(metrics.get("timing/checkpoint_write", 0.0))

    def make(**keys: Any) -> tuple[Trainer, float]:
        start = time.perf_counter()
        model, tokenizer = load(root / "model")
        made = Trainer(
            model,
            lambda completion_ids, **_: reward(completion_ids),
            rows(work, 64, options.seed),
            tokenizer=tokenizer,
            prompts_per_step=work.prompts_per_step,
            num_generations=work.num_generations,
            max_completion_length=work.max_completion_length,
            max_steps=10_000,
            learning_rate=1e-6,
            log_level="quiet",
            output_dir=str(root / "runs"),
            save_steps=2,
            save_total_limit=1,
            async_save=is_async,
            **keys,
        )
        return made, time.perf_counter() - start

    trainer, begin_seconds = make(callbacks=[Watch()])
    with trainer:
        trainer.fit(steps=2 * (FIRST + options.saves) + 2)
        folder = trainer.run_folder / f"checkpoint-{trainer.global_step}"
    num_bytes = _bytes_of(folder)
    resumed, resume_seconds = make(resume=str(folder))
    resumed.close()
    shutil.rmtree(root / "runs")
    progress(f"{'background' if is_async else 'blocking'}: {statistics.median(stalls[FIRST:]):.3f} s")
    return {
        "stall_seconds": stalls[FIRST:],
        "write_seconds": statistics.median(writes[FIRST:]) if is_async else None,
        "step_seconds_while_written": statistics.median(during[FIRST:]),
        "step_seconds": statistics.median(others[FIRST:]),
        "bytes": num_bytes,
        "begin_seconds": begin_seconds,
        "resume_seconds": resume_seconds,
    }


def _await(folder: Path) -> None:
    """Wait until a checkpoint is there."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not folder.is_dir():
        if time.monotonic() > end:
            raise TimeoutError(f"{folder} has not appeared after {PATIENCE_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)


def theirs(options: argparse.Namespace, work: Work, root: Path, threads: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Train with TRL and save after every step. Returns its versions, and seconds and bytes as `ours`."""
    job = Job(
        work,
        str(root / "model"),
        str(root / "trl"),
        num_steps=FIRST + options.saves + 1,
        threads=threads,
        seed=options.seed,
        learning_rate=1e-6,
        save_steps=1,
    )
    with peers.trl(job, peers.trl_python(options.trl_python)) as side:
        side.wait_ready()
        steps = [side.step() for _ in range(FIRST + options.saves)]
        folder = max((root / "trl").glob("checkpoint-*"), key=os.path.getmtime)
        num_bytes = _bytes_of(folder)
    stalls = [step["save_seconds"] for step in steps[FIRST:]]
    progress(f"TRL: {statistics.median(stalls):.3f} s")
    return side.ready["versions"], {"stall_seconds": stalls, "bytes": num_bytes}


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Measure what the command line asks for."""
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=positive, default=1024)
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--tokens", type=positive, default=16, help="of a completion")
    parser.add_argument("--saves", type=positive, default=5, help="of each variant that count")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: that of temporary files")
    parser.add_argument("--compare", choices=["none", "trl"], default="none")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL")
    options = parser.parse_args()
    for threads in options.threads:
        measure(options, threads)


if __name__ == "__main__":
    peers.run_script(main)
