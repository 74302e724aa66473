"""The example of docs/contributing.md works as it stands."""

import re
from pathlib import Path

import pytest
import torch

from hybrid_rl.algos import POLICY_LOSSES, LossInputs, registry
from hybrid_rl.config import load_config, visible_leaves

PAGE = Path(__file__).parents[3] / "docs" / "contributing.md"


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(registry, "_policy_losses", registry._policy_losses)
    before = dict(registry._policy_losses)
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    found: dict[str, object] = {"__name__": "example"}
    exec(compile(code[1], str(PAGE), "exec", dont_inherit=True), found)
    yield found
    registry._policy_losses.clear()
    registry._policy_losses.update(before)


def test_a_registered_record_is_a_choice_of_the_configuration(namespace: dict[str, object]) -> None:
    assert POLICY_LOSSES["tempered"] is namespace["Tempered"]
    config, _ = load_config({"policy_loss": "tempered", "ratio_power": 0.3, "advantage": "rloo"})
    assert config.policy_loss.ratio_power == 0.3  # type: ignore[attr-defined]
    assert visible_leaves({"policy_loss": "tempered"})["policy_loss.ratio_power"].default == 0.5


def test_its_loss_by_hand(namespace: dict[str, object]) -> None:
    """ratio 4 to the power .5 weighs the gradient of REINFORCE by 2."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64) - torch.tensor(4.0, dtype=torch.float64).log()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=torch.tensor([3.0], dtype=torch.float64),
        mask=torch.tensor([True]),
        rows=torch.tensor([0]),
        num_rows=1,
        entropy=torch.zeros(1, dtype=torch.float64),
        rollout_logprobs=old,
    )
    loss = POLICY_LOSSES["tempered"]().loss(inputs)
    loss.per_token.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-6.0, rel=1e-12)
    assert loss.ratio.item() == pytest.approx(4.0, rel=1e-12)
