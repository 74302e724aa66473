"""The vLLM engine: vLLM inside the trainer's process, as a RolloutEngine.

Nothing of vLLM is imported here: `library` imports what the engine uses, `flash` its attention alone. Raises
ConfigError if vLLM is missing or of another version than the supported ones.
"""

from hybrid_rl.vllm.versions import installed_version, require_vllm

require_vllm(installed_version())
