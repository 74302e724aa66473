"""Environments of `verifiers`, which bring their own loop: they ask the endpoint of the trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from hybrid_rl.extras.endpoint.requests import MODEL

VerifiersAgent = Callable[[Mapping[str, Any], str, str], Coroutine[Any, Any, dict[str, Any]]]


def verifiers_agent(environment: Any, **sampling: Any) -> VerifiersAgent:
    """Return an `agent` for the Trainer that runs episodes of a verifiers environment.

    Its reward becomes that of the trajectory; its metrics go to samples.jsonl. A reward function that raises has
    failed, and the trajectory has no reward; verifiers itself logs that, and counts it as 0.

    Args:
        environment: what `verifiers.load_environment` returns, with the rows of `environment.get_dataset()` (0.1.10 to
            0.1.14); or a `verifiers.v1` Env (0.3 and later), with the rows of `verifiers_tasks(environment)`.
        sampling: arguments of its requests, such as max_tokens. The endpoint refuses those that would bias training.
    """
    if hasattr(environment, "run_episode"):
        return _Episodes(environment, sampling)
    if (rubric := getattr(environment, "rubric", None)) is not None:
        _let_errors_pass(rubric)

    async def agent(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as openai:
            client = OpenAIChatCompletionsClient(openai)
            try:
                output = await environment.run_rollout(dict(row), client, MODEL, dict(sampling))
            except RewardFailed as failed:
                raise RuntimeError(f"a reward function of the verifiers environment failed: {failed}") from failed
        if output.get("error"):
            raise RuntimeError(f"the verifiers environment failed: {output['error']}")
        return {**(output.get("metrics") or {}), "reward": output["reward"]}

    return agent


class RewardFailed(BaseException):  # noqa: N818
    """What a reward function raised, in a form that a rubric lets pass: it catches every Exception, and gives 0 instead
    (verifiers 0.1.14)."""


def _let_errors_pass(rubric: Any) -> None:
    """Have what reward functions of a rubric raise end the episode. Those of weight 0, which are metrics, are left."""
    for inner in getattr(rubric, "rubrics", ()):
        _let_errors_pass(inner)
    weights = getattr(rubric, "weights", ())
    rubric.funcs = [
        _passing(function) if weight and not hasattr(function, "lets_errors_pass") else function
        for function, weight in zip(rubric.funcs, weights, strict=True)
    ]


def _passing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def passing(*arguments: Any, **keywords: Any) -> Any:
        try:
            value = function(*arguments, **keywords)
            value = await value if inspect.isawaitable(value) else value
            return value if isinstance(value, list) else float(value)
        except Exception as error:
            raise RewardFailed(f"{function.__name__} raised {type(error).__name__}: {error}") from error

    passing.lets_errors_pass = True  # type: ignore[attr-defined]
    return passing


def verifiers_tasks(environment: Any, num_tasks: int | None = None) -> list[dict[str, Any]]:
    """Return rows for `Dataset.from_list`, one for each task of a `verifiers.v1` Env; the first num_tasks of one whose
    tasks do not end."""
    tasks = environment.taskset if num_tasks is None else environment.taskset.take(num_tasks)
    return [{"task": task.data.idx} for task in tasks]


class _Episodes:
    """The agent of a `verifiers.v1` Env, which serves while any of its episodes runs."""

    def __init__(self, environment: Any, sampling: Mapping[str, Any]) -> None:
        self._environment, self._sampling = environment, dict(sampling)
        self._tasks: dict[int, Any] = {}
        self._unread: Any = None
        self._open = 0
        self._serving: contextlib.AsyncExitStack | None = None
        self._lock = asyncio.Lock()

    async def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Run one episode."""
        import verifiers.v1 as vf

        variable = f"HYBRID_RL_KEY_{api_key[-12:]}"  # the only door for a key that its clients have
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(MODEL, client, vf.Sampling(**self._sampling))
            async with self._served():
                episode = await self._environment.run_episode(self._task(int(row["task"])), context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"the verifiers environment failed: {errors[-1] if errors else 'it does not say why'}")
        metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items()}
        return {**metrics, "reward": sum(trace.reward for trace in episode.traces)}

    def _task(self, number: int) -> Any:
        self._unread = iter(self._environment.taskset) if self._unread is None else self._unread
        while number not in self._tasks:
            task = next(self._unread)
            self._tasks[task.data.idx] = task
        return self._tasks[number]

    @contextlib.asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        async with self._lock:
            if self._serving is None:
                stack = contextlib.AsyncExitStack()
                await stack.enter_async_context(self._environment.serving())
                self._serving = stack
            self._open += 1
        try:
            yield
        finally:
            async with self._lock:
                self._open -= 1
                if not self._open:
                    serving, self._serving = self._serving, None
                    await serving.aclose()
