"""The example of docs/adding_an_algorithm.md works as it stands."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_rl.algos import ADVANTAGES, POLICY_LOSSES, AdvantageInputs, LossInputs, register
from hybrid_rl.config import load_config, visible_leaves
from tests.support.inside.algorithms import registrations_forgotten
from tests.unit.training.combination_case import resolved, train

PAGE = Path(__file__).parents[3] / "docs" / "adding_an_algorithm.md"


@pytest.fixture
def namespace() -> Iterator[dict[str, object]]:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    found: dict[str, object] = {"__name__": "example"}
    with registrations_forgotten():
        exec(compile("\n".join(blocks), str(PAGE), "exec", dont_inherit=True), found)
        yield found


def test_a_registered_record_is_a_choice_of_the_configuration(namespace: dict[str, object]) -> None:
    assert POLICY_LOSSES["tempered"] is namespace["Tempered"]
    assert register(POLICY_LOSSES["tempered"]) is namespace["Tempered"]  # again: the same
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


@pytest.mark.usefixtures("namespace")
def test_a_run_trains_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is enough: with the power 0 the gradient of a step is REINFORCE's, with another one it is not."""
    keys = {"advantage": "above_threshold", "num_iterations": 2, "learning_rate": 0.3}
    plain = train(resolved({**keys, "policy_loss": "reinforce"}), monkeypatch, dense=False).gradients
    weighted = [
        train(resolved({**keys, "policy_loss": "tempered", "ratio_power": power}), monkeypatch, dense=False).gradients
        for power in (0.0, 1.0)
    ]
    assert all(map(torch.equal, plain, weighted[0])) and plain[1].any()
    assert torch.equal(weighted[1][0], plain[0]) and not torch.equal(weighted[1][1], plain[1])


def test_a_loss_of_the_library_is_four_files() -> None:
    """SimKO as the example: its module, the import that registers it, the preset and the test."""
    root = PAGE.parents[1]
    folders = [root / folder for folder in ("hybrid_rl", "tests", "recipes")]
    files = (path for folder in folders for kind in ("*.py", "presets.yaml") for path in folder.rglob(kind))
    named = {str(path.relative_to(root)) for path in files if "simko" in path.read_text().lower()}
    # A loss that compares the tokens of a sample with each other is also in the list of those, in the second.
    others = {"tests/unit/algos/test_adding_an_algorithm.py", "tests/unit/training/test_environment_tokens.py"}
    assert named - others == {
        "hybrid_rl/algos/policy_losses/simko.py",
        "hybrid_rl/algos/policy_losses/__init__.py",
        "hybrid_rl/config/presets.yaml",
        "tests/unit/algos/policy_losses/test_simko.py",
    }
