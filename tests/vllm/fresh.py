"""What vLLM does in a process that has not imported it yet, as a script: prints one JSON object.

changed, handlers: variables of the environment that importing the engine changes, and handlers of vLLM's log then.
with_attention: what of the engine is imported with vLLM's attention alone. kept: whether whoever imported it is still
there after being dropped. compiled: see `compiled`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import weakref
from contextlib import suppress

import torch
import transformers

from hybrid_rl.engines.detached_import import import_apart
from tests.support.libraries.vllm_names import inspect_here

ENGINE = "hybrid_rl.vllm.library"
OF_THE_ENGINE = ("hybrid_rl.vllm.vllm_engine", "vllm.config", "vllm.engine.arg_utils", "vllm.v1.engine.llm_engine")


class Importer:
    """Whoever imports the engine."""

    def __init__(self) -> None:
        assert import_apart(ENGINE) is sys.modules[ENGINE]


def compiled(run_name: str, cache_bytes: int) -> tuple[str, str]:
    """Under which folder and hash vLLM keeps what it compiles for a model, whose cache has so many bytes."""
    from vllm import EngineArgs

    from hybrid_rl.vllm.arguments import engine_arguments
    from hybrid_rl.vllm.build_engine import give_cache, variables
    from hybrid_rl.vllm.config_folder import config_folder
    from hybrid_rl.vllm.process_state import process_kept
    from tests.support.engines.engine_settings import vllm_settings
    from tests.vllm.rigs import tiny

    module, cpu = tiny(), torch.device("cpu")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with process_kept(variables(cpu, run_name)):
            folder = config_folder(module)
            settings = {"dtype": torch.float32, "max_length": 64, "seed": 0}
            settings |= {"trust_remote_code": False, "can_sleep": False}
            arguments = engine_arguments(vllm_settings(enforce_eager=False), folder, device=cpu, **settings)
            config = EngineArgs(**arguments | {"load_format": "dummy"}).create_engine_config()
            give_cache(config.cache_config, cache_bytes)
            return str(folder), config.compute_hash()
    finally:
        torch.distributed.destroy_process_group()


def main() -> None:
    """Import, start, print."""
    transformers.PreTrainedModel  # noqa: B018  # loads what transformers sets
    before = dict(os.environ)
    with suppress(ImportError):  # which a build for CPUs does not have
        import_apart("hybrid_rl.vllm.flash").functions()
    assert "vllm" in sys.modules
    with_attention = [name for name in OF_THE_ENGINE if name in sys.modules]
    importer = weakref.ref(Importer())
    gc.collect()
    kept = importer() is not None
    changed = sorted({name for name, _ in set(os.environ.items()) ^ set(before.items())})
    handlers = len(logging.getLogger("vllm").handlers)
    inspect_here()  # see `inspected_here`
    seen = {"changed": changed, "handlers": handlers, "kept": kept, "with_attention": with_attention}
    print(json.dumps({**seen, "compiled": compiled("one", 2**24)}))


if __name__ == "__main__":
    main()
