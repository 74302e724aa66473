"""Ranks that only generate beside ranks that train: the same run as one step off in turn, with newer weights in the
middle of completions, and with failures on either side."""

import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl import Trainer
from hybrid_rl.batch import BatchRef
from hybrid_rl.errors import WorkerError
from tests.distributed.conftest import is_running, wait_until
from tests.support.engines.replayed import gaps_by_version
from tests.support.tiny import build_model, build_tokenizer, sums

pytestmark = pytest.mark.slow  # processes are started

KEYS = {
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 40,
    "stop_token_ids": [6, 7],  # so that completions end by chance, after some 14 tokens
    "learning_rate": 2e-2,
    "max_steps": 4,
    "save_steps": 1,
    "rollout_ranks": 1,
}


def long(completion_ids, trainer_state, **_):
    """Depends on the step that it is told."""
    return [len(ids) + trainer_state.global_step / 64 for ids in completion_ids]


@pytest.fixture
def make(tmp_path: Path, forked_ranks):
    made = []

    def make(reward=long, folder="runs", **keys) -> Trainer:
        rows = [row | {"number": number} for number, row in enumerate(sums(60))]
        keys = {**KEYS, "output_dir": str(tmp_path / folder), "run_name": "run", **keys}
        keys = {name: value for name, value in keys.items() if value is not None}
        made.append(Trainer(build_model(), reward, rows, tokenizer=build_tokenizer(), **keys))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def interrupt_twice(trainer: Trainer) -> None:
    """Press Ctrl-C in a step before its update, and in the next try after its update has begun."""
    score, update = trainer.policy.advantages, trainer.policy.update
    for name, method in (("advantages", score), ("update", update)):
        setattr(
            trainer.policy, name, lambda *given, method=method: (os.kill(os.getpid(), signal.SIGINT), method(*given))[1]
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.step()
        setattr(trainer.policy, name, method)


def loaded(batch):
    return batch.load() if isinstance(batch, BatchRef) else batch


def numbers(batch) -> list[int]:
    """The rows of the dataset of the groups of a batch, one for each."""
    return [row["number"] for row in batch["row"][:: KEYS["num_generations"]]]


def weights_at(trainer: Trainer, step: int) -> dict[str, torch.Tensor]:
    """The weights of a policy version, as the checkpoint of that step has them."""
    if not step:
        return build_model().state_dict()
    return AutoModelForCausalLM.from_pretrained(trainer.run_folder / f"checkpoint-{step}").state_dict()


def weights_folders() -> set[Path]:
    """Those whose lock this process holds."""
    paths = {Path(file.path).parent for file in psutil.Process().open_files()}
    return {path for path in paths if path.match("/dev/shm/hrl-weights-*")}


def test_the_run_is_that_of_one_process_one_step_off(make, tmp_path):
    """Samples, versions, rewards and losses; resumed, and with Ctrl-C before and after the weights change, no prompt is
    lost or used twice."""
    one = make(folder="one", **{"rollout_ranks": None, "rollout.async_level": 1})
    results = [one.step() for _ in range(4)]
    apart = make()
    (weights_folder,) = weights_folders()
    again = [apart.step() for _ in range(4)]
    steps = [loaded(result.batch) for result in again]
    for ours, theirs, batch in zip(again, results, steps, strict=True):
        for name in ("completion_ids", "policy_version"):
            assert torch.equal(batch[name].values, theirs.batch[name].values)
        assert torch.equal(batch["group"], theirs.batch["group"]) and torch.equal(
            batch["rewards"], theirs.batch["rewards"]
        )
        assert torch.allclose(batch["rollout_logprobs"].values, theirs.batch["rollout_logprobs"].values, atol=2e-6)
        for name in ("loss", "grad_norm", "staleness/mean_age", "buffer/held_tokens"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], abs=1e-5)
        assert 0 < ours.metrics["ranks/generating_busy"] <= 1 and 0 < ours.metrics["ranks/training_busy"] <= 1
    weights = {step: weights_at(apart, step) for step in range(4)}
    for version, batch in enumerate(steps):
        gap, _, ages = gaps_by_version(build_model(), weights, batch, version)
        assert gap < 1e-5 and list(ages) == [min(version, 1)]
    apart.close()
    assert not weights_folder.exists()
    kept = shutil.copytree(apart.run_folder / "checkpoint-2", tmp_path / "kept" / "checkpoint-2")
    resumed = make(folder="again", resume=str(apart.run_folder / "checkpoint-2"))
    third = loaded(resumed.step().batch)
    in_turn = make(folder="turn", resume=str(kept), rollout_ranks=None, **{"rollout.async_level": 1})
    for name in ("completion_ids", "policy_version", "rollout_logprobs"):
        assert torch.equal(third[name].values, steps[2][name].values)
    assert torch.equal(in_turn.step().batch["completion_ids"].values, third["completion_ids"].values)
    interrupt_twice(resumed)
    assert resumed.global_step == 4
    resumed.max_steps = 5
    fifth = loaded(resumed.step().batch)
    held = resumed.generating.held_prompts(5).values()
    used = [number for batch in (*steps, fifth) for number in numbers(batch)]
    used += [prompt.row.columns["number"] for prompt in held]
    assert len(set(used)) == len(used) == 6 * 4


def parity(completion_ids, **_):
    return [float(len(ids) % 2) for ids in completion_ids]


def test_groups_that_teach_nothing_are_replaced_before_the_next_batch_is_begun(make):
    """Half of all groups of two have equal rewards. Those in their place are made by the newest weights."""
    trainer, used, ages = make(parity, max_refills=30), list[int](), list[int]()
    for step in range(4):
        result = trainer.step()
        batch = loaded(result.batch)
        rewards = torch.as_tensor(batch["rewards"]).view(4, 2)
        assert (rewards.sum(1) == 1).all() and result.metrics["buffer/held_groups"] == 4
        used += numbers(batch)
        ages += [step - min(row.tolist()) for row in batch["policy_version"]]
    held = [prompt.row.columns["number"] for prompt in trainer.generating.held_prompts(4).values()]
    assert len({*used, *held}) == len(used) + len(held) and {*ages} == {0, 1}


class WaitsForWeights:
    """A reward that, on the rank that generates, delays the second look of each call for newer weights until they are
    there, so that they come in the middle of completions."""

    __name__ = "waits"

    def __call__(self, completion_ids, trainer_state, **_):
        from hybrid_rl.workers import apart

        if not getattr(apart, "is_patched", False):
            apart.is_patched, folder_of, looks = True, apart.version_folder, Counter()

            def waiting(root: Path, version: int) -> Path:
                path = folder_of(root, version)
                looks[version] += 1
                if looks[version] == 2:
                    wait_until(path.is_dir, "newer weights never come")
                return path

            apart.version_folder = waiting
        return long(completion_ids, trainer_state)


def test_newer_weights_are_taken_in_the_middle_of_completions(make):
    """By two training ranks to one that generates: every token has the version of the weights that made it, and the
    run can be replayed, though it depends on time which weights made what."""
    partial = {"rollout.partial": True, "oversample": 2}
    trainer = make(WaitsForWeights(), num_ranks=2, save_rollouts=True, **partial)
    results = [trainer.step() for _ in range(4)]
    steps = [loaded(result.batch) for result in results]
    weights, ages = {step: weights_at(trainer, step) for step in range(4)}, Counter[int]()
    for version, batch in enumerate(steps):
        gap, _, found = gaps_by_version(build_model(), weights, batch, version)
        assert gap < 1e-5
        if version:  # no look is delayed before the first step
            ages.update(found)
    mixed = sum(len(set(row.tolist())) > 1 for batch in steps for row in batch["policy_version"])
    assert mixed > 4 and ages[0] > 40 and max(ages) <= trainer.config.buffer.max_staleness
    used = [number for batch in steps for number in numbers(batch)]
    assert len(set(used)) == len(used)
    assert len(trainer.generate(["3+4=", "5+6="], max_completion_length=4)) == 2
    saved = {"mode": "train", "rollouts_path": str(trainer.run_folder / "rollouts"), "rollout_ranks": None}
    replayed = make(folder="replay", num_ranks=2, **partial, **saved, **{"rollout.async_level": 1})
    for result in results:
        again = replayed.step().metrics
        assert (again["loss"], again["grad_norm"]) == (result.metrics["loss"], result.metrics["grad_norm"])
    last = weights_at(trainer, 4)
    assert not torch.equal(last["lm_head.weight"], weights[3]["lm_head.weight"])
    assert all(torch.equal(tensor, last[name]) for name, tensor in weights_at(replayed, 4).items())


@pytest.mark.sweep
def test_of_a_policy_with_adapters_only_those_travel(make):
    """The run is that of one process, and every handoff moves the bytes of the adapters and of buffers."""
    keys = {"lora.r": 2, "lora_alpha": 8, "handoff.probe_steps": 1, "save_steps": None}
    one = make(folder="one", **keys, **{"rollout_ranks": None, "rollout.async_level": 1})
    apart = make(**keys)
    for _ in range(3):
        theirs, ours = one.step(), apart.step()
        batch = loaded(ours.batch)
        for name in ("completion_ids", "policy_version"):
            assert torch.equal(batch[name].values, theirs.batch[name].values)
        assert torch.allclose(batch["rollout_logprobs"].values, theirs.batch["rollout_logprobs"].values, atol=2e-6)
        assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"], abs=1e-5)
        assert ours.metrics["handoff/probe_gap"] < 1e-5
    adapters = sum(p.nbytes for p in one.module.parameters() if p.requires_grad)
    buffers = sum(buffer.nbytes for buffer in one.module.buffers())
    assert ours.metrics["handoff/bytes"] == adapters + buffers


def sabotage(side: str):
    """A reward that breaks a side in the second step: the ranks that generate die, or the update of the others
    raises."""

    class Sabotage:
        __name__ = "sabotage"

        def __reduce__(self):
            return _broken, (side,)

        def __call__(self, completion_ids, trainer_state, **_):
            return long(completion_ids, trainer_state)

    return Sabotage()


def _broken(side: str):
    """Made on the ranks of both sides."""
    from hybrid_rl.rollout.completion_stream import CompletionStream
    from hybrid_rl.training.actor import Actor

    go_ahead, update = CompletionStream.go_ahead, Actor.update

    def dies(self, tasks, call, *given):
        if call.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return go_ahead(self, tasks, call, *given)

    def raises(self, batch, plan, version):
        if version == 1:
            raise ZeroDivisionError("sabotaged update")
        return update(self, batch, plan, version)

    if side == "rollout":
        CompletionStream.go_ahead = dies
    else:
        Actor.update = raises
    return sabotage(side)


@pytest.mark.parametrize(
    ("side", "says"),
    [
        ("rollout", ["rollout rank 0 of 1", "go_ahead()", "is gone", "rollout-rank0.log"]),
        pytest.param(
            "policy",
            ["policy rank 0 of 1", "update()", "ZeroDivisionError: sabotaged update"],
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_a_side_that_fails_ends_the_run_with_its_name(make, side, says):
    children = ranks()
    trainer = make(sabotage(side))
    assert len(ranks()) == len(children) + 2
    (weights_folder,) = weights_folders()
    trainer.step()
    with pytest.raises(WorkerError) as raised:
        trainer.step()
    for part in (*says, "training step 2"):
        assert part in str(raised.value), str(raised.value)
    trainer.close()
    wait_until(lambda: ranks() == children, "ranks are left")
    assert not weights_folder.exists()


def ranks() -> set[int]:
    """Processes of ranks below this one."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if is_running(process.pid) and any("RankServer" in part for part in process.cmdline()[:1])
    }
