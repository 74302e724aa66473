"""What vLLM does in a process that has not imported it yet, as a script: prints one JSON object.

changed, handlers: variables of the environment that importing the engine changes, and handlers of vLLM's log then.
kept: whether whoever imported it is still there after being dropped.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import weakref

import transformers

from hybrid_rl.rollout.apart import import_apart

ENGINE = "hybrid_rl.rollout.vllm.engine"


class Importer:
    """Whoever imports the engine."""

    def __init__(self) -> None:
        assert import_apart(ENGINE) is sys.modules[ENGINE]


def main() -> None:
    """Import, start, print."""
    transformers.PreTrainedModel  # noqa: B018  # loads what transformers sets
    before = dict(os.environ)
    importer = weakref.ref(Importer())
    gc.collect()
    kept = importer() is not None
    changed = sorted({name for name, _ in set(os.environ.items()) ^ set(before.items())})
    handlers = len(logging.getLogger("vllm").handlers)
    print(json.dumps({"changed": changed, "handlers": handlers, "kept": kept}))


if __name__ == "__main__":
    main()
