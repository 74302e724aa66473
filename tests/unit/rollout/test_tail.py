"""The tail of a rollout: lengths predicted, the longest completions first, prompts dealt to ranks by tokens, what is
unfinished dropped. Neither order nor dealing changes a sample."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.config import num_training_steps, resolve
from hybrid_rl.config.load import load_config
from hybrid_rl.controller.dispatch import Dispatch
from hybrid_rl.controller.exchange import cut
from hybrid_rl.data.mixture import DATASET_COLUMN
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import Beginning, FinishedSample, SamplingParams
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards import RewardRunner, TrainerState
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.collector import Collector, StepPlan
from hybrid_rl.rollout.completion_stream import CompletionGroup, CompletionStream, in_order
from hybrid_rl.rollout.held_json import plain
from hybrid_rl.rollout.hold_rule import HoldRule
from hybrid_rl.rollout.lengths import LengthRecord, expected_length, group_lengths
from hybrid_rl.rollout.task_split import TaskList, split_off
from tests.support.inside.rollouts import begin_group, loads_of, set_lengths, wrap_begin
from tests.unit.engines.engines import inplace, prompt
from tests.unit.models.families import VOCABULARY
from tests.unit.rollout import holding
from tests.unit.rollout.holding import STOP, KnownEngine
from tests.unit.rollout.scripted import Workers

CALL = RolloutCall(2, SamplingParams(40, stop_token_ids=(STOP,)), 0, TrainerState(1, 10, 0.0), "train/1", 0)


def row(index, **columns):
    return PromptRow(index, str(index), (index + 1,), columns)


def tasks_of(expected, call=CALL, loads=None):
    """Prompts with these expected lengths."""
    return TaskList([RolloutTask(place, row(place), one) for place, one in enumerate(expected)], call, loads or {})


def places(tasks):
    return [task.place for task in tasks]


@pytest.mark.parametrize(
    ("num_tokens", "known", "expected"),
    [
        (0, (), 40),  # nothing is known: all that it may have
        (0, (4, 9), 7),  # 6.5
        (5, (4, 9, 12), 11),  # the mean of those above 5 is 10.5
        (12, (4, 9, 12), 24),  # longer than all: as much again
        (30, (4,), 40),  # but not above the limit
    ],
)
def test_expected_lengths_by_hand(num_tokens, known, expected):
    assert expected_length(num_tokens, known, 40) == expected


def test_lengths_of_groups_are_means_over_trajectories():
    """Group 5: trajectories of 2 + 3 and of 4 tokens, mean 4.5; group 2: one of 7. Halves are rounded up."""
    ids = {"trajectory": torch.tensor([0, 0, 1, 2]), "turn": torch.tensor([0, 1, 0, 0])}
    columns = {"group": torch.tensor([5, 5, 5, 2]), "policy_length": torch.tensor([2, 3, 4, 7])}
    assert group_lengths(Batch({**ids, **columns})) == [7, 5]


def test_a_record_knows_last_time_and_otherwise_the_mean():
    record = LengthRecord()
    record.begin(1)
    assert record.expected(row(3)) is None
    record.observe([row(3), row(4, **{DATASET_COLUMN: "b"})], [10, 21])
    assert record.expected(row(3)) is None  # within a step predictions stay as they are
    record.begin(2)
    assert record.expected(row(3)) == 10
    assert record.expected(row(4, **{DATASET_COLUMN: "b"})) == 21
    assert record.expected(row(4)) == 16  # of another dataset: not known, so the mean, 15.5
    record.observe([row(3)], [30])
    record.begin(3)
    assert record.expected(row(3)) == 30


def test_a_step_taken_back_leaves_the_record_as_it_was():
    record = LengthRecord()
    record.begin(1)
    record.observe([row(1)], [10])
    before = record.state_dict(1)
    record.begin(2)
    record.observe([row(1), row(2)], [50, 60])
    assert record.state_dict(1) == before == {"1": 10}  # a checkpoint after the interrupt
    assert record.state_dict(2) == {"1": 50, "2": 60}
    record.begin(2)
    assert record.expected(row(1)) == record.expected(row(2)) == 10
    other = LengthRecord()
    other.load_state_dict(before)
    other.begin(2)
    assert other.expected(row(1)) == 10


def test_the_longest_are_listed_first_and_dealt_to_the_rank_with_least_by_hand():
    """Two samples each of 5, 9, unknown (40), 9 and 4 tokens are 10, 18, 80, 18 and 8. Rank 1 holds 60 already. 80 goes
    to rank 0 (80, 60), 18 to rank 1 (78), 18 to rank 1 (96), 10 to rank 0 (90), 8 to rank 0 (98)."""
    tasks = tasks_of([5, 9, None, 9, 4], loads={1: 60})
    assert places(tasks) == [2, 1, 3, 0, 4]
    assert [places(part) for part in tasks.dealt(2)] == [[2, 0, 4], [1, 3]]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_without_knowledge_prompts_are_dealt_one_by_one(num_parts):
    tasks = tasks_of([None] * 7)
    assert [places(part) for part in tasks.dealt(num_parts)] == [list(range(7))[i::num_parts] for i in range(num_parts)]


def test_dealing_gives_every_prompt_once_and_keeps_to_the_bound_of_the_greedy_rule():
    """Against 200 random lists: every prompt once, and no rank has more than the mean and one prompt; with counts
    instead of tokens the fullest rank has far more."""
    rng, by_tokens, by_counts = random.Random(5), 0.0, 0.0
    for _ in range(200):
        expected = [min(1000, int(20 * rng.paretovariate(0.9))) for _ in range(rng.randint(8, 40))]
        num_parts = rng.randint(2, 8)
        parts = tasks_of(expected).dealt(num_parts)
        assert sorted(place for part in parts for place in places(part)) == list(range(len(expected)))
        sums = [sum(expected[place] for place in places(part)) for part in parts]
        mean = sum(expected) / num_parts
        assert max(sums) <= mean + max(expected)
        least = max(mean, max(expected))  # no dealing is better than that
        by_tokens += max(sums) / least / 200
        by_counts += max(sum(expected[part::num_parts]) for part in range(num_parts)) / least / 200
    assert by_tokens < 1.05
    assert by_counts > 1.3


def test_the_next_batch_has_the_last_places_whatever_is_expected_of_prompts():
    """The first step begins 2 prompts for itself and 2 for the next one; the longest of each start first, and are dealt
    to ranks by tokens."""
    rows = [PromptRow(number, str(number), (number,), {}) for number in range(4)]
    rule = HoldRule(2, 1, ahead=2)
    call = RolloutCall(1, SamplingParams(max_tokens=40), 0, TrainerState(1, 9, 0.0), "train/1", 0, hold=rule)
    expected = (3, 9, 2, 30)
    tasks = TaskList([RolloutTask(place, row, expected[place]) for place, row in enumerate(rows)], call, {1: 5})
    present, following = split_off(tasks, 2)
    assert [task.place for task in present] == [1, 0] and [task.place for task in following] == [3, 2]
    assert [task.place for task in tasks] == [3, 1, 0, 2]
    assert [[task.place for task in part] for part in present.dealt(2)] == [[1], [0]]


def test_a_call_is_cut_as_its_list_says():
    """Lists without a wish of their own are still dealt one by one."""
    tasks = tasks_of([1, 30, 1])
    parts = cut("rollout", Dispatch(split="items"), (tasks, [1, 2, 3], CALL), 2, lambda *_: [])
    assert [(places(mine), others, call) for mine, others, call in parts.arguments] == [
        ([1], [1, 3], CALL),
        ([0, 2], [2], CALL),
    ]


def test_held_groups_start_with_what_is_begun_and_then_with_what_takes_longest():
    """By hand. Group 0: one sample of 6 tokens has finished, two have not begun: 6 each. Group 1, 20 tokens last time:
    one sample has 3 tokens (17 to go), one has 25 (longer than all: 15 more to the limit of 40), one has none (20).
    Group 2: nothing is known: 40."""

    def group(number, num_samples, expected=None):
        ids = range(10 * number, 10 * number + num_samples)
        return CompletionGroup(row(number), number, 1, (4,), CALL.params, dict.fromkeys(ids, 0), expected=expected)

    def end(id_, num_tokens, reason):
        return FinishedSample(id_, [7] * num_tokens, [-1.0] * num_tokens, [0] * num_tokens, reason)

    groups = [group(0, 3), group(1, 3, 20), group(2, 2)]
    groups[0].take(end(0, 6, "stop"))
    groups[1].take(end(10, 25, "abort"))
    groups[1].take(end(11, 3, "abort"))
    assert [request.id for request in in_order(groups)] == [11, 10, 20, 21, 12, 1, 2]
    assert [one.num_missing for one in groups] == [12, 17 + 15 + 20, 80]
    assert [one.prompt(3).num_missing for one in groups] == [12, 52, 80]
    again = [CompletionGroup.of_json(plain(one)) for one in groups]
    assert [one.num_missing for one in again] == [12, 52, 80]
    assert in_order(again)[1].begun == Beginning((7,) * 25, (-1.0,) * 25, (0,) * 25)


def rolled_out(tasks, num_slots, num_ranks=1):
    """The samples of these prompts by trajectory, and the engine steps of each rank."""
    call, samples, steps = CALL, {}, []
    for part in tasks.dealt(num_ranks):
        engine, count = KnownEngine(num_slots, 100), 0
        step = engine.step

        def counted_step(step=step):
            nonlocal count
            count += 1
            return step()

        engine.step = counted_step
        rollout = CompletionStream(EngineClient(engine), None, lambda ids: str(len(ids)), seed=3)
        batch, _ = rollout.run(part, call)
        tokens, logprobs = batch["completion_ids"], batch["rollout_logprobs"]
        for place, trajectory in enumerate(batch["trajectory"].tolist()):
            samples[trajectory] = (tokens[place].tolist(), logprobs[place].tolist(), batch["group"][place].item())
        steps.append(count)
    return samples, steps


def test_order_and_dealing_change_no_sample_and_save_engine_steps(monkeypatch):
    """By hand: 6 prompts of two samples, of 2, 2, 2, 2, 2 and 20 tokens, 4 places. In order of the prompts the long one
    starts after 4 engine steps and ends at step 24; if it starts first, all end at step 20. Two ranks of 2 places: by
    counts one of them has prompts of 2, 2 and 20 tokens, which takes 24 steps; by tokens it has that of 20 only."""
    by_prompt = [2, 2, 2, 2, 2, 20]
    seeds = {}

    def length_of(seed):
        return by_prompt[seeds[seed]]

    monkeypatch.setattr(holding, "length_of", length_of)
    unknown, known = tasks_of([None] * 6), tasks_of(by_prompt)
    rollout = CompletionStream(EngineClient(KnownEngine(4, 100)), None, str, seed=3)
    groups = [(begin_group(rollout, task, CALL), task.place) for task in known]
    seeds.update((request.params.seed, place) for group, place in groups for request in group.requests.values())
    late, (late_steps,) = rolled_out(unknown, 4)
    early, (early_steps,) = rolled_out(known, 4)
    assert (late_steps, early_steps) == (24, 20)
    assert late == early and len(late) == 12
    dealt, steps = rolled_out(known, 2, num_ranks=2)
    assert dealt == late
    assert steps == [20, 10]  # 2 of 20; 10 of 2 at two places
    assert max(rolled_out(unknown, 2, num_ranks=2)[1]) == 24


def test_a_resumed_run_predicts_and_deals_as_the_whole_one(tmp_path: Path, monkeypatch):
    """Partial rollouts over 3 epochs of 6 prompts on 3 ranks: every step of a run killed after each step is that of
    the whole one, and both differ from a run that forgets lengths and loads when it is resumed."""
    setting = holding.Setting(
        2,
        2,
        0,
        3,
        2,
        "fifo",
        check_steps=2,
        num_ranks=3,
        slots=2,
        max_num_waiting=4,
    )

    class Epochs(holding.Prompts):
        def take(self, num_prompts):
            return [row(one.index % 6) for one in super().take(num_prompts)]

    dealt = []
    monkeypatch.setattr(holding, "Prompts", Epochs)
    monkeypatch.setattr(holding.Run, "_checked", lambda run, batch: _tokens(batch))
    known = TaskList.dealt

    def noted(tasks, num_parts):
        parts = known(tasks, num_parts)
        dealt.append(([places(part) for part in parts], +Counter(loads_of(tasks))))
        return parts

    monkeypatch.setattr(TaskList, "dealt", noted)

    def run(name, kills, forgets=False):
        dealt.clear()
        found = holding.Run(setting, tmp_path / name)
        holding.listen(monkeypatch, lambda: found.script)
        loads = Counter[int]()
        for _ in range(9):
            found.one_step()
            assert dealt[-1][1] == loads
            held = {rank: rollout.held(found.step) for rank, rollout in enumerate(found.ranks)}
            loads = +Counter({rank: sum(one.num_missing for one in groups) for rank, groups in held.items()})
            if kills:
                found.save()
                if forgets:
                    step, position, state, num_steps = found.saved
                    found.saved = step, position, {**state, "lengths": {}}, num_steps
                found.kill()
        return found.steps, list(dealt)

    whole = run("whole", kills=False)
    assert any(sum(loads.values()) for _, loads in whole[1])
    assert run("killed", kills=True) == whole
    assert run("forgotten", kills=True, forgets=True)[1] != whole[1]


def _tokens(batch):
    columns = (batch["trajectory"].tolist(), batch["group"].tolist())
    rows = ([row.tolist() for row in batch[name]] for name in ("completion_ids", "policy_version"))
    return list(zip(*columns, *rows, strict=True))


def test_what_is_dropped_is_counted_and_nothing_is_held(tmp_path, monkeypatch):
    """By hand: 4 prompts of one sample, of 9, 2, 2 and 5 tokens, begin together; a step needs 2 of them and looks every
    2 engine steps. After 2 engine steps prompts 1 and 2 are whole: 0 and 3 are dropped with 2 tokens each. In the
    next step, of 3, 30, 4 and 3 tokens, three are whole after 4: the first two of them are taken, and the third is
    dropped with its 3 tokens, beside 4 of the long one."""
    lengths = [9, 2, 2, 5, 3, 30, 4, 3]
    seeds = {}
    monkeypatch.setattr(holding, "length_of", lambda seed: lengths[seeds[seed]])

    def begin(begun, rollout, task, call):
        found = begun(rollout, task, call)
        seeds.update((request.params.seed, task.row.index) for request in found.requests.values())
        return found

    wrap_begin(monkeypatch, begin)
    setting = holding.Setting(2, 1, 0, 2, 0, "fifo", 2, num_ranks=1, slots=8, max_num_waiting=9, drops=True)
    run = holding.Run(setting, tmp_path)
    holding.listen(monkeypatch, lambda: run.script)
    collect, metrics = run.collector.take, []

    def noted(*args):
        found = collect(*args)
        metrics.append({name: found.metrics[name] for name in found.metrics if name.startswith("buffer/")})
        return found

    monkeypatch.setattr(run.collector, "take", noted)
    run.one_step()
    run.one_step()
    assert [sorted(prompt for prompt, _ in step.samples) for step in run.steps] == [[1, 2], [4, 6]]
    assert metrics == [
        {"buffer/dropped_groups": 2.0, "buffer/dropped_tokens": 4.0},
        {"buffer/dropped_groups": 2.0, "buffer/dropped_tokens": 7.0},
    ]
    run.check_prompts()


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"rollout.partial": False, "rollout.async_level": 1}, "unfinished=drop would do nothing without rollout.part"),
        ({"rollout.async_level": 1}, "holds no groups, but async_level=1 trains on groups that are held"),
        ({"max_staleness": 2}, "max_staleness=2 would do nothing with unfinished=drop"),
        ({"buffer_order": "freshest"}, "buffer_order=freshest would do nothing with unfinished=drop"),
    ],
)
def test_keys_that_cannot_be_joined_with_dropping_are_refused(keys, match):
    with pytest.raises(ConfigError, match=match):
        resolve(*load_config({**KEYS, **keys})[:2])


KEYS = {"prompts_per_step": 32, "learning_rate": 1e-3, "rollout.partial": True, "unfinished": "drop"}


def test_dropping_takes_more_prompts_and_needs_no_correction():
    """By hand: 32 prompts a step and 2 (a sixteenth) besides are 34 of 490 prompts: 14 steps; that are held, 15."""
    config = resolve(*load_config(KEYS)[:2])
    assert config.buffer.oversample == 2 and config.correction.correction_mode == "none"
    assert num_training_steps(config, 490) == 14
    held = resolve(*load_config({**KEYS, "unfinished": "hold"})[:2])
    assert held.correction.correction_mode == "tis"
    assert num_training_steps(held, 490) == 15
    with pytest.raises(ConfigError, match=r"33 prompts .* prompts_per_step=32 and oversample=2; set max_steps"):
        num_training_steps(config, 33)


def test_a_real_engine_makes_the_same_samples_in_the_order_of_their_lengths():
    """The second visit to 5 prompts, 3 sequences at a time: the same tokens as if the first were forgotten, and
    logprobs to the last bits, which depend on the shapes of matrix products."""
    rows = [PromptRow(at, str(at), prompt(length, start=3 + at), {}) for at, length in enumerate((4, 9, 1, 6, 4))]
    params = SamplingParams(12, stop_token_ids=tuple(range(0, VOCABULARY, 9)))

    def second_visit(*, forgets):
        client = EngineClient(inplace(max_num_seqs=3).ready().engine)
        stream, started = client.stream, []
        client.stream = lambda requests, version: started.append(requests) or stream(requests, version)
        sampler = SimpleNamespace(take=lambda num: rows[:num], metrics=dict, epoch=0.0)
        rewards = RewardRunner([lambda completions, **_: [0.0] * len(completions)])
        workers = Workers([CompletionStream(client, rewards, lambda ids: str(len(ids)), seed=11)])
        collector = Collector(workers, ["zero"], StepPlan(sampler, 5, 3, params), max_failure_share=1.0, success=None)
        first = collector.take(1, TrainerState(1, 10, 0.0)).batch
        if forgets:
            set_lengths(collector, LengthRecord())
        second = collector.take(1, TrainerState(2, 10, 0.0)).batch
        return group_lengths(first), [request.prompt_ids for request in started[1][::3]], second

    lengths, order, sorted_ = second_visit(forgets=False)
    assert len({*lengths}) > 2
    longest_first = sorted(rows, key=lambda one: -lengths[one.index])
    assert order == [one.prompt_ids for one in longest_first] != [one.prompt_ids for one in rows]
    _, order, plain = second_visit(forgets=True)
    assert order == [one.prompt_ids for one in rows]
    for name in ("completion_ids", "prompt_ids"):
        assert torch.equal(sorted_[name].values, plain[name].values)
        assert torch.equal(sorted_[name].offsets, plain[name].offsets)
    for name in ("group", "trajectory"):
        assert torch.equal(sorted_[name], plain[name])
    theirs = plain["rollout_logprobs"].values
    torch.testing.assert_close(sorted_["rollout_logprobs"].values, theirs, rtol=0, atol=1e-5)
