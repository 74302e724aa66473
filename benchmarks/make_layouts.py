"""Traces of vLLM's loaders for models of real sizes: benchmarks/layouts/<model>-tp<size>-rank<rank>.npz.

The models are built on meta, by transformers as the trainer and by vLLM as the engine, with stand-ins for the other
ranks; nothing is downloaded and no weight exists. Of a tensor-parallel group the first and the last rank are written.
`load_trace` of hybrid_rl.resharding.trace_files reads the files.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from transformers import DeepseekV3Config, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig  # noqa: E402

from hybrid_rl.resharding.trace_files import save_trace  # noqa: E402
from hybrid_rl.vllm.meta import trace_on_meta, views_on_meta  # noqa: E402

FOLDER = Path(__file__).parent / "layouts"
SIZES = (1, 2, 4, 8)


def configs() -> dict[str, tuple[PreTrainedConfig, str]]:
    """Config and vLLM's class, by name."""
    return {
        "qwen2.5-7b": (
            Qwen2Config(
                vocab_size=152064,
                hidden_size=3584,
                intermediate_size=18944,
                num_hidden_layers=28,
                num_attention_heads=28,
                num_key_value_heads=4,
                max_position_embeddings=32768,
            ),
            "Qwen2ForCausalLM",
        ),
        "qwen2.5-72b": (
            Qwen2Config(
                vocab_size=152064,
                hidden_size=8192,
                intermediate_size=29568,
                num_hidden_layers=80,
                num_attention_heads=64,
                num_key_value_heads=8,
                max_position_embeddings=32768,
            ),
            "Qwen2ForCausalLM",
        ),
        "qwen3-30b-a3b": (
            Qwen3MoeConfig(
                vocab_size=151936,
                hidden_size=2048,
                intermediate_size=6144,
                moe_intermediate_size=768,
                num_hidden_layers=48,
                num_attention_heads=32,
                num_key_value_heads=4,
                num_experts=128,
                num_experts_per_tok=8,
                max_position_embeddings=40960,
                head_dim=128,  # type: ignore[call-arg]
            ),
            "Qwen3MoeForCausalLM",
        ),
        # transformers' own defaults are DeepSeek-V3's; the last two keys are in its config.json, and vLLM reads them.
        "deepseek-v3": (
            DeepseekV3Config(topk_method="noaux_tc", scoring_func="sigmoid"),  # type: ignore[call-arg]
            "DeepseekV3ForCausalLM",
        ),
    }


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
