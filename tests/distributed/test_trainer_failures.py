"""A Trainer whose ranks fail in the middle of a step: one error that says where, and nothing left running."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from hybrid_rl import Trainer
from hybrid_rl.errors import DivergedError, RewardError, WorkerError
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.run import restarts
from tests.distributed.conftest import DEADLINE_SECONDS, is_running, wait_until
from tests.support.inside.training import after_gradients
from tests.support.tiny import build_model, build_tokenizer, spread, sums

pytestmark = pytest.mark.slow


@pytest.fixture
def make(tmp_path: Path, forked_ranks):
    made = []

    def trainer(reward, **keys) -> Trainer:
        keys = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "max_steps": 3, **keys}
        keys = {"output_dir": str(tmp_path / "runs"), "num_ranks": 2, **keys}
        made.append(Trainer(build_model(), reward, sums(12), tokenizer=build_tokenizer(), **keys))
        return made[-1]

    yield trainer
    for one in made:
        one.close()


def rank_pids() -> list[int]:
    """Processes of ranks below this one."""
    return [
        p.pid
        for p in psutil.Process().children(recursive=True)
        if is_running(p.pid) and any("RankServer" in part for part in p.cmdline()[:1])
    ]


def sabotage(how: str):
    """A reward that, on rank 1 in step 2, replaces the actor's update by one that fails. Rewards run on the ranks."""

    def reward(completion_ids, trainer_state, **columns):
        import torch.distributed as dist

        from hybrid_rl.training.actor import Actor

        def raises(self, batch, plan, version):
            raise ZeroDivisionError("sabotaged update")

        def dies(self, batch, plan, version):
            os.kill(os.getpid(), signal.SIGKILL)

        def hangs(self, batch, plan, version):
            time.sleep(3600)

        def exhausts(self, batch, plan, version):
            import torch

            return torch.empty(1 << 60)

        if trainer_state.global_step == 2 and dist.get_rank() == 1:
            Actor.update = {"raises": raises, "dies": dies, "hangs": hangs, "exhausts": exhausts}[how]
        return spread(completion_ids)

    return reward


@pytest.mark.parametrize(
    ("how", "says"),
    [
        pytest.param(
            "raises",
            ["ZeroDivisionError: sabotaged update", 'raise ZeroDivisionError("sabotaged update")'],
            marks=pytest.mark.sweep,
        ),
        pytest.param("dies", ["process ended", "is gone"], marks=pytest.mark.sweep),
        ("hangs", ["watchdog_seconds", "time.sleep(3600)"]),
        pytest.param("exhausts", ["memory"], marks=pytest.mark.sweep),
    ],
)
def test_a_rank_that_fails_in_an_update_whose_others_wait_for_it(make, how: str, says: list[str]):
    trainer = make(sabotage(how), ray={"watchdog_seconds": 10.0 if how == "hangs" else 600.0})
    with pytest.raises(WorkerError) as raised:
        for _ in trainer.steps():
            begin = time.monotonic()
            assert len(rank_pids()) == 2
    assert time.monotonic() - begin < DEADLINE_SECONDS
    message = str(raised.value)
    for part in ("policy rank 1 of 2", "update()", "training step 2", "policy-rank1.log", *says):
        assert part in message, message
    # The weights may be between two steps: nothing continues from there.
    with pytest.raises(Exception, match="make a new Trainer"):
        trainer.step()
    assert [line["step"] for line in read_jsonl(trainer.run_folder / "metrics.jsonl")] == [1]
    trainer.close()
    wait_until(lambda: not rank_pids(), "ranks are left")


@pytest.mark.parametrize(
    ("culprit", "place"),
    [(1, "in a collective"), pytest.param(1, "between two", marks=pytest.mark.sweep), (0, "between two")],
)
def test_a_rank_that_is_killed_while_a_checkpoint_is_written(make, culprit: int, place: str):
    """The one that is gone is named, not the other one and a full disk; nothing goes on without it, and what the leader
    had begun is not left behind."""

    def reward(completion_ids, trainer_state, **columns):
        import torch.distributed as dist

        from hybrid_rl.training.trained import TrainedModel
        from hybrid_rl.workers.roles import Roles

        def dies(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        if trainer_state.global_step == 2 and dist.get_rank() == culprit:
            if place == "in a collective":
                TrainedModel.save_model = dies
            else:
                Roles.save_models = dies
        return spread(completion_ids)

    trainer = make(reward, save_steps=1)
    trainer.step()
    with pytest.raises(WorkerError) as raised:
        trainer.step()
    for part in (f"policy rank {culprit} of 2 failed in save()", "process ended", "is gone"):
        assert part in str(raised.value)
    assert "Free space" not in str(raised.value).split("after that also")[0]
    with pytest.raises(WorkerError, match=f"have ended after: policy rank {culprit}"):
        trainer.step()
    assert [line["step"] for line in read_jsonl(trainer.run_folder / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in trainer.run_folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert [path.name for path in trainer.run_folder.glob(".checkpoint-*")] == []


def test_a_reward_that_fails_on_one_rank_ends_the_step_and_not_the_trainer(make, tmp_path):
    def reward(completion_ids, trainer_state, log_metric, **columns):
        import torch.distributed as dist

        log_metric("rank", dist.get_rank())
        if dist.get_rank() == 1 and Path(os.environ["CLOSED"]).exists():
            raise LookupError("no verifier today")
        return spread(completion_ids)

    closed = tmp_path / "closed"
    trainer = make(reward, ray={"env_vars": {"CLOSED": str(closed)}})
    assert trainer.step().metrics["rank"] == 0.5  # the mean over both ranks
    closed.touch()
    with pytest.raises(RewardError, match="4 of 8 samples .* have no reward") as raised:
        trainer.step()
    assert "no verifier today" in str(raised.value)
    closed.unlink()
    assert trainer.step().metrics["rewards/num_failed"] == 0 and trainer.global_step == 2


def test_ctrl_c_in_a_rollout_takes_the_step_back_and_fit_goes_on(make, tmp_path):
    """Sent while rank 1 waits for a slow reward."""

    def reward(completion_ids, trainer_state, **columns):
        import torch.distributed as dist

        slow = Path(os.environ["SLOW"])
        if dist.get_rank() == 1 and trainer_state.global_step == 2 and slow.exists():
            slow.unlink()
            time.sleep(8)
        return spread(completion_ids)

    slow = tmp_path / "slow"
    slow.touch()
    undisturbed = make(spread).fit()
    trainer = make(reward, ray={"env_vars": {"SLOW": str(slow)}})

    def press() -> None:
        wait_until(lambda: not slow.exists(), "the slow reward is never called")
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    thread.join()
    assert time.monotonic() - begin < DEADLINE_SECONDS
    assert trainer.global_step == 1
    resumed = trainer.fit()
    for name in ("loss", "grad_norm", "reward"):
        assert resumed[name] == pytest.approx(undisturbed[name], rel=1e-6, abs=1e-9)


# ----------------------------------------------------------------------------------------------------------- restarts

CLOCK = ("timing/", "perf/", "memory/", "step_time", "handoff/", "restarts")


def mortal(completion_ids, trainer_state, **columns):
    """Kills rank 1 in step 4, once."""
    import torch.distributed as dist

    mark = Path(os.environ["MARK"])
    if dist.get_rank() == 1 and trainer_state.global_step == 4 and mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return spread(completion_ids)


def test_a_lost_rank_costs_the_steps_since_the_last_checkpoint(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.0)
    keys = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2}
    straight = make(spread, **keys)
    straight.fit()
    mark = tmp_path / "mark"
    mark.touch()
    trainer = make(mortal, max_restarts=1, **keys, ray={"env_vars": {"MARK": str(mark)}})
    assert trainer.fit()["restarts"] == 1.0 and not mark.exists()
    told = next(text for text in caplog.messages if "Restart 1 of at most 1" in text)
    assert "after training step 3: policy rank 1 of 2 failed in rollout()" in told and "checkpoint-2" in told
    records = [
        [
            {name: value for name, value in line.items() if not name.startswith((*CLOCK, "rewards/"))}
            for line in read_jsonl(one.run_folder / "metrics.jsonl")
        ]
        for one in (straight, trainer)
    ]
    assert [line["step"] for line in records[1]] == [0, 1, 2, 3, 4] and records[0] == records[1]
    weights = [(one.run_folder / "checkpoint-4" / "model.safetensors").read_bytes() for one in (straight, trainer)]
    assert weights[0] == weights[1]


def test_gradients_that_are_no_numbers_on_one_rank_end_the_run_with_their_name(make):
    """All ranks skip the update alike; which parameter it was one of them knows."""

    def reward(completion_ids, **columns):
        import torch.distributed as dist

        def poison(targets):
            targets["model.norm.weight"].grad.fill_(float("nan"))

        if dist.get_rank() == 1:
            after_gradients(poison)
        return spread(completion_ids)

    trainer = make(reward, max_steps=9, save_steps=9)
    with pytest.raises(DivergedError, match="has not changed in the last 3 .* first that of model.norm.weight"):
        trainer.fit()
    assert trainer.global_step == 3 and (trainer.run_folder / "checkpoint-3").is_dir()
