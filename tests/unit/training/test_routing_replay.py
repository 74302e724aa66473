"""Routing replay in runs: what the engine records is what the routers choose, in every form of rollout, and the policy
computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import hybrid_rl
from hybrid_rl import Trainer
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.batch.rollout_files import load_rollout
from hybrid_rl.controller import RankContext
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import FinishedSample
from hybrid_rl.errors import ConfigError, DataError, ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.experts.routing import find_routers
from hybrid_rl.models.row import PackedRow
from hybrid_rl.rollout.sample_columns import columns_of
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.batch_plan import row_size
from hybrid_rl.workers.reference import Reference
from tests.support.agents import callers
from tests.support.plans import make_plan
from tests.support.tiny import VOCABULARY, build_tokenizer, spread, sums
from tests.unit.models.families import EXPERTS, HEADS, build, made
from tests.unit.training.grpo_step import case_config, plan_of, rolled_batch

NEXT_TO_NOTHING = 1e-20  # a learning rate that moves no weight in float32
CALLS: list[tuple[str, dict[str, Any]]] = [("add", {"a": 1, "b": 2}), ("add", {"a": 30, "b": 4})]
FORMS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "partial": {"rollout.partial": True, "oversample": 0},
    "a batch ahead": {"rollout.async_level": 1},
    "a small cache": {"kv_cache_memory_bytes": 3 * 16 * 2 * 2 * (8 + 16) * 4},
}


def policy(**changes: Any) -> PreTrainedModel:
    return build("qwen3-moe", vocab_size=len(VOCABULARY), **changes)


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: a number
        b: another
    """
    return a + b


def chosen_by(module: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    layers: list[torch.Tensor] = []
    handles = [
        router.register_forward_hook(lambda _, __, output: layers.append(output[2]))
        for router, _ in find_routers(module)
    ]
    with torch.no_grad():
        module(input_ids=token_ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(layers, dim=1)


def check(batch: Batch, module: PreTrainedModel) -> None:
    """Every token before the last of the policy has the experts that a plain forward of its sequence chooses."""
    columns = (batch[name] for name in ("prompt_ids", "completion_ids", "completion_mask", "routed_experts"))
    for prompt, completion, mask, recorded in zip(*columns, strict=True):
        token_ids = torch.cat([prompt, completion])
        last = len(prompt) + int(mask.nonzero().max()) if bool(mask.any()) else 0
        own = chosen_by(module, token_ids)
        assert torch.equal(recorded[:last].sort().values.long(), own[:last].sort().values)
        assert bool((recorded[last:] == -1).all())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_runs_record_what_routers_choose_and_compute_with_it(
    form: str, make_trainer: Callable[..., Trainer], records: Callable[..., list[dict[str, Any]]]
) -> None:
    keys = {
        "routing_replay": "rollout",
        "save_rollouts": True,
        "learning_rate": NEXT_TO_NOTHING,
        "max_completion_length": 12,
    }
    keys |= {"old_logprobs": "recompute", **FORMS[form]}
    trainer = make_trainer(policy(), spread, **keys)
    trainer.fit()
    for step in (1, 2):
        batch = load_rollout(trainer.run_folder / "rollouts", step)
        assert batch.num_samples == 8
        check(batch, policy())
    for line in records(trainer)[1:]:
        assert line["routing/unrecorded_share"] == 0 and line["routing/changed_share"] == 0
        assert line["mismatch/kl"] < 1e-6


@pytest.mark.slow
def test_turns_of_agents_have_the_experts_of_the_whole_conversation(
    make_trainer: Callable[..., Trainer], records: Callable[..., list[dict[str, Any]]]
) -> None:
    tokenizer = callers.build_tokenizer(CALLS)
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "tie_word_embeddings": False}
    modules = [build("qwen3-moe", **settings) for _ in range(2)]
    for module in modules:
        callers.steer(module, tokenizer, CALLS, {"k": 0.5})
    keys = {
        "routing_replay": "rollout",
        "save_rollouts": True,
        "learning_rate": NEXT_TO_NOTHING,
        "max_completion_length": 120,
    }
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("k", "kk", "kkk", "kk")]
    trainer = make_trainer(modules[0], spread, rows, tokenizer=tokenizer, tools=[add], num_generations=4, **keys)
    trainer.fit()
    batch = load_rollout(trainer.run_folder / "rollouts", 1)
    assert max(len(turn) for turn in batch["completion_mask"]) > 20 and not batch["completion_mask"].values.all()
    check(batch, modules[1])
    assert all(line["routing/changed_share"] == 0 for line in records(trainer)[1:])


@pytest.mark.slow
def test_saved_rollouts_replay_their_experts(make_trainer: Callable[..., Trainer], tmp_path: Any) -> None:
    keys = {"routing_replay": "rollout", "old_logprobs": "recompute", "run_name": "made"}
    trainer = make_trainer(policy(), spread, save_rollouts=True, **keys)
    results = [trainer.step() for _ in range(2)]
    keys["run_name"] = "again"
    path = str(trainer.run_folder / "rollouts")
    again = make_trainer(policy(), spread, mode="train", rollouts_path=path, **keys)
    replayed = [again.step() for _ in range(2)]
    assert [result.metrics["loss"] for result in replayed] == [result.metrics["loss"] for result in results]
    other = hybrid_rl.replay(trainer.run_folder, 1, policy(), spread, sums(12), tokenizer=build_tokenizer())
    assert other.metrics["loss"] == results[0].metrics["loss"]
    assert other.metrics["routing/changed_share"] == results[0].metrics["routing/changed_share"]
    plain = make_trainer(policy(), spread, save_rollouts=True, run_name="plain")
    plain.step()
    keys["run_name"] = "refused"
    refused = make_trainer(
        policy(), spread, mode="train", rollouts_path=str(plain.run_folder / "rollouts"), max_steps=1, **keys
    )
    with pytest.raises(DataError, match="has no record of experts, which routing_replay=rollout repeats"):
        refused.step()


def actor_of(replay: str, **keys: Any) -> Actor:
    """An actor of a mixture over the recorded batch."""
    settings = {**EXPERTS, **HEADS, "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    module = made("Qwen3MoeConfig", settings, attention="eager")
    config = case_config(routing_replay=replay, old_logprobs="recompute", learning_rate=1e-2, **keys)
    return Actor(CausalLM(module), config, RankContext(), num_optimizer_steps=1)


def other_experts(batch: Batch) -> Jagged:
    """Experts by a token and its place, so that what samples share has the same."""
    rows = []
    for prompt, completion in zip(batch["prompt_ids"], batch["completion_ids"], strict=True):
        ids = torch.cat([prompt, completion])
        first = (ids + torch.arange(len(ids))) % 4
        second = (first + 1 + ids % 3) % 4
        pair = torch.stack([first, second], dim=1)
        row = torch.stack([pair, pair.flip(0)], dim=1).to(torch.int16)
        row[:, 1] = pair.to(torch.int16)
        row[-1] = -1
        rows.append(row)
    return Jagged.from_rows(rows)


@pytest.mark.parametrize("cap", [10_000, 40])
def test_updates_use_the_recorded_experts_however_they_are_cut(cap: int) -> None:
    """The reference: the update of one micro-batch per sample."""
    parameters = []
    for tokens in (cap, 1):
        actor = actor_of("rollout")
        batch = rolled_batch()
        batch = batch.with_columns(routed_experts=other_experts(batch))
        plan = plan_of(batch, tokens) if tokens > 1 else [[[row] for row in range(batch.num_samples)]]
        batch = batch.with_columns(**actor.columns(batch, plan))
        is_forced = batch["routed_experts"].values >= 0
        replayed = batch["replayed_experts"].values
        assert torch.equal(replayed[is_forced], batch["routed_experts"].values[is_forced])
        assert bool((replayed >= 0).all())
        metrics = actor.update(batch, plan, 0).result()
        assert 0.3 < metrics["routing/changed_share"] < 1
        parameters.append(torch.cat([p.detach().flatten() for p in actor.model.module.parameters()]))
    torch.testing.assert_close(parameters[0], parameters[1], rtol=0, atol=2e-5)


def test_scoring_records_what_the_update_repeats() -> None:
    actor, batch = actor_of("scoring"), rolled_batch()
    plan = plan_of(batch, 40)
    columns = actor.columns(batch, plan)
    with torch.no_grad():
        for router, _ in find_routers(actor.model.module):
            router.weight.neg_()  # as if an update had turned them round
    batch = batch.with_columns(**columns)
    metrics = actor.update(batch, plan, 0).result()
    assert metrics["routing/changed_share"] > 0.5
    free = actor_of("off")
    assert "replayed_experts" not in free.columns(rolled_batch(), plan)


def test_the_reference_follows_the_policy_and_a_teacher_does_not() -> None:
    """With equal weights the KL is 0 to the bit, whatever was recorded."""
    actor, batch = actor_of("rollout"), rolled_batch()
    batch = batch.with_columns(routed_experts=other_experts(batch))
    plan = plan_of(batch, 40)
    reference = Reference(actor.model.module, case_config(), RankContext())
    first = reference.logprobs(batch, plan)
    batch = batch.with_columns(**actor.columns(batch, plan))
    assert torch.equal(first.values, batch["old_logprobs"].values)
    assert torch.equal(reference.logprobs(batch, plan).values, batch["old_logprobs"].values)
    assert not torch.equal(reference.logprobs(batch, plan, is_teacher=True).values, batch["old_logprobs"].values)
    settings = {**EXPERTS, **HEADS, "num_experts_per_tok": 1, "vocab_size": 32, "num_hidden_layers": 2}
    settings |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    for other in (made("Qwen3MoeConfig", settings, attention="eager"), build("qwen2", vocab_size=32)):
        own = Reference(other, case_config(), RankContext())
        free = own.logprobs(batch, plan, is_teacher=True)
        assert torch.equal(own.logprobs(batch, plan).values, free.values)


def test_no_micro_batch_is_over_the_cap_if_records_of_a_prompt_differ() -> None:
    """A prompt stands once for each different record of it."""
    prompts = Jagged.from_rows([[5] * 40] * 8, torch.int64)
    completions = Jagged.from_rows([[6, 7 + number] for number in range(8)], torch.int64)
    experts = torch.zeros(8, 42, 1, 2, dtype=torch.int16)
    experts[:, 3] = torch.arange(8)[:, None, None] // 4  # two computations of the prompt
    column = Jagged(experts.flatten(0, 1), torch.arange(0, 8 * 42 + 1, 42))
    batch = Batch(
        {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "group": torch.zeros(8, dtype=torch.int64),
            "routed_experts": column,
        }
    )
    assert row_size(batch, range(8)) == 2 * 40 + 8 * 2 and row_size(batch.without("routed_experts"), range(8)) == 56
    for cap, sizes in ((96, [8]), (60, [4, 4])):
        (mini,) = make_plan(batch, tokens_per_micro_batch=cap, seed=0)
        assert [len(rows) for rows in mini] == sizes
        for rows in mini:
            part = batch.select(rows)
            row = PackedRow.of(*(part[name] for name in ("prompt_ids", "completion_ids")), torch.device("cpu"), None)
            with_experts = PackedRow.of(
                part["prompt_ids"], part["completion_ids"], torch.device("cpu"), 2.0, part["routed_experts"]
            )
            assert row.layout.num_tokens <= with_experts.layout.num_tokens <= cap


def test_a_rank_without_samples_or_without_records_has_the_column_too() -> None:
    row = PromptRow(0, "ab", (4, 5), {})
    experts = np.zeros((4, 2, 2), dtype=np.int16)
    recorded = FinishedSample(0, [6, 1], [-0.1, -0.1], [0, 0], "stop", experts)
    failed = FinishedSample(1, [6], [0.0], [-1], "stop")
    parts = [
        Batch(columns_of([row] * len(samples), [0] * len(samples), samples, 1.0, (2, 2)))
        for samples in ([recorded], [], [failed])
    ]
    whole = Batch.concat(parts)
    assert [len(rows) for rows in whole["routed_experts"]] == [4, 3]
    assert bool((whole["routed_experts"][1] == -1).all()) and whole["routed_experts"].values.shape[1:] == (2, 2)
    assert "routed_experts" not in columns_of([row], [0], [recorded], 1.0)


def test_a_record_of_another_model_and_a_dense_model_are_refused() -> None:
    actor, batch = actor_of("rollout"), rolled_batch()
    plan = plan_of(batch, 40)
    with pytest.raises(DataError, match="needs the column routed_experts"):
        actor.columns(batch, plan)
    experts = other_experts(batch)
    other = batch.with_columns(routed_experts=experts.with_values(experts.values[:, :1]))
    with pytest.raises(DataError, match=r"has \[1, 2\] experts \[layers, K\] for each token, and the model chooses"):
        actor.columns(other, plan)
    with pytest.raises(DataError, match="not as long as prompt_ids and completion_ids together"):
        batch.with_columns(routed_experts=Jagged(experts.values[:3], torch.tensor([0, *[3] * batch.num_samples])))
    config = case_config(routing_replay="scoring", old_logprobs="recompute")
    with pytest.raises(ModelError, match="has no routers that can be read"):
        Actor(CausalLM(build("qwen2")), config, RankContext(), num_optimizer_steps=1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"routing_replay": "rollout", "torch_compile": True}, "compiled blocks hide them"),
        ({"routing_replay": "rollout", "engine": "hf"}, "which rollout.engine=hf does not record"),
        ({"routing_replay": "scoring", "old_logprobs": "detach"}, "old_logprobs=detach has no such pass"),
        ({"routing_replay": "scoring", "old_logprobs": "rollout"}, "old_logprobs=rollout has no such pass"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        case_config(**keys)


def test_scoring_needs_a_pass_before_the_update() -> None:
    assert case_config(routing_replay="scoring").algorithm.old_logprobs == "recompute"
    assert case_config(routing_replay="rollout").algorithm.old_logprobs == "detach"
