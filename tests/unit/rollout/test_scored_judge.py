"""The engine as judge: its second round, over a scripted client and over the in-place engine."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import TAGS, FinishedSample, RolloutRequest, SamplingParams
from hybrid_rl.engines.coordinator import Coordinator
from hybrid_rl.engines.engine_client import EngineClient, Handle
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.errors import ConfigError
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.rewards import EngineJudge, RewardRunner, TrainerState
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.completion_stream import CompletionStream
from hybrid_rl.rollout.judged import JudgeRound, judge_encoder
from hybrid_rl.rollout.stream import GroupStream
from tests.support.engines.engine_settings import inplace_settings
from tests.support.tiny import EOS_ID, build_model, build_tokenizer, ids_of
from tests.unit.rollout.holding import MAX_TOKENS, STOP, Exchange, KnownEngine
from tests.unit.rollout.scripted import ROWS, STATE, ScriptedClient, decode

TASKS = [RolloutTask(place, row) for place, row in enumerate(ROWS)]
PARAMS = SamplingParams(3, temperature=0.5, stop_token_ids=(7,), seed=2)
CALL = RolloutCall(2, PARAMS, 9, STATE, "test", 100)


class JudgingClient(ScriptedClient):
    """Beside the script: answers a question, whose tokens are characters, with `answer` of it, as characters. asked:
    all questions, and the version that is to answer them."""

    def __init__(self, answer, **options):
        super().__init__(**options)
        self.judge, self.asked = answer, []

    def session(self):
        return nullcontext()

    def stream(self, requests, version):
        if not self.calls:
            return super().stream(requests, version)
        self.calls.append((requests, version))
        return iter(())

    def submit(self, requests, version):
        handle = Handle(requests)
        self.asked += ((request, version) for request in requests)
        for request in reversed(requests):
            answer = self.judge("".join(map(chr, request.prompt_ids)))
            ids = [8] if answer is None else [ord(answer)]
            handle.put(FinishedSample(request.id, ids, [0.0], [9], "stop"))
        return handle

    def wait(self, handle):
        return handle.take()


def text_or_words(ids):
    return decode(ids) if all(token < 9 for token in ids) else "".join(map(chr, ids))


def encode(prompt):
    return [ord(char) for char in prompt]


def parse(text):
    return float(text) if text.isdigit() else None


def run(judges, answer, tasks=TASKS, call=CALL, batches=None, **options):
    client = JudgingClient(answer, batches=batches)
    rewards = RewardRunner(judges)
    scored = CompletionStream(client, rewards, text_or_words, seed=11, encode=encode, **options)
    batch, report = scored.run(tasks, call)
    rewards.close()
    return batch, report, client


def grade(question):
    return str(len(question.split("|")[1]))


def test_a_judge_is_asked_about_all_samples():
    judge = EngineJudge("{prompt}|{completion}|{answer}", parse, max_tokens=5, temperature=0.25)

    def length(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    batch, report, client = run([length, judge], grade)
    assert batch["function_rewards"] == [[2.0, 2.0], [1.0, 1.0], [3.0, 3.0], [2.0, 2.0]]
    assert batch["rewards"].tolist() == [4.0, 2.0, 6.0, 4.0]
    assert {version for _, version in (*client.calls, *client.asked)} == {9}
    questions = [question for question, _ in client.asked]
    texts = ["".join(map(chr, question.prompt_ids)) for question in questions]
    assert texts == ["first|ab|a", "first|c|a", "2|aaa|b", "2|bc|b"]
    for question in questions:
        params = question.params
        assert (params.max_tokens, params.temperature, params.stop_token_ids) == (5, 0.25, (7,))
    assert len({question.params.seed for question in questions}) == 4
    # No id of a sample of any rollout, none twice, and not the probe's.
    assert len({question.id for question in questions}) == 4 and max(question.id for question in questions) < -1
    assert report.logged.result() == {"engine_judge/unparsed": 0.0} and "judge" in report.seconds


def test_ids_and_noise_of_questions_depend_on_the_sample_alone():
    judge = EngineJudge("{prompt}|{completion}", parse, mode="pointwise")
    pair = EngineJudge("{completion_a}|{completion_b}", parse, mode="pairwise")
    _, _, whole = run([judge, pair], grade)
    _, _, second = run([judge, pair], grade, tasks=TASKS[1:])
    asked, of_second = ([request for request, _ in client.asked] for client in (whole, second))
    assert len({request.id for request in asked}) == len(asked) == 4 + 2 + 2
    assert set(of_second) <= set(asked) and len(of_second) == 4


def judged(judges, completions, group, trajectory, turn, num_generations, max_length=None):
    """The scores of a judges' round about such samples, in which A always wins, and what was asked."""
    asked = []

    class Client:
        def stream(self, requests, version):
            asked.extend(requests)
            yield [FinishedSample(request.id, [ord("1")], [0.0], [9], "stop") for request in requests]

    number = len(completions)
    ids = {"group": group, "trajectory": trajectory, "turn": turn}
    prompts = {"prompt": ["p"] * number, "prompt_ids": Jagged.from_rows([[ord("p")]] * number, torch.int64)}
    columns = {"completion": list(completions), "row": [{}] * number}
    batch = Batch({**prompts, **columns, **{name: torch.tensor(values) for name, values in ids.items()}})
    with RewardRunner(judges) as rewards:
        judge_round = JudgeRound(Client(), rewards, text_or_words, encode, seed=0, max_length=max_length)
        return judge_round.run(batch, RolloutCall(num_generations, PARAMS, 9, STATE, "test", 100)), asked


def test_every_pair_of_a_group_has_an_id_of_its_own():
    judges = [EngineJudge("{completion_a}|{completion_b}", parse, mode="pairwise") for _ in range(2)]
    late, asked = judged(judges, "abcdef", [0] * 3 + [1] * 3, range(100, 106), [0] * 6, 3)
    assert len({request.id for request in asked}) == len(asked) == 2 * 2 * 6
    assert late.values == {0: [0.5] * 6, 1: [0.5] * 6}


def test_the_last_turn_of_a_trajectory_is_judged():
    """Its prompt holds the turns before it, and the pairs of a group are of different trajectories."""
    judge = EngineJudge("{completion_a}|{completion_b}", parse, mode="pairwise")
    samples = (["a2", "b", "a1"], [0] * 3, [100, 101, 100], [1, 0, 0], 2)
    late, asked = judged(judge, *samples)
    assert ["".join(map(chr, request.prompt_ids)) for request in asked] == ["a2|b", "b|a2"]
    assert late.values == {0: [0.5, 0.5]}
    late, _ = judged(judge, *samples, max_length=1)
    assert {failure.key for failure in late.failures} == {(100, 1), (101, 0)}


def test_unreadable_answers_are_unscored_and_counted():
    judge = EngineJudge("{prompt}|{completion}", parse)
    batch, report, _ = run(judge, lambda question: None if "aaa" in question else "3")
    assert batch["rewards"].isnan().tolist() == [False, False, True, False]
    assert [(failure.function, failure.key.trajectory, failure.reason) for failure in report.failures] == [
        ("all functions", 102, "none")
    ]
    assert report.logged.result() == {"engine_judge/unparsed": 0.25}


def test_questions_that_are_too_long_fail_their_samples():
    judge = EngineJudge("{prompt}|{completion}", parse, max_tokens=5)
    batch, report, client = run(judge, grade, max_length=5 + len("first|c"))
    assert batch["rewards"].isnan().tolist() == [True, False, False, False]
    assert [(failure.function, failure.key.trajectory, failure.reason) for failure in report.failures] == [
        ("engine_judge", 100, "long")
    ]
    assert len(client.asked) == 3


def test_pairs_need_no_score_by_group():
    judge = EngineJudge("{completion_a}|{completion_b}", lambda text: float(text), mode="pairwise")
    batch, _, _ = run(judge, lambda question: str(int(len(question.split("|")[0]) > len(question.split("|")[1]))))
    assert batch["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_a_rank_without_samples_takes_part_in_the_round():
    batch, report, client = run(EngineJudge("{completion}", parse), grade, tasks=[])
    assert batch.num_samples == 0 and not report.failures
    assert client.calls[1:] == [([], 9)]  # ranks that share an engine step together


def test_without_a_tokenizer_a_judge_is_refused():
    with pytest.raises(ConfigError, match="encode"):
        CompletionStream(ScriptedClient(), RewardRunner(EngineJudge()), decode, seed=0)


def test_unscored_rollouts_ask_nobody():
    client = ScriptedClient()
    scored = CompletionStream(client, RewardRunner(EngineJudge()), decode, seed=0, encode=encode)
    batch, _ = scored.run(TASKS, RolloutCall(2, PARAMS, 9, STATE, "test", 0, is_scored=False))
    assert "rewards" not in batch and len(client.calls) == 1


def test_room_for_the_judge():
    assert EngineJudge(max_tokens=10).max_length(100) == 100 + 512 + 10
    assert EngineJudge(max_tokens=10, mode="pairwise").max_length(100) == 200 + 512 + 10
    assert EngineJudge(max_tokens=10, max_prompt_length=30).max_length(100) == 40
    entries = RewardRunner([lambda completions: [], EngineJudge(max_tokens=10, max_prompt_length=30)]).entries
    assert [entries.max_length(length) for length in (100, 20)] == [100, 40]


def test_a_group_is_judged_while_others_are_made():
    """The second group is whole before the first, and is asked about before that has its last sample. A column that
    only its row has is known to the questions about the first one, too."""
    rows = [ROWS[0], replace(ROWS[1], columns={"answer": "b", "hint": "h"})]
    asked_before = list[int]()
    client = JudgingClient(
        grade, batches=[[2, 0], [3], [1]], between=lambda number: asked_before.append(len(client.asked))
    )
    judge = EngineJudge("{prompt}|{completion}|{hint}", parse)
    with RewardRunner(judge) as rewards:
        stream = CompletionStream(client, rewards, text_or_words, seed=11, encode=encode)
        batch, report = stream.run([RolloutTask(place, row) for place, row in enumerate(rows)], CALL)
    assert asked_before == [0, 0, 2] and report.use.cost is None
    texts = ["".join(map(chr, question.prompt_ids)) for question, _ in client.asked]
    assert texts == ["2|aaa|h", "2|bc|h", "first|ab|None", "first|c|None"]
    assert batch["trajectory"].tolist() == [100, 101, 102, 103] and batch["rewards"].tolist() == [2.0, 1.0, 3.0, 2.0]


# ------------------------------------------------------------------------------------------------- the real engine


def ready_engine(module):
    engine = InPlaceEngine(CausalLM(module), inplace_settings(block_size=4, max_num_seqs=8), max_length=96)
    engine.wake(TAGS)
    engine.update_weights(TensorSource.of(module), 1)
    return engine


@pytest.mark.parametrize("chat", [False, True])
def test_the_policy_judges_itself(chat):
    tokenizer, module = build_tokenizer(chat=chat), build_model(max_position_embeddings=128)

    def text(ids):
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    engine = ready_engine(module)
    prompts = [[{"role": "user", "content": t}] if chat else t for t in ("1+2=", "3+4=")]
    tokens = judge_encoder(tokenizer)
    tasks = [RolloutTask(i, PromptRow(i, p, tuple(tokens(p)), {"answer": "x"})) for i, p in enumerate(prompts)]
    judge = EngineJudge("is {completion} {answer} to {prompt}", lambda answer: float(len(answer)), max_tokens=6)
    call = RolloutCall(3, SamplingParams(5, stop_token_ids=(EOS_ID,)), 1, TrainerState(1, 1, 0.0), "train/1", 0)
    with RewardRunner(judge) as rewards:
        scored = CompletionStream(EngineClient(engine), rewards, text, seed=0, encode=tokens, max_length=96)
        batch, report = scored.run(tasks, call)
    assert not report.failures and len(set(batch["completion"])) > 1
    plain = [
        f"is {completion} x to {t}"
        for completion, t in zip(batch["completion"], ["1+2="] * 3 + ["3+4="] * 3, strict=True)
    ]
    expected = []
    for number, question in enumerate(plain):
        ids = ids_of(f"[u{question}]/") if chat else ids_of(question)
        params = SamplingParams(6, temperature=0.0, stop_token_ids=(EOS_ID,))
        (answer,) = EngineClient(engine).generate([RolloutRequest(1000 + number, tuple(ids), params)], 1)
        expected.append(float(len(text(answer.completion_ids))))
    assert batch["rewards"].tolist() == expected


class CountingClient(EngineClient):
    """Counts the requests that are unfinished when further ones are submitted, by the ids of those."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.unfinished = dict[tuple[int, ...], int]()

    def submit(self, requests, version):
        if requests:
            self.unfinished[tuple(request.id for request in requests)] = self.engine.num_unfinished
        return super().submit(requests, version)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_scores_are_those_of_a_round_after_generation(num_ranks):
    """On one rank, and on two that share an engine, of which one has more samples: questions, ids, noise and failures,
    of a judge of pairs and of one whose questions are too long for some."""

    def lengths(answer):
        return float(len(answer))

    judges = [
        EngineJudge("{completion_a}|{completion_b}", lengths, mode="pairwise", max_tokens=6, temperature=1.0),
        EngineJudge("{completion}", lengths, max_tokens=30, temperature=1.0),
    ]
    rows = [PromptRow(i, f"p{i}", (2 + i, 3), {}) for i in range(5)]
    deal = [rows] if num_ranks == 1 else [rows[:4], rows[4:]]
    params = SamplingParams(MAX_TOKENS, stop_token_ids=(STOP,))
    call = RolloutCall(2, params, 0, TrainerState(1, 1, 0.0), "train/1", 0)
    inner, num_early = Exchange(num_ranks), list[int]()

    def work(rank):
        shared = {"gather": inner.of_rank(rank), "gather_numbers": inner.of_rank(rank), "fingerprint": lambda: 0}
        coordinator = Coordinator(rank=rank, num_ranks=num_ranks, **shared) if num_ranks > 1 else None
        client = CountingClient(KnownEngine(4, 100), coordinator=coordinator)
        decode = lambda ids: "".join(chr(40 + token % 80) for token in ids)  # noqa: E731
        tasks = [RolloutTask(row.index, row) for row in deal[rank]]
        with RewardRunner(judges) as rewards:
            options = {"seed": 11, "encode": lambda text: [2 + ord(char) % 80 for char in text], "max_length": 40}
            stream = CompletionStream(client, rewards, decode, **options)
            batch, report = stream.run(tasks, call)
            judge_round = JudgeRound(client, rewards, decode, **options)
            num_early.append(sum(unfinished > 0 for ids, unfinished in client.unfinished.items() if ids[0] < 0))
            client.unfinished.clear()
            with client.session():
                late = judge_round.run(batch, call)
        (ids,) = client.unfinished or [()]
        values = [[late.values[place][sample] for place in range(2)] for sample in range(batch.num_samples)]
        scores = [[None if value != value else value for value in row] for row in batch["function_rewards"]]
        assert scores == values and len({*map(str, values)}) > 1 or not tasks
        too_long = [failure.key for failure in report.failures if failure.reason == "long"]
        assert too_long == [failure.key for failure in late.failures]
        return len(ids), too_long

    with ThreadPoolExecutor(num_ranks) as pool:
        answers = list(pool.map(work, range(num_ranks)))
    assert sum(num_early) >= 2 and sum(number for number, _ in answers) > 10
    assert any(too_long for _, too_long in answers)


def test_questions_find_the_prefixes_of_the_samples_that_they_are_about():
    """Each question begins with its sample's prompt of four tokens: one block, which the first round has left."""
    tokenizer, module = build_tokenizer(), build_model(max_position_embeddings=128)
    client = EngineClient(ready_engine(module))
    tokens = judge_encoder(tokenizer)
    tasks = [RolloutTask(i, PromptRow(i, p, tuple(tokens(p)), {})) for i, p in enumerate(("1+2=", "3+4="))]
    call = RolloutCall(1, SamplingParams(5), 1, TrainerState(1, 1, 0.0), "train/1", 0)

    def text(ids):
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    found = []
    with RewardRunner(EngineJudge("{prompt}x{completion}", lambda answer: 1.0, max_tokens=2)) as rewards:
        scored = CompletionStream(client, rewards, text, seed=0, encode=tokens, max_length=96)
        for _ in range(2):
            scored.run(tasks, call)
            found.append(client.stats().num_prefix_tokens)
    assert found == [2 * 4, 2 * 2 * 4]


@pytest.mark.parametrize("level", [1, 2])
def test_a_batch_that_is_ahead_is_judged_beside_the_generation(level, make_trainer, monkeypatch):
    """With the scores that it has if it is judged when the generation is over."""
    asked, submit = [], EngineClient.submit

    def watched(client, requests, version):
        asked.extend(["judge" if requests[0].id < 0 else "samples"] if requests else [])
        return submit(client, requests, version)

    monkeypatch.setattr(EngineClient, "submit", watched)
    judge = EngineJudge("{prompt}x{completion}", lambda answer: float(sum(map(ord, answer)) % 13), max_tokens=4)

    def run():
        keys = {"rollout.async_level": level, "max_steps": 4, "temperature": 1.5, "handoff.probe_steps": 0}
        trainer, rewards, orders = make_trainer(reward_funcs=judge, **keys), [], []
        for _ in range(4):
            asked.clear()
            rewards.append(trainer.step().batch["rewards"].tolist())
            orders.append([*asked])
        return rewards, orders

    early, orders = run()
    assert orders[1:] == [["judge"] * 4 + ["samples"]] * 3 and orders[0][0] == "samples"  # nothing is ahead yet
    monkeypatch.setattr(CompletionStream, "judge_early", GroupStream.judge_early)
    late, orders = run()
    assert all(order[0] == "samples" for order in orders)
    assert early == late and len({*map(str, early)}) > 1
