"""Asynchronous forms against the synchronous run: with nothing ahead each of them is that run, and with batches ahead
each is the same run again and after a resume."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_rl import Trainer
from hybrid_rl.batch import BatchRef
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.agents import callers
from tests.support.engines.replayed import gaps_by_version
from tests.support.kills.killed import is_among, without_chance
from tests.support.tiny import build_model, build_tokenizer, sums

pytestmark = pytest.mark.slow  # processes are started

NUM_STEPS = 2
KEYS: dict[str, Any] = {
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 40,
    "stop_token_ids": [6, 7],  # so that completions end by chance, after some 14 tokens
    "learning_rate": 2e-2,
    "save_steps": 1,
    "run_name": "run",
    "log_completions": 0,
}
FORMS: dict[str, dict[str, Any]] = {
    "partial": {"rollout.partial": True, "oversample": 0},
    "in turn": {"rollout.async_level": 0},
    "ranks apart": {"rollout.async_level": 0},  # and as many ranks that only generate as train
}
OF_FORMS = ("buffer/*", "ranks/*", "handoff/*")  # metrics that only some forms have, or of other ranks
# Which turns of agents are decoded together depends on time, and with it the last bits of the engine's logprobs.
OF_LAST_BITS = ("mismatch/*", "sampling/*", "agents/prefix_hit_share", "engine/*")
AHEAD = 2
Run = tuple[list[dict[str, Any]], Mapping[str, Tensor]]


def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Half of all groups of two have equal rewards."""
    return [float(len(ids) % 2) for ids in completion_ids]


def length(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """Depends on the step that it is told."""
    return [len(ids) + trainer_state.global_step / 64 for ids in completion_ids]


def trainer_of(kind: str, folder: Path, **keys: Any) -> Trainer:
    """A Trainer of completions, of those with dynamic sampling, or of agents whose tool answers at once."""
    keys = {"max_steps": NUM_STEPS, "output_dir": str(folder), **keys}
    if kind == "agents":
        model, tokenizer = callers.build_policy(callers.SUM_CALLS, favour={"k": 8.0})
        keys = {**KEYS, **callers.SUM_KEYS, "stop_token_ids": [], **keys}
        return Trainer(model, length, callers.SUM_ROWS, tokenizer=tokenizer, environment_factory=callers.Sums, **keys)
    reward = parity if kind == "dynamic sampling" else length
    keys = {**KEYS, **({"max_refills": 30} if kind == "dynamic sampling" else {}), **keys}
    return Trainer(build_model(), reward, sums(200), tokenizer=build_tokenizer(), **keys)


def weights_at(folder: Path, step: int) -> Mapping[str, Tensor]:
    """The weights after a step, as its checkpoint has them."""
    return AutoModelForCausalLM.from_pretrained(folder / "run" / f"checkpoint-{step}").state_dict()


def run_of(kind: str, folder: Path, **keys: Any) -> Run:
    """What a run logs of each of its steps but what chance decides, and its last weights."""
    with trainer_of(kind, folder, **keys) as trainer:
        trainer.fit()
        lines = read_jsonl(trainer.run_folder / "metrics.jsonl")
        return [without_chance(line) for line in lines if line["step"]], weights_at(folder, trainer.global_step)


def assert_same(run: Run, other: Run, others: Sequence[str]) -> None:
    """To the bit. others: metrics that are not compared."""
    (lines, weights), (other_lines, other_weights) = run, other
    assert len(lines) == len(other_lines) > 1
    for line, known in zip(lines, other_lines, strict=True):
        names = {name for name in {*line, *known} if not is_among(name, others)}
        assert {name: line.get(name) for name in names} == {name: known.get(name) for name in names}
        assert {"loss", "grad_norm", "reward", "entropy", "completions/mean_length"} <= names
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Run]:
    """The synchronous run of a kind on so many ranks, made once."""
    runs = dict[tuple[str, int], Run]()

    def run(kind: str, num_ranks: int) -> Run:
        if (kind, num_ranks) not in runs:
            runs[kind, num_ranks] = run_of(kind, tmp_path_factory.mktemp("synchronous"), num_ranks=num_ranks)
        return runs[kind, num_ranks]

    return run


@pytest.mark.parametrize(
    ("kind", "form", "num_ranks"),
    [
        ("completions", "partial", 1),
        ("completions", "in turn", 1),
        ("completions", "ranks apart", 1),
        ("dynamic sampling", "partial", 1),
        ("agents", "partial", 1),
        ("completions", "partial", 2),
        pytest.param("agents", "partial", 2, marks=pytest.mark.sweep),
        pytest.param("agents", "ranks apart", 1, marks=pytest.mark.sweep),
        pytest.param("completions", "in turn", 2, marks=pytest.mark.sweep),
        pytest.param("completions", "ranks apart", 2, marks=pytest.mark.sweep),
        pytest.param("completions", "partial", 4, marks=pytest.mark.sweep),
        pytest.param("dynamic sampling", "partial", 4, marks=pytest.mark.sweep),
    ],
)
def test_with_nothing_ahead_every_form_is_the_synchronous_run(
    kind: str, form: str, num_ranks: int, synchronous: Callable[[str, int], Run], tmp_path: Path, forked_ranks: Any
) -> None:
    """To the bit: losses, all metrics that are no times, and weights."""
    keys = FORMS[form] | {"num_ranks": num_ranks} | ({"rollout_ranks": num_ranks} if form == "ranks apart" else {})
    others = (*OF_FORMS, *OF_LAST_BITS) if kind == "agents" else OF_FORMS
    assert_same(run_of(kind, tmp_path, **keys), synchronous(kind, num_ranks), others)


@pytest.mark.parametrize(
    "apart",
    [pytest.param({}, id="in turn"), pytest.param({"rollout_ranks": 1}, id="ranks apart", marks=pytest.mark.sweep)],
)
def test_batches_ahead_are_the_same_again_and_after_a_resume(
    apart: dict[str, int], tmp_path: Path, forked_ranks: Any
) -> None:
    """To the bit. Once the first batches are trained on all tokens are as old as batches are ahead, and made by the
    weights of their versions. As many batches are held after every step."""
    keys = {**apart, "rollout.async_level": AHEAD, "max_steps": 4, "resume": "auto"}
    with trainer_of("completions", tmp_path / "whole", **keys) as whole:
        results = [whole.step() for _ in range(4)]
        batches = [one.batch.load() if isinstance(one.batch, BatchRef) else one.batch for one in results]
        lines = [without_chance(line) for line in read_jsonl(whole.run_folder / "metrics.jsonl") if line["step"]]
    weights = {step: weights_at(tmp_path / "whole", step) if step else build_model().state_dict() for step in range(5)}
    for version, (result, batch) in enumerate(zip(results, batches, strict=True)):
        gap, _, ages = gaps_by_version(build_model(), weights, batch, version)
        assert gap < 1e-5 and [*ages] == [min(version, AHEAD)]
        assert result.metrics["buffer/held_groups"] == AHEAD * KEYS["prompts_per_step"]
        assert ("ranks/generating_busy" in result.metrics) == bool(apart)
    groups = [group for batch in batches for group in batch["group"].unique().tolist()]
    assert len({*groups}) == len(groups) == 4 * KEYS["prompts_per_step"]
    with trainer_of("completions", tmp_path / "again", **keys) as broken:
        broken.step(), broken.step()
    others = ("ranks/*", "handoff/probe*")  # a resumed run begins with a probe
    assert_same(run_of("completions", tmp_path / "again", **keys), (lines, weights[4]), others)


def test_rewards_have_as_many_generations_as_batches_are_ahead(tmp_path: Path) -> None:
    """Those of the third batch, which is generated in the first step, come when the second is over."""
    is_due, too_late = threading.Event(), list[int]()

    async def late(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        deadline = time.monotonic() + 60
        while number[0] // KEYS["prompts_per_step"] == AHEAD and not is_due.is_set():
            if time.monotonic() > deadline:
                too_late.append(number[0])
                break
            await asyncio.sleep(0.001)
        return [float(len(ids)) for ids in completion_ids]

    rows = [row | {"number": number} for number, row in enumerate(sums(40))]
    keys = {**KEYS, "max_steps": 3, "rollout.async_level": AHEAD, "data.shuffle": False, "output_dir": str(tmp_path)}
    with Trainer(build_model(), late, rows, tokenizer=build_tokenizer(), **keys) as trainer:
        trainer.step(), trainer.step()
        is_due.set()
        metrics = trainer.step().metrics
    assert not too_late, "a step waits for rewards that it does not need"
    assert metrics["rewards/num_failed"] == 0 and metrics["staleness/mean_age"] == AHEAD
