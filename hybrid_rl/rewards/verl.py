"""Reward functions with verl's signature."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from hybrid_rl.data.formats import decoded_mapping
from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import ConfigError, RewardError
from hybrid_rl.rewards.completions import response_text
from hybrid_rl.rewards.marks import is_async_callable, layers

PARAMETERS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
TRUTHS = ("ground_truth", "reward_model", "answer")  # columns; of each row the first that says something counts


class VerlReward:
    """A function `(data_source, solution_str, ground_truth, extra_info)`, called for every completion by itself.

    data_source, extra_info: columns of verl's rows, None without them. ground_truth: of each row the first of its
    ground_truth, reward_model.ground_truth and answer that is not None; a row with none of them fails. solution_str:
    the text of the completion, as in verl with the results of tools. The function returns a number, or a mapping with
    `score`, whose other numbers become metrics: their means, under their names. An `async def` function is awaited for
    all completions of a call at once; one that raises fails its own sample.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        bound = {name for part in layers(function) if isinstance(part, functools.partial) for name in part.keywords}
        names = PARAMETERS if takes_all else PARAMETERS & {parameter.name for parameter in parameters}
        self._taken = names - bound

    def __call__(
        self,
        completions: Sequence[str | Messages],
        data_source: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
        ground_truth: Sequence[Any] | None = None,
        reward_model: Sequence[Any] | None = None,
        answer: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[Any] | Coroutine[Any, Any, list[Any]]:
        """Score K completions; an error in the place of a number fails that sample. Returns a coroutine if the function
        does. Raises RewardError if the function returns neither a number nor a mapping with one."""
        nothing = [None] * len(completions)
        columns = [ground_truth or nothing, reward_model or nothing, answer or nothing]
        results: list[Any] = []
        for source, extra, completion, *row in zip(
            data_source or nothing, extra_info or nothing, completions, *columns, strict=True
        ):
            truth = _truth(*row)
            if truth is None and "ground_truth" in self._taken:
                results.append(RewardError(self._no_truth(*row)))
                continue
            arguments = {"data_source": source, "extra_info": extra, "ground_truth": truth}
            arguments["solution_str"] = response_text(completion)
            results.append(self.function(**{name: arguments[name] for name in self._taken}))
        return (
            self._awaited(results, log_metric)
            if is_async_callable(self.function)
            else self._scores(results, log_metric)
        )

    async def _awaited(self, results: Sequence[Any], log_metric: Callable[[str, float], None] | None) -> list[Any]:
        calls = [result for result in results if inspect.isawaitable(result)]
        values = iter(await asyncio.gather(*calls, return_exceptions=True))
        known = [next(values) if inspect.isawaitable(result) else result for result in results]
        return self._scores(known, log_metric)

    def _scores(self, results: Sequence[Any], log_metric: Callable[[str, float], None] | None) -> list[Any]:
        mappings = [result for result in results if isinstance(result, Mapping)]
        for name in dict.fromkeys(name for result in mappings for name in result if name != "score"):
            values = [result[name] for result in mappings if isinstance(result.get(name), int | float)]
            if values and log_metric is not None:
                log_metric(name, sum(values) / len(values))
        return [result if isinstance(result, BaseException) else self._score(result) for result in results]

    def _no_truth(self, *row: Any) -> str:
        """Say that a row has no expected answer. row: its cells in TRUTHS."""
        cells = ", ".join(f"{name}={cell!r:.80}" for name, cell in zip(TRUTHS, row, strict=True))
        return (
            f"{self.__name__} needs ground_truth, but this row has none: {cells}; fill one of them, reward_model with "
            'a mapping {"ground_truth": ...}'
        )

    def _score(self, result: Any) -> float:
        value: Any = result.get("score") if isinstance(result, Mapping) else result
        try:
            return float(value)
        except (TypeError, ValueError):
            raise RewardError(
                f"{self.__name__} returned {result!r:.80}; return a number, or a mapping with the number `score`"
            ) from None


def adapted(function: Callable[..., Any], columns: Sequence[str] | None) -> Callable[..., Any]:
    """Return a `VerlReward` for a function with verl's signature, and any other as it is.

    columns: of the dataset, None if they are not known. Raises ConfigError if none of them is the expected answer.
    """
    if isinstance(function, VerlReward):
        return function
    parameters = inspect.signature(function).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if not {"solution_str", "ground_truth"} <= needed <= PARAMETERS:
        return function
    if columns is not None and not set(TRUTHS) & set(columns):
        raise ConfigError(
            f"reward function {getattr(function, '__name__', function)!r} is one of verl's and needs ground_truth, but "
            f"the dataset has none of the columns {', '.join(TRUTHS)} (columns: {', '.join(columns) or 'none'})"
        )
    return VerlReward(function)


def _truth(ground_truth: Any, reward_model: Any, answer: Any) -> Any:
    """Return the expected answer of a row, None if it has none. The cell reward_model may be a text of JSON."""
    model = decoded_mapping(reward_model)
    of_model = model.get("ground_truth") if isinstance(model, Mapping) else reward_model
    return next((truth for truth in (ground_truth, of_model, answer) if truth is not None), None)
