"""The judges of a rollout: the engine judges the samples that it has made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.batch import Batch, Trajectories
from hybrid_rl.batch.trajectories import sample_keys
from hybrid_rl.data.prompts import Messages, PromptEncoder
from hybrid_rl.engines.base import RolloutRequest, SamplingParams, derive_seed
from hybrid_rl.engines.engine_client import EngineClient, Handle
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.process import progress
from hybrid_rl.rewards import EngineJudge, RewardFailure, RewardRunner
from hybrid_rl.rewards.completions import TAIL_TOKENS, opening_of
from hybrid_rl.rewards.judging import Question
from hybrid_rl.rollout.call import RolloutCall
from hybrid_rl.rollout.deferred_scores import LateScores, failed_before
from hybrid_rl.rollout.sample_records import shown_completions

Encode = Callable[[str | Messages], Sequence[int]]
FIRST_JUDGE_ID = -2  # and downwards: requests of samples count upwards from 0, -1 is that of the probe


def judge_encoder(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> Encode:
    """Return the encoder of questions to the policy as a judge: text becomes a message of the user if there is a chat
    template."""
    encoder = PromptEncoder(tokenizer, max_prompt_length=None, chat_template_kwargs=chat_template_kwargs)
    has_template = bool(getattr(tokenizer, "chat_template", None) or encoder.chat_template_kwargs.get("chat_template"))

    def encode(prompt: str | Messages) -> list[int]:
        is_message = isinstance(prompt, str) and has_template
        return encoder.encode([[{"role": "user", "content": prompt}] if is_message else prompt])[0]

    return encode


@dataclass
class Asked:
    """What judges are asked about some samples. questions: by the place of the judge in reward_funcs; requests: by that
    and the index of a question, but for those that are too long; too_long: failures of these. handle: of the requests,
    once the engine has them."""

    num_samples: int
    questions: Mapping[int, list[Question]]
    requests: Mapping[tuple[int, int], RolloutRequest]
    too_long: Sequence[RewardFailure]
    handle: Handle | None = None


@dataclass(frozen=True)
class JudgeRound:
    """Same arguments as GroupStream. Runs inside the session in which the samples are made, whose prefixes its prompts
    find: after all of them (`run`), or whenever a group is whole (`begin`, and `scores` at the end)."""

    client: EngineClient
    rewards: RewardRunner
    decode: Callable[[Sequence[int]], str]
    encode: Encode
    seed: int
    max_length: int | None

    def run(self, batch: Batch, call: RolloutCall, failures: Sequence[RewardFailure] = ()) -> LateScores:
        """Return the scores of this rank's trajectories, None for those that failed before they had a completion. Ranks
        that share an engine must all call this, with or without samples. failures: so far."""
        return self.scores([self._asked(batch, call, failures)], call)

    def begin(self, batch: Batch, call: RolloutCall, columns: Iterable[str]) -> Asked:
        """Ask about whole groups while the engine makes others, at its next step. columns: of the dataset, which rows
        may lack."""
        asked = self._asked(batch, call, (), columns)
        asked.handle = self.client.submit(list(asked.requests.values()), call.version)
        return asked

    def _asked(
        self, batch: Batch, call: RolloutCall, failures: Sequence[RewardFailure], columns: Iterable[str] = ()
    ) -> Asked:
        """Write the questions about samples."""
        batch = Trajectories.of(batch).last_turns(batch)
        keys, judges, names = sample_keys(batch), self.rewards.entries.judges, self.rewards.names
        failed = failed_before(failures)
        questions = {place: self._questions(judge, batch, columns) for place, judge in judges.items()}
        questions = {
            place: [q for q in of_judge if not failed & {keys[i].trajectory for i in q.samples}]
            for place, of_judge in questions.items()
        }
        requests: dict[tuple[int, int], RolloutRequest] = {}
        too_long: list[RewardFailure] = []
        for number, (place, judge) in enumerate(judges.items()):
            for index, question in enumerate(questions[place]):
                trajectories = [keys[sample].trajectory for sample in question.samples]
                request = self._request(number, judge, question, trajectories, call)
                if self.max_length is None or len(request.prompt_ids) + judge.max_tokens <= self.max_length:
                    requests[place, index] = request
                    continue
                detail = (
                    f"the judge's prompt has {len(request.prompt_ids)} tokens and its answer up to {judge.max_tokens}, "
                    f"but the engine takes {self.max_length}; shorten the judge's prompt, lower its max_tokens or "
                    f"max_completion_length, or use a model with more positions"
                )
                too_long += [RewardFailure(names[place], keys[i], "long", detail) for i in question.samples]
        return Asked(batch.num_samples, questions, requests, too_long)

    def scores(self, parts: Sequence[Asked], call: RolloutCall) -> LateScores:
        """Return the scores of all parts of a batch, in their order, when they have been answered. Collective as `run`
        is."""
        waiting = [request for part in parts if part.handle is None for request in part.requests.values()]
        handles = [part.handle for part in parts if part.handle is not None]
        answers: dict[int, str] = {}
        with progress.doing("judges", len(waiting) + sum(handle.num_unfinished for handle in handles), "answers"):
            for events in self.client.stream(waiting, call.version):
                answers.update((event.id, self.decode(event.completion_ids)) for event in events)
                progress.advance(len(events))
            for handle in handles:  # ranks that share an engine have taken all of their steps in the loop above
                num_unfinished, events = handle.num_unfinished, self.client.wait(handle)
                answers.update((event.id, self.decode(event.completion_ids)) for event in events)
                progress.advance(num_unfinished)
        values: dict[int, list[float | None]] = {}
        logged, too_long = MetricSums(), list[RewardFailure]()
        for place, judge in self.rewards.entries.judges.items():
            num_asked = num_unparsed = 0
            values[place] = []
            for part in parts:
                questions = part.questions[place]
                parsed: list[float | None | Exception] = [None] * len(questions)
                asked = [index for index in range(len(questions)) if (place, index) in part.requests]
                for index in asked:
                    parsed[index] = judge.style.read(answers[part.requests[place, index].id])
                num_asked += len(asked)
                num_unparsed += sum(parsed[index] is None for index in asked)
                values[place] += judge.style.scores(questions, parsed, part.num_samples)
            name = self.rewards.names[place]
            logged.mean(f"{name}/unparsed", num_unparsed, num_asked)
            too_long += (failure for part in parts for failure in part.too_long if failure.function == name)
        return LateScores(values, too_long, logged)

    def _questions(self, judge: EngineJudge, batch: Batch, columns: Iterable[str]) -> list[Question]:
        rows = batch["row"]
        names = dict.fromkeys((*columns, *(name for row in rows for name in row)))
        values = {name: [row.get(name) for row in rows] for name in names}
        completions = shown_completions(batch)
        tails = (self.decode(ids[-TAIL_TOKENS:].tolist()) for ids in batch["prompt_ids"])
        openings = [
            "" if isinstance(completion, list) else opening_of(prompt, tail)
            for prompt, completion, tail in zip(batch["prompt"], completions, tails, strict=True)
        ]
        return judge.style.questions(batch["prompt"], completions, values, batch["group"].tolist(), openings)

    def _request(
        self, number: int, judge: EngineJudge, question: Question, trajectories: Sequence[int], call: RolloutCall
    ) -> RolloutRequest:
        """Make one request. number: of the judge; trajectories: those it is asked about, of one group. Ids
        are unique over ranks and judges; noise depends only on the places of these trajectories in the rollout."""
        places = [trajectory - call.first_id for trajectory in trajectories]
        other, num_judges = places[-1] % call.num_generations, len(self.rewards.entries.judges)
        identity = FIRST_JUDGE_ID - ((trajectories[0] * num_judges + number) * call.num_generations + other)
        params = SamplingParams(
            max_tokens=judge.max_tokens,
            temperature=judge.temperature,
            stop_token_ids=call.params.stop_token_ids,
            seed=derive_seed(self.seed, call.params.seed, call.purpose, "judge", number, *places),
        )
        return RolloutRequest(identity, tuple(self.encode(question.prompt)), params)
