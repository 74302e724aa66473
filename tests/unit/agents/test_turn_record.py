"""Conversations go on from their last finished turn: after a kill, and on another environment if theirs is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.agents import EnvironmentLostError, repeatable
from hybrid_rl.agents.calls import Caller, CallTimeoutError, Outcome
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.environments import says_lost
from hybrid_rl.agents.schemas import tool_schema
from hybrid_rl.agents.tools import Functions
from hybrid_rl.agents.turn_record import RecordedError, TurnRecord, begin_record, delete_before
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import AgentError
from tests.support.agents.callers import build_policy
from tests.support.agents.keyed_tools import die_once, keyed, keyed_later

CALLS = [("move", {"by": 5}), ("move", {"by": 1}), ("note", {"text": "a"})]
ROWS = [{"prompt": [{"role": "user", "content": str(start)}], "start": start} for start in range(7)]
KEYS: dict[str, Any] = {
    "max_steps": 2,
    "prompts_per_step": 3,
    "num_generations": 2,
    "max_completion_length": 120,
    "max_prompt_length": 100,
    "max_tool_calling_iterations": 3,
    "learning_rate": 1e-3,
}
QUESTION = SamplingParams(9, seed=5)
COMPLETION = Completion([3, 4], [-0.1, -1 / 3], [2, 3], "stop")


# ---------------------------------------------------------------------------------------------------- what is recorded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    begin_record(tmp_path / "turns", {"seed": 1}, goes_on=False)
    return tmp_path / "turns"


def test_what_has_ended_is_there_after_a_kill(folder: Path) -> None:
    """As another rank wrote it, whose last line was cut off."""
    first = TurnRecord(folder, rank=1)
    record = first.of("train/4/0/1", 4)
    record.note_answer(QUESTION, COMPLETION)
    call = record.call(0, "move", {"by": 5})
    record.note_call(call.key, Outcome([{"type": "text", "text": "6"}]), {"place": 6}, is_acted=True)
    late = record.call(1, "move", {"by": 1})
    record.note_call(late.key, Outcome(None, CallTimeoutError("no answer")), None)
    wrong = record.call(2, "note", {})
    record.note_call(wrong.key, Outcome(None, ValueError("no text")), None)
    with (folder / "step-4" / "rank-1.jsonl").open("a") as file:
        file.write('["train/4/0/1","answer')
    again = TurnRecord(folder, rank=0).of("train/4/0/1", 4)
    assert again.key == record.key and again.has_acted
    assert again.answer(QUESTION, version=3) == COMPLETION
    assert again.answer(SamplingParams(9, seed=6), version=3) is None
    assert again.answer(SamplingParams(8, seed=5), version=3) is None
    assert again.call(0, "move", {"by": 5}) == (call.key, ([{"type": "text", "text": "6"}], None), {"place": 6})
    for number, name, arguments, kind, text in (
        (1, "move", {"by": 1}, CallTimeoutError, "no answer"),
        (2, "note", {}, RecordedError, "no text"),
    ):
        outcome = again.call(number, name, arguments).outcome
        assert outcome is not None and type(outcome.error) is kind and str(outcome.error) == text
    assert again.call(0, "move", {"by": 6}).outcome is None and again.call(1, "move", {"by": 5}).outcome is None
    # The life that was cut off goes on in its file.
    mended = TurnRecord(folder, rank=1).of("train/4/0/1", 4)
    mended.note_answer(SamplingParams(1), COMPLETION)
    assert TurnRecord(folder).of("train/4/0/1", 4).answer(SamplingParams(1), 3) == COMPLETION
    assert TurnRecord(folder).of("train/4/0/0", 4).answer(QUESTION, 3) is None


def test_answers_of_weights_that_are_not_there_yet_are_not_used(folder: Path) -> None:
    record = TurnRecord(folder).of("train/4/0/1", 4)
    record.note_answer(QUESTION, COMPLETION)
    assert record.answer(QUESTION, version=2) is None and record.answer(QUESTION, version=3) == COMPLETION


def test_a_record_is_used_only_by_a_run_that_makes_the_same_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, config = tmp_path / "turns", {"seed": 1, "num_ranks": 1, "checkpoints": {"async_save": True}}

    def run(**changes: Any) -> str:
        goes_on = changes.pop("goes_on", True)
        begin_record(folder, {**config, **changes}, goes_on=goes_on)
        return str(json.loads((folder / "record.json").read_text())["run"])

    first = run()
    TurnRecord(folder).of("train/1/0/0", 1).note_answer(QUESTION, COMPLETION)
    assert run(num_ranks=2, checkpoints={"async_save": False}) == first
    assert TurnRecord(folder).of("train/1/0/0", 1).answer(QUESTION, 3) == COMPLETION
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        assert run(seed=2) != first
    assert "not used, because seed changed" in caplog.text
    assert TurnRecord(folder).of("train/1/0/0", 1).answer(QUESTION, 3) is None
    second = run(seed=2)
    assert run(seed=2, goes_on=False) != second


def test_steps_before_a_checkpoint_are_deleted(folder: Path) -> None:
    record = TurnRecord(folder)
    for step in (3, 4, 5):
        record.of(f"train/{step}/0/0", step).note_answer(QUESTION, COMPLETION)
    delete_before(folder, 5)
    assert [path.name for path in folder.glob("step-*")] == ["step-5"]
    record.forget({5})
    assert record.of("train/4/0/0", 4).answer(QUESTION, 9) is None
    assert record.of("train/5/0/0", 5).answer(QUESTION, 9) == COMPLETION


def test_a_disk_that_is_full_costs_the_record_and_not_the_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "step-4").write_text("a file where the folder is to be")
    record = TurnRecord(folder).of("train/4/0/0", 4)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        record.note_answer(QUESTION, COMPLETION)
        record.note_answer(SamplingParams(1), COMPLETION)
    assert caplog.text.count("finished turns cannot be written") == 1
    assert record.answer(QUESTION, 9) == COMPLETION


def test_a_state_that_json_cannot_hold_ends_the_run() -> None:
    with pytest.raises(AgentError, match=r"state\(\) of an environment returned \{'place': \{1\}\}"):
        TurnRecord().of("x", None).note_beginning("text", {"place": {1}})


# ------------------------------------------------------------------------------------------------------- keys of calls


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_tool_gets_the_key_of_its_call_which_the_policy_does_not_see(num_processes: int) -> None:
    assert [*tool_schema(keyed)["function"]["parameters"]["properties"]] == ["number"]
    caller = Caller(timeout_seconds=30)
    functions, record = Functions([keyed, keyed_later], caller, num_processes), TurnRecord().of("t", None)

    def contents(*calls: tuple[str, int]) -> list[str]:
        asked = [{"type": "function", "function": {"name": name, "arguments": {"number": n}}} for name, n in calls]
        messages = asyncio.run(functions.tools.answer(asked, Counter(), record))
        return [message["content"] for message in messages]

    first = contents(("keyed", 1), ("keyed_later", 1), ("keyed", 1))
    keys = [content.split()[1] for content in first]
    assert len({*keys}) == 3 and all(key.startswith(record.key) for key in keys)
    assert contents(("keyed", 1), ("keyed_later", 1), ("keyed", 1)) == first
    assert contents(("keyed", 2))[0].split()[1] not in keys
    refused = contents(("keyed", 3))
    assert len(refused) == 1
    functions.close()
    caller.close()


def test_a_call_whose_process_is_killed_is_made_again_with_its_key(tmp_path: Path) -> None:
    caller = Caller(timeout_seconds=60)
    functions = Functions([die_once], caller, 1)
    asked = [{"type": "function", "function": {"name": "die_once", "arguments": {"path": str(tmp_path / "calls")}}}]
    messages = asyncio.run(functions.tools.answer(asked, Counter()))
    assert messages[0]["content"] == "done"
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) == 2 and len({*calls}) == 1
    functions.close()
    caller.close()


# --------------------------------------------------------------------------------------------------- lost environments


class Line:
    """A place on a line, whose process may end. lost_at: numbers of the calls, of all together, that find it gone."""

    lost_at: frozenset[int] = frozenset()
    error: Exception = ConnectionResetError("the server is gone")
    num_calls = num_used_again = 0
    moves: list[int] = []
    restored: list[int] = []
    rewarded_at: list[int] = []

    is_gone = False

    def reset(self, start: int, **row: Any) -> str:
        self.place = start
        Line.num_used_again += self.is_gone
        return f" at {start}"

    def move(self, by: int) -> str:
        """Move.

        Args:
            by: how far
        """
        self._look()
        Line.moves.append(by)
        self.place += by
        return str(self.place)

    def _look(self) -> None:
        Line.num_calls += 1
        if Line.num_calls in Line.lost_at:
            self.is_gone = True
            raise Line.error

    def get_reward(self) -> float:
        Line.rewarded_at.append(Line.num_calls + 1)
        self._look()
        return self.place / 10


class WithState(Line):
    def state(self) -> dict[str, int]:
        return {"place": self.place}

    def restore(self, state: dict[str, int]) -> None:
        Line.restored.append(state["place"])
        self.place = state["place"]


@repeatable
class Repeatable(Line):
    pass


notes: list[str] = []


def note(text: str) -> str:
    """Note.

    Args:
        text: what
    """
    notes.append(text)
    return "noted"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Line.lost_at, Line.num_calls, Line.num_used_again = frozenset(), 0, 0
    Line.moves, Line.restored, Line.rewarded_at = [], [], []
    Line.error = ConnectionResetError("the server is gone")
    notes.clear()


def run(make_trainer: Callable[..., Trainer], kind: type[Line], lost_at: set[int], **keys: Any) -> Trainer:
    _fresh.__wrapped__()  # type: ignore[attr-defined]
    Line.lost_at = frozenset(lost_at)
    model, tokenizer = build_policy(CALLS)
    own = {"tools": [note], "environment_factory": kind, "max_open_trajectories": 1}
    trainer = make_trainer(model, None, ROWS, tokenizer=tokenizer, **(KEYS | own | keys))
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def total(records: Any, trainer: Trainer, name: str) -> float:
    return sum(line.get(name, 0.0) for line in records(trainer))


@pytest.mark.parametrize("kind", [WithState, Repeatable, Line])
@pytest.mark.parametrize("error", [ConnectionResetError("gone"), EnvironmentLostError("gone")])
def test_a_trajectory_goes_on_if_its_environment_is_lost(
    kind: type[Line], error: Exception, make_trainer: Callable[..., Trainer], records: Any
) -> None:
    """At any of its calls, that for the reward included: the run is the undisturbed one, with no turn made twice."""
    whole = run(make_trainer, kind, set())
    num_calls, num_notes, num_moves = Line.num_calls, len(notes), len(Line.moves)
    first = next(at for at in Line.rewarded_at if at > 5)
    lost_at = {first, *range(first + 17, 2 * num_calls, 16)}
    Line.error = error
    other = run(make_trainer, kind, lost_at, max_environments=2)
    assert all(map(torch.equal, weights(whole), weights(other)))
    assert total(records, other, "agents/lost_environments") == sum(at <= Line.num_calls for at in lost_at) >= 2
    assert total(records, other, "agents/recorded_turns") > 0
    assert Line.num_used_again == 0
    assert len(notes) == num_notes  # a tool that is no part of the environment is never called again
    assert total(records, other, "rewards/num_failed") == 0
    again = len(Line.moves) - num_moves
    if kind is WithState:
        assert again == 0 and len(Line.restored) > 0 and not total(records, other, "agents/repeated_calls")
    else:
        assert again == total(records, other, "agents/repeated_calls") > 0


def test_clients_whose_server_is_gone_say_that_it_is_lost() -> None:
    """As those libraries that are installed raise it when nobody listens."""
    import aiohttp
    import requests

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"

    async def ask() -> None:
        async with aiohttp.ClientSession() as session, session.get(url):
            pass

    for call in (lambda: requests.get(url), lambda: urllib.request.urlopen(url), lambda: asyncio.run(ask())):
        with pytest.raises(Exception) as raised:
            call()
        assert says_lost(raised.value)
    for other in (ValueError("no"), TimeoutError(), URLError("unknown url type"), OSError(28, "disk full"), None):
        assert not says_lost(other)


def test_one_that_is_lost_again_and_again_has_no_reward(make_trainer: Callable[..., Trainer], records: Any) -> None:
    trainer = run(make_trainer, WithState, {1, 2, 3}, max_reward_failure_share=1.0)
    lines = [json.loads(line) for line in (trainer.run_folder / "samples.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["reward"] is None]
    assert len(failed) == 1 and "the server is gone" in failed[0]["error"]
    assert total(records, trainer, "agents/lost_environments") == 3
    assert failed[0]["advantage"] in (0.0, None)


def test_one_that_cannot_be_restored_has_no_reward(make_trainer: Callable[..., Trainer], records: Any) -> None:
    class Broken(WithState):
        def restore(self, state: dict[str, int]) -> None:
            raise ValueError("no such place")

    run(make_trainer, Broken, set())
    last_call = next(at for at in Line.rewarded_at if at > 5)
    trainer = run(make_trainer, Broken, {last_call}, max_reward_failure_share=1.0)
    lines = [json.loads(line) for line in (trainer.run_folder / "samples.jsonl").read_text().splitlines()]
    (failed,) = (line for line in lines if line["reward"] is None)
    assert "restore() of the environment Broken failed: ValueError: no such place" in json.dumps(failed)


@pytest.mark.parametrize("is_restorable", [True, False])
def test_a_run_that_ended_before_its_rewards_goes_on_with_them(
    is_restorable: bool, make_trainer: Callable[..., Trainer], records: Any
) -> None:
    """All turns and calls have ended; reward functions look at environments, which are in the state that they had."""

    class Silent(WithState):
        get_reward = None  # type: ignore[assignment]

        def restore(self, state: dict[str, int]) -> None:
            if not is_restorable:
                raise ValueError("no such place")
            super().restore(state)

    places: list[int] = []

    def by_place(environments: list[Any], **_: Any) -> list[float]:
        places.extend(environment.place for environment in environments)
        if len(places) == 6:  # all samples of the step
            os.kill(os.getpid(), signal.SIGINT)
        return [environment.place / 10 for environment in environments]

    def trainer() -> Trainer:
        model, tokenizer = build_policy(CALLS)
        own = {"environment_factory": Silent, "tools": [note], "run_name": "run", "resume": "auto", "save_steps": 9}
        keys = {**KEYS, "max_steps": 1, "max_reward_failure_share": 1.0}
        return make_trainer(model, by_place, ROWS, tokenizer=tokenizer, **keys, **own)

    with trainer() as first, pytest.raises(KeyboardInterrupt):
        first.fit()
    num_moves, num_notes = len(Line.moves), len(notes)
    with trainer() as second:
        second.fit()
    assert (len(Line.moves), len(notes)) == (num_moves, num_notes) and num_moves > 2
    lines = [json.loads(line) for line in (second.run_folder / "samples.jsonl").read_text().splitlines()]
    if is_restorable:
        assert total(records, second, "agents/recorded_calls") >= num_moves + num_notes
        assert sorted(places[:6]) == sorted(places[6:]) == sorted(round(10 * line["reward"]) for line in lines)
    else:
        acted = [line for line in lines if any(turn["origin"] == "environment" for turn in line["tokens"])]
        assert acted and all(line["reward"] is None and "no such place" in line["error"] for line in acted)


def test_one_that_may_not_act_again_is_dropped(make_trainer: Callable[..., Trainer], records: Any) -> None:
    whole = run(make_trainer, Line, set())
    trainer = run(make_trainer, Line, {3}, max_reward_failure_share=1.0, unrestorable="drop")
    assert [total(records, trainer, f"agents/{name}") for name in ("dropped", "lost_environments")] == [1, 1]
    lines = [json.loads(line) for line in (trainer.run_folder / "samples.jsonl").read_text().splitlines()]
    (dropped,) = (line for line in lines if line["reward"] is None)
    assert "unrestorable=drop" in dropped["error"]
    for kind in (WithState, Repeatable):
        kept = run(make_trainer, kind, {3}, unrestorable="drop")
        assert total(records, kept, "agents/dropped") == 0
        assert all(map(torch.equal, weights(whole), weights(kept)))


def test_calls_that_are_marked_repeatable_and_differ_are_told(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    @repeatable
    class Random(Line):
        def move(self, by: int) -> str:
            """Move.

            Args:
                by: how far
            """
            self._look()
            Line.moves.append(by)
            return str(len(Line.moves))

    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        run(make_trainer, Random, {3, 20, 37})
    assert "although it is marked repeatable" in caplog.text
