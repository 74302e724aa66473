"""Where the tests of this folder run, and how to move the rigs of the unit tests there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.models import CausalLM
from tests.support.engines.engine_settings import inplace_settings
from tests.unit.engines import engines
from tests.unit.models import families

CHOSEN = "HYBRID_RL_TEST_DEVICE" in os.environ
DEVICE = os.environ.get("HYBRID_RL_TEST_DEVICE", "cuda")
cuda_only = pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA has this")


class DeviceRig(engines.Rig):
    """A rig whose weights lie on the device."""

    def perturb(self) -> None:
        """The same optimizer step as on the CPU."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
                parameter.add_(0.05 * noise.to(parameter.device))


def build(name: str, **settings: Any) -> PreTrainedModel:
    """A model of `families` on the device. Its own forward and `generate` take arguments from the CPU too and then
    answer there, so that references written for the CPU run unchanged; neither engine nor trainer calls these two."""
    module = families.build(name, **settings).to(DEVICE)
    generate = module.generate
    asked_from = torch.device(DEVICE)

    def to_device(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        nonlocal asked_from
        asked_from = (arguments[0] if arguments else keywords["input_ids"]).device
        moved = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in keywords.items()}
        return tuple(v.to(DEVICE) if isinstance(v, Tensor) else v for v in arguments), moved

    def send_back(_module: Any, _arguments: Any, output: Any) -> Any:
        output.logits = output.logits.to(asked_from)
        return output

    def generate_there(token_ids: Tensor, *, attention_mask: Tensor, **keywords: Any) -> Tensor:
        out = generate(token_ids.to(DEVICE), attention_mask=attention_mask.to(DEVICE), **keywords)
        return out.to(token_ids.device)

    module.register_forward_pre_hook(to_device, with_kwargs=True)
    module.register_forward_hook(send_back)
    module.generate = generate_there
    return module


def rig_of(family: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> DeviceRig:
    """An engine over a model of `families`, ready at version 1."""
    module = build(family, dtype=dtype)
    config = inplace_settings(**{"block_size": 4, "max_num_seqs": 16, **settings})
    engine = InPlaceEngine(CausalLM(module), config, max_length=48)
    rig = DeviceRig(engine, module)
    rig.ready()
    return rig


def move_rigs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every factory of `engines` builds on the device until the test ends."""
    monkeypatch.setattr(engines, "build", build)
    monkeypatch.setattr(engines, "Rig", DeviceRig)
