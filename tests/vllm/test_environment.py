"""What is put back behind a guest: every state that it may touch, also where it fails."""

import gc
import logging
import os
import random
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from vllm.distributed import parallel_state

from hybrid_rl.vllm.build_engine import own_group, release_groups, variables
from hybrid_rl.vllm.meta import stand_in_model
from hybrid_rl.vllm.process_state import (
    EngineRandom,
    Guest,
    RandomState,
    classes_kept,
    process_kept,
)
from hybrid_rl.vllm.switches import INDUCTOR, compile_alone
from tests.unit.engines.test_step_thread import Streams
from tests.unit.models.families import BASE


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_an_engine_draws_its_own_sequence_and_nobody_notices():
    engine, twin, other = EngineRandom(7), EngineRandom(7), EngineRandom(8)
    start = RandomState.now()
    undisturbed = [draw() for _ in range(3)]
    start.apply()
    mine = []
    for expected in undisturbed:
        with engine.active():
            mine.append(draw())
        assert draw() == expected
    with twin.active():
        assert [draw() for _ in range(3)] == mine
    with other.active():
        assert draw() != mine[0]


def test_a_step_draws_on_from_the_engines_sequence_and_nobody_notices():
    """PyTorch's generator is switched for a step, and only it: the others are left alone."""
    engine, twin = EngineRandom(7), EngineRandom(7)
    with engine.active():
        expected = [float(torch.rand(())) for _ in range(3)]
    start = RandomState.now()
    undisturbed = [draw() for _ in range(3)]
    start.apply()
    for mine, others in zip(expected, undisturbed, strict=True):
        with twin.sampling():
            assert float(torch.rand(())) == mine
        assert draw() == others
    with pytest.raises(KeyError), twin.sampling():
        raise KeyError
    start.apply()
    with twin.sampling():
        random.random(), np.random.rand()
    assert draw()[2] == undisturbed[0][2]


def test_a_guest_steps_and_acts_on_its_own_stream_and_the_thread_returns_to_the_callers(monkeypatch):
    streams = Streams(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # there are no random generators of its devices
    streams.set(streams.stream("of the trainer"))
    guest = Guest(1)
    for context in (guest.active, guest.stepping):
        with context():
            assert streams.current().name == "of the trainer"  # it has none yet
    guest.stream = streams.stream("of the engine")
    for context in (guest.active, guest.stepping):
        with pytest.raises(KeyError), context():
            assert streams.current().name == "of the engine"
            streams.set(streams.stream("another of the engine's"))
            raise KeyError
        assert streams.current().name == "of the trainer"


def test_an_error_inside_gives_the_generators_back():
    engine, start = EngineRandom(1), RandomState.now()
    expected = draw()
    start.apply()
    with pytest.raises(KeyError), engine.active():
        draw()
        raise KeyError
    assert draw() == expected


def test_what_a_guest_changes_in_a_process_is_put_back():
    root = logging.getLogger()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    excepthook = sys.excepthook
    handlers, level, handler = root.handlers[:], root.level, signal.getsignal(signal.SIGTERM)
    start = RandomState.now()
    expected = draw()
    start.apply()
    with process_kept({"VLLM_X": "1"}):
        assert os.environ["VLLM_X"] == "1"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        set_num_threads(num_threads + 1)
        torch.set_num_threads = lambda number: None
        root.addHandler(logging.NullHandler())
        root.setLevel(logging.DEBUG)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.excepthook = print
        random.seed(5)
        torch.set_default_device("cpu")
        torch.manual_seed(5)
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device() == torch.device("cpu")
    assert torch.set_num_threads is set_num_threads and torch.get_num_threads() == num_threads
    assert (root.handlers, root.level) == (handlers, level)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert sys.excepthook is excepthook
    assert "VLLM_X" not in os.environ
    assert draw() == expected


@pytest.mark.parametrize("how", ["nothing", "high", "tf32 of CUDA"])
def test_the_precision_of_products_is_put_back(how):
    """vLLM asks for the highest; whoever trains in TF32 goes on in TF32, whichever of PyTorch's two ways he said so."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    precisions = [backend.fp32_precision for backend in backends]
    name = torch.get_float32_matmul_precision()
    try:
        if how == "high":
            torch.set_float32_matmul_precision("high")
        elif how != "nothing":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        before = [backend.fp32_precision for backend in backends]
        with pytest.raises(KeyError), process_kept():
            torch.set_float32_matmul_precision("highest" if how != "nothing" else "medium")
            raise KeyError
        assert [backend.fp32_precision for backend in backends] == before
        if how != "tf32 of CUDA":
            assert torch.get_float32_matmul_precision() == ("high" if how == "high" else name)
    finally:
        torch.set_float32_matmul_precision(name)
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision


def test_the_compiler_has_its_processes_again(monkeypatch):
    """vLLM compiles in one process, and says so by a variable that PyTorch reads once, as its compiler is imported."""
    config = SimpleNamespace(compile_threads=7, decide_compile_threads=lambda: 5)
    monkeypatch.setitem(sys.modules, INDUCTOR, config)
    with process_kept():
        compile_alone()
        assert config.compile_threads == 1
    assert config.compile_threads == 7
    monkeypatch.delitem(sys.modules, INDUCTOR)
    config.compile_threads = 1
    with process_kept():
        monkeypatch.setitem(sys.modules, INDUCTOR, config)
    assert config.compile_threads == 5


def test_triton_says_no_more_than_before(monkeypatch):
    """A setting that nobody made is none again, one that the user made stays."""
    knobs = SimpleNamespace(autotuning=SimpleNamespace(), runtime=SimpleNamespace(jit_post_compile_hook=print))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    with process_kept():
        knobs.autotuning.print = True
        knobs.runtime.jit_post_compile_hook = None
    assert vars(knobs.autotuning) == {} and knobs.runtime.jit_post_compile_hook is print


def test_what_the_user_set_is_not_overridden(monkeypatch):
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "1")
    with process_kept():
        assert os.environ["VLLM_CONFIGURE_LOGGING"] == "1"


@pytest.mark.slow
def test_importing_the_engine_leaves_the_environment_as_it_was(fresh_process):
    """transformers, which the trainer has imported by then, leaves what it sets. It keeps nothing of whoever imports
    it either: modules of vLLM keep errors, with the frames of the import."""
    told = {name: fresh_process[name] for name in ("changed", "handlers", "kept")}
    assert told == {"changed": [], "handlers": 0, "kept": False}


@pytest.mark.slow
def test_vllms_attention_is_imported_without_its_engine(fresh_process):
    assert fresh_process["with_attention"] == []


def smollm3():
    return SmolLM3ForCausalLM(SmolLM3Config(**BASE)).eval()


@pytest.mark.slow
def test_classes_of_transformers_that_vllm_changes_are_put_back():
    """vLLM has no SmolLM3 of its own: it decorates transformers' class, and its model must go on as decorated."""
    module = smollm3()
    kind, token_ids = type(module.model), torch.arange(5)[None]
    entries, bases = dict(vars(kind)), kind.__bases__
    expected = module(token_ids).logits
    with classes_kept(module) as models:
        with stand_in_model(module.config, "SmolLM3ForCausalLM", 0, 1, torch.float32, "cpu") as theirs:
            models.append(theirs)
        decorated = {name: vars(kind)[name] for name in ("__init__", "__call__")}
        assert kind.__bases__ != bases
        with pytest.raises(AttributeError, match="do_not_compile"):
            module(token_ids)
    assert (dict(vars(kind)), kind.__bases__) == (entries, bases)
    assert torch.equal(module(token_ids).logits, expected)
    assert type(smollm3().model) is kind
    own = type(theirs.model)
    assert own is not kind and isinstance(theirs.model, kind)
    assert {name: vars(own)[name] for name in decorated} == decorated


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, None),  # vLLM reads it itself
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            "expandable_segments:True",
        ),
    ],
    ids=str,
)
def test_vllm_knows_of_segments_that_grow_by_whichever_name_they_were_asked_for(given, expected, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    own_group(torch.device("cpu"))
    try:
        assert variables(torch.device("cpu"), "run").get("PYTORCH_CUDA_ALLOC_CONF") == expected
    finally:
        dist.destroy_process_group()


def test_what_garbage_is_looked_for_among_is_put_back():
    """vLLM freezes it: a Trainer that is dropped would never go, nor its engine be closed."""
    gc.unfreeze()  # what tests/conftest.py froze
    with process_kept():
        gc.freeze()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        with process_kept():
            pass
        assert gc.get_freeze_count() > 0  # the user's own
    finally:
        gc.unfreeze()


def test_vllm_takes_its_groups_down_and_leaves_the_trainers():
    """A later engine must not find groups of a torch.distributed that has ended since."""
    for with_all in (False, False, True):
        own_group(torch.device("cpu"))
        parallel_state.init_distributed_environment(1, 0, "", 0, "gloo")
        parallel_state.get_world_group().barrier()
        release_groups(with_all=with_all)
        assert dist.is_initialized() != with_all
        if not with_all:
            dist.destroy_process_group()
