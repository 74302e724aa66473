"""All of vLLM that this folder uses, imported once: whoever imports from this folder imports this module first.

Importing vLLM exports environment variables and configures logging. Here it is all put back, so that every module of
this folder may import from vLLM as usual.
"""

import logging

from hybrid_rl.vllm.process_state import process_kept

_logger = logging.getLogger("vllm")
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.ERROR)  # a page per engine else; who needs it sets the level before
with process_kept():
    from hybrid_rl.vllm.vllm_engine import VLLMEngine, make_engine

__all__ = ["VLLMEngine", "make_engine"]
