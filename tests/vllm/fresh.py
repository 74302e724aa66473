"""What vLLM does in a process that has not imported it yet, as a script: prints one JSON object.

changed, handlers: variables of the environment that importing the engine changes, and handlers of vLLM's log then.
"""

from __future__ import annotations

import json
import logging
import os

import transformers


def main() -> None:
    """Import, start, print."""
    transformers.PreTrainedModel  # noqa: B018  # loads what transformers sets
    before = dict(os.environ)
    import hybrid_rl.rollout.vllm.engine  # noqa: F401

    changed = sorted({name for name, _ in set(os.environ.items()) ^ set(before.items())})
    handlers = len(logging.getLogger("vllm").handlers)
    print(json.dumps({"changed": changed, "handlers": handlers}))


if __name__ == "__main__":
    main()
