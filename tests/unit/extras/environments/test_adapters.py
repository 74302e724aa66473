"""Adapters with stand-ins for the objects of other libraries, and with the real ones where they are installed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl import Trainer
from hybrid_rl.agents import EnvironmentLostError
from hybrid_rl.agents.client import AgentClient, Limits
from hybrid_rl.agents.environments import EnvironmentKind
from hybrid_rl.agents.floor import RolloutClient, checked_trajectories
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.extras.endpoint.http_agent import HttpAgent
from hybrid_rl.extras.environments.gym import gymnasium_environment
from hybrid_rl.extras.environments.openenv import openenv_environment
from hybrid_rl.extras.environments.reasoning_gym import reasoning_gym_rollout, reasoning_gym_rows
from hybrid_rl.extras.environments.tinker import stop_texts, tinker_rollout
from hybrid_rl.extras.environments.verifiers import verifiers_agent, verifiers_tasks
from tests.support.agents.callers import build_policy
from tests.unit.agents.scripted import BOS, EOS, ByteChat, ScriptedTokens, episode_of, run_agent, text_of


def roll(
    function: Any, rows: Sequence[dict[str, Any]], write: Callable[[str], str], limits: Limits | None = None
) -> list[Trajectory]:
    """Run a rollout_func with a policy whose answers are written by a function."""
    limits = limits or Limits(max_completion_length=10_000, max_length=20_000)
    tokens = ScriptedTokens(write, delay=lambda number: 0.001 * (number % 3))

    def make(place: int | None, trajectory: Trajectory, *_: Any) -> AgentClient:
        return AgentClient(tokens, ByteChat(), trajectory, limits, place=place or 0, generation=0)

    made = asyncio.run(function(rows, RolloutClient(rows, make), tokenizer=BYTES))
    return checked_trajectories(made, len(rows))


def schemas_of(factory: Any) -> dict[str, Any]:
    kind = EnvironmentKind(None, factory)
    kind.look_at(factory())
    return {name: schema["function"] for name, schema in kind.schemas.items()}


# ---------------------------------------------------------------------------------------------------- gymnasium


class Corridor:
    """A Gymnasium environment by its methods: five places in a row, the prize at the end."""

    action_space = SimpleNamespace(n=2, contains=lambda action: action in (0, 1))

    def __init__(self) -> None:
        self.place, self.is_closed = 0, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self.place = seed or 0
        return self.place, {"seed": seed, "options": options}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += 1 if action else -1
        return self.place, float(self.place == 4) - 0.125, self.place == 4, self.place < 0, {"place": self.place}

    def close(self) -> None:
        self.is_closed = True


def test_gymnasium_steps_are_tool_calls() -> None:
    factory = gymnasium_environment(Corridor, render=lambda place: f"place {place}", instructions="Go right. ")
    assert schemas_of(factory)["act"]["parameters"]["required"] == ["action"]
    environment: Any = factory()
    assert environment.reset(seed=2, options={"a": 1}, other="x") == "Go right. place 2"
    assert environment.info == {"seed": 2, "options": {"a": 1}}
    with pytest.raises(ValueError, match="'up' is no action"):
        environment.act("up")
    assert environment.act("1") == "place 3" and environment.get_reward() == -0.125
    assert environment.act(action=" 1") == "place 4\n(The episode is over.)"
    assert environment.get_reward() == 0.75 and environment.rewards == [-0.125, 0.875]
    with pytest.raises(ValueError, match="over"):
        environment.act("1")
    assert environment.reset(seed=0).endswith("place 0") and environment.get_reward() == 0
    environment.act("0")
    assert environment.is_done  # truncated
    environment.close()
    assert environment.env.is_closed
    with pytest.raises(DataError, match="render="):
        gymnasium_environment(Corridor)().reset(seed=1)


def test_actions_of_ones_own_are_tools_with_their_own_schemas() -> None:
    def walk(steps: int, backwards: bool = False) -> int:
        """Walk.

        Args:
            steps: How many.
            backwards: The other way.
        """
        assert steps == 1
        return 0 if backwards else 1

    factory = gymnasium_environment(Corridor, walk, render=str)
    schema = schemas_of(factory)["walk"]
    assert schema["description"] == "Walk." and schema["parameters"]["required"] == ["steps"]
    assert schema["parameters"]["properties"]["steps"] == {"type": "integer", "description": "How many."}
    environment: Any = factory()
    environment.reset()
    assert environment.walk(steps=1) == "1" and environment.walk(1, backwards=True) == "0"

    def reset() -> int:
        """A name that is taken."""
        return 0

    for actions in ((reset,), (walk, walk), (lambda: 0,)):
        with pytest.raises(ConfigError, match="taken or no name"):
            gymnasium_environment(Corridor, *actions)


def test_the_real_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    factory = gymnasium_environment(
        lambda: gymnasium.make("FrozenLake-v1", is_slippery=False), render=lambda place: f"field {place}"
    )
    environment: Any = factory()
    assert environment.reset(seed=1) == "field 0"
    texts = [environment.act(action) for action in "112122"]  # down and right, around the holes
    assert texts[-1] == "field 15\n(The episode is over.)" and environment.get_reward() == 1.0
    with pytest.raises(ValueError, match="no action"):
        environment.reset() and environment.act("7")

    class Parrot(gymnasium.Env):
        action_space = observation_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return "say hello", {}

        def step(self, action: str) -> Any:
            return f"you said {action}", float(action == "hello"), True, False, {}

    parrot: Any = gymnasium_environment(Parrot)()
    assert parrot.reset() == "say hello" and parrot.act("hello").startswith("you said hello")
    assert parrot.get_reward() == 1.0


# ------------------------------------------------------------------------------------------------------ openenv


@dataclass
class Seen:
    """An observation of OpenEnv, as far as an adapter looks."""

    letters: str
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class Client:
    """A client of OpenEnv by its methods; `sync()` gives the plain one."""

    def __init__(self) -> None:
        self.is_sync, self.row, self.is_closed = False, {}, False

    def sync(self) -> Client:
        self.is_sync = True
        return self

    def reset(self, **row: Any) -> Any:
        self.row = row
        return SimpleNamespace(observation=Seen("___"), reward=None, done=False)

    def step(self, action: Any) -> Any:
        assert self.is_sync
        return SimpleNamespace(observation=Seen(action["word"]), reward=0.5, done=action["word"] == "end")

    def close(self) -> None:
        self.is_closed = True


def guess(word: str) -> dict[str, str]:
    """Guess a word.

    Args:
        word: The word.
    """
    return {"word": word}


def test_openenv_actions_are_tool_calls() -> None:
    environment: Any = openenv_environment(Client, guess)()
    assert environment.reset(seed=3, prompt=[], answer="x") == '{"letters": "___"}'
    assert environment.client.row == {"seed": 3}
    assert environment.guess("abc") == '{"letters": "abc"}'
    assert environment.guess("end") == '{"letters": "end"}\n(The episode is over.)'
    assert environment.get_reward() == 1.0 and environment.info.done
    environment.close()
    assert environment.client.is_closed
    with pytest.raises(ConfigError, match="no actions"):
        openenv_environment(Client)


SERVER = """
import sys
import threading

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    n: int


class Seen(Observation):
    count: int = 0


class Server(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.count = 0

    def reset(self, seed=None, episode_id=None, **_):
        self.count = seed or 0
        return Seen(count=self.count, done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self.count += action.n
        return Seen(count=self.count, done=self.count >= 50, reward=0.25)

    @property
    def state(self):
        return State(episode_id="e", step_count=self.count)


class Told(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


app = create_app(Server, Word, Seen, env_name="words", max_concurrent_envs=4)
port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
Told(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error")).run()
"""


@pytest.fixture(scope="module")
def real_openenv() -> Iterator[Any]:
    """The factory of environments on a server of four sessions, in a process of its own."""
    pytest.importorskip("openenv.core")
    from openenv.core import GenericEnvClient

    def step(n: int) -> dict[str, int]:
        """Step.

        Args:
            n: how far
        """
        return {"n": n}

    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())  # printed once it listens
        yield openenv_environment(lambda: GenericEnvClient(base_url=f"http://127.0.0.1:{port}"), step)
    finally:
        server.kill()
        server.communicate()


def test_the_real_openenv_through_its_server(real_openenv: Any) -> None:
    one, other = real_openenv(), real_openenv()
    try:
        assert one.reset(seed=48) == '{"count": 48}' and other.reset() == '{"count": 0}'
        assert one.step(1) == '{"count": 49}' and other.step(2) == '{"count": 2}'
        assert one.step(1) == '{"count": 50}\n(The episode is over.)'
        assert one.get_reward() == 0.5 and other.get_reward() == 0.25
    finally:
        one.close()
        other.close()


def test_trajectories_wait_for_a_session_of_the_real_openenv_server(real_openenv: Any, tmp_path: Path) -> None:
    """32 trajectories over a process that has four sessions: without the key some find the server full."""
    model, tokenizer = build_policy([("step", {"n": 1}), ("step", {"n": 2})])
    rows = [{"prompt": [{"role": "user", "content": f"go {place}"}]} for place in range(4)]
    keys: dict[str, Any] = {"max_steps": 1, "prompts_per_step": 4, "num_generations": 8, "log_completions": 0}
    keys |= {"max_completion_length": 160, "max_prompt_length": 300, "max_environments": 4}
    keys |= {"environment_factory": real_openenv, "tokenizer": tokenizer, "output_dir": str(tmp_path)}
    with Trainer(model, train_dataset=rows, **keys) as trainer:
        [(batch, metrics)] = list(trainer.steps())
    rewards = batch["rewards"].tolist()
    assert len(rewards) == 32 and all(reward % 0.25 == 0 for reward in rewards) and max(rewards) > 0
    assert metrics["rewards/num_failed"] == 0 and metrics["agents/ended_error"] == 0


def test_a_session_of_the_real_openenv_that_begins_anew_is_lost() -> None:
    """The server comes again at once, where it was: the client connects again, and says nothing."""
    pytest.importorskip("openenv.core")
    from openenv.core import GenericEnvClient

    def step(n: int) -> dict[str, int]:
        """Step.

        Args:
            n: how far
        """
        return {"n": n}

    def start(*port: int) -> tuple[Any, int]:
        command = [sys.executable, "-c", SERVER, *map(str, port)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        return server, int(server.stdout.readline())

    server, port = start()
    made: Any = openenv_environment(lambda: GenericEnvClient(base_url=f"http://127.0.0.1:{port}"), step)()
    try:
        assert made.reset(seed=40) == '{"count": 40}' and made.step(1) == '{"count": 41}'
        server.kill()
        server.communicate()
        server, _ = start(port)
        with pytest.raises(EnvironmentLostError, match="opened another one"):
            made.step(1)
        assert made.reset(seed=40) == '{"count": 40}' and made.step(1) == '{"count": 41}'
    finally:
        made.close()
        server.kill()
        server.communicate()


def test_trajectories_go_on_if_the_real_openenv_server_dies(tmp_path: Path) -> None:
    """It is killed at the fifth action, with all sessions; whoever needs a session next starts it again."""
    pytest.importorskip("openenv.core")
    from openenv.core import GenericEnvClient

    servers: list[tuple[Any, int]] = []
    num_actions = 0
    lock = threading.Lock()

    def client() -> Any:
        with lock:
            if not servers or servers[-1][0].poll() is not None:
                server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
                assert server.stdout is not None
                servers.append((server, int(server.stdout.readline())))
            return GenericEnvClient(base_url=f"http://127.0.0.1:{servers[-1][1]}")

    def step(n: int) -> dict[str, int]:
        """Step.

        Args:
            n: how far
        """
        nonlocal num_actions
        num_actions += 1
        if num_actions == 5:
            servers[-1][0].kill()
            servers[-1][0].wait()
        return {"n": n}

    model, tokenizer = build_policy([("step", {"n": 1}), ("step", {"n": 2})])
    rows = [{"prompt": [{"role": "user", "content": f"go {place}"}]} for place in range(4)]
    keys: dict[str, Any] = {"max_steps": 1, "prompts_per_step": 4, "num_generations": 2, "max_environments": 4}
    keys |= {"max_completion_length": 160, "max_prompt_length": 300, "tokenizer": tokenizer}
    keys |= {"environment_factory": openenv_environment(client, step), "output_dir": str(tmp_path)}
    try:
        with Trainer(model, train_dataset=rows, **keys) as trainer:
            [(batch, metrics)] = list(trainer.steps())
        assert len(servers) == 2 and metrics["agents/lost_environments"] >= 1
        assert metrics["rewards/num_failed"] == 0 and metrics["agents/ended_error"] == 0
        assert all(reward % 0.25 == 0 for reward in batch["rewards"].tolist())
    finally:
        for server, _ in servers:
            server.kill()
            server.communicate()


# ------------------------------------------------------------------------------------------------ reasoning-gym


class Sums(list[dict[str, Any]]):
    """A reasoning-gym dataset by its methods: half a point for an answer that is off by one."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        if answer == "break":
            raise RuntimeError("the scorer broke")
        gap = abs(int(answer or 0) - int(entry["answer"]))
        return 1.0 if gap == 0 else 0.5 * (gap == 1)


SUMS = Sums([{"question": "2+3=", "answer": "5"}, {"question": "4+4=", "answer": "8"}])


def test_reasoning_gym_answers_may_be_tried_again() -> None:
    rows = [dict(row) for row in [*reasoning_gym_rows(SUMS), *reasoning_gym_rows(SUMS)]]
    assert rows[1] == {"prompt": [{"role": "user", "content": "4+4="}], "entry": 1}

    def write(prompt: str) -> str:
        tries = prompt.count("[assistant]")
        if "4+4" in prompt:
            return "a guess: <answer>1</answer>"
        return f"<answer>{3 + tries}</answer>"

    function = reasoning_gym_rollout(SUMS, max_turns=3, instructions="", per_turn=True)
    right, wrong, *_ = roll(function, rows, write)
    assert text_of(right.samples[0].prompt_ids) == "<s>[user]2+3=\n[assistant]"
    again = "[user]That is not right: it scores 0.50 of 1. Try again.\n[assistant]"
    assert text_of(right.samples[0].token_ids) == f"<answer>4</answer></s>{again}<answer>5</answer></s>"
    assert right.samples[0].turn_rewards == [0.5, 0.5] and right.reward is None
    assert (right.end_reason, right.extra, len(right.messages)) == ("stop", {"score": 1.0}, 3)
    assert wrong.samples[0].turn_rewards == [0.0, 0.0, 0.0] and wrong.counts["turns"] == 3

    at_end, _ = roll(reasoning_gym_rollout(SUMS), rows[:2], write)
    assert at_end.reward == 1.0 and at_end.samples[0].turn_rewards == [None, None]
    assert "between <answer>" in text_of(at_end.samples[0].prompt_ids)


def test_a_row_that_fails_or_meets_a_limit_ends_alone() -> None:
    rows = [{"prompt": "", "entry": 0}, {"prompt": "", "entry": 1}]
    function = reasoning_gym_rollout(SUMS, instructions="")
    broken, right = roll(function, rows, lambda prompt: "break" if "2+3" in prompt else "8")
    assert broken.end_reason == "error" and broken.error.endswith("RuntimeError: the scorer broke\n")
    assert (right.end_reason, right.reward) == ("stop", 1.0)
    short, _ = roll(function, rows, lambda _: "4", Limits(max_completion_length=30, max_length=1000))
    assert (short.end_reason, short.reward, short.counts["turns"]) == ("length", 0.5, 1)
    with pytest.raises(DataError, match="reasoning_gym_rows"):
        roll(function, [{"prompt": "2"}], lambda _: "4")
    with pytest.raises(ConfigError, match="max_turns"):
        reasoning_gym_rollout(SUMS, max_turns=0)


def test_the_real_reasoning_gym() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    dataset = reasoning_gym.create_dataset("chain_sum", size=4, seed=1)
    rows = [dict(row) for row in reasoning_gym_rows(dataset)]
    right = {entry["question"]: entry["answer"] for entry in dataset}

    def write(prompt: str) -> str:
        answer = next(answer for question, answer in right.items() if question in prompt)
        return f"Hm. <answer>{answer if 'not right' in prompt else -1}</answer>"

    made = roll(reasoning_gym_rollout(dataset, max_turns=2), rows, write)
    assert [(one.reward, one.counts["turns"]) for one in made] == [(1.0, 2)] * 4


# ------------------------------------------------------------------------------------------------------- tinker


class Bytes:
    """The tokenizer of `ByteChat`, as far as adapters and renderers look."""

    eos_token, eos_token_id, bos_token, bos_token_id = "</s>", EOS, "<s>", BOS
    all_special_ids = (BOS, EOS)
    name_or_path = "bytes"

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return ByteChat().decode(token_ids) if EOS not in token_ids else "</s>"

    def convert_ids_to_tokens(self, token: int) -> str:
        return {BOS: "<s>", EOS: "</s>"}[token]


BYTES: Any = Bytes()


def tokens(text: str) -> Any:
    """A tinker.ModelInput by its method."""
    return SimpleNamespace(to_ints=lambda: list(text.encode()))


class Countdown:
    """An Env of tinker-cookbook by its methods: the policy counts down, a point for each right number."""

    def __init__(self, start: int) -> None:
        self.left, self.text = start, f"{start};"
        self.reasons: list[str] = []

    async def initial_observation(self) -> Any:
        if self.left > 9:
            return SimpleNamespace(reward=0.0, logs={"why": "too long"})
        return tokens(self.text), [";"]

    async def step(self, action: list[int], *, extra: Mapping[str, Any] | None = None) -> Any:
        said = bytes(token for token in action if token < BOS).decode()
        self.reasons.append((extra or {})["stop_reason"])
        self.left -= 1
        self.text += said + "."
        return SimpleNamespace(
            reward=float(said == f"{self.left};"),
            episode_done=self.left == 0,
            next_observation=tokens(self.text),
            next_stop_condition=[ord(";"), EOS],
            metrics={"left": self.left},
            logs={},
        )


def test_tinker_environments_see_tokens_and_give_rewards() -> None:
    made: list[Countdown] = []

    async def make(row: Mapping[str, Any]) -> Countdown:
        made.append(Countdown(row["start"]))
        return made[-1]

    def write(prompt: str) -> str:
        return f"{int(prompt.rstrip('.').rstrip(';').split('.')[-1].split(';')[-1]) - 1}; and more"

    rows = [{"start": 3}, {"start": 2}, {"start": 12}]
    three, two, long = roll(tinker_rollout(make), rows, write)
    assert text_of(three.samples[0].prompt_ids) == "3;" and text_of(three.samples[0].token_ids) == "2;.1;.0;"
    assert three.samples[0].mask == [True, True, False] * 2 + [True, True]
    assert (three.reward, three.end_reason, three.extra) == (3.0, "stop", {"left": 0})
    assert made[0].reasons == ["stop"] * 3 and two.reward == 2.0
    assert long.end_reason == "error" and "too long" in long.error and not long.samples
    by_turn, *_ = roll(tinker_rollout(make, per_turn=True), rows, write)
    assert by_turn.samples[0].turn_rewards == [1.0, 1.0, 1.0] and by_turn.reward is None
    cut, *_ = roll(tinker_rollout(make), rows, write, Limits(max_completion_length=4, max_length=100))
    assert cut.end_reason == "length" and made[-3].reasons == ["stop", "length"]


def test_stop_conditions_are_texts() -> None:
    assert stop_texts(["a", "</s>"], BYTES) == ["a"]
    assert stop_texts([EOS, ord(";")], BYTES) == [";"]
    with pytest.raises(DataError, match="special token 256"):
        stop_texts([BOS], BYTES)


def test_the_real_tinker_cookbook() -> None:
    pytest.importorskip("tinker_cookbook")
    from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberEnv
    from tinker_cookbook.renderers import get_renderer

    renderer = get_renderer("role_colon", BYTES)

    def write(prompt: str) -> str:
        low, high = 0, 1024
        for part in prompt.split("Assistant: ")[1:]:
            number = int(part.removeprefix("Guess: ").split()[0].strip("\n")) if part.strip() else 0
            low, high = (number + 1, high) if "Too low" in part else (low, number - 1 if "Too high" in part else high)
        return f" Guess: {(low + high) // 2}\n\nUser: and more".lstrip()

    function = tinker_rollout(lambda row: GuessNumberEnv(row["number"], renderer))
    rows = [{"number": number} for number in (512, 700, 3)]
    made = roll(function, rows, write)
    assert [one.end_reason for one in made] == ["stop"] * 3, [one.error for one in made]
    assert made[0].reward == 1.0 and made[0].counts["turns"] == 1


# ---------------------------------------------------------------------------------------------------- verifiers


def run_http(
    agent: Any, row: Mapping[str, Any], write: Callable[[str], str], limits: Limits | None = None
) -> Trajectory:
    async def main() -> Trajectory:
        http = HttpAgent(agent, temperature=1.0)
        try:
            return await run_agent(http, episode_of(ScriptedTokens(write), row, limits=limits))
        finally:
            http.close()

    return asyncio.run(main())


def test_the_real_verifiers_before_its_second_form() -> None:
    vf = pytest.importorskip("verifiers")
    if not hasattr(vf, "MultiTurnEnv"):
        pytest.skip("this verifiers has only the environments of verifiers.v1")
    from datasets import Dataset

    class HotAndCold(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "Higher." if int(_last(messages)) < int(state["answer"]) else "Lower."}]

        @vf.stop
        async def is_found(self, state: Any) -> bool:
            steps = state["trajectory"]
            return bool(steps) and _last(steps[-1]["completion"]) == state["answer"]

    def _last(messages: Any) -> str:
        last = messages[-1]
        return str(last["content"] if isinstance(last, dict) else last.content)

    def found(completion: Any, answer: str, **_: Any) -> float:
        return float(_last(completion) == answer)

    rows = Dataset.from_list([{"question": "A number from 1 to 9.", "answer": "7"}])
    environment = HotAndCold(dataset=rows, rubric=vf.Rubric(funcs=[found]), max_turns=5)

    def write(prompt: str) -> str:
        return "7" if prompt.count("Higher") == 2 else str(3 + prompt.count("Higher"))

    row = environment.get_dataset()[0]
    trajectory = run_http(verifiers_agent(environment), row, write)
    assert (trajectory.reward, trajectory.counts["turns"], trajectory.end_reason) == (1.0, 3, "stop")
    (sample,) = trajectory.samples
    assert text_of(sample.token_ids).startswith("3</s>[user]Higher.\n[assistant]4</s>")
    assert trajectory.extra["found"] == 1.0
    with pytest.raises(ValueError, match="seven"):
        run_http(verifiers_agent(environment), row, lambda _: "seven")
    # verifiers knows the refusal of a prompt that is too long, and ends the episode by itself.
    cut = run_http(verifiers_agent(environment), row, lambda _: "3", Limits(max_completion_length=25, max_length=1000))
    assert (cut.end_reason, cut.reward, cut.counts["turns"]) == ("length", 0.0, 1)


def test_a_reward_that_raises_in_the_real_verifiers_is_no_reward_of_zero() -> None:
    """Its rubric catches every Exception. A metric, of weight 0, that raises is left to it."""
    vf = pytest.importorskip("verifiers")
    if not hasattr(vf, "SingleTurnEnv"):
        pytest.skip("this verifiers has only the environments of verifiers.v1")
    from datasets import Dataset

    def half(completion: Any, **_: Any) -> float:
        return 0.5

    def breaks(completion: Any, **_: Any) -> float:
        raise ConnectionError("the grader is gone")

    async def breaks_later(completion: Any, answer: str) -> Any:
        return None

    rows = Dataset.from_list([{"question": "A number.", "answer": "7"}])

    def reward(function: Any, weight: float) -> Any:
        rubric = vf.Rubric(funcs=[half, function], weights=[1.0, weight])
        environment = vf.SingleTurnEnv(dataset=rows, rubric=rubric)
        agent = verifiers_agent(environment)
        verifiers_agent(environment)  # twice is once
        return run_http(agent, environment.get_dataset()[0], lambda _: "7").reward

    assert reward(half, 1.0) == 1.0 and reward(breaks, 0.0) == 0.5
    with pytest.raises(RuntimeError, match="breaks raised ConnectionError: the grader is gone"):
        reward(breaks, 1.0)
    with pytest.raises(RuntimeError, match="breaks_later raised TypeError"):
        reward(breaks_later, 1.0)


class Served:
    """An Env of verifiers.v1 by its methods, which asks the endpoint."""

    def __init__(self) -> None:
        self.taskset = [SimpleNamespace(data=SimpleNamespace(idx=place)) for place in range(3)]
        self.num_serving = self.most_serving = 0

    def serving(self) -> Any:
        served = self

        class Serving:
            async def __aenter__(self) -> None:
                served.num_serving += 1
                served.most_serving = max(served.most_serving, served.num_serving)

            async def __aexit__(self, *_: Any) -> None:
                served.num_serving -= 1

        return Serving()

    async def run_episode(self, task: Any, context: Any) -> Any:
        assert self.num_serving == 1
        trace = SimpleNamespace(metrics={"seen": task.data.idx}, reward=0.5, errors=[])
        return SimpleNamespace(ok=task.data.idx < 2, errors=["it broke"], traces=[trace, trace])


def test_the_second_form_of_verifiers_serves_while_episodes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    second = SimpleNamespace(
        EvalClientConfig=lambda **given: seen.append(given) or SimpleNamespace(**given),
        ModelContext=lambda model, client, sampling: SimpleNamespace(model=model, client=client, sampling=sampling),
        Sampling=lambda **given: given,
    )
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(v1=second))
    monkeypatch.setitem(sys.modules, "verifiers.v1", second)
    environment = Served()
    agent: Any = verifiers_agent(environment, max_tokens=5)
    rows = verifiers_tasks(environment)

    async def main() -> list[Any]:
        jobs = (agent(row, f"http://{row['task']}", f"sk-{row['task']}") for row in rows)
        return await asyncio.gather(*jobs, return_exceptions=True)

    first, _, broken = asyncio.run(main())
    assert first == {"seen": 0, "reward": 1.0} and "it broke" in str(broken)
    assert (environment.num_serving, environment.most_serving) == (0, 1)
    assert [one["base_url"] for one in seen] == ["http://0", "http://1", "http://2"]
    assert not [name for name in os.environ if name.startswith("HYBRID_RL_KEY")]
