"""Conversations go on from their last finished turn: after a kill, and on another environment if theirs is lost."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import signal
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.agents import EnvironmentLostError, repeatable
from hybrid_rl.agents.calls import Caller, CallTimeoutError, Outcome
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.environments import Environment, EnvironmentKind, is_connection_error
from hybrid_rl.agents.schemas import tool_schema
from hybrid_rl.agents.tools import Functions, ToolSet
from hybrid_rl.agents.turn_record import RecordedError, TurnFiles, TurnRecord
from hybrid_rl.checkpoint.reading import STATE_FILE
from hybrid_rl.config import load_config
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import AgentError
from hybrid_rl.rollout import episodes
from hybrid_rl.run.turns_folder import RunTurns
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
def files(tmp_path: Path) -> TurnFiles:
    return TurnFiles(tmp_path, "run")


def test_experts_of_a_conversation_are_written_once(files: TurnFiles) -> None:
    """Each turn has those of all tokens so far; what changed since the last turn is written from there on."""
    record = TurnRecord(files).of("train/4/0/1", 4)
    numbers = np.random.default_rng(0)
    whole = numbers.integers(0, 512, (6000, 2, 4)).astype(np.int16)
    turns = [whole[:2000].copy(), whole[:4000].copy(), whole.copy(), whole[:50].copy()]
    turns[0][-1] = turns[1][-1] = -1
    turns[2][3000:] += 1
    for number, experts in enumerate(turns):
        record.note_answer(SamplingParams(9, seed=number), replace(COMPLETION, routed_experts=experts))
    record.note_answer(SamplingParams(9, seed=9), COMPLETION)
    (path,) = files.folder.glob("step-4/run-*-0.jsonl")
    assert path.stat().st_size < 1.1 * (4000 + 3000) * 16 * 4 / 3 + 2000
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0)):
        again = TurnRecord(files).of("train/4/0/1", 4)
        for number in order:
            answer = again.answer(SamplingParams(9, seed=number), 3)
            assert answer is not None and answer.routed_experts is not None
            assert answer.routed_experts.dtype == np.int16
            assert np.array_equal(answer.routed_experts, turns[number])
        plain = again.answer(SamplingParams(9, seed=9), 3)
        assert plain == COMPLETION and plain.routed_experts is None
    # Without an answer that later ones go on with, their experts are not known; their tokens are.
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]))
    cut = TurnRecord(files).of("train/4/0/1", 4)
    assert cut.answer(SamplingParams(9, seed=0), 3) is None
    assert cut.answer(SamplingParams(9, seed=1), 3) == COMPLETION
    assert all(cut.answer(SamplingParams(9, seed=number), 3).routed_experts is None for number in (1, 2))


def test_experts_of_conversations_in_turn_are_written_once_each(files: TurnFiles) -> None:
    record, numbers = TurnRecord(files).of("train/4/0/1", 4), np.random.default_rng(0)
    whole = [numbers.integers(0, 512, (2000, 2, 4)).astype(np.int16) for _ in range(2)]
    for turn in range(1, 21):
        for number, experts in enumerate(whole):
            made = replace(COMPLETION, routed_experts=experts[: 100 * turn])
            record.note_answer(SamplingParams(9, seed=100 * number + turn), made)
    (path,) = files.folder.glob("step-4/run-*-0.jsonl")
    assert path.stat().st_size < 1.5 * 2 * 2000 * 16 * 4 / 3


def test_an_answer_that_is_made_again_does_not_refer_to_itself(files: TurnFiles) -> None:
    turns = TurnRecord(files)
    record = turns.of("train/4/0/1", 4)
    experts = np.arange(80, dtype=np.int16).reshape(10, 2, 4)
    for _ in range(2):
        record.note_answer(QUESTION, replace(COMPLETION, routed_experts=experts))
    again = TurnRecord(files).of("train/4/0/1", 4).answer(QUESTION, 3)
    assert again is not None and np.array_equal(again.routed_experts, experts)


def test_what_has_ended_is_there_after_a_kill(files: TurnFiles) -> None:
    """As another rank wrote it, whose last line was cut off."""
    record = TurnRecord(files, rank=1).of("train/4/0/1", 4)
    record.note_answer(QUESTION, COMPLETION)
    call = record.call("asked", 0, "move", {"by": 5})
    record.note_call(call.key, Outcome([{"type": "text", "text": "6"}]), {"place": 6}, is_acted=True)
    late = record.call("asked", 1, "move", {"by": 1})
    record.note_call(late.key, Outcome(None, CallTimeoutError("no answer")))
    wrong = record.call("asked", 2, "note", {})
    record.note_call(wrong.key, Outcome(None, ValueError("no text")))
    (path,) = files.folder.glob("step-4/run-*-1.jsonl")
    with path.open("a") as file:
        file.write('[1,"train/4/0/1","answer')
    again = TurnRecord(files, rank=0).of("train/4/0/1", 4)
    assert again.key == record.key and again.has_acted and again.oldest_version == 2
    assert again.answer(QUESTION, version=3) == COMPLETION
    assert again.answer(SamplingParams(9, seed=6), version=3) is None
    assert again.answer(SamplingParams(8, seed=5), version=3) is None
    assert (again.num_answered, again.num_ended) == (1, 1) and record.num_answered == 0
    known = again.call("asked", 0, "move", {"by": 5})
    assert known == (call.key, ([{"type": "text", "text": "6"}], None), {"place": 6}, True, 0)
    for place, name, arguments, kind, text in (
        (1, "move", {"by": 1}, CallTimeoutError, "no answer"),
        (2, "note", {}, RecordedError, "no text"),
    ):
        known = again.call("asked", place, name, arguments)
        assert known.outcome is not None and type(known.outcome.error) is kind and str(known.outcome.error) == text
        assert not known.has_state
    # The same call after another conversation, at another place, or with other arguments is another one.
    others = [("other", 0, "move", {"by": 5}), ("asked", 1, "move", {"by": 5}), ("asked", 0, "move", {"by": 6})]
    assert [again.call(*other).outcome for other in others] == [None] * 3
    # The life that was cut off goes on in its file.
    mended = TurnRecord(files, rank=1).of("train/4/0/1", 4)
    mended.note_answer(SamplingParams(1), COMPLETION)
    assert TurnRecord(files).of("train/4/0/1", 4).answer(SamplingParams(1), 3) == COMPLETION
    assert TurnRecord(files).of("train/4/0/0", 4).answer(QUESTION, 3) is None


def test_numbers_come_back_to_the_bit(files: TurnFiles) -> None:
    """float32 and float64, and ids of any size."""
    for logprobs in ([-0.1, -1 / 3], torch.tensor([-0.1, -1 / 3]).tolist()):
        completion = Completion([3, 2**40], logprobs, [2, 2], "length")
        TurnRecord(files).of("x", 1).note_answer(QUESTION, completion)
        assert TurnRecord(files).of("x", 1).answer(QUESTION, 2) == completion


def test_answers_of_weights_that_are_not_there_yet_are_not_used(files: TurnFiles) -> None:
    record = TurnRecord(files).of("train/4/0/1", 4)
    record.note_answer(QUESTION, COMPLETION)
    assert record.answer(QUESTION, version=2) is None and record.answer(QUESTION, version=3) == COMPLETION


def test_turns_are_used_only_under_a_configuration_that_makes_the_same(files: TurnFiles) -> None:
    config = load_config({})[0]

    def changed(**sections: Any) -> Any:
        parts = {
            name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
            for name, value in sections.items()
        }
        return replace(config, **parts)

    record = TurnRecord(files, config=config)
    record.of("train/1/0/0", 1).note_answer(QUESTION, COMPLETION)
    same = [changed(num_ranks=2, log_completions=3), changed(optimizer={"tokens_per_micro_batch": 7})]
    same += [changed(rollout={"kv_cache_memory_bytes": 9}), changed(agents={"tool_processes": 2})]
    for other in same:
        assert TurnRecord(files, config=other).of("train/1/0/0", 1).answer(QUESTION, 3) == COMPLETION
    for other in (changed(seed=2), changed(max_steps=9), changed(optimizer={"learning_rate": 0.5})):
        assert TurnRecord(files, config=other).of("train/1/0/0", 1).answer(QUESTION, 3) is None
        record.reconfigure(other)
        assert record.of("train/1/0/0", 1).answer(QUESTION, 3) is None
        record.reconfigure(config)
        assert record.of("train/1/0/0", 1).answer(QUESTION, 3) == COMPLETION


def test_a_disk_that_is_full_costs_the_record_and_not_the_run(
    files: TurnFiles, caplog: pytest.LogCaptureFixture
) -> None:
    (files.folder / "step-4").write_text("a file where the folder is to be")
    record = TurnRecord(files).of("train/4/0/0", 4)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        record.note_answer(QUESTION, COMPLETION)
        record.note_answer(SamplingParams(1), COMPLETION)
    assert caplog.text.count("finished turns cannot be written") == 1
    assert record.answer(QUESTION, 9) == COMPLETION
    (files.folder / "step-4").unlink()
    record.note_answer(SamplingParams(2), COMPLETION)
    assert TurnRecord(files).of("train/4/0/0", 4).answer(SamplingParams(2), 9) == COMPLETION


def test_an_agent_that_goes_on_after_its_step_writes_nothing(files: TurnFiles) -> None:
    turns = TurnRecord(files)
    record = turns.of("train/4/0/0", 4)
    turns.forget({5})
    record.note_answer(QUESTION, COMPLETION)
    assert not [*files.folder.iterdir()]


def checkpoint(run: Path, step: int) -> Any:
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE_FILE).write_text("{}")
    return SimpleNamespace(folder=folder, step=step)


def turn(run: Path, step: int) -> Path:
    (run / "turns" / f"step-{step}").mkdir(parents=True, exist_ok=True)
    path = run / "turns" / f"step-{step}" / "x-0.jsonl"
    path.write_text("")
    return path


def begun(run: Path, at: Any) -> tuple[RunTurns, str]:
    turns = RunTurns(run)
    name = turns.start(at).run
    turns.begin()
    return turns, name


def test_a_run_goes_on_with_the_record_only_from_its_newest_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, first = begun(tmp_path, None)
    assert begun(tmp_path, None)[1] == first  # killed before its first checkpoint
    turns, _ = begun(tmp_path, None)
    at_4 = checkpoint(tmp_path, 4)
    kept, gone = turn(tmp_path, 5), turn(tmp_path, 4)
    turns.saved(5)
    assert kept.exists() and not gone.exists()
    assert begun(tmp_path, at_4)[1] == first and kept.exists()
    at_8 = checkpoint(tmp_path, 8)
    (tmp_path / "checkpoint-9").mkdir()  # an incomplete copy
    RunTurns(tmp_path).start(at_4)  # a Trainer that trains nothing changes nothing
    assert kept.exists() and begun(tmp_path, at_8)[1] == first
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        _, branch = begun(tmp_path, at_4)
    assert branch != first and not kept.exists() and "belong to training after another checkpoint" in caplog.text
    assert begun(tmp_path, at_4)[1] == branch  # killed before checkpoints of the other branch were set aside
    elsewhere = checkpoint(tmp_path / "other", 8)
    _, third = begun(tmp_path, elsewhere)
    assert third != branch and begun(tmp_path, elsewhere)[1] == third  # a restart before the first checkpoint here


def test_a_run_from_the_beginning_uses_nothing_of_one_that_had_checkpoints(tmp_path: Path) -> None:
    turns, first = begun(tmp_path, None)
    turns.saved(5)
    assert begun(tmp_path, None)[1] != first


def batch(*rewards: float) -> Any:
    columns = {"group": [1, 1], "completion_length": [3, 4], "rewards": [*rewards]}
    return {name: torch.tensor(values) for name, values in columns.items()}


def test_the_record_is_void_if_a_step_has_another_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Later ones were made by other weights; so was what trajectories that were begun before have made since."""
    turns, name = begun(tmp_path, None)
    files = TurnFiles(tmp_path / "turns", name)
    for step in (1, 2, 3):
        TurnRecord(files).of("x", step).note_answer(QUESTION, COMPLETION)
    assert not turns.settle(1, batch(1.0, torch.nan))
    turns, _ = begun(tmp_path, None)
    rank = TurnRecord(files)
    held = rank.of("x", 1)
    held.note_answer(SamplingParams(1), COMPLETION)
    assert not turns.settle(1, batch(1.0, torch.nan)) and held.answer(QUESTION, 9) == COMPLETION
    for other in (batch(1.0, 0.5), batch(1.0, 0.5) | {"completion_length": torch.tensor([3, 5])}):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hybrid_rl"):
            assert turns.settle(1, other)
        assert "step 1 has another batch, or other rewards" in caplog.text
    rank.void(1)
    assert held.answer(QUESTION, 9) is None and held.answer(SamplingParams(1), 9) == COMPLETION
    assert rank.of("x", 2).answer(QUESTION, 9) is None
    held.note_answer(SamplingParams(2), COMPLETION)
    rank.void(1)
    assert TurnRecord(files).of("x", 1).answer(SamplingParams(2), 9) == COMPLETION


def test_a_run_whose_disk_is_gone_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    turns = RunTurns(tmp_path / "gone" / "run")
    files = turns.start(None)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        turns.begin()
        assert not turns.settle(1, batch(1.0, 2.0))
        turns.saved(1)
        record = TurnRecord(files).of("x", 1)
        record.note_answer(QUESTION, COMPLETION)
    assert record.answer(QUESTION, 9) == COMPLETION and not (tmp_path / "gone").exists()
    assert caplog.text.count("training goes on") == 2


def test_a_state_that_json_cannot_hold_ends_the_run() -> None:
    class Wrong(Slow):
        def state(self) -> Any:
            return {"place": {1}}

    caller = Caller(timeout_seconds=30)
    with pytest.raises(AgentError, match=r"state\(\) of the environment Wrong returned \{'place': \{1\}\}"):
        asyncio.run(environment_of(caller, TurnRecord().of("x", None), Wrong))
    caller.close()


# ------------------------------------------------------------------------------------------------------- keys of calls


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_tool_gets_the_key_of_its_call_which_the_policy_does_not_see(num_processes: int) -> None:
    assert [*tool_schema(keyed)["function"]["parameters"]["properties"]] == ["number"]
    caller = Caller(timeout_seconds=30)
    functions, record = Functions([keyed, keyed_later], caller, num_processes), TurnRecord().of("t", None)

    def contents(*calls: tuple[str, int], after: str = "first") -> list[str]:
        asked = [{"type": "function", "function": {"name": name, "arguments": {"number": n}}} for name, n in calls]
        messages = asyncio.run(functions.tools.answer(asked, Counter(), record, after))
        return [message["content"] for message in messages]

    first = contents(("keyed", 1), ("keyed_later", 1), ("keyed", 1))
    keys = [content.split()[1] for content in first]
    assert len({*keys}) == 3 and all(key.startswith(record.key) for key in keys)
    assert contents(("keyed", 1), ("keyed_later", 1), ("keyed", 1)) == first
    assert contents(("keyed", 2))[0].split()[1] not in keys
    assert contents(("keyed", 1), after="second")[0].split()[1] not in keys
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
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "FIRST_WAIT_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Line.lost_at, Line.num_calls, Line.num_used_again = frozenset(), 0, 0
    Line.moves, Line.restored, Line.rewarded_at = [], [], []
    Line.error = ConnectionResetError("the server is gone")
    notes.clear()


def run(
    make_trainer: Callable[..., Trainer], kind: type[Line], lost_at: set[int], error: Any = None, **keys: Any
) -> Trainer:
    _fresh.__wrapped__()  # type: ignore[attr-defined]
    Line.lost_at, Line.error = frozenset(lost_at), error or ConnectionResetError("the server is gone")
    model, tokenizer = build_policy(CALLS)
    own = {"tools": [note], "environment_factory": kind, "max_open_trajectories": 1}
    trainer = make_trainer(model, None, ROWS, tokenizer=tokenizer, **(KEYS | own | keys))
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def total(records: Any, trainer: Trainer, name: str) -> float:
    return sum(line.get(name, 0.0) for line in records(trainer))


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (WithState, ConnectionResetError("gone")),
        (Repeatable, ConnectionResetError("gone")),
        (Line, EnvironmentLostError("gone")),
    ],
)
def test_a_trajectory_goes_on_if_its_environment_is_lost(
    kind: type[Line], error: Exception, make_trainer: Callable[..., Trainer], records: Any
) -> None:
    """At any of its calls, that for the reward included: the run is the undisturbed one, with no turn made twice."""
    whole = run(make_trainer, kind, set())
    num_calls, num_notes, num_moves = Line.num_calls, len(notes), len(Line.moves)
    first = next(at for at in Line.rewarded_at if at > 5)
    lost_at = {first, *range(first + 17, 2 * num_calls, 16)}
    other = run(make_trainer, kind, lost_at, error, max_environments=2)
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
        assert is_connection_error(raised.value)
    assert is_connection_error(http.client.IncompleteRead(b""))
    for other in (ValueError("no"), TimeoutError(), http.client.HTTPException(), OSError(28, "disk full"), None):
        assert not is_connection_error(other)


def test_one_that_is_lost_again_and_again_has_no_reward(make_trainer: Callable[..., Trainer], records: Any) -> None:
    trainer = run(make_trainer, WithState, {*range(1, episodes.LIVES + 1)}, max_reward_failure_share=1.0)
    lines = [json.loads(line) for line in told(trainer).splitlines()]
    failed = [line for line in lines if line["reward"] is None]
    assert len(failed) == 1 and "the server is gone" in failed[0]["error"]
    assert total(records, trainer, "agents/lost_environments") == episodes.LIVES
    assert failed[0]["advantage"] in (0.0, None)


def test_one_that_cannot_be_restored_has_no_reward(make_trainer: Callable[..., Trainer], records: Any) -> None:
    class Broken(WithState):
        def restore(self, state: dict[str, int]) -> None:
            raise ValueError("no such place")

    run(make_trainer, Broken, set())
    last_call = next(at for at in Line.rewarded_at if at > 5)
    trainer = run(make_trainer, Broken, {last_call}, max_reward_failure_share=1.0)
    lines = [json.loads(line) for line in told(trainer).splitlines()]
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
    lines = [json.loads(line) for line in told(second).splitlines()]
    if is_restorable:
        assert total(records, second, "agents/recorded_calls") >= num_moves + num_notes
        assert sorted(places[:6]) == sorted(places[6:]) == sorted(round(10 * line["reward"]) for line in lines)
    else:
        acted = [line for line in lines if any(turn["origin"] == "environment" for turn in line["tokens"])]
        assert acted and all(line["reward"] is None and "no such place" in line["error"] for line in acted)


def told(trainer: Trainer) -> str:
    return (trainer.run_folder / "samples.jsonl").read_text()


def test_only_environments_that_can_go_on_take_a_lost_connection_for_their_end(
    make_trainer: Callable[..., Trainer], records: Any
) -> None:
    """Another one may have looked for a host that the policy has invented: the policy is told."""
    trainer = run(make_trainer, Line, {3})
    assert "{'error': 'the server is gone'}" in told(trainer) and total(records, trainer, "rewards/num_failed") == 0
    assert total(records, trainer, "agents/lost_environments") == 0
    trainer = run(make_trainer, WithState, {3})
    assert "the server is gone" not in told(trainer) and total(records, trainer, "agents/lost_environments") == 1


def test_a_trajectory_that_comes_no_further_ends(make_trainer: Callable[..., Trainer], records: Any) -> None:
    """Each life has another prompt, and so other turns than those before it."""

    class Elsewhere(WithState):
        def reset(self, start: int, **row: Any) -> str:
            self.place = start
            return f" at {Line.num_calls}"

        def state(self) -> dict[str, int]:
            raise ConnectionResetError("gone again")

    trainer = run(make_trainer, Elsewhere, set(), max_reward_failure_share=1.0, max_steps=1)
    assert total(records, trainer, "agents/lost_environments") == episodes.LIVES * 6
    assert total(records, trainer, "agents/ended_error") == 1


def test_a_server_that_takes_time_to_come_again_is_waited_for(
    make_trainer: Callable[..., Trainer], records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither can an object be made meanwhile, nor one be reset."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(episodes, "FIRST_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(episodes.asyncio, "sleep", sleep)

    class Away(WithState):
        num_refused = 0

        def __init__(self) -> None:
            if Line.num_calls >= 4 and Away.num_refused < 3:
                Away.num_refused += 1
                raise ConnectionRefusedError("nobody is there")

        def reset(self, start: int, **row: Any) -> str:
            if Line.num_calls >= 4 and Away.num_refused < 6:
                Away.num_refused += 1
                raise ConnectionRefusedError("nobody is there yet")
            return super().reset(start, **row)

    trainer = run(make_trainer, Away, {4}, max_steps=1)
    assert total(records, trainer, "rewards/num_failed") == 0 and Away.num_refused == 6
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0] and total(records, trainer, "agents/lost_environments") == 5


def test_no_life_begins_after_the_time_of_a_trajectory(
    make_trainer: Callable[..., Trainer], records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be an empty one in the place of what was made, and be compared with others."""
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += 1000.0

    monkeypatch.setattr(episodes.EngineTurns, "seconds", lambda turns: now[0])
    monkeypatch.setattr(episodes.asyncio, "sleep", sleep)
    keys = {"max_steps": 1, "max_reward_failure_share": 1.0, "trajectory_timeout_seconds": 999.0}
    monkeypatch.setattr(episodes.Episodes, "_pass", lambda self, deadline: asyncio.Event().wait())
    trainer = run(make_trainer, WithState, {3}, **keys)
    (lost,) = (line for line in map(json.loads, told(trainer).splitlines()) if line["reward"] is None)
    assert lost["finish_reason"] == "error" and len(lost["tokens"]) > 0


def test_a_reward_that_cannot_be_asked_for_is_told(make_trainer: Callable[..., Trainer]) -> None:
    class NoReward(WithState):
        def get_reward(self) -> float:
            raise EnvironmentLostError("no answer")

    trainer = run(make_trainer, NoReward, set(), max_reward_failure_share=1.0, max_steps=1)
    lines = [json.loads(line) for line in told(trainer).splitlines()]
    assert all(line["reward"] is None and line["finish_reason"] == "error" for line in lines)
    assert all("get_reward() of the environment NoReward" in line["error"] for line in lines)


class Slow:
    """An environment whose calls of one answer run together."""

    def __init__(self) -> None:
        self.count, self.restored, self.acted_on = 0, list[int](), list[int]()
        self.is_first_over, self.is_restored = asyncio.Event(), asyncio.Event()

    def reset(self) -> None: ...

    async def add(self, number: int) -> int:
        """Add.

        Args:
            number: how much
        """
        self.acted_on.append(self.count)
        if number == 1 and not self.restored:
            await self.is_first_over.wait()
        self.count += number
        self.is_first_over.set()
        return self.count

    async def late(self) -> int:
        """Come too late."""
        await asyncio.Event().wait()
        return 0

    async def gone(self) -> int:
        """Lose the connection."""
        raise ConnectionResetError("gone")

    def state(self) -> int:
        return self.count

    async def restore(self, state: int) -> None:
        await asyncio.sleep(0)
        self.restored.append(state)
        self.count = state


async def environment_of(caller: Caller, record: Any, factory: Any = Slow) -> tuple[Environment, ToolSet]:
    kind = EnvironmentKind(None, factory)
    environment = Environment(kind, caller)
    await environment.make()
    kind.look_at(environment.instance)
    await environment.begin(None, record)
    return environment, ToolSet([*environment.tools(), *Functions([keyed_later], caller).tools.tools.values()])


def calls(*names: str | int) -> list[Any]:
    made = [("add", {"number": name}) if isinstance(name, int) else (name, {}) for name in names]
    return [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in made]


def test_calls_of_one_answer_are_restored_as_they_ended() -> None:
    """The first of two ended last; two others, which had not ended, act on what is restored once."""
    record, caller = TurnRecord().of("t", None), Caller(timeout_seconds=30)

    async def main() -> None:
        first, tools = await environment_of(caller, record)
        await tools.answer(calls(1, 2), Counter(), record, "one")
        assert first.instance.count == 3
        second, tools = await environment_of(caller, record)
        counts = Counter[str]()
        messages = await tools.answer(calls(1, 2), counts, record, "one")
        assert [message["content"] for message in messages] == ["3", "2"] and counts["recorded_calls"] == 2
        messages = await tools.answer(calls(10, 20), counts, record, "two")
        assert (second.instance.restored, second.instance.count) == ([3], 33)
        assert min(second.instance.acted_on) == 3

    asyncio.run(main())
    caller.close()


def test_a_call_that_had_not_ended_acts_on_what_another_one_of_its_answer_has_left() -> None:
    """The second of two had ended when the run was killed."""
    record, caller = TurnRecord().of("t", None), Caller(timeout_seconds=30)

    async def main() -> None:
        _, tools = await environment_of(caller, record)
        asked = calls(1, 2)
        known = record.call("one", 1, "add", {"number": 2})
        record.note_call(known.key, Outcome("2"), 2, is_acted=True)
        second, tools = await environment_of(caller, record)
        second.instance.is_first_over.set()
        messages = await tools.answer(asked, Counter(), record, "one")
        assert [message["content"] for message in messages] == ["3", "2"]
        assert second.instance.restored == [2] and second.instance.acted_on == [2]

    asyncio.run(main())
    caller.close()


def test_a_recorded_state_is_nobodys_object() -> None:
    record, caller = TurnRecord().of("t", None), Caller(timeout_seconds=30)

    class Board(Slow):
        def __init__(self) -> None:
            self.board = [0]

        async def add(self, number: int) -> int:
            """Add.

            Args:
                number: how much
            """
            self.board.append(number)
            return len(self.board)

        def state(self) -> Any:
            return self.board

        async def restore(self, state: Any) -> None:
            self.board = state

    async def main() -> None:
        first, tools = await environment_of(caller, record, Board)
        await tools.answer(calls(1), Counter(), record, "one")
        first.instance.board.append(9)
        for number in (5, 6):
            second, tools = await environment_of(caller, record, Board)
            await tools.answer(calls(1), Counter(), record, "one")
            await tools.answer(calls(number), Counter(), record, f"two {number}")
            assert second.instance.board == [0, 1, number]

    asyncio.run(main())
    caller.close()


def test_a_call_past_its_limit_is_told_though_the_environment_has_a_state() -> None:
    record, caller = TurnRecord().of("t", None), Caller(timeout_seconds=30)

    async def main() -> None:
        _, tools = await environment_of(caller, record)
        caller.timeout_seconds = 0.2  # of the call that never ends, alone
        (message,) = await tools.answer(calls("late"), Counter(), record, "one")
        assert "no answer within 0.2 s" in message["content"]

    asyncio.run(main())
    caller.close()


def test_a_lost_environment_waits_for_the_other_calls_of_its_answer() -> None:
    """Else the next life would make them a second time, beside those."""
    record, caller, ended = TurnRecord().of("t", None), Caller(timeout_seconds=30), list[str]()

    async def pay() -> str:
        """Pay."""
        await asyncio.sleep(0.05)
        ended.append("paid")
        return "paid"

    async def main() -> None:
        environment, _ = await environment_of(caller, record)
        tools = ToolSet([*environment.tools(), *Functions([pay], caller).tools.tools.values()])
        with pytest.raises(EnvironmentLostError, match="gone"):
            await tools.answer(calls("gone", "pay"), Counter(), record, "one")
        assert ended == ["paid"]
        with pytest.raises(EnvironmentLostError, match="gone"):
            await tools.answer(calls("gone", "pay"), Counter(), record, "one")
        assert ended == ["paid"]

    asyncio.run(main())
    caller.close()


def test_answers_of_generate_have_calls_of_their_own(make_trainer: Callable[..., Trainer]) -> None:
    keys: list[str] = []

    def book(call_key: str) -> str:
        """Book."""
        keys.append(call_key)
        return "booked"

    model, tokenizer = build_policy([("book", {})])
    trainer = make_trainer(model, None, ROWS, tokenizer=tokenizer, environment_factory=Line, tools=[book], **KEYS)
    for _ in range(2):
        trainer.generate([{"prompt": ROWS[0]["prompt"], "start": 1}], num_generations=2)
    assert len(keys) == len({*keys}) > 2


def test_one_that_may_not_act_again_is_dropped(make_trainer: Callable[..., Trainer], records: Any) -> None:
    whole = run(make_trainer, Line, set())
    lost = EnvironmentLostError("gone")
    trainer = run(make_trainer, Line, {3}, lost, max_reward_failure_share=1.0, unrestorable="drop")
    assert [total(records, trainer, f"agents/{name}") for name in ("dropped", "lost_environments")] == [1, 1]
    lines = [json.loads(line) for line in told(trainer).splitlines()]
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
