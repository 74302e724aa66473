"""Dynamic sampling: which groups stay, how many prompts are rolled out for them, and what is said of it."""

import functools
import logging
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.batch import Batch, BatchRef
from hybrid_rl.batch.ref import store
from hybrid_rl.batch.rollout_files import save_rollout
from hybrid_rl.data.prompts import PromptEncoder
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.data.source import load_source
from hybrid_rl.errors import DataError, NoSignalError, RewardError
from hybrid_rl.rewards import RewardRunner, TrainerState, overlong_penalty, shaping_reward
from hybrid_rl.rewards.trl import get_repetition_penalty_reward, get_soft_overlong_punishment
from hybrid_rl.rollout.refill import GroupRewards, Refill, judged_rewards
from tests.support.tiny import build_tokenizer
from tests.unit.rollout.refilling import Rig, row_of, rows_of, worth
from tests.unit.rollout.scripted import Workers

NAN = math.nan
MIXED, RIGHT, WRONG = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)
RANKS = pytest.mark.parametrize(("num_ranks", "keep"), [(1, False), (2, False), (1, True), (2, True)])


def loaded(batch) -> Batch:
    return batch.load() if isinstance(batch, BatchRef) else batch


def prompts(batch) -> list[int]:
    return [int(prompt.split()[1]) for prompt in loaded(batch)["prompt"]]


# -------------------------------------------------------------------------------------------------- which groups stay


@RANKS
def test_a_step_by_hand(num_ranks, keep):
    """3 prompts: 1 of 3 has signal; 2 are missing, of 3 tries 1 hits, so that 6 would be needed, at most 3: of those
    again 1; 1 missing at 2 of 6: 3 more, of which 2 hit and the first stays."""
    rows = rows_of(RIGHT, MIXED, WRONG, WRONG, WRONG, (0.0, 0.5), (3.0, 0.0), RIGHT, MIXED, MIXED)
    rig = Rig(rows, num_ranks=num_ranks, keep=keep)
    collected = rig.collect(3)
    assert rig.sampler.asked == [3, 3, 3]
    assert rig.rolled() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert isinstance(collected.batch, BatchRef if keep else Batch)
    assert prompts(collected.batch) == [1, 1, 5, 5, 6, 6]
    batch = loaded(collected.batch)
    assert batch["rewards"].tolist() == [1.0, 0.0, 0.0, 0.5, 3.0, 0.0]
    assert batch["completion"] == ["a", "b"] * 3
    assert len(batch.group_rows()) == 3 and batch["trajectory"].unique().numel() == 6
    expected = {
        "collect/num_rollouts": 3.0,
        "collect/groups_dropped": 6.0,
        "collect/groups_kept_share": 1 / 3,
        "collect/reward_all": (2 + 1 + 0 + 0 + 0 + 0.5 + 3 + 2 + 1) / 18,
        "reward": 4.5 / 6,
        "frac_reward_zero_std": 0.0,
        "completions/mean_length": 1.0,
    }
    assert {name: collected.metrics[name] for name in expected} == pytest.approx(expected)
    assert set(collected.timings.seconds) == {"rollout", "reward"}


def test_without_refills_every_group_stays_and_nothing_is_said_of_it():
    rig = Rig(rows_of(RIGHT, MIXED, WRONG))
    collected = rig.collect(3, max_refills=0)
    assert prompts(collected.batch) == [0, 0, 1, 1, 2, 2]
    assert not [name for name in collected.metrics if name.startswith(("collect/", "baseline/"))]
    assert (collected.metrics["pass@1"], collected.metrics["pass@2"]) == (1 / 2, 2 / 3)


@pytest.mark.parametrize("max_refills", [0, 3])
def test_of_groups_that_were_chosen_for_their_rewards_no_success_is_told(tmp_path, max_refills):
    """Of each there are right and wrong samples; nor is it when they were saved."""
    made = Rig(rows_of(MIXED, MIXED)).collect(2, max_refills=max_refills)
    save_rollout(tmp_path, 3, 0, 1, made.batch)
    again = Rig(rows_of(WRONG, WRONG)).collect(2, max_refills=max_refills, rollouts_path=tmp_path)
    assert torch.equal(again.batch["rewards"], made.batch["rewards"])
    assert ("pass@1" in made.metrics) == ("pass@1" in again.metrics) == (max_refills == 0)


def test_a_first_rollout_with_signal_throughout_is_the_batch():
    collected = (rig := Rig(rows_of(MIXED, MIXED, MIXED))).collect(2)
    assert rig.rolled() == [[0, 1]]
    assert prompts(collected.batch) == [0, 0, 1, 1]
    assert collected.metrics["collect/groups_dropped"] == 0
    assert collected.metrics["collect/groups_kept_share"] == 1


@pytest.mark.parametrize(
    ("scores", "has_signal"),
    [
        ((1.0, 0.0, 0.0), True),
        ((0.1, 0.1, 0.1), False),
        ((1.0, None, 1.0), False),
        ((1.0, NAN, NAN), False),  # nothing to compare with
        ((NAN, NAN, NAN), False),
        ((-1.0, NAN, -2.0), True),
        ((-1.0, -1.0, NAN), False),
    ],
)
def test_what_signal_is(scores, has_signal):
    """The group is in the first rollout; ones with signal follow."""
    rig = Rig(rows_of(scores, *[(1.0, 0.0, 0.0)] * 2), share=1.0)
    kept = prompts(rig.collect(1, 3).batch)
    assert kept == [0 if has_signal else 1] * 3


def constant(completion_ids, **_):
    return [1.0] * len(completion_ids)


@shaping_reward
def too_long(completion_ids, **_):
    return [-float(ids[0]) for ids in completion_ids]


@shaping_reward
class LengthOf:
    def __call__(self, completion_ids, **_):
        return [-float(ids[0]) for ids in completion_ids]


def judged(functions, *rows, weights=None, generations=2):
    rig = Rig(rows, functions, weights=weights)
    batch = rig.collect(len(rows), generations, max_refills=0).batch
    return judged_rewards(batch, rig.rewards.weights, rig.rewards.entries.shaping).tolist()


@pytest.mark.parametrize(
    "function",
    [
        overlong_penalty(2, 2),
        get_soft_overlong_punishment(2, 2),
        get_repetition_penalty_reward(1),
        functools.partial(too_long, extra=1),
        LengthOf(),
    ],
    ids=lambda function: getattr(function, "__name__", type(function).__name__),
)
def test_every_shaping_reward_is_left_out_by_its_mark(function):
    """Whatever its name is, and whether it is a function, a partial or an object."""
    runner = RewardRunner([function, worth, function])
    assert runner.entries.shaping == [0, 2]
    with pytest.raises(NoSignalError):
        Rig(rows_of(RIGHT, RIGHT), [function, worth]).collect(1, max_refills=1)


def test_a_name_is_no_mark():
    def overlong_penalty(completion_ids, **_):
        return [-float(ids[0]) for ids in completion_ids]

    assert Rig(rows_of(RIGHT, RIGHT), [worth, overlong_penalty]).collect(1).batch["rewards"].tolist() == [0.0, -1.0]


def test_a_shaping_reward_does_not_hide_a_difference():
    """1 - 1 and 2 - 2: the same reward, but not the same answer."""
    batch = Rig(rows_of((1.0, 2.0)), [worth, too_long]).collect(1).batch
    assert batch["rewards"].tolist() == [0.0, 0.0]


def test_judged_rewards_by_hand():
    row = row_of(0, 3.0, 5.0)
    assert judged([worth, too_long, constant], row, weights=[2.0, 10.0, 0.5]) == [6.5, 10.5]
    assert judged([too_long], row) == [-1.0, -2.0]  # alone it is the reward
    # A sample that has only the penalty was judged by nobody; nor was one that failed.
    assert judged([worth, too_long], row_of(0, None, NAN, 4.0), generations=3)[2] == 4.0
    assert all(math.isnan(value) for value in judged([worth, too_long], row_of(0, None, NAN)))
    # A sample on which another function failed has no reward at all.
    failing = judged([worth, lambda completion_ids, **_: [1.0 / (i[0] - 1) for i in completion_ids]], row)
    assert math.isnan(failing[0]) and failing[1] == 6.0
    # None counts as nothing, as in the weighted reward.
    assert judged([worth, constant], row_of(0, None, 2.0)) == [1.0, 3.0]


def test_equal_rows_are_judged_equal_to_the_last_bit():
    """A matrix product may round 0.1 + 0.2 otherwise in one row than in the next."""
    values = [[0.1, 0.2, 0.3]] * 1001
    batch = Batch({"function_rewards": values, "rewards": torch.ones(1001, dtype=torch.float64)})
    assert judged_rewards(batch, [0.7, 1.1, 1.3]).unique().numel() == 1


def test_groups_by_hand():
    rewards = torch.tensor([1.0, 5.0, NAN, 2.0, NAN, 5.0], dtype=torch.float64)
    groups = GroupRewards.of(rewards, torch.tensor([7, 9, 8, 7, 8, 9]))
    assert groups.low.tolist() == [1.0, math.inf, 5.0] and groups.high.tolist() == [2.0, -math.inf, 5.0]
    assert groups.num_scored.tolist() == [2, 0, 2]
    assert groups.group.tolist() == [0, 2, 1, 0, 1, 2]
    assert groups.has_signal.tolist() == [True, False, False]


# --------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=60, deadline=None)
@given(
    signal=st.lists(st.booleans(), min_size=40, max_size=40),
    num_prompts=st.integers(1, 7),
    num_generations=st.integers(2, 3),
    max_refills=st.integers(1, 5),
    layout=st.sampled_from([(1, False), (2, False), (3, True)]),
)
def test_refilling(signal, num_prompts, num_generations, max_refills, layout):
    num_ranks, keep = layout
    groups = [[1.0] + [0.0] * (num_generations - 1) if flag else [0.5] * num_generations for flag in signal]
    rig = Rig(rows_of(*groups), num_ranks=num_ranks, keep=keep)
    try:
        batch = loaded(rig.collect(num_prompts, num_generations, max_refills).batch)
    except NoSignalError:
        batch = None
    rollouts = rig.rolled()
    used = [index for rollout in rollouts for index in rollout]
    assert used == list(range(len(used)))  # none lost, none twice, in the order of the data
    assert len(rollouts) <= 1 + max_refills
    found = 0
    for number, rollout in enumerate(rollouts):
        assert num_prompts - found <= len(rollout) <= num_prompts
        assert number == 0 or found < num_prompts  # no rollout more than needed
        found += sum(signal[index] for index in rollout)
    right = [index for index in used if signal[index]]
    if batch is None:
        assert len(rollouts) == 1 + max_refills and len(right) < num_prompts
        return
    assert prompts(batch) == [index for index in right[:num_prompts] for _ in range(num_generations)]
    assert batch["rewards"].tolist() == groups[right[0]] * num_prompts
    assert sorted(set(batch["trajectory"].tolist())) == batch["trajectory"].tolist()


def test_a_group_of_several_turns_is_kept_whole():
    """Group 4 has one trajectory of three turns beside a failed one, 5 has two that differ, 6 two that are equal."""
    group = torch.tensor([5, 4, 4, 5, 4, 4, 5, 6, 6])
    batch = Batch(
        {
            "group": group,
            "trajectory": torch.tensor([52, 41, 41, 51, 42, 41, 51, 61, 62]),
            "turn": torch.tensor([0, 0, 2, 1, 0, 1, 0, 0, 0]),
            "rewards": torch.tensor([1.0, 3, 3, 0, NAN, 3, 0, 2, 2], dtype=torch.float64),
            "function_rewards": [[value] for value in (1.0, 3, 3, 0, 7, 3, 0, 2, 2)],
        }
    )
    refill, rows = Refill(2, 1, (1.0,)), [row_of(place) for place in (4, 5, 6)]
    ((kept_rows, kept),) = refill.kept(rows, batch)
    assert kept_rows == rows[1:2] and kept["trajectory"].tolist() == [52, 51, 51]
    refill.num_rollouts += 1
    assert refill.metrics()["collect/reward_all"] == (1 + 3 + 0 + 2 + 2) / 5
    with pytest.raises(NoSignalError, match="1 had fewer than two scored samples"):
        refill.check(1)


@settings(max_examples=100, deadline=None)
@given(found=st.integers(0, 20), rolled=st.integers(1, 40), num_prompts=st.integers(1, 20))
def test_the_next_rollout_is_as_large_as_the_share_lets_expect(found, rolled, num_prompts):
    found = min(found, rolled, num_prompts - 1)
    refill = Refill(num_prompts, 3, ())
    refill.num_rolled, refill.num_with_signal = rolled, found
    wanted, missing = refill.num_wanted, num_prompts - found
    assert missing <= wanted <= num_prompts
    if wanted < num_prompts:  # the smallest number that gives enough: no float rounds it
        assert wanted * found >= missing * rolled > (wanted - 1) * found


# -------------------------------------------------------------------------------------------------- noise and resume


def seeds(rig):
    return [[request.params.seed for request in requests] for requests in rig.clients[0].calls]


def test_refills_have_noise_of_their_own_and_always_the_same():
    rows = rows_of(RIGHT, RIGHT, RIGHT, WRONG, MIXED, MIXED)
    runs = [Rig(rows), Rig(rows)]
    runs[1].collect(1, max_refills=0, state=TrainerState(2, 10, 0.0))  # whatever came before
    runs[1].sampler.position = 0
    runs[1].clients[0].calls.clear()
    for rig in runs:
        rig.collect(2)
    assert seeds(runs[0]) == seeds(runs[1])
    flat = [seed for rollout in seeds(runs[0]) for seed in rollout]
    assert len(rig.clients[0].calls) == 3 and len(set(flat)) == len(flat) == 12
    later = Rig(rows)
    later.collect(2, state=TrainerState(4, 10, 0.5))
    assert not set(flat) & {seed for rollout in seeds(later) for seed in rollout}


def test_ids_are_unique_over_refills():
    rig = Rig(rows_of(RIGHT, RIGHT, MIXED, MIXED, MIXED, MIXED))
    batches = [rig.collect(2, max_refills=1).batch for _ in range(2)]
    requests = [request for call in rig.clients[0].calls for request in call]
    assert len({request.id for request in requests}) == len(requests) == 12
    assert [batch["group"].tolist() for batch in batches] == [[4, 4, 5, 5], [8, 8, 9, 9]]


class Source:
    """The collector with a real sampler over 11 prompts in a shuffled order, of which the even ones have signal."""

    def __init__(self):
        data = [{"prompt": f"prompt {i}", "scores": [1.0, float(i % 2)], "greedy": 0.0} for i in range(11)]
        encoder = PromptEncoder(build_tokenizer(), max_prompt_length=None)
        self.rig = Rig([])
        self.rig.sampler = self.sampler = PromptSampler(load_source(data, encoder), seed=5)

    def step(self, number):
        return prompts(self.rig.collect(3, state=TrainerState(number, 9, 0.0)).batch)


def test_a_resumed_run_takes_the_prompts_behind_the_refills():
    whole, saved = Source(), None
    steps = []
    for number in (1, 2, 3, 4):
        steps.append(whole.step(number))
        saved = saved if number > 2 else whole.sampler.state_dict()
    assert all(index % 2 == 0 for step in steps for index in step)
    resumed = Source()
    resumed.sampler.load_state_dict(saved)
    assert [resumed.step(number) for number in (3, 4)] == steps[2:]
    assert whole.sampler.epoch == resumed.sampler.epoch > 1


# ------------------------------------------------------------------------------------------------------------- memory


class Handle:
    def __init__(self, block):
        self.block = block


class Counted(Workers):
    """Ranks whose blocks lie behind handles that are counted."""

    def __init__(self, ranks, *, keep):
        super().__init__(ranks, keep=keep)
        self.handles, self.kept = [], self

    def __getitem__(self, handle):
        return handle.block

    def _reference(self, batch):
        def put(block):
            handle = Handle(block)
            self.handles.append(weakref.ref(handle))
            return handle

        return store(batch, put)

    def alive(self):
        return [handle() is not None for handle in self.handles]


def test_blocks_of_dropped_groups_are_freed():
    """Two blocks per rollout: tensors and objects. The second rollout has no signal, of the third one group stays."""
    seen = []
    rig = Rig(
        rows_of(MIXED, WRONG, WRONG, RIGHT, MIXED, MIXED),
        keep=True,
        workers=Counted,
        between=lambda: seen.append(rig.workers.alive()),
    )
    batch = rig.collect(2).batch
    assert seen == [[], [True] * 2, [True] * 2 + [False] * 2]
    assert rig.workers.alive() == [True] * 2 + [False] * 2 + [True] * 2
    assert prompts(batch) == [0, 0, 4, 4]
    assert batch.select([2, 3])["rewards"].tolist() == [1.0, 0.0]
    del batch
    assert rig.workers.alive() == [False] * 6


# ------------------------------------------------------------------------------------------------------------- errors


def test_too_few_groups_with_signal():
    """Two refills after 4 prompts, 4 more each: too easy 3, too hard 6, one of one scored sample, 2 with signal."""
    groups = [MIXED, RIGHT, RIGHT, RIGHT, *[WRONG] * 6, (1.0, NAN), MIXED]
    with pytest.raises(NoSignalError) as raised:
        Rig(rows_of(*groups, *[MIXED] * 9)).collect(4, max_refills=2)
    assert isinstance(raised.value, DataError)
    assert str(raised.value) == (
        "step 3: 2 of 12 prompts (16.7%) had a group with different rewards, but prompts_per_step=4 are needed, and "
        "max_refills=2 are used up. Of the others, 3 are too easy (all alike, mean reward 1), 6 are too hard (all "
        "alike, mean reward 0), 1 had fewer than two scored samples. Give prompts that the policy solves sometimes, "
        "raise num_generations or max_refills, lower prompts_per_step, or train on all groups with max_refills=0"
    )


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([WRONG] * 4, "0 of 4 prompts (0.0%) .* Of the others, 4 had the reward 0 throughout. Give"),
        ([(0.25, 0.25)] * 4, "Of the others, 4 had the reward 0.25 throughout. Give"),
        ([(NAN, NAN)] * 4, "Of the others, 4 had fewer than two scored samples. Give"),
        ([MIXED, (0.2, 0.2), (0.3, 0.3), (0.9, 0.9)], "1 are too easy .*reward 0.9.*, 2 are too hard .*reward 0.25"),
        ([MIXED, (0.5, 0.5), RIGHT, RIGHT], "2 are too easy .*reward 1.*, 1 are too hard .*reward 0.5"),
        ([MIXED, WRONG, WRONG, WRONG], "Of the others, 3 are too hard .all alike, mean reward 0.. Give"),
    ],
)
def test_what_the_others_were(groups, words):
    with pytest.raises(NoSignalError, match=words.replace("(0.0%)", r"\(0.0%\)")):
        Rig(rows_of(*groups)).collect(2, max_refills=1)


def test_failures_count_over_the_whole_step(caplog):
    """One of four samples fails in each rollout, 25 % all along; or two of the third: 4 of 12."""
    groups = [WRONG, (1.0, NAN), RIGHT, (NAN, 0.0)]
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        batch = Rig(rows_of(*groups, MIXED, (NAN, 1.0), MIXED, MIXED), share=0.25).collect(2).batch
    assert prompts(batch) == [4, 4, 6, 6]
    assert "train/3: 1 sample has no reward" in caplog.text and "(trajectory 3)" in caplog.text
    assert "train/3/refill/1: 1 sample has no reward" in caplog.text and "(trajectory 6)" in caplog.text
    with pytest.raises(RewardError, match=r"step 3: 4 of 12 samples \(33.3%\) .*") as raised:
        Rig(rows_of(*groups, WRONG, (NAN, NAN)), share=0.25).collect(2)
    assert "4 samples returned NaN or infinity (trajectories 3, 6, 10, 11)" in str(raised.value)


def test_rewards_that_are_logged_are_those_of_all_samples():
    def logging_worth(completion_ids, scores, log_metric, **_):
        log_metric("tokens", completion_ids[0][0])
        return worth(completion_ids, scores, [0.0] * len(scores))

    collected = Rig(rows_of(WRONG, MIXED, MIXED), logging_worth).collect(2)
    assert collected.logged == {"tokens": 1.5}


def test_timings_are_sums_of_what_the_slowest_rank_took():
    rig = Rig(rows_of(WRONG, WRONG, MIXED, MIXED), num_ranks=2)
    for scored, taken in zip(rig.workers.ranks, ({"rollout": 1.0, "judge": 3.0}, {"rollout": 2.0}), strict=True):

        def timed(*args, run=scored.run, taken=taken):
            batch, report = run(*args)
            report.seconds = taken
            return batch, report

        scored.run = timed
    assert rig.collect(2).timings.seconds == {"rollout": 4.0, "reward": 0.0, "judge": 6.0}


def test_a_step_without_signal_takes_nothing_from_the_data(make_trainer):
    """The numbers say why; the next step begins where this one did."""
    trainer = make_trainer(reward_funcs=constant, max_refills=2, prompts_per_step=4)
    before = trainer.train_dataset.state_dict()
    with pytest.raises(NoSignalError, match="step 1: 0 of 12 prompts .* Of the others, 12 had the reward 1 throughout"):
        trainer.step()
    assert trainer.train_dataset.state_dict() == before and trainer.global_step == 0
