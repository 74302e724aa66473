"""The example of docs/contributing.md works as it stands."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_rl.algos import ADVANTAGES, POLICY_LOSSES, AdvantageInputs, LossInputs, interface
from hybrid_rl.config import load_config, visible_leaves

PAGE = Path(__file__).parents[3] / "docs" / "contributing.md"


@pytest.fixture
def namespace() -> Iterator[dict[str, object]]:
    homes = interface._registered
    before = {tag: dict(home) for tag, home in homes.items()}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    found: dict[str, object] = {"__name__": "example"}
    exec(compile("\n".join(blocks), str(PAGE), "exec", dont_inherit=True), found)
    yield found
    for tag, home in homes.items():
        home.clear()
        home.update(before[tag])


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


@pytest.mark.usefixtures("namespace")
def test_its_advantages_by_hand() -> None:
    """Rewards .7, .5, .2 and none; the second token of the first sample is not the policy's."""
    inputs = AdvantageInputs(
        rewards=torch.tensor([0.7, 0.5, 0.2, math.nan], dtype=torch.float64),
        groups=torch.zeros(4, dtype=torch.int64),
        rows=torch.tensor([0, 0, 0, 1, 2, 2, 3]),
        mask=torch.tensor([True, False, True, True, True, True, True]),
        token_rewards=torch.zeros(7, dtype=torch.float64),
    )
    advantages = ADVANTAGES["above_threshold"]().compute(inputs).advantages
    assert advantages.tolist() == [1.0, 0.0, 1.0, 1.0, -1.0, -1.0, 0.0]
