"""Traces of vLLM's loaders for models of real sizes: benchmarks/layouts/<model>-tp<size>-rank<rank>.npz.

The models are built on meta, by transformers as the trainer and by vLLM as the engine, with stand-ins for the other
ranks; nothing is downloaded and no weight exists. Of a tensor-parallel group the first and the last rank are written.
`load_trace` of hybrid_rl.extras.plan.trace_files reads the files.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from transformers import AutoConfig, DeepseekV3Config, PreTrainedConfig  # noqa: E402

import hybrid_rl.vllm.library  # noqa: E402, F401
from hybrid_rl.extras.plan.trace_files import save_trace  # noqa: E402
from hybrid_rl.vllm.meta import trace_on_meta, views_on_meta  # noqa: E402

FOLDER = Path(__file__).parent / "layouts"
MODELS = Path(__file__).parents[1] / "docs" / "plans" / "models"
SIZES = (1, 2, 4, 8)


def configs() -> dict[str, tuple[PreTrainedConfig, str]]:
    """Config and vLLM's class, by name."""
    models: dict[str, tuple[PreTrainedConfig, str]] = {}
    for folder in sorted(MODELS.iterdir()):
        config = AutoConfig.from_pretrained(folder)
        models[folder.name] = (config, config.architectures[0])
    # transformers' own defaults are DeepSeek-V3's; the last two keys are in its config.json, and vLLM reads them.
    deepseek = DeepseekV3Config(topk_method="noaux_tc", scoring_func="sigmoid")  # type: ignore[call-arg]
    return {**models, "deepseek-v3": (deepseek, "DeepseekV3ForCausalLM")}


def main() -> None:
    """Write the layouts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(configs()), default=list(configs()))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="tensor-parallel sizes")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    for name in arguments.models:
        config, architecture = configs()[name]
        views = views_on_meta(config)
        for size in arguments.sizes:
            if config.num_attention_heads % size:
                print(f"{name}: {config.num_attention_heads} heads cannot be split over {size} ranks", flush=True)
                continue
            for rank in sorted({0, size - 1}):
                started = time.process_time()
                trace = trace_on_meta(config, architecture, views, rank, size, torch.bfloat16)
                path = arguments.folder / f"{name}-tp{size}-rank{rank}.npz"
                save_trace(trace, path)
                seconds = time.process_time() - started
                print(
                    f"{path.name}: {len(trace.copies)} copies, {len(trace.fills)} fills, {len(trace.untraced)} "
                    f"untraced, {path.stat().st_size} bytes, {seconds:.1f} CPU seconds",
                    flush=True,
                )


if __name__ == "__main__":
    main()
