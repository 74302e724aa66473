"""The choice of an attention backend, and the refusal of what cannot run, before any work."""

import logging
import sys
from types import ModuleType

import pytest
import torch

from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.attention import compiled
from hybrid_rl.models.attention.backends import AttentionNeeds, check_dtype, check_machine, choose_backend, obstacles
from tests.unit.models.families import build

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def needs(device=GPU, dtype=torch.bfloat16, head_dim=64, softcap=None):
    return AttentionNeeds(device, dtype, head_dim, softcap)


@pytest.fixture
def hopper(monkeypatch):
    """Pretend a CUDA build of torch on a machine with a recent GPU and flash-attn."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(
        "hybrid_rl.models.attention.backends.metadata.version", lambda name: {"flash-attn": "2.8.3"}[name]
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # flash-attn-3 is not installed
    return monkeypatch


def test_auto_on_a_cpu(monkeypatch):
    assert choose_backend("auto", needs(CPU)).name == "sdpa"  # bfloat16
    assert CausalLM(build("qwen2")).attention.name == ("compiled" if compiled.is_available() else "sdpa")
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    assert choose_backend("auto", needs(CPU, torch.float32)).name == "sdpa"
    with pytest.raises(ConfigError, match="compiled cannot run here: the compiled extension was not built"):
        choose_backend("compiled", needs(CPU, torch.float32))


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (needs(), "varlen"),
        (needs(head_dim=256), "varlen"),
        (needs(dtype=torch.float32), "sdpa"),
        (needs(softcap=50.0), "sdpa"),
        (needs(head_dim=72), "varlen"),
        (needs(head_dim=100), "sdpa"),
        (needs(head_dim=288), "sdpa"),
        (needs(head_dim=None), "sdpa"),
    ],
)
def test_auto_on_cuda(hopper, wanted, name):
    assert choose_backend("auto", wanted).name == name


def test_older_machines_and_packages(hopper):
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert obstacles("varlen", needs()) == ["it needs compute capability 8.0, and cuda:0 has 7.5"]
    assert choose_backend("auto", needs()).name == "sdpa"
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert not obstacles("varlen", needs()) and not obstacles("flash_attn", needs())
    hopper.setattr("hybrid_rl.models.attention.backends.metadata.version", lambda name: "2.6.3")
    assert obstacles("flash_attn", needs()) == ["it needs flash-attn 2.7, and this is 2.6.3"]


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("varlen", needs(CPU), "model.attention=varlen cannot run here: it needs a CUDA device.*on cpu; use auto or "),
        ("flash_attn", needs(CPU), "flash-attn is not installed"),
        ("flash_attn_3", needs(CPU), "model.attention=flash_attn_3 cannot run here: it needs a CUDA device"),
        ("varlen", needs(dtype=torch.float32), "computes in bfloat16, and the model holds float32"),
        ("varlen", needs(softcap=50.0), "no soft-capping, and this architecture caps at 50"),
        ("varlen", needs(head_dim=20), "multiple of 8, at most 256, and have 20"),
        ("varlen", needs(head_dim=None), "does not have one head size"),
        ("compiled", needs(), "it runs on a CPU.*cuda:0; it computes in float32, and the model holds bfloat16"),
        ("compiled", needs(CPU, torch.float32, 576), "at most 512 elements, and these have 576"),
        ("paged", needs(), "model.attention='paged' is unknown; use auto, sdpa, compiled, varlen, flash_attn"),
    ],
)
def test_what_cannot_run_is_refused(name, wanted, message):
    with pytest.raises(ConfigError, match=message):
        choose_backend(name, wanted)


def test_the_refusal_names_what_would_run(hopper):
    with pytest.raises(ConfigError, match="use auto or one of: sdpa, flash_attn$"):
        choose_backend("varlen", needs(softcap=50.0))


def test_flash_attention_3_runs_where_its_package_is(hopper, caplog):
    assert choose_backend("auto", needs()).name == "varlen"
    with pytest.raises(ConfigError, match="flash_attn_3 cannot run here: flash-attn-3 is not installed; use auto or"):
        choose_backend("flash_attn_3", needs())
    switched = []
    hopper.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    hopper.setattr("hybrid_rl.models.attention.backends.activate_flash_attention_impl", switched.append)
    with caplog.at_level(logging.INFO, "hybrid_rl"):
        assert choose_backend("auto", needs()).name == choose_backend("flash_attn_3", needs()).name == "flash_attn_3"
    assert switched == ["FA3", "FA3"] and "runs on FlashAttention 3" in caplog.text
    hopper.setattr("hybrid_rl.models.attention.backends.current_flash_attention_impl", lambda: "FA3")
    assert choose_backend("varlen", needs()).name == "varlen" and choose_backend("auto", needs()).name == "flash_attn_3"
    assert len(switched) == 2  # it was on
    assert obstacles("flash_attn_3", needs(softcap=50.0)) == [
        "it has no soft-capping, and this architecture caps at 50"
    ]


def test_flash_attention_3_is_left_out_elsewhere(hopper):
    hopper.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    hopper.setattr("hybrid_rl.models.attention.backends.current_flash_attention_impl", lambda: "FA4")
    assert obstacles("flash_attn_3", needs()) == ["PyTorch's flash attention is switched to FA4 already"]
    for capability in ((8, 9), (10, 0)):
        hopper.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert obstacles("flash_attn_3", needs())[0].startswith("it needs compute capability 9.0")
        assert choose_backend("auto", needs()).name == "varlen"


def test_a_machine_is_refused_for_all_that_it_lacks(hopper):
    with pytest.raises(ConfigError) as refusal:
        check_machine("flash_attn_3", CPU, torch.float32)
    for obstacle in ("it needs a CUDA device", "it computes in bfloat16", "flash-attn-3 is not installed", "of: sdpa"):
        assert obstacle in str(refusal.value)
    check_machine("flash_attn_3", GPU, torch.bfloat16, is_here=False)  # another machine may have the package
    with pytest.raises(ConfigError, match="flash-attn-3 is not installed"):
        check_machine("flash_attn_3", GPU, torch.bfloat16)
    check_machine("varlen", GPU, torch.bfloat16)
    check_machine("auto", CPU, torch.bfloat16)


def test_a_model_is_refused_before_it_is_run():
    with pytest.raises(ConfigError, match="model.attention=varlen cannot run here"):
        CausalLM(build("qwen2"), attention="varlen")


@pytest.mark.parametrize(
    ("name", "head_dim", "softcap"), [("qwen2", 8, None), ("qwen3", 16, None), ("gpt2", 8, None), ("gemma2", 8, 2.0)]
)
def test_needs_are_read_from_the_config(name, head_dim, softcap):
    found = AttentionNeeds.of(build(name), CPU, torch.float32)
    assert (found.head_dim, found.softcap) == (head_dim, softcap)


def test_float16_is_refused():
    with pytest.raises(ModelError, match=r"holds float16.*without loss scaling; use bfloat16 or float32"):
        CausalLM(build("qwen2", dtype=torch.float16))


def test_bfloat16_runs_in_software_on_a_cpu_but_not_on_a_gpu(monkeypatch):
    check_dtype(CPU, torch.bfloat16)
    asked = []

    def is_supported(including_emulation=True):
        asked.append(including_emulation)
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    check_dtype(GPU, torch.float32)
    with pytest.raises(ModelError, match="Tesla T4 has no bfloat16 in hardware; use dtype=float32"):
        check_dtype(GPU, torch.bfloat16)
    assert asked == [False]
