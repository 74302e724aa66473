"""The loop of tools: what the policy is shown, when it ends, and what an environment says of it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from hybrid_rl.agents.client import AgentClient, Limits, TrajectoryEndedError
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.environments import EnvironmentFailedError, EnvironmentKind
from hybrid_rl.agents.episode import Episode
from hybrid_rl.agents.tool_agent import ToolAgent
from hybrid_rl.agents.trajectory import Conversation, Trajectory
from hybrid_rl.config import AgentConfig
from hybrid_rl.errors import DataError


class Letters:
    """A chat format in which a message is its text in brackets, a token is a letter, and "+n" in an answer calls
    step(n). Engine and template agree on it, so samples can be written down by hand."""

    error_role: Literal["tool", "user"] = "tool"

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        known: Sequence[Conversation],
        most_tokens: int | None = None,
    ) -> list[int]:
        names = "".join(f"({tool['function']['name']})" for tool in tools)
        text = "".join(f"[{message['content']}]" for message in messages)
        return self.encode(f"{names}{text}[")

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        text = self.decode(token_ids).removesuffix("]")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if "?" in text:
            return {**message, "tool_call_error": "not a call"}
        calls = [
            {"type": "function", "function": {"name": "step", "arguments": {"n": int(n)}}} for n in text.split("+")[1:]
        ]
        return {**message, "tool_calls": calls} if calls else message

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


class Script:
    """An engine that gives these answers; one longer than max_tokens is cut off."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.prompts = list(answers), list[str]()

    async def complete(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed_parts: Sequence[int | str]
    ) -> Completion:
        self.prompts.append("".join(map(chr, prompt_ids)))
        answer = self.answers.pop(0) + "]"
        ids = [ord(char) for char in answer[:max_tokens]]
        return Completion(ids, [-1.0] * len(ids), [3] * len(ids), "stop" if len(ids) == len(answer) else "length")


class Walk:
    """An environment that walks."""

    def reset(self, start: int = 0, **row: Any) -> str:
        self.place, self.row = start, row
        return f" from {start}"

    def step(self, n: int) -> int:
        """Step.

        Args:
            n: how far
        """
        if n > 7:
            raise ValueError("too far")
        self.place += n
        return self.place

    def get_reward(self) -> float:
        return float(self.place)


class Judged(Walk):
    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        raise LookupError("no judge")


def agent_of(*kinds: EnvironmentKind, tools: Sequence[Any] = ()) -> ToolAgent:
    for kind in kinds:
        kind.look_at(kind.factory())
    return ToolAgent(tools, kinds, AgentConfig(tool_timeout_seconds=1.0))


def run(
    agent: ToolAgent,
    *answers: str,
    prompt: Any = ({"role": "user", "content": "go"},),
    max_tokens: int = 100,
    **row: Any,
) -> tuple[Trajectory, Script]:
    """Run an episode as the rollout does."""
    script, trajectory = Script(*answers), Trajectory(row)
    limits = Limits(max_tokens, 500, row.pop("most", None), 40)
    client = AgentClient(script, Letters(), trajectory, limits, place=0, generation=0)
    prompt = list(prompt) if isinstance(prompt, tuple) else prompt

    async def episode() -> None:
        try:
            await agent(Episode(prompt, row, client, trajectory))
        except TrajectoryEndedError as error:
            trajectory.end(error.reason)
        finally:
            for hook in trajectory.on_end:
                await hook()

    asyncio.run(episode())
    return trajectory, script


@pytest.fixture
def walk() -> Any:
    agent = agent_of(EnvironmentKind(None, Walk))
    yield agent
    agent.close()


def test_calls_are_answered_until_there_is_none(walk: ToolAgent) -> None:
    trajectory, script = run(walk, "a+2+3", "b+9", "c", start=1, other="x")
    assert trajectory.end_reason == "stop"
    assert script.prompts[-1] == "(step)[go from 1][a+2+3][3][6][b+9][{'error': 'too far'}]["
    [sample] = trajectory.samples
    said = "a+2+3][3][6][b+9][{'error': 'too far'}][c]"
    assert "".join(map(chr, sample.token_ids)) == said
    assert "".join("x" if ours else "." for ours in sample.mask) == "xxxxxx" + "." * 7 + "xxxx" + "." * 23 + "xx"
    assert trajectory.prompt == [{"role": "user", "content": "go from 1"}]
    assert [message["role"] for message in trajectory.messages] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert trajectory.messages[2] == {"role": "tool", "name": "step", "content": "6"}
    assert trajectory.counts == {"turns": 3, "tool_calls": 3, "tool_failures": 1, "tool_timeouts": 0}
    assert trajectory.environment.row == {"other": "x", "prompt": [{"role": "user", "content": "go"}]}
    assert trajectory.given == {"Walk": 6.0}


def test_rounds_of_calls_are_limited(walk: ToolAgent) -> None:
    trajectory, _ = run(walk, "+1+1", "+1", "+1", most=1)
    assert trajectory.end_reason == "turns"
    assert trajectory.counts["tool_calls"] == 2  # one round, two calls; those of the second answer are not made
    assert trajectory.messages[-1]["content"] == "+1"
    assert trajectory.given == {"Walk": 2.0}


def test_results_that_leave_no_room_for_an_answer_are_left_out(walk: ToolAgent) -> None:
    """Answer and result are "+1][1][": 7 tokens. With 8 the policy has one left; with 7 it has none, and the result is
    dropped although the call was made (as in TRL)."""
    trajectory, _ = run(walk, "+1", "long", max_tokens=8)
    assert (trajectory.end_reason, len(trajectory.samples[0].token_ids)) == ("length", 8)
    assert [message["role"] for message in trajectory.messages] == ["assistant", "tool", "assistant"]
    trajectory, script = run(walk, "+1", "long", max_tokens=7)
    assert (trajectory.end_reason, len(trajectory.samples[0].token_ids)) == ("length", 3)
    assert [message["role"] for message in trajectory.messages] == ["assistant"]
    assert script.answers == ["long"]
    assert trajectory.given == {"Walk": 1.0}


def test_a_call_in_an_answer_that_is_cut_off_is_not_made(walk: ToolAgent) -> None:
    trajectory, _ = run(walk, "a+12", max_tokens=3)
    assert trajectory.end_reason == "length"
    assert trajectory.counts["tool_calls"] == 0


def test_a_call_that_cannot_be_read_is_told_to_the_policy(walk: ToolAgent) -> None:
    trajectory, script = run(walk, "?", "+1", "b")
    assert script.prompts[1] == "(step)[go from 0][?][not a call]["
    assert trajectory.counts["tool_failures"] == 1
    assert trajectory.given == {"Walk": 1.0}


def test_a_prompt_that_is_too_long_names_the_remedy(walk: ToolAgent) -> None:
    with pytest.raises(DataError, match=r"has 47 tokens with its tools .* planned for 40: raise max_prompt_length"):
        run(walk, "a", prompt=({"role": "user", "content": "x" * 31},))


def test_an_environment_makes_the_prompt_if_there_is_none(walk: ToolAgent) -> None:
    trajectory, script = run(walk, "a", prompt=None, start=4)
    assert script.prompts == ["(step)[ from 4]["]
    assert trajectory.environment.row == {}


def test_text_prompts_have_no_tools(walk: ToolAgent) -> None:
    with pytest.raises(DataError, match="chat messages; it is text"):
        run(walk, "a", prompt="go")


def double(n: int) -> int:
    """Double.

    Args:
        n: what
    """
    return 2 * n


def test_the_column_environment_chooses_by_name() -> None:
    """It is not passed on then; with a single kind it is a column as any other."""
    agent = agent_of(EnvironmentKind("walk", Walk), EnvironmentKind("judged", Judged), tools=[double])
    trajectory, script = run(agent, "+1", "b", environment="judged")
    assert script.prompts[0].startswith("(double)(step)[")
    assert type(trajectory.environment) is Judged
    assert "environment" not in trajectory.environment.row
    assert isinstance(trajectory.given["Judged"], LookupError)
    with pytest.raises(EnvironmentFailedError, match="environment='swim' is not in"):
        run(agent, "b", environment="swim")
    agent.close()
    agent = agent_of(EnvironmentKind(None, Walk))
    assert run(agent, "b", environment="any")[0].environment.row["environment"] == "any"
    agent.close()


def test_tools_alone_need_no_environment() -> None:
    agent = agent_of(tools=[double])
    trajectory, script = run(agent, "b+1", "c")
    assert script.prompts[0] == "(double)[go]["
    assert "Tool step not found. The tools are: double" in script.prompts[1]
    assert (trajectory.environment, trajectory.given) == (None, {})
    agent.close()


def test_an_error_or_abort_has_no_reward(walk: ToolAgent) -> None:
    trajectory = Trajectory({})
    script = Script("+1")
    client = AgentClient(script, Letters(), trajectory, Limits(90, 500), place=0, generation=0)

    async def episode() -> None:
        with pytest.raises(IndexError):  # there is no second answer
            await walk(Episode([{"role": "user", "content": "go"}], {}, client, trajectory))
        trajectory.end("error")
        for hook in trajectory.on_end:
            await hook()

    asyncio.run(episode())
    assert trajectory.given == {}
