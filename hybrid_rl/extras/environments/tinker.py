"""Environments in the form of tinker-cookbook: token ids in, token ids out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.floor import RolloutClient, RolloutFunction
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.errors import DataError

MakeEnv = Callable[[Mapping[str, Any]], Any | Awaitable[Any]]


def tinker_rollout(make_env: MakeEnv, *, per_turn: bool = False) -> RolloutFunction:
    """Return a `rollout_func` that lets the policy act in environments of tinker-cookbook's class `Env`.

    Their observations must be made with the tokenizer of this run's model. The reward of a trajectory is the sum of its
    steps' rewards; what an environment counts (`metrics`) goes to samples.jsonl.

    Args:
        make_env: makes the environment of a row (a dict of its columns), each for one episode; plain or `async`.
        per_turn: give the rewards at the turns instead of at the end.
    """

    async def rollout(
        rows: Sequence[dict[str, Any]], client: RolloutClient, tokenizer: Any = None, **_: Any
    ) -> list[Trajectory]:
        async def run(row: Mapping[str, Any], trajectory: Trajectory) -> None:
            env = make_env(row)
            env = await env if isinstance(env, Awaitable) else env
            takes_extra = "extra" in inspect.signature(env.step).parameters  # since tinker-cookbook 0.2
            first = await env.initial_observation()
            if not isinstance(first, tuple):  # an InitialObservationOverflow
                trajectory.end("error", f"the environment says that its first observation is too long: {first.logs}")
                return
            observation, stop = first
            while True:
                ids = list(observation.to_ints())
                turn = await client.generate(ids, trajectory, stop=stop_texts(stop, tokenizer))
                reason = "length" if turn.finish_reason == "length" else "stop"
                extra: dict[str, Any] = {"extra": {"stop_reason": reason}} if takes_extra else {}
                result = await env.step(list(turn.token_ids), **extra)
                trajectory.add_reward(result.reward, turn if per_turn else None)
                trajectory.extra.update(result.metrics)
                if turn.finish_reason != "stop":
                    raise TrajectoryEndedError("length" if reason == "length" else "abort")
                if result.episode_done:
                    trajectory.end("stop")
                    return
                observation, stop = result.next_observation, result.next_stop_condition

        return await client.each(rows, run)

    return rollout


def stop_texts(stop: Sequence[str] | Sequence[int], tokenizer: Any) -> list[str]:
    """Return a stop condition as texts, without the token that ends every answer. Raises DataError for another special
    token, which the text of an answer does not have."""
    texts = []
    for ending in stop:
        if not isinstance(ending, str) and ending != tokenizer.eos_token_id and ending in tokenizer.all_special_ids:
            raise DataError(
                f"the environment stops at the special token {ending} ({tokenizer.convert_ids_to_tokens(ending)!r}), "
                f"but answers of this model end with {tokenizer.eos_token!r}; use the renderer of this model"
            )
        texts.append(ending if isinstance(ending, str) else tokenizer.decode([ending]))
    return [text for text in texts if text != tokenizer.eos_token]
