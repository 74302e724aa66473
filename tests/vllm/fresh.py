"""What vLLM does in a process that has not imported it yet, as a script: prints one JSON object.

changed, handlers: variables of the environment that importing the engine changes, and handlers of vLLM's log then;
folder, hash: what `start` gives.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch
import transformers


def start(run: str, cache_bytes: int) -> tuple[Path, str]:
    """Folder and hash of the configuration with which vLLM starts, compiled."""
    from vllm import EngineArgs

    from hybrid_rl.config.schema import VLLMConfig
    from hybrid_rl.rollout.vllm.arguments import engine_arguments
    from hybrid_rl.rollout.vllm.build import give_cache, variables
    from hybrid_rl.rollout.vllm.config_folder import config_folder
    from hybrid_rl.rollout.vllm.environment import process_kept
    from tests.vllm.rigs import tiny

    module, device = tiny(), torch.device("cpu")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with process_kept(variables(device, run)):
            folder = config_folder(module)
            settings = {"max_length": 64, "seed": 0, "trust_remote_code": False, "can_sleep": False}
            config = VLLMConfig(enforce_eager=False)
            arguments = engine_arguments(config, folder, device=device, dtype=torch.float32, **settings)
            made = EngineArgs(**arguments | {"load_format": "dummy"}).create_engine_config()
            give_cache(made.cache_config, cache_bytes)
    finally:
        torch.distributed.destroy_process_group()
    return Path(folder), made.compute_hash()


def main() -> None:
    """Import, start, print."""
    transformers.PreTrainedModel  # noqa: B018  # loads what transformers sets
    before = dict(os.environ)
    import hybrid_rl.rollout.vllm.engine  # noqa: F401

    changed = sorted({name for name, _ in set(os.environ.items()) ^ set(before.items())})
    handlers = len(logging.getLogger("vllm").handlers)
    folder, number = start("one", 2**24)
    print(json.dumps({"changed": changed, "handlers": handlers, "folder": folder.name, "hash": number}))


if __name__ == "__main__":
    main()
