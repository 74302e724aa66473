"""`hybrid-rl data`: what the model will see of a dataset."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hybrid_rl.cli.key_values import Settings, take
from hybrid_rl.cli.running import say_lookup


def show_data(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE|NAME", help="JSONL, parquet, a folder, or reasoning_gym:TASK."),
    ],
    settings: Settings = None,
    rows: Annotated[int, typer.Option(metavar="N", help="Prompts to show.", show_default=True)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON, every refused row included.")] = False,
) -> None:
    """Show what the model will see of a dataset, its lengths, and what would be refused.

    With model.path the prompts are rendered and counted in that model's tokens; without it they are shown as text.
    eval_path=FILE also looks for prompts that are in both. reward= is as in hybrid-rl train. The exit status is 1 if a
    run would refuse the data.

    Examples:
      hybrid-rl data train.parquet model.path=Qwen/Qwen2.5-0.5B-Instruct
      hybrid-rl data gsm8k.jsonl eval_path=test.jsonl reward=math_reward
      hybrid-rl data reasoning_gym:chain_sum max_prompt_length=64
    """
    from hybrid_rl.cli.train import load_reward
    from hybrid_rl.config import load_config
    from hybrid_rl.extras.preview.run_preview import preview

    rewards, arguments = take("reward", settings or [])
    files, arguments = take("config", arguments)
    config, _ = load_config(files[-1] if files else None, arguments=arguments)
    functions = [load_reward(reference) for reference in rewards]
    say_lookup(config.model.path)
    data_preview = preview(file, config=config, reward_funcs=functions or None, num_shown=rows)
    print(json.dumps(data_preview.to_dict(), indent=2) if as_json else data_preview)
    if not data_preview.would_start:
        raise typer.Exit(1)
