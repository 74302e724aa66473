"""The hybrid worker: what it adds to a batch, what it leaves in memory, and that it refuses a stale engine."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_rl.batch.rollout_files import load_rollout
from hybrid_rl.errors import DataError, EngineStateError, HandoffError, ModelError
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.models import CausalLM
from hybrid_rl.rollout.sample_records import sample_records
from hybrid_rl.training import actor
from hybrid_rl.workers.handoff_probe import causes
from hybrid_rl.workers.rollout_side import ColocatedSide
from tests.support.inside.engines import compute_with, model_of, set_model
from tests.support.inside.training import before_steps
from tests.support.inside.workers import actor_of, engine_of, gather_with, optimizer_of, side_of
from tests.support.tiny import build_tokenizer, ids_of, spread
from tests.unit.rollout.agents import own_logprobs


@pytest.mark.parametrize("mode", ["detach", "recompute", "rollout"])
def test_score_adds_what_the_mode_needs(make_bench, mode: str) -> None:
    bench = make_bench(old_logprobs=mode, temperature=0.8)
    batch = bench.rollout()
    scored = bench.group.score(batch, 1)
    assert set(scored) - set(batch) == (set() if mode == "detach" else {"old_logprobs"})
    expected = own_logprobs(bench.module, batch, 0.8).float()
    torch.testing.assert_close(batch["rollout_logprobs"].values, expected, rtol=0, atol=1e-5)
    if mode == "recompute":
        torch.testing.assert_close(scored["old_logprobs"].values, expected, rtol=0, atol=1e-5)
    if mode == "rollout":
        assert torch.equal(scored["old_logprobs"].values, batch["rollout_logprobs"].values)


def test_advantages_are_spread_over_the_tokens_of_a_sample(make_bench) -> None:
    batch = make_bench().rollout()
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, math.nan, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    batch = batch.without("rewards").with_columns(rewards=rewards)
    found = make_bench().group.advantages(batch)["advantages"]
    # one success in three: mean 1/3, sample deviation sqrt(1/3); one of two after a failure: mean 1/2, sqrt(1/2)
    third, half = math.sqrt(1 / 3) + 1e-4, math.sqrt(1 / 2) + 1e-4
    expected = [2 / 3 / third, -1 / 3 / third, -1 / 3 / third, 0, 0, 0, -0.5 / half, 0, 0.5 / half, 0, 0, 0]
    for row, value in zip(found, expected, strict=True):
        torch.testing.assert_close(row, torch.full_like(row, value), rtol=0, atol=1e-6)


def test_rollout_mode_compares_with_the_engine(make_bench) -> None:
    metrics = make_bench(old_logprobs="rollout").train()
    assert 0 < abs(metrics["ratio/max"] - 1) < 1e-4


@pytest.mark.parametrize(
    ("keys", "ratios"),
    [
        ({}, "one"),
        ({"old_logprobs": "recompute"}, "one"),
        ({"num_iterations": 3}, "others"),
        ({"old_logprobs": "rollout", "prompts_per_mini_batch": 2}, "others"),
    ],
)
def test_the_first_ratio_is_exactly_one_and_mismatch_is_measured_before_the_first_update(
    make_bench, keys: dict[str, Any], ratios: str
) -> None:
    """Two fp32 implementations of one forward pass; after an update of 1e-2 the gap would be a thousandfold."""
    metrics = make_bench(**keys).train()
    if ratios == "one":
        assert metrics["ratio/min"] == metrics["ratio/max"] == metrics["ratio/mean"] == 1.0
        assert metrics["clip_ratio/region_mean"] == 0.0
    else:
        assert metrics["ratio/min"] < 1.0 < metrics["ratio/max"]
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["mismatch/prob_difference_mean"] < 1e-5
    assert abs(metrics["mismatch/kl"]) < 1e-8


def test_reference_stays_at_the_initial_weights(make_bench) -> None:
    bench = make_bench(beta=0.1, temperature=0.8)
    initial = copy.deepcopy(bench.module)
    first = bench.train(1)
    second = bench.train(2)
    assert first["kl"] == pytest.approx(0.0, abs=1e-10)
    assert second["kl"] > 1e-4
    batch = bench.group.score(bench.rollout(3), 3)
    expected = own_logprobs(initial, batch, 0.8).float()
    torch.testing.assert_close(batch["ref_logprobs"].values, expected, rtol=0, atol=1e-5)
    moved = own_logprobs(bench.module, batch, 0.8).float()
    assert (moved - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("keys", "per_step"),
    [
        ({}, 1),
        ({"prompts_per_mini_batch": 2}, 2),
        ({"prompts_per_mini_batch": 1, "num_iterations": 3}, 12),
    ],
)
def test_take_steps_and_schedule(make_bench, keys: dict, per_step: int) -> None:
    """The schedule runs over the real number of optimizer steps: linear to 0 at the end of the last training step."""
    bench = make_bench(lr_scheduler_type="linear", num_training_steps=2, **keys)
    optimizer = optimizer_of(bench.worker)
    assert optimizer.learning_rate == pytest.approx(1e-2)
    rates = [1e-2 * (1 - index / (2 * per_step)) for index in range(2 * per_step)]
    first, second = bench.train(1), bench.train(2)
    assert first["learning_rate"] == pytest.approx(sum(rates[:per_step]) / per_step)
    assert second["learning_rate"] == pytest.approx(sum(rates[per_step:]) / per_step)
    assert optimizer.learning_rate == pytest.approx(0.0, abs=1e-12)
    assert {int(step) for step in optimizer.state_dict()["step"].values()} == {2 * per_step}


def test_cache_sleeps_while_the_actor_trains(make_bench) -> None:
    bench = make_bench()
    assert "kv_cache" in bench.awake
    full = bench.memory()["memory/kv_cache_bytes"]
    assert full > 0
    batch = bench.prepared()
    bench.group.update(batch, 1)
    assert "kv_cache" not in bench.awake
    metrics = bench.memory()
    assert metrics["memory/kv_cache_bytes"] == 0
    assert metrics["memory/actor_bytes"] == 4 * sum(p.numel() for p in bench.module.parameters())
    bench.group.update_weights(1)
    assert "kv_cache" in bench.awake
    assert bench.memory()["memory/kv_cache_bytes"] == full


def test_handoff_says_version_bytes_and_gap(make_bench) -> None:
    bench = make_bench()
    bench.train(1)
    assert bench.handoff["handoff/version"] == 1.0
    assert bench.handoff["handoff/bytes"] == 0.0
    assert 0 <= bench.handoff["handoff/probe_gap"] < 1e-4


@pytest.mark.parametrize(("every", "probed"), [(0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 1, 2, 4]), (3, [0, 1, 2, 3])])
def test_probe_cadence(make_bench, every: int, probed: list[int]) -> None:
    bench = make_bench(handoff={"probe_steps": every})
    handoffs = [bench.handoff]
    for version in (1, 2, 3, 4):
        handoffs.append(bench.publish(version))
    assert [version for version, found in enumerate(handoffs) if "handoff/probe_gap" in found] == probed


def test_what_was_lost_or_failed_is_probed_again(make_bench, monkeypatch) -> None:
    """Three handoffs in a row, whatever the schedule says; so is a rank's that failed alone."""
    bench = make_bench(handoff={"probe_steps": 100})

    def unreadable(_version: int) -> None:
        raise RuntimeError("unreadable")

    def probed(*versions: int) -> list[bool]:
        return ["handoff/probe_gap" in bench.publish(version) for version in versions]

    assert probed(1, 2, 3, 4) == [True, True, False, False]
    (again,) = bench.group.update_weights_again(4)
    assert "handoff/probe_gap" in again
    assert probed(5, 6, 7) == [True, True, False]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="unreadable"):
        patch.setattr(side_of(bench.worker), "verify", unreadable)
        bench.publish(8)
    assert probed(8, 9, 10, 11) == [True, True, True, False]
    others = [True, False]
    gather_with(monkeypatch, bench.worker, lambda mine: [mine, others.pop(0)])
    assert probed(12, 13) == [True, False]


def test_every_handoff_ends_with_letting_go_of_addresses(make_bench, monkeypatch) -> None:
    bench = make_bench()
    side, calls = side_of(bench.worker), []

    def wrong(_version: int) -> None:
        calls.append("verify")
        raise HandoffError("other bytes")

    monkeypatch.setattr(side, "let_go", lambda: calls.append(bench.awake))
    bench.publish(1)
    assert calls == [{"actor", "optimizer"}]  # before the cache wakes for the probe
    monkeypatch.setattr(side, "verify", wrong)
    with pytest.raises(HandoffError, match="other bytes"):
        bench.publish(2)
    assert calls[1:] == ["verify", {"actor", "optimizer"}]


def test_engine_with_other_modules_is_refused(make_bench) -> None:
    bench = make_bench()
    set_model(engine_of(bench.worker), CausalLM(copy.deepcopy(bench.module)))
    with pytest.raises(HandoffError, match="replaced"):
        bench.group.update_weights(1)


def test_probe_catches_an_engine_that_computes_something_else(make_bench, monkeypatch) -> None:
    """Every tensor is shared and yet the answer is stale: what a derived tensor that was not refreshed would do."""
    bench = make_bench()
    engine = engine_of(bench.worker)
    logits = model_of(engine).logits
    head = bench.module.lm_head.weight.detach().clone()

    class Stale:
        def __getattr__(self, name: str):
            return getattr(actor_of(bench.worker).model, name)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return logits(hidden) - hidden @ bench.module.lm_head.weight.T + hidden @ head.T

    compute_with(engine, Stale())
    bench.group.update_weights(1)
    with torch.no_grad():
        bench.module.lm_head.weight.normal_()
    why = "the engine computes this architecture differently .*; its weights are the trainer's own memory"
    with pytest.raises(HandoffError, match=rf"policy version 2.*logprobs of the probe prompt .*: {why}"):
        bench.group.update_weights(2)


def test_causes_of_a_gap_are_told_in_the_order_of_what_is_known() -> None:
    prove: Any = ColocatedSide.proof
    side, adopting = (
        SimpleNamespace(_config=SimpleNamespace(handoff=SimpleNamespace(adopt_weights=adopts)), _sends_adapters=False)
        for adopts in (False, True)
    )
    assert prove(side, {}) is None and prove(adopting, {}) == "its weights are the trainer's own memory"
    compared = prove(side, {"timing/verify": 0.1, "handoff/unproven_bytes": 0.0})
    assert compared.endswith("byte by byte in this handoff, and are equal")
    derived = prove(side, {"timing/verify": 0.1, "handoff/unproven_bytes": 640.0})
    assert derived == f"{compared}, but for 640 bytes that it derives from them, which may be stale"
    unknown, known = causes(0.5, None), causes(0.5, compared)
    assert unknown.startswith("the engine does not hold the trainer's weights (they were not compared in this handoff")
    assert "or it computes differently" in unknown and "verify_steps=1" in unknown
    assert known.startswith("the engine computes this architecture differently") and compared in known
    assert "does not hold" not in known
    for gap, proof in ((math.nan, None), (math.inf, compared)):
        assert causes(gap, proof) == "the weights, or numbers that one of them computes from them, are not finite"


def test_weights_that_are_not_finite_stop_the_run(make_bench) -> None:
    bench = make_bench()
    with torch.no_grad():
        bench.module.model.norm.weight[0] = math.nan
    with pytest.raises(ModelError, match="not finite"):
        bench.group.update_weights(1)


def test_rebound_storage_is_followed(make_bench) -> None:
    """`param.data = ...` moves the storage: the engine decodes from the same module and so follows."""
    bench = make_bench()
    for parameter in bench.module.parameters():
        parameter.data = parameter.data.clone() * 1.5
    assert bench.publish(1)["handoff/probe_gap"] < 1e-4


def test_update_that_broke_off_leaves_no_gradient_behind(make_bench, monkeypatch) -> None:
    """The third micro-batch runs out of memory; what the first two accumulated must not enter the next update."""
    broken, clean = make_bench(tokens_per_micro_batch=20), make_bench(tokens_per_micro_batch=20)
    batch = broken.prepared()
    calls, loss = [], actor.micro_batch_loss

    def out_of_memory(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return loss(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(actor, "micro_batch_loss", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            broken.group.update(batch, 1)
    assert all(parameter.grad is None for parameter in broken.module.parameters())  # others need their memory
    assert broken.update(batch) == clean.update(clean.prepared())


def test_stale_version_refuses_to_generate(make_bench) -> None:
    bench = make_bench()
    bench.publish(1)
    with pytest.raises(EngineStateError, match="version 1 but version 0"):
        bench.rollout()
    bench.version = 1
    assert bench.rollout()["policy_version"].values.unique().tolist() == [1]


def test_rollout_is_scored_by_the_worker(make_bench) -> None:
    """Prompts in, scored samples out: the text is what the tokenizer reads, the reward what the function says of it."""
    batch = make_bench().rollout()
    assert batch.num_samples == 12
    assert batch["rewards"].tolist() == spread([ids.tolist() for ids in batch["completion_ids"]])
    tokenizer = build_tokenizer()
    for ids, text in zip(batch["completion_ids"], batch["completion"], strict=True):
        assert text == tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    assert [prompt.tolist() for prompt in batch["prompt_ids"]] == [ids_of(text) for text in batch["prompt"]]


def test_mini_batches_are_those_that_the_driver_assigned(make_bench, monkeypatch) -> None:
    """Whole groups, in the order of the column, whatever the order of the samples."""
    bench = make_bench(prompts_per_mini_batch=1)
    batch = bench.prepared()
    seen = []

    def look(batch, micro_batches, *_, **__):
        seen.append(sorted(row for micro in micro_batches for row in micro))

    before_steps(actor_of(bench.worker), look)
    bench.update(batch)
    assert seen == [(batch["mini_batch"] == index).nonzero()[:, 0].tolist() for index in range(4)]
    assert all(len(set(batch["group"][rows].tolist())) == 1 for rows in seen)


def test_a_mini_batch_that_does_not_exist(make_bench) -> None:
    bench = make_bench(prompts_per_mini_batch=2)
    batch = bench.prepared()
    batch = batch.without("mini_batch").with_columns(mini_batch=batch["mini_batch"] + 1)
    with pytest.raises(DataError, match="is in mini-batch 2, but there are 2"):
        bench.update(batch)


# --------------------------------------------------------------------------------------------------- samples in files


def test_samples_of_a_step_are_logged_and_saved(make_bench, tmp_path) -> None:
    bench = make_bench()
    batch = bench.rollout()
    for step in (1, 2):
        bench.group.log_samples(batch.select([3, 1]), step, tmp_path, (0, 0))
    bench.group.save_rollout(batch, 7, tmp_path / "rollouts", must=True)
    assert bench.group.lost_samples() == []
    records = read_jsonl(tmp_path / "samples.jsonl")
    expected = [sample_records(step, batch.select([3, 1]), ["spread"], (0, 0)) for step in (1, 2)]
    tokens = [record.pop("token_values") for record in records]
    assert records == [record for step in expected for record in step]
    lengths = batch.select([3, 1])["completion_ids"].lengths.tolist()
    assert [len(one["text"]) for one in tokens] == [len(one["logprob"]) for one in tokens] == 2 * lengths
    saved = load_rollout(tmp_path / "rollouts", 7)
    assert set(saved) == set(batch)
    assert torch.equal(saved["completion_ids"].values, batch["completion_ids"].values)
    assert saved["prompt"] == batch["prompt"] and torch.equal(saved["rewards"], batch["rewards"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device of a full disk")
def test_samples_that_cannot_be_written_wait_and_are_named(make_bench, tmp_path) -> None:
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    bench = make_bench()
    bench.group.log_samples(bench.rollout(), 1, tmp_path, (0, 0))
    assert bench.group.lost_samples() == [tmp_path / "samples.jsonl"]
    (tmp_path / "samples.jsonl").unlink()
    assert bench.group.lost_samples() == []
    assert [record["step"] for record in read_jsonl(tmp_path / "samples.jsonl")] == [1] * 12


def test_non_finite_gradient_is_counted_and_leaves_the_weights(make_bench) -> None:
    bench = make_bench(num_iterations=2)
    before = copy.deepcopy(bench.module.state_dict())
    handle = bench.module.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * math.inf)
    metrics = bench.train(1)
    assert metrics["skipped_updates"] == 2.0  # both optimizer steps
    assert all(torch.equal(value, before[name]) for name, value in bench.module.state_dict().items())
    handle.remove()
    assert bench.train(2)["skipped_updates"] == 0.0
    assert not torch.equal(bench.module.lm_head.weight, before["lm_head.weight"])
