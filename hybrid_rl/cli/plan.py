"""`hybrid-rl plan`: memory, phases and handoff of a run before it is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hybrid_rl.cli.key_values import complete_setting, take
from hybrid_rl.cli.tables import show, wide_console


def show_plan(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="A recipe, a YAML file (also config=FILE), a run's folder or a preset, and KEY=VALUE.",
            autocompletion=complete_setting,
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", help="GPUs of all hosts; none for a run with device=cpu.")
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of one GPU, such as 80GB or 80GiB.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="For shares of time, and its memory: H100.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of one host, for what may leave the GPUs, such as 1TB.")
    ] = None,
    gpus_per_host: Annotated[int, typer.Option(metavar="N", help="8 if it is not given.", show_default=False)] = 8,
    layouts: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Traces of vLLM's loader (benchmarks/layouts).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as JSON, in bytes and seconds.")] = False,
) -> None:
    """Memory, phases and handoff of a run, and shares of its step time, before it is started.

    Only the model's config.json is read. No GPU, weights or tokenizer are needed. The words of a `hybrid-rl train`
    command will do; its reward= is not looked at. The exit status is 1 if the run would not fit.

    Examples:
      hybrid-rl plan grpo model.path=Qwen/Qwen2.5-7B rollout.engine=vllm \\
          --gpus 8 --gpu H100
      hybrid-rl plan recipes/ppo.py model.path=models/mine \\
          max_completion_length=4096 --gpus 8 --gpu-memory 80GB
      hybrid-rl plan run.yaml --gpus 64 --gpu-memory 80GB --host-memory 2TB
    """
    from hybrid_rl.extras.plan.request import Machine
    from hybrid_rl.extras.plan.run_planning import plan_words

    _, words = take("reward", run or [])
    plan = plan_words(words, Machine(gpus, gpu_memory, gpu, host_memory, gpus_per_host), layouts=layouts)
    if as_json:
        print(plan.to_json())
    else:
        sys.stdout.flush()
        show(wide_console(), plan)
    if not plan.fits:
        raise typer.Exit(1)
