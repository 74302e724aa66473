"""The vLLM engine: vLLM inside the trainer's process, as a RolloutEngine.

Importing vLLM exports environment variables and configures logging: that happens here, once, with all of it that this
folder uses, and is put back, so that every module of this folder may import from it as usual. Raises ConfigError if
vLLM is missing or of another version than the supported ones.
"""

import importlib
import logging

from hybrid_rl.vllm.environment import process_kept
from hybrid_rl.vllm.versions import installed_version, require_vllm

require_vllm(installed_version())
_logger = logging.getLogger("vllm")
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.ERROR)  # a page per engine else; who needs it sets the level before
with process_kept():
    importlib.import_module("hybrid_rl.vllm.engine")
