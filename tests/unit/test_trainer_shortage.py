"""Memory that runs out in one phase of a step costs a pass, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.inside.wrapping import wrap
from tests.support.tiny import build_model

# An update that is proportional to the gradient: Adam's own would make noise of the smallest ones as large as the rest.
KEYS = {"learning_rate": 0.1, "adam_epsilon": 1.0, "max_grad_norm": 1e6, "max_steps": 2, "num_generations": 4}


def ask_for_too_much(*_):
    """The real error of the host's allocator."""
    torch.empty(1 << 60, dtype=torch.uint8)


class SmallMemory:
    """Passes of one phase do not fit with more than `most` tokens: the embedding asks for memory that there is not.
    at_end: as the last thing of the backward pass, when other gradients have been added up. number: of failures."""

    def __init__(self, phase: str, most: int, *, at_end: bool = False) -> None:
        self.phase, self.most, self.at_end, self.number = phase, most, at_end, 0

    def __call__(self, own, module, token_ids):
        now = "rollout" if torch.is_inference_mode_enabled() else "update" if torch.is_grad_enabled() else "scoring"
        if now != self.phase or token_ids.numel() <= self.most:
            return own(module, token_ids)
        if self.at_end:
            embedded = own(module, token_ids)
            embedded.register_hook(self.fail)
            return embedded
        return self.fail()

    def fail(self, *_):
        self.number += 1
        return ask_for_too_much()


def trained(make_trainer, **keys):
    model = build_model()
    trainer = make_trainer(model, **{**KEYS, **keys})
    results = [trainer.step() for _ in range(2)]
    return model, results


@pytest.mark.parametrize(
    ("phase", "at_end", "keys"),
    [
        ("update", False, {}),
        ("update", True, {}),
        ("update", True, {"gradient_checkpointing": True}),
        ("update", True, {"algorithm": "gspo"}),
        ("update", False, {"top_entropy_quantile": 0.5}),
        ("scoring", False, {"old_logprobs": "recompute", "beta": 0.1}),
        ("scoring", False, {"algorithm": "ppo"}),
        ("update", True, {"algorithm": "ppo"}),
        ("rollout", False, {}),
        ("rollout", False, {"rollout": {"engine": "hf"}}),
    ],
    ids=str,
)
def test_a_shortage_in_a_phase_costs_a_pass_and_changes_nothing(phase, at_end, keys, make_trainer, monkeypatch, caplog):
    expected, results = trained(make_trainer, **keys)
    memory = SmallMemory(phase, 40 if phase != "rollout" else 12, at_end=at_end)
    wrap(monkeypatch, nn.Embedding, "forward", memory)
    model, mine = trained(make_trainer, **keys)
    assert memory.number >= 1 and "memory ran out in a pass" in caplog.text
    for result, other in zip(mine, results, strict=True):
        assert torch.equal(result.batch["completion_ids"].values, other.batch["completion_ids"].values)
        for name in ("loss", "grad_norm", "entropy"):
            assert result.metrics[name] == pytest.approx(other.metrics[name], rel=1e-5, abs=1e-6)
    for (name, parameter), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, theirs, rtol=0, atol=1e-6, msg=name)


def test_what_fits_in_no_way_ends_the_run_with_what_to_do(make_trainer, monkeypatch):
    wrap(monkeypatch, nn.Embedding, "forward", SmallMemory("update", 3))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        trained(make_trainer)
    assert any("not even a single sample of" in note for note in raised.value.__notes__)
