"""Training with an environment that uses every point of TRL's convention."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from hybrid_rl.errors import ConfigError, DataError
from tests.support.agents.callers import build_policy

CALLS = [
    ("step", {"n": 1}),
    ("step", {"n": 2}),
    ("step", {"m": 2}),
    ("later", {"n": 1}),
    ("boom", {}),
    ("nope", {}),
    ("double", {"n": 3}),
]
SETTINGS: dict[str, Any] = {
    "max_steps": 1,
    "num_generations": 4,
    "prompts_per_step": 2,
    "max_completion_length": 160,
    "max_prompt_length": 300,
    "log_completions": 0,
}


class Walk:
    """Every kind of method, and state of its own; it remembers what was done to it."""

    every: list["Walk"] = []
    closed = 0

    def __init__(self) -> None:
        self.place = 0
        self.rows: list[dict[str, Any]] = []
        self.rewarded: list[float] = []
        self.threads = {threading.current_thread()}
        Walk.every.append(self)

    def reset(self, start: int = 0, **row: Any) -> str | None:
        self.place = start
        self.rows.append({"start": start, **row})
        self.threads.add(threading.current_thread())
        return f" from {start}" if start else None

    def step(self, n: int) -> int:
        """Step.

        Args:
            n: how far
        """
        self.place += n
        self.threads.add(threading.current_thread())
        return self.place

    async def later(self, n: int) -> str:
        """Step after a while.

        Args:
            n: how far
        """
        await asyncio.sleep(0.001)
        self.place += n
        return f"now {self.place}"

    def boom(self) -> str:
        """Explode."""
        raise ValueError("Game over.")

    def get_reward(self) -> float:
        self.rewarded.append(float(self.place))
        return float(self.place)

    def close(self) -> None:
        Walk.closed += 1

    def _helper(self) -> None: ...


class Swim(Walk):
    """Another environment, which leaves the reward to functions."""

    get_reward = None  # type: ignore[assignment]


def double(n: int) -> int:
    """Double.

    Args:
        n: what
    """
    return 2 * n


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Walk.every, Walk.closed = [], 0


def rows(count: int = 4) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": "go"}], "start": start} for start in range(count)]


def trainer_of(tmp_path: Path, *arguments: Any, **settings: Any) -> Trainer:
    model, tokenizer = build_policy(CALLS)
    return Trainer(model, *arguments, tokenizer=tokenizer, output_dir=str(tmp_path), **(SETTINGS | settings))


def test_an_environment_is_reset_acted_on_rewarded_and_used_again(tmp_path: Path) -> None:
    seen: list[tuple[int, list[dict[str, Any]], list[dict[str, Any]], float]] = []

    def reads(environments: list[Any], prompts: Any, completions: Any, start: list[int], **_: Any) -> list[float]:
        for environment, prompt, completion, at in zip(environments, prompts, completions, start, strict=True):
            seen.append((at, prompt, completion, environment.place))
        return [10.0 * environment.place for environment in environments]

    trainer = trainer_of(
        tmp_path, reads, rows(), environment_factory=Walk, tools=[double], max_steps=3, reward_weights=[0.5]
    )
    steps = list(trainer.steps())
    trainer.close()
    for batch, metrics in steps:
        for reward, (by_function, own) in zip(batch["rewards"].tolist(), batch["function_rewards"], strict=True):
            assert reward == pytest.approx(0.5 * by_function + own)  # get_reward has the weight 1
            assert by_function == 10 * own
        assert metrics["rewards/Walk/mean"] == pytest.approx(metrics["rewards/reads/mean"] / 10)
        assert not batch["completion_mask"].values.all()
    assert len(seen) == 24
    for at, prompt, completion, place in seen:
        assert prompt == [{"role": "user", "content": f"go from {at}" if at else "go"}]
        # The environment is what its messages say: all steps of the conversation, and no others.
        done = [m["content"] for m in completion if m["role"] == "tool" and m["name"] in ("step", "later")]
        done = [text for text in done if "error" not in text]
        told = [int(text.removeprefix("now ")) for text in done]
        if completion[-1]["role"] == "assistant" and not completion[-1].get("tool_calls"):
            assert place == max([at, *told])
    roles = {message["role"] for _, _, completion, _ in seen for message in completion}
    assert roles == {"assistant", "tool"}
    told = {m["content"] for _, _, completion, _ in seen for m in completion if m["role"] == "tool"}
    assert "{'error': 'Game over.'}" in told
    assert "6" in told
    assert any("Tool nope not found. The tools are: double, boom, later, step" in text for text in told)
    assert any("there is no argument 'm'" in text for text in told)
    assert len(Walk.every) == Walk.closed == 8  # one per trajectory of a step, used by all steps, closed at the end
    assert all(len(one.rows) == 3 and len(one.rewarded) == 3 for one in Walk.every)
    assert all(len(one.threads) == 1 for one in Walk.every)
    assert threading.main_thread() not in {thread for one in Walk.every for thread in one.threads}
    assert all(row.keys() == {"start", "prompt"} for one in Walk.every for row in one.rows)
    records = [json.loads(line) for line in (trainer.run_folder / "samples.jsonl").read_text().splitlines()]
    assert len(records) == 24


def test_a_column_routes_to_environments_by_name_without_prompts(tmp_path: Path) -> None:
    """Only that environment's tools are shown, and only its own reward counts; the column is not passed on."""
    shown: dict[str, set[str]] = {"Walk": set(), "Swim": set()}

    def one(environments: list[Any], prompts: Any, **_: Any) -> list[float | None]:
        for environment, prompt in zip(environments, prompts, strict=True):
            shown[type(environment).__name__].add(prompt[-1]["content"])
        return [None if type(environment) is Walk else float(environment.place) for environment in environments]

    data = [{"environment": "walk", "start": 1}, {"environment": "swim", "start": 2}]
    trainer = trainer_of(tmp_path, one, data, environment_factory={"walk": Walk, "swim": Swim})
    [(batch, metrics)] = list(trainer.steps())
    generated = trainer.generate([{"environment": "walk", "start": 4}, {"environment": "swim", "start": 5}])
    assert [one.prompt[-1]["content"] for one in generated] == [" from 4", " from 5"]
    assert all(one.messages[0]["role"] == "assistant" and one.completion_ids for one in generated)
    question = [{"role": "user", "content": "?"}]
    with pytest.raises(DataError, match=r"environment=None; environment_factory has 'walk', 'swim': give rows such as"):
        trainer.generate([question])
    with pytest.raises(DataError, match="is text, but tools"):
        trainer.generate(["plain"])
    trainer.close()
    assert shown == {"Walk": {" from 1"}, "Swim": {" from 2"}}
    for row, (by_function, own) in zip(batch["row"], batch["function_rewards"], strict=True):
        assert (by_function != by_function) == (row["environment"] == "walk")  # nan: does not apply
        assert (own != own) == (row["environment"] == "swim")
    assert metrics["rewards/num_failed"] == 0
    assert all(row.keys() == {"start"} for environment in Walk.every for row in environment.rows)


def test_an_environment_may_own_the_data(tmp_path: Path) -> None:
    """Neither a dataset nor reward functions: reset() says what to do, get_reward() how well it was done. Without any
    round of tool calls, that is what it was at the start."""

    class Own(Walk):
        def reset(self, **row: Any) -> str | None:
            return super().reset(start=3, **row)

    trainer = trainer_of(tmp_path, environment_factory=Own, max_tool_calling_iterations=0)
    [(batch, _)] = list(trainer.steps())
    trainer.close()
    assert [prompt[0]["content"] for prompt in batch["prompt"]] == [" from 3"] * 8
    assert (batch["rewards"] == 3).all()
    assert "turns" in batch["finish_reason"]
    assert all(row == {"start": 3} for environment in Walk.every for row in environment.rows)


def named(environments: Any, **_: Any) -> list[float]:
    return [0.0 for _ in environments]


def ready(completions: Any, **_: Any) -> list[float]:
    return [0.0 for _ in completions]


async def own_loop(rows: Any, client: Any) -> list[Any]:
    return []


async def own_agent(row: Any, base_url: str, api_key: str) -> float:
    return 0.0


TEXT = [{"prompt": "go"}]


@pytest.mark.parametrize(
    ("error", "arguments", "settings", "says"),
    [
        (ConfigError, (ready, rows()), {"tools": {"double": double}}, "pass a list of functions"),
        (ConfigError, (ready, rows()), {"tools": [double], "rollout_func": own_loop}, "pass only one of them"),
        (ConfigError, (None, rows()), {"environment_factory": Swim}, "or give the environment a method get_reward()"),
        (ConfigError, (named, rows()), {"tools": [double]}, "environments are there only with environment_factory="),
        (
            ConfigError,
            (lambda environments, completions: [0.0], rows()),
            {"environment_factory": Walk, "reward_processes": 1},
            "takes `environments`, objects of the trainer's process",
        ),
        (DataError, (ready, TEXT), {"tools": [double]}, "tools and environments need chat messages"),
        (DataError, (ready, [{"start": 1}]), {"tools": [double]}, "no `prompt` column"),
        (ConfigError, (None, None), {"environment_factory": {"walk": Walk}}, "by its column `environment`"),
        (ConfigError, (None, None), {"environment_factory": Walk, "max_steps": None}, "set max_steps"),
        (DataError, (None, rows()), {"environment_factory": {"walk": Walk}}, "has no column 'environment'"),
        (
            DataError,
            (None, [{"environment": "walk"}, {"environment": "fly"}]),
            {"environment_factory": {"walk": Walk}},
            "row 1: environment='fly' is not in environment_factory; it has 'walk'",
        ),
        (ConfigError, (ready, rows()), {"tools": [double], "overlong_prompts": "truncate"}, "use 'drop' or 'error'"),
        (ConfigError, (ready, rows()), {"trajectory_timeout_seconds": 3}, "has no effect without tools=, environment_"),
        (ConfigError, (ready, rows()), {"rollout_func": own_loop, "tool_processes": 3}, "no effect on rollout_func"),
        (
            ConfigError,
            (ready, rows()),
            {"rollout_func": own_loop, "max_open_trajectories": 3},
            "no effect on rollout_fu",
        ),
        (
            ConfigError,
            (ready, rows()),
            {"rollout_func": own_loop, "max_tool_calling_iterations": 3},
            "no effect on roll",
        ),
        (ConfigError, (ready, rows()), {"environment_factory": Walk, "tool_processes": 3}, "no effect on environments"),
        (ConfigError, (ready, rows()), {"agent": lambda row: 1.0}, "agent(row, base_url, api_key)"),
        (ConfigError, (ready, rows()), {"agent": own_agent, "tool_timeout_seconds": 3}, "no effect on agent"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_loaded(
    error: type[Exception], arguments: Any, settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        trainer_of(tmp_path, *arguments, **settings)
    assert says in str(caught.value)
    assert not list(tmp_path.iterdir())
    for _ in range(100):  # instances that were made to look at them are closed, in threads of their own
        if Walk.closed == len(Walk.every):
            break
        time.sleep(0.05)
    assert Walk.closed == len(Walk.every)


class Session(Walk):
    """A session of a server that has only so many."""

    num_open = most_open = 0
    places = 4
    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        with Session.lock:
            if Session.num_open >= Session.places:
                raise RuntimeError(f"Server at capacity: {Session.num_open}/{Session.places} sessions active")
            Session.num_open += 1
            Session.most_open = max(Session.most_open, Session.num_open)

    def close(self) -> None:
        with Session.lock:
            Session.num_open -= 1


class OtherSession(Session):
    """A session for other rows on the same server."""


def slow(completions: Any) -> list[float]:
    time.sleep(0.02)
    return [float(len(completion)) for completion in completions]


def looks(environments: list[Any], **_: Any) -> list[float]:
    return [float(environment.place) for environment in environments]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("functions", "settings"),
    [
        ([], {}),
        ([slow], {"score_by": "group"}),
        ([looks], {}),
        ([looks], {"score_by": "group"}),
        ([looks], {"rollout.partial": True, "oversample": 2, "score_by": "group", "max_steps": 3, "eval_steps": 1}),
        ([looks], {"async_level": 1}),
        ([looks], {"environment_factory": {"one": Session, "other": OtherSession}}),
    ],
)
def test_no_more_environments_than_a_server_has(tmp_path: Path, functions: Any, settings: Any) -> None:
    """Without a bound each of these asks for more sessions at once than there are."""
    Session.num_open = Session.most_open = 0
    kinds = ["one", "other"] if "environment_factory" in settings else [None]
    data = [{**row, **({"environment": kinds[place % 2]} if kinds[0] else {})} for place, row in enumerate(rows(6))]
    keys = {"environment_factory": Session, "prompts_per_step": 3, "num_generations": 4, "max_environments": 4}
    if "eval_steps" in settings:
        keys |= {"eval_dataset": data[:2]}
    # 12 trajectories in 4 places: too many in the first step. Places go from step to step without rewards, and if held.
    num_steps = 2 if not functions or settings.keys() & {"rollout.partial", "async_level"} else 1
    trainer = trainer_of(tmp_path, functions, data, **(keys | {"max_steps": num_steps} | settings))
    for _, metrics in trainer.steps():
        assert metrics["rewards/num_failed"] == 0 and metrics["agents/ended_error"] == 0
    trainer.close()
    assert 0 < Session.most_open <= Session.places and Session.num_open == 0


def test_a_bound_on_environments_that_a_group_does_not_fit_in_is_refused(tmp_path: Path) -> None:
    keys = {"environment_factory": Walk, "num_generations": 4, "score_by": "group", "max_environments": 3}
    with pytest.raises(ConfigError, match="max_environments=3, but score_by=group scores 4 trajectories at once"):
        trainer_of(tmp_path, looks, rows(), **keys)
    with pytest.raises(ConfigError, match="max_environments=1, but environment_factory has 2 kinds, and one of each"):
        trainer_of(tmp_path, environment_factory={"a": Walk, "b": Walk}, train_dataset=rows(), max_environments=1)
    for given in ({"tools": [double]}, {"agent": lambda row, url, key: 1.0}):
        with pytest.raises(ConfigError, match="max_environments=2 has no effect"):
            trainer_of(tmp_path, slow, rows(), max_environments=2, **given)
