"""The critic's values, gradients, metrics and checkpoints on one rank, against loops over single samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification, PreTrainedModel, Qwen2ForTokenClassification

from hybrid_rl.batch import Batch
from hybrid_rl.checkpoint.reading import OPTIMIZER_FOLDER, read_optimizer_into
from hybrid_rl.checkpoint.writing import write_checkpoint
from hybrid_rl.config import TrainerConfig, ValueHeadConfig
from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.errors import CheckpointError, ModelError
from hybrid_rl.metrics.metric_sums import joined
from hybrid_rl.models.heads.value_head import value_model_of
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.training import critic as critic_module
from hybrid_rl.training.batch_plan import Plan
from hybrid_rl.training.critic import Critic, value_metrics
from hybrid_rl.training.sharding.build import build_model
from tests.reference import grpo_case
from tests.support.float64 import KeepFloat64
from tests.support.tiny import build_tokenizer
from tests.unit.training.critic_case import (
    RecordedGradients,
    config_of,
    critic_batch,
    plain_gradient,
    plain_loss,
    plain_values,
    policy_with_head,
)

HERE = RankContext(device=torch.device("cpu"))
EVERYTHING = [[list(range(16))]]


def critic_of(module: PreTrainedModel | ModelRecipe, config: TrainerConfig | None = None, **options: Any) -> Critic:
    settings = {"critic_learning_rate": 1e-3, **options}
    return Critic(module, config or config_of(), HERE, num_optimizer_steps=100, options=ValueHeadConfig(**settings))


def cut(num_micro_batches: int) -> Plan:
    """The 16 samples in so many micro-batches of one mini-batch, not in order."""
    order = torch.randperm(16, generator=torch.Generator().manual_seed(num_micro_batches)).tolist()
    return [[order[start::num_micro_batches] for start in range(num_micro_batches)]]


# ------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("plan", [EVERYTHING, cut(5), [*cut(3), [[]]]], ids=["one", "five", "with an empty one"])
def test_a_value_is_what_the_critic_makes_of_the_tokens_before(plan: Plan) -> None:
    module = policy_with_head(torch.float64)
    with KeepFloat64():
        values = critic_of(module).values(critic_batch(), plan)
    for row, wanted in zip(values, plain_values(module), strict=True):
        torch.testing.assert_close(row, wanted.detach(), rtol=1e-12, atol=1e-12)
    assert critic_of(module).values(critic_batch(), plan).values.dtype == torch.float32


def test_a_new_critic_says_zero_everywhere() -> None:
    critic = critic_of(grpo_case.build_model())
    values = critic.values(critic_batch(), cut(2))
    assert values.lengths.tolist() == list(grpo_case.COMPLETION_LENGTHS) and not values.values.any()
    assert not critic.values(critic_batch(), [[]]).values.any()  # a rank without samples


# --------------------------------------------------------------------------------------------------- gradients


def gradients_of(module: PreTrainedModel, plan: Plan, batch: Batch, config: TrainerConfig, **options: Any) -> Any:
    """Loss of each optimizer step and its gradients by name, as the optimizer gets them."""
    critic = critic_of(module, config, **options)
    recorded = RecordedGradients(critic)
    with KeepFloat64():
        sums = critic.update(batch, plan)
    return sums.result(), recorded.by_step


PLANS: dict[str, Plan] = {
    "1": EVERYTHING,
    "4": cut(4),
    "16 reversed": [cut(16)[0][::-1]],
    "no prompt shared": [[[group * 4 + member for group in range(4)] for member in range(4)]],
    "empty ones": [[[], *cut(3)[0], []]],
}


@pytest.mark.parametrize(
    ("plan", "clip"), [*((plan, 0.1) for plan in PLANS.values()), (PLANS["4"], None)], ids=[*PLANS, "4, no clip"]
)
def test_loss_and_gradient_are_those_of_single_samples_however_they_are_cut(plan: Plan, clip: float | None) -> None:
    module = policy_with_head(torch.float64)
    batch = critic_batch()
    metrics, (found,) = gradients_of(module, plan, batch, config_of(), cliprange_value=clip)
    loss, clipped, num_tokens = plain_loss(plain_values(module), batch, clip)
    assert metrics["critic/value_loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["critic/clip_ratio"] == clipped / num_tokens
    assert (clipped > 0) is (clip is not None) and clipped < num_tokens
    expected = plain_gradient(module, loss)
    norm = sum(float(gradient.square().sum()) for gradient in expected.values()) ** 0.5
    assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-6)  # float32
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-12 * largest, name


def test_mini_batches_have_denominators_of_their_own() -> None:
    module = policy_with_head(torch.float64)
    batch = critic_batch()
    plan = [cut(2)[0][:1], cut(2)[0][1:]]
    metrics, steps = gradients_of(module, plan, batch, config_of(), critic_learning_rate=0.0)
    losses = []
    for rows, found in zip((mini[0] for mini in plan), steps, strict=True):
        loss, _, _ = plain_loss(plain_values(module), batch, 0.2, rows)
        losses.append(loss.item())
        torch.testing.assert_close(found, plain_gradient(module, loss), rtol=1e-9, atol=1e-12)
    assert metrics["critic/value_loss"] == pytest.approx(sum(losses) / 2, rel=1e-12)


def test_tokens_of_the_environment_and_samples_without_a_reward_teach_nothing() -> None:
    module = policy_with_head(torch.float64)
    batch = critic_batch()
    mask = batch["completion_mask"].values.clone()
    mask[6:9] = False
    rewards = batch["rewards"].clone()
    rewards[4] = float("nan")
    left_out = ~mask | torch.isin(batch["completion_ids"].row_index(), torch.tensor([2, 4, 7, 8, 9, 13]))
    completions = batch["completion_ids"]
    columns = {name: batch[name] for name in batch if name not in ("completion_mask", "rewards", "values", "returns")}
    nothing = {name: completions.with_values(batch[name].values.masked_fill(left_out, float("nan"))) for name in
               ("values", "returns")}  # fmt: skip
    hidden = Batch({**columns, **nothing, "completion_mask": completions.with_values(mask), "rewards": rewards})
    config = config_of(mask_truncated_completions=True)  # samples 2, 7, 8, 9 and 13
    metrics, (found,) = gradients_of(module, cut(3), hidden, config)
    loss, _, num_tokens = plain_loss(plain_values(module), batch, 0.2, left_out=left_out)
    assert num_tokens == int((~left_out).sum()) < len(mask)
    assert metrics["critic/value_loss"] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(found, plain_gradient(module, loss), rtol=1e-9, atol=1e-12)
    assert metrics["critic/return_mean"] == pytest.approx(float(batch["returns"].values[~left_out].double().mean()))


def test_recomputed_activations_give_the_same_gradients() -> None:
    module = policy_with_head(torch.float32)
    plain, again = (
        gradients_of(module, cut(2), critic_batch(), config_of(gradient_checkpointing=on))[1][0] for on in (False, True)
    )
    torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------------------------------ updates


def test_the_first_update_moves_the_head_alone_and_the_policy_never() -> None:
    policy = grpo_case.build_model()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    critic = critic_of(policy)
    module = critic.model.module
    start = {name: p.detach().clone() for name, p in module.named_parameters()}

    def moved() -> set[str]:
        return {name for name, p in module.named_parameters() if not torch.equal(p, start[name])}

    critic.update(critic_batch(), EVERYTHING)
    assert moved() == {"score.weight", "score.bias"}
    metrics = critic.update(critic_batch(), EVERYTHING).result()
    assert moved() == start.keys()
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert metrics["critic/learning_rate"] == 1e-3 and metrics["critic/skipped_updates"] == 0


def test_it_learns_the_returns() -> None:
    critic = critic_of(grpo_case.build_model(), critic_learning_rate=1e-2, cliprange_value=None)
    batch = critic_batch()
    losses, explained = [], []
    for _ in range(30):
        now = batch.without("values").with_columns(values=critic.values(batch, EVERYTHING))
        metrics = critic.update(now, EVERYTHING).result()
        losses.append(metrics["critic/value_loss"])
        explained.append(metrics["critic/explained_variance"])
    assert losses[-1] < 0.25 * losses[0] and explained[0] == 0 and explained[-1] > 0.75


def test_every_iteration_is_an_update_towards_the_same_returns_around_the_same_values() -> None:
    batch = critic_batch()
    twice = critic_of(policy_with_head(torch.float32), config_of(num_iterations=2))
    once = critic_of(policy_with_head(torch.float32))
    twice.update(batch, cut(2))
    for _ in range(2):
        once.update(batch, cut(2))
    pairs = zip(twice.model.module.parameters(), once.model.module.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_an_update_that_was_broken_off_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, untouched = (critic_of(policy_with_head(torch.float32)) for _ in range(2))
    loss, calls = critic_module.micro_batch_value_loss, []

    def breaking(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss(*arguments)

    monkeypatch.setattr(critic_module, "micro_batch_value_loss", breaking)
    with pytest.raises(KeyboardInterrupt):
        broken.update(critic_batch(), cut(4))
    for critic in (broken, untouched):
        critic.update(critic_batch(), cut(4))
    pairs = zip(broken.model.module.parameters(), untouched.model.module.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_gradients_that_are_no_numbers_update_nothing() -> None:
    critic = critic_of(policy_with_head(torch.float32))
    before = {name: p.detach().clone() for name, p in critic.model.module.named_parameters()}
    batch = critic_batch()
    broken = batch["returns"].values.clone()
    broken[3] = float("inf")
    metrics = critic.update(
        batch.without("returns").with_columns(returns=batch["completion_ids"].with_values(broken)), cut(2)
    ).result()
    assert metrics["critic/skipped_updates"] == 1
    assert all(torch.equal(p, before[name]) for name, p in critic.model.module.named_parameters())


# ------------------------------------------------------------------------------------------------------ metrics


def test_metrics_of_values_and_returns_by_hand() -> None:
    batch = critic_batch().select([0, 3])  # 1 and 3 tokens
    ids = batch["completion_ids"]
    batch = batch.without("values").without("returns")
    batch = batch.with_columns(
        values=ids.with_values(torch.tensor([1.0, 1.0, 2.0, 2.0])),
        returns=ids.with_values(torch.tensor([0.0, 2.0, 2.0, 4.0])),
    )
    everything = torch.ones(4, dtype=torch.bool)
    found = value_metrics(batch, everything, HERE).result()
    # Returns have mean 2 and squares 4 + 0 + 0 + 4; errors are -1, 1, 0, 2, with mean 0.5 and squares 5.
    assert found == {"critic/value_mean": 1.5, "critic/return_mean": 2.0, "critic/explained_variance": 1 - 5 / 8}
    # Returns 2, 2 and 4 have squares 8/3; errors 1, 0 and 2 have squares 2.
    some = value_metrics(batch, torch.tensor([False, True, True, True]), HERE).result()
    assert some["critic/explained_variance"] == pytest.approx(1 - 2 / (8 / 3), rel=1e-12)
    equal = value_metrics(batch, torch.tensor([False, True, True, False]), HERE).result()
    assert equal == {"critic/value_mean": 1.5, "critic/return_mean": 2.0}
    assert value_metrics(batch, ~everything, HERE).result() == {}


def test_explained_variance_of_equal_returns_is_left_out_whatever_their_rounding() -> None:
    batch = critic_batch()
    ids = batch["completion_ids"]
    equal = batch.without("returns").with_columns(returns=ids.with_values(torch.full((len(ids.values),), 0.1)))
    mask = torch.ones(len(ids.values), dtype=torch.bool)
    assert "critic/explained_variance" not in value_metrics(equal, mask, HERE).result()


def test_metrics_join_over_ranks() -> None:
    batch = critic_batch()
    mask = torch.ones(len(batch["completion_ids"].values), dtype=torch.bool)
    whole = value_metrics(batch, mask, HERE).result()
    parts = [batch.select(list(range(5))), batch.select([]), batch.select(list(range(5, 16)))]
    shares: list[Any] = []

    def share(value: Any) -> list[Any]:
        shares.append(value)
        return [value] * 3

    def metrics(rank: int, gather: Any) -> Any:
        part = parts[rank]
        mine = torch.ones(len(part["completion_ids"].values), dtype=torch.bool)
        return value_metrics(part, mine, dataclasses.replace(HERE, rank=rank, mesh=RankMesh(dp_shard=3), gather=gather))

    for rank in range(3):
        metrics(rank, share)
    found = joined([metrics(rank, lambda _: shares) for rank in range(3)])
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name


# -------------------------------------------------------------------------------------------------- checkpoints


def saved(critic: Critic, folder: Path) -> None:
    def save_models(target: Path) -> None:
        (target / "weights").touch()
        critic.save_model(target / "critic")

    policy = {"exp_avg": {"weight": torch.arange(3.0)}, "of": "the policy"}
    write_checkpoint(folder, save_models, policy, {}, parts={"critic": critic.optimizer_state()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_critic_goes_on_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    config = config_of(dtype=dtype, lr_scheduler_type="linear")
    batch = critic_batch()
    policy = grpo_case.build_model(getattr(torch, dtype))
    critic = critic_of(policy, config)
    for _ in range(3):
        critic.update(batch, cut(2))
    saved(critic, tmp_path / "checkpoint-3")
    again = critic_of(policy, config)
    again.load(tmp_path / "checkpoint-3" / "critic")
    assert torch.equal(again.values(batch, cut(2)).values, critic.values(batch, cut(2)).values)
    results = [its.update(batch, cut(4)).result() for its in (critic, again)]
    assert results[0] == results[1]
    pairs = zip(critic.model.module.parameters(), again.model.module.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_checkpoint_holds_a_critic_that_transformers_reads_and_a_run_can_start_from(tmp_path: Path) -> None:
    critic = critic_of(grpo_case.build_model())
    for _ in range(2):
        critic.update(critic_batch(), EVERYTHING)
    folder = tmp_path / "checkpoint-2"
    saved(critic, folder)
    policy = read_optimizer_into(folder, {"exp_avg": {"weight": torch.zeros(3)}})
    assert policy["of"] == "the policy" and policy["exp_avg"]["weight"].tolist() == [0, 1, 2]
    assert (folder / "critic" / OPTIMIZER_FOLDER).is_dir() and not list(tmp_path.glob(".*"))
    mine = critic.model.module.state_dict()
    stored: Any = AutoModelForTokenClassification.from_pretrained(folder / "critic")
    started = critic_of(ModelRecipe.of_folder(str(folder / "critic")))
    for module in (stored, started.model.module):
        assert type(module) is Qwen2ForTokenClassification
        assert all(torch.equal(tensor, mine[name]) for name, tensor in module.state_dict().items())


def test_a_checkpoint_without_or_of_another_critic_is_refused(tmp_path: Path) -> None:
    critic = critic_of(grpo_case.build_model())
    write_checkpoint(tmp_path / "grpo", lambda folder: None, {}, {})
    with pytest.raises(CheckpointError, match="grpo/critic does not exist: the checkpoint is of a run without a cr"):
        critic.load(tmp_path / "grpo" / "critic")
    config = grpo_case.model_config()
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    saved(critic_of(type(grpo_case.build_model())(config)), tmp_path / "small")
    before = critic.model.module.state_dict()
    with pytest.raises(CheckpointError, match="missing keys, e.g. model.layers.1"):
        critic.load(tmp_path / "small" / "critic")
    assert all(torch.equal(before[name], tensor) for name, tensor in critic.model.module.state_dict().items())


# ------------------------------------------------------------------------------------------------------- models


def test_what_it_is_made_from(tmp_path: Path) -> None:
    policy = grpo_case.build_model()
    policy.save_pretrained(tmp_path)
    live, read = critic_of(policy), critic_of(ModelRecipe.of_folder(str(tmp_path)))
    theirs = read.model.module.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in live.model.module.state_dict().items())


def test_a_critic_must_take_the_policys_tokens() -> None:
    critic = critic_of(grpo_case.build_model())
    with pytest.raises(ModelError, match="tokens but the model embeds 24"):
        critic.check(build_tokenizer(), 20)
    tokenizer: Sequence[Any] = Tokens(range(24))
    critic.check(tokenizer, 64)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"critic takes at most 64 tokens \(the model has 64 positions\), .* take 65"):
        critic.check(tokenizer, 65)  # type: ignore[arg-type]


class Tokens(list[int]):
    """A tokenizer of so many tokens."""

    def __call__(self, text: str) -> None: ...

    def decode(self, ids: Any) -> None: ...


def test_a_critic_is_no_policy() -> None:
    module = value_model_of(grpo_case.build_model())
    with pytest.raises(ModelError, match="Qwen2ForTokenClassification has no linear output head"):
        build_model(module, config_of(), HERE, is_trained=True)


def test_a_critic_whose_first_step_has_no_reward_begins_at_the_mean_of_the_next(make_trainer) -> None:
    """Values of 0 before the first returns, and of 5 after them, which are all 5: the critic hardly learns here."""

    def later(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float | None]:
        return [None if trainer_state.global_step == 1 else 5.0] * len(completion_ids)

    trainer = make_trainer(
        reward_funcs=later,
        algorithm="ppo",
        beta=0.0,
        lam=1.0,
        critic_learning_rate=1e-9,
        max_reward_failure_share=1.0,
        max_steps=3,
    )
    values = [step.metrics.get("critic/value_mean") for step in trainer.steps()]
    assert values == [None, 0.0, pytest.approx(5.0, abs=1e-4)]
