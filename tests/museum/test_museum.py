"""Every bug of the museum is stopped before a token that it made is learned from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.engines.inplace.engine import RoundedEngine
from hybrid_rl.errors import HybridRLError
from tests.museum.exhibits import EXHIBITS, FAULTY, GUARD, Exhibit, History, tensors_of
from tests.support.engines.sleeping_engine import SleepingEngine, sleeping_engine
from tests.support.tiny import EOS_ID, VOCABULARY, build_model, sums
from tests.unit.conftest import trainers
from tests.unit.models.families import build

PAGE = Path(__file__).parents[2] / "docs" / "museum.md"
KEYS: dict[str, Any] = {"engine": "sleeping", "max_steps": 7, "learning_rate": 3e-2, "max_completion_length": 8}


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    with sleeping_engine(), trainers(tmp_path) as make:
        yield make


def model_of(exhibit: Exhibit) -> Any:
    if exhibit.model == "qwen2":
        return build_model()
    return build(exhibit.model, vocab_size=len(VOCABULARY), eos_token_id=EOS_ID)


class Installed:
    """An exhibit in the engine. trained: the trainer's weights when the fault began."""

    def __init__(self, exhibit: Exhibit, model: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
        self.exhibit, self.model, self.patch = exhibit, model, patch
        self.history = History()
        self.trained: dict[str, torch.Tensor] | None = None
        self.num_handoffs = 0
        self.own = exhibit.engine.update_weights
        patch.setattr(exhibit.engine, "update_weights", lambda *arguments: self.update_weights(*arguments))

    def update_weights(self, engine: Any, source: Any, version: int) -> Any:
        if version == FAULTY and self.trained is None:
            self.trained = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        if version == self.exhibit.begins:
            for name, function in self.exhibit.patches.items():
                self.patch.setattr(SleepingEngine, name, functools.partialmethod(function_of(name, function)))
        report = self.own(engine, source, version)
        self.num_handoffs += 1
        with torch.no_grad():
            self.history.weights[version] = {name: tensor.clone() for name, tensor in tensors_of(engine).items()}
            if version >= FAULTY and self.exhibit.fault is not None:
                self.exhibit.fault(engine, self.history, version)
        return report


def function_of(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    own = getattr(SleepingEngine, name)
    return lambda engine, *arguments: function(own, engine, *arguments)


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_a_bug_is_stopped_before_a_token_that_it_made_is_learned_from(exhibit, make_trainer, monkeypatch) -> None:
    model = model_of(exhibit)
    installed = Installed(exhibit, model, monkeypatch)
    if exhibit.engine is RoundedEngine and native.operator("int8_linear") is None:
        pytest.skip("the compiled extension is not built")
    trainer = make_trainer(model, train_dataset=sums(4), **{**KEYS, **exhibit.keys})
    with pytest.raises(HybridRLError) as raised:
        trainer.fit()
    assert exhibit.message in str(raised.value)
    assert installed.trained is not None and installed.num_handoffs == FAULTY + 1, "not in the handoff with the fault"
    if exhibit.stopped_by == GUARD:
        assert trainer.save().is_dir()  # nothing of the policy has changed
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, installed.trained[name]), f"{name} was trained with it"


@pytest.mark.parametrize("model", ["qwen2", "qwen3-moe"])
@pytest.mark.parametrize("keys", [{}, {"lora.r": 2, "lora_alpha": 8}], ids=str)
def test_without_a_bug_nothing_is_stopped(model, keys, make_trainer, monkeypatch) -> None:
    exhibit = Exhibit("none", "", "", "", "", fault=lambda *_: None, keys=keys, model=model)
    module = model_of(exhibit)
    installed = Installed(exhibit, module, monkeypatch)
    trainer = make_trainer(module, train_dataset=sums(4), **KEYS, **keys)
    trainer.fit()
    assert trainer.global_step == 7 and installed.num_handoffs >= 7


def test_the_page_has_every_exhibit() -> None:
    rows = [row_of(exhibit) for exhibit in EXHIBITS]
    assert [line for line in PAGE.read_text().splitlines() if line.startswith("| **")] == rows


def row_of(exhibit: Exhibit) -> str:
    return f"| **{exhibit.name}**: {exhibit.what} | {exhibit.told} | {exhibit.stopped_by} |"
