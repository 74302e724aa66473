"""A live vLLM for tests: made once per file, as good as new for every test."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.engines.base import TAGS, Counters
from hybrid_rl.vllm.vllm_engine import VLLMEngine
from tests.support.engines.engine_settings import vllm_settings
from tests.support.inside.vllm import count_anew, forget_requests
from tests.unit.engines.engines import Rig, decode
from tests.unit.models.families import build

MAX_NUM_SEQS, BLOCK_SIZE = 64, 32  # the smallest blocks of vLLM's attention on CPUs; its heads have 32 dims at least
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 4096,
    "enforce_eager": True,
    "per_request_seeds": True,
    "others": {"block_size": BLOCK_SIZE},
}
CONFIG = vllm_settings(**SETTINGS)


def tiny(family: str = "qwen2", **changes: Any) -> PreTrainedModel:
    """A model that vLLM runs on CPUs, in fp32."""
    return build(family, **{**SHAPE, **changes})


def make_engine(module: PreTrainedModel, config: VLLMRolloutConfig = CONFIG, **settings: Any) -> VLLMEngine:
    """An engine of this process in fp32, of the model's positions."""
    defaults = {"dtype": torch.float32, "device": torch.device("cpu"), "max_length": 64, "decode": decode}
    return VLLMEngine(module, config, **{**defaults, **settings})


class VLLMRig(Rig):
    """A rig whose engine is emptied instead of being made again."""

    engine: VLLMEngine

    @classmethod
    def start(cls) -> VLLMRig:
        module = tiny()
        rig = cls(make_engine(module), module, remembers_prefixes=False, counts_shared=False)
        rig.first_weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        return rig

    def renewed(self, *, max_num_seqs: int = 16, max_num_waiting: int = CONFIG.engine_args.max_num_waiting) -> VLLMRig:
        """As if it had just been made, with these settings."""
        live = self.engine
        if forget_requests(live):
            live.wake(TAGS)
            live.policy_version = max(live.policy_version, 0)
            live.step()
        live.sleep(TAGS)
        live.policy_version = -1
        count_anew(live, CONFIG, max_num_seqs=max_num_seqs, max_num_waiting=max_num_waiting, counters=Counters())
        self.module.load_state_dict(self.first_weights)
        return self
