"""What a user reads where vLLM fails: its own words, and what to do."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from hybrid_rl.errors import ConfigError, EngineStateError, HandoffError, ModelError
from hybrid_rl.vllm import build_engine as build_module
from hybrid_rl.vllm import loader
from hybrid_rl.vllm.build_engine import explain_step
from hybrid_rl.vllm.process_state import process_kept
from tests.vllm.rigs import CONFIG

UNSEEN = "Model architectures ['Gemma3'] failed to be inspected. Please check the logs for more details."


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (
            KeyError("layers.1.mlp.gate.e_score_correction_bias"),
            ModelError,
            "vLLM fails on this model \\(KeyError: 'layers.1.mlp.gate.*set rollout.engine=inplace",
        ),
        (
            ValueError("Head dimension 64 is not supported by MLA."),
            ConfigError,
            "refuses this model .*: Head dimension 64 is not supported by MLA.; .*set rollout.engine=inplace",
        ),
        (
            NotImplementedError("MLA is not supported on CPU."),  # vLLM 0.25.1: attention over latents
            ConfigError,
            "vLLM refuses this model or .*: MLA is not supported on CPU",
        ),
        (
            ModuleNotFoundError("No module named 'torchvision'", name="torchvision"),
            ModelError,
            "lacks a package for this model: No module named 'torchvision'; pip install torchvision, or set rollout",
        ),
        (
            ValueError(UNSEEN),
            ModelError,
            "failed to be inspected.*import torchvision and torchaudio, not .*: pip install torchvision torchaudio,",
        ),
        (
            RuntimeError("mat1 and mat2 shapes cannot be multiplied"),  # in a warm-up pass
            ModelError,
            "vLLM fails on this model \\(RuntimeError: mat1 and mat2 shapes .*set rollout.engine=inplace",
        ),
        (
            RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"),
            ModelError,
            "cannot be compiled here: Could not find nvcc .*engine_args.attention_backend=FLASH_ATTN, or set rollout",
        ),
        (ConfigError("ours"), ConfigError, "^ours$"),
        (torch.distributed.DistNetworkError("a rank"), torch.distributed.DistNetworkError, "^a rank$"),
        (torch.OutOfMemoryError("as it is"), torch.OutOfMemoryError, "^as it is$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_vllm_fails_on_while_an_engine_is_built(monkeypatch, error, kind, told):
    def fails(**_):
        raise error

    find = importlib.util.find_spec
    hidden = {"torchvision", "torchaudio"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else find(name, *rest))
    monkeypatch.setattr(build_module, "EngineArgs", fails)
    with process_kept(), pytest.raises(kind, match=told):
        build_module.build({}, CONFIG, 64, torch.device("cpu"), 1.0)


def test_seeds_of_prompts_in_chunks_on_a_cpu():
    explain_step(RuntimeError("anything else"), is_first=False)
    with pytest.raises(RuntimeError) as caught:
        torch.Generator().set_offset(0)
    with pytest.raises(
        EngineStateError, match="in chunks on a CPU with engine_args.per_request_seeds=true .*set engine_args.per_re"
    ):
        explain_step(caught.value, is_first=False)


def test_the_first_step_of_a_model_that_vllm_cannot_run():
    told = "its first step ended with ValueError: too many values to unpack; set rollout.engine=inplace"
    with pytest.raises(ModelError, match=told):
        explain_step(ValueError("too many values to unpack\nand a page more"), is_first=True)
    for error in (
        ConfigError("ours"),
        torch.OutOfMemoryError("of memory"),
        torch.distributed.DistNetworkError("a rank"),
        KeyboardInterrupt(),
    ):
        explain_step(error, is_first=True)  # as it is


@pytest.mark.parametrize(
    ("error", "kind"),
    [(HandoffError("ours"), HandoffError), (RuntimeError("The expanded size of the tensor (16)"), ModelError)],
    ids=["ours", "a shape"],
)
def test_what_a_loader_raises_is_told_as_it_is_unless_it_is_vllms(monkeypatch, error, kind):
    """Ours are RuntimeErrors too."""

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(loader, "trace_loader", fails)
    views = SimpleNamespace(views=[], tied=[], tensors={})
    with pytest.raises(kind) as caught:
        loader.trace_model(SimpleNamespace(named_buffers=dict, named_parameters=dict, load_weights=None), views)
    assert (caught.value is error) == (kind is HandoffError)
