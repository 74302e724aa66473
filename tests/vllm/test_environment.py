"""What is put back behind a guest: every state that it may touch, also where it fails."""

import logging
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from vllm.distributed import parallel_state

from hybrid_rl.rollout.vllm.build import own_group, release_groups
from hybrid_rl.rollout.vllm.environment import (
    EngineRandom,
    RandomState,
    classes_kept,
    environment_kept,
    process_kept,
)
from hybrid_rl.rollout.vllm.meta import stand_in_model
from tests.vllm.rigs import tiny


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_states_come_back():
    state = RandomState.now()
    first = draw()
    state.apply()
    assert draw() == first


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


def test_an_error_inside_gives_the_generators_back():
    engine, start = EngineRandom(1), RandomState.now()
    expected = draw()
    start.apply()
    with pytest.raises(KeyError), engine.active():
        draw()
        raise KeyError
    assert draw() == expected


def test_environment_variables_that_are_set_changed_or_removed_come_back(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.setenv("REMOVED", "before")
    monkeypatch.delenv("ADDED", raising=False)
    before = dict(os.environ)
    with pytest.raises(KeyError), environment_kept({"INSIDE": "1", "KEPT": "given"}):
        assert (os.environ["INSIDE"], os.environ["KEPT"]) == ("1", "given")
        os.environ["ADDED"] = os.environ["LD_PRELOAD"] = "x"
        del os.environ["REMOVED"]
        raise KeyError
    assert dict(os.environ) == before


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


def test_what_the_user_set_is_not_overridden(monkeypatch):
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "1")
    with process_kept():
        assert os.environ["VLLM_CONFIGURE_LOGGING"] == "1"


@pytest.mark.slow
def test_importing_the_engine_leaves_the_environment_as_it_was():
    """transformers, which the trainer has imported by then, leaves what it sets."""
    program = """
import logging, os, sys, transformers
transformers.PreTrainedModel
before = dict(os.environ)
import hybrid_rl.rollout.vllm.engine
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
assert logging.getLogger("vllm").handlers == []
"""
    # A variable that vLLM sets as it is imported, and that this process might have from it.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("AITER_")}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, env=variables)


@pytest.mark.slow
def test_classes_of_transformers_that_vllm_changes_are_put_back():
    """vLLM has no OLMo of its own: it decorates transformers' class, and its model must go on as decorated."""
    module = tiny("olmo")
    kind, token_ids = type(module.model), torch.arange(5)[None]
    entries, bases = dict(vars(kind)), kind.__bases__
    expected = module(token_ids).logits
    with classes_kept(module) as models:
        with stand_in_model(module.config, "OlmoForCausalLM", 0, 1, torch.float32, "cpu") as theirs:
            models.append(theirs)
        decorated = {name: vars(kind)[name] for name in ("__init__", "__call__")}
        assert kind.__bases__ != bases
        with pytest.raises(AttributeError, match="do_not_compile"):
            module(token_ids)
    assert (dict(vars(kind)), kind.__bases__) == (entries, bases)
    assert torch.equal(module(token_ids).logits, expected)
    assert type(tiny("olmo").model) is kind
    own = type(theirs.model)
    assert own is not kind and isinstance(theirs.model, kind)
    assert {name: vars(own)[name] for name in decorated} == decorated


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
