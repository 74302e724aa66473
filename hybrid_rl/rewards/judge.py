"""A judge at an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import ConfigError, RewardError
from hybrid_rl.rewards.judging import JudgeMode, JudgeParser, JudgePrompt, JudgeStyle, Question


@dataclass(eq=False)
class LLMJudge:
    """An `async` reward function that asks a chat model for a grade of each completion, or compares them in pairs.

    base_url, model: of the endpoint, e.g. "http://judge:8000/v1". prompt, parser: see JudgeStyle; None: a grade from 0
    to 10 in <score></score>; pairwise the winner in <winner></winner>: both orders of every pair of a group are asked,
    and the score is the share of wins (needs score_by=group). An answer in which the parser finds nothing leaves the
    sample unscored; their share is logged as <name>/unparsed. A request that still fails after num_retries more
    attempts fails the sample.

    api_key_env: the environment variable that holds the key; None: the endpoint needs none. max_concurrency: requests
    at a time, over all samples. timeout_seconds: of one request. max_tokens, temperature: of an answer.
    extra_body: further keys of the request.
    Raises ConfigError for an unusable argument, if the `openai` package is missing, and if the variable is not set.
    """

    base_url: str
    model: str
    prompt: JudgePrompt | None = None
    parser: JudgeParser | None = None
    mode: JudgeMode = "pointwise"
    api_key_env: str | None = "OPENAI_API_KEY"
    max_concurrency: int = 32
    timeout_seconds: float = 60.0
    num_retries: int = 2
    max_tokens: int = 1024
    temperature: float = 0.0
    extra_body: dict[str, Any] | None = None
    name: str = "llm_judge"

    def __post_init__(self) -> None:
        if self.max_concurrency < 1 or self.num_retries < 0 or not self.timeout_seconds > 0 or self.max_tokens < 1:
            raise ConfigError(
                f"max_concurrency={self.max_concurrency} and max_tokens={self.max_tokens} must be at least 1, "
                f"num_retries={self.num_retries} at least 0, timeout_seconds={self.timeout_seconds} above 0"
            )
        self.style = JudgeStyle.of(self.mode, self.prompt, self.parser)
        self.needs_group = self.mode == "pairwise"
        self.__name__ = self.name
        self._clients = _no_clients()
        openai_client()
        self._api_key()

    async def __call__(
        self,
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        log_metric: Callable[[str, float], None],
        completion_openings: Sequence[str] | None = None,
        **columns: Any,
    ) -> list[Any]:
        """Ask about the samples; returns their scores. An exception in the place of a score fails that sample."""
        values = {name: column for name, column in columns.items() if isinstance(column, list)}
        questions = self.style.questions(prompts, completions, values, [0] * len(prompts), completion_openings)
        answers = await asyncio.gather(*(self._answer(question) for question in questions))
        if answers:
            log_metric(f"{self.name}/unparsed", answers.count(None) / len(answers))
        return self.style.scores(questions, answers, len(prompts))

    async def _answer(self, question: Question) -> float | None | Exception:
        client, semaphore = self._client()
        prompt = question.prompt
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            async with semaphore:
                answer = await client.chat.completions.create(
                    model=self.model,
                    messages=messages,
                    max_tokens=self.max_tokens,
                    temperature=self.temperature,
                    extra_body=self.extra_body,
                )
            choices = getattr(answer, "choices", None)
            message = choices[0].message if choices else None
            if message is None:
                raise RewardError(
                    f"{self.name}: the answer of {self.base_url} holds no message ({str(answer)!r:.200}), as behind a "
                    "filter of contents; look at what was asked about this sample, or at the server"
                )
        except Exception as error:  # of one request: the others continue
            return error
        return self.style.read(message.content)

    def _client(self) -> tuple[Any, asyncio.Semaphore]:
        """Return the client of the running event loop: connections belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = openai_client()(
                base_url=self.base_url,
                api_key=self._api_key(),
                timeout=self.timeout_seconds,
                max_retries=self.num_retries,
            )
            self._clients[loop] = client, asyncio.Semaphore(self.max_concurrency)
        return self._clients[loop]

    def _api_key(self) -> str:
        if self.api_key_env is None:
            return "none"
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ConfigError(
                f"the environment variable {self.api_key_env} is not set; set it to the key of {self.base_url}, or "
                f"pass api_key_env=None if the endpoint needs none"
            )
        return key

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_clients"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _clients=_no_clients())


def _no_clients() -> weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, asyncio.Semaphore]]:
    return weakref.WeakKeyDictionary()


def openai_client() -> Any:
    """Import the class of clients. Raises ConfigError if its package is missing."""
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise ConfigError("LLMJudge needs the openai package, which is not installed: pip install openai") from error
    return AsyncOpenAI
