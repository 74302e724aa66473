"""The collector over ranks that make scripted rollouts: what it asks of them, counts and keeps in order."""

import logging
import math

import pytest
import torch

from hybrid_rl.batch import Batch, BatchRef, SampleKey
from hybrid_rl.batch.rollout_files import save_batch, save_rollout
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.engines.base import SamplingParams, SlotUse
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import DataError, RewardError
from hybrid_rl.rewards import RewardFailure, RewardRunner, TrainerState
from hybrid_rl.rollout.call import RolloutCall, RolloutReport
from hybrid_rl.rollout.collector import Collector, StepPlan
from hybrid_rl.rollout.completion_stream import CompletionStream
from hybrid_rl.rollout.counters import Tally
from hybrid_rl.rollout.generations import generations_of
from hybrid_rl.rollout.lengths import length_metrics
from hybrid_rl.rollout.reward_metrics import reward_metrics
from tests.support.agents.turns import cut_in_turns
from tests.support.inside.rollouts import note_use
from tests.unit.engines.engines import decode as letters
from tests.unit.engines.engines import inplace, prompt
from tests.unit.rollout.scripted import ROWS, SCRIPT, STATE, ScriptedClient, Workers, decode, replayed

NAN = math.nan


def collector_of(functions, clients, *, plan=None, share=1.0, keep=False, decode=decode, **options):
    """A collector over a rank per client, each with a reward runner of its own (functions None: without)."""
    runners = [None if functions is None else RewardRunner(functions, **options) for _ in clients]
    ranks = [CompletionStream(c, runner, decode, seed=11) for c, runner in zip(clients, runners, strict=True)]
    names = runners[0].names if runners[0] else ()
    return Collector(Workers(ranks, keep=keep), names, plan, max_failure_share=share)


RANKS = pytest.mark.parametrize(("num_ranks", "keep"), [(1, False), (2, False), (1, True), (2, True)])


def rollout(functions, script=SCRIPT, *, num_ranks=1, is_scored=True, **options):
    collector = collector_of(functions, [ScriptedClient(script) for _ in range(num_ranks)], **options)
    return collector.rollout(ROWS, 2, SamplingParams(3), 9, STATE, purpose="test", is_scored=is_scored)


def length(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def loaded(batch) -> Batch:
    return batch.load() if isinstance(batch, BatchRef) else batch


# ------------------------------------------------------------------------------------------------------------ calls


def test_a_later_rollout_has_new_ids_and_for_the_same_purpose_the_same_noise():
    clients = [ScriptedClient() for _ in range(2)]
    collector = collector_of(None, clients)
    params = SamplingParams(3, temperature=0.5, seed=2)
    for _ in range(2):
        collector.rollout(ROWS, 2, params, 9, STATE, purpose="eval/3", is_scored=False)
    for client, prompt_ids, group in zip(clients, ((4, 5), (6,)), (0, 1), strict=True):
        (first, version), (second, _) = client.calls
        assert version == 9
        assert [(r.id, r.group, r.prompt_ids) for r in first] == [(2 * group + g, group, prompt_ids) for g in (0, 1)]
        assert [(r.id, r.group) for r in second] == [(r.id + 4, r.group + 4) for r in first]
        assert [r.params for r in second] == [r.params for r in first]
        assert first[0].params.seed != first[1].params.seed


class Sampler(PromptSampler):
    def __init__(self, rows=ROWS):
        self.rows = rows

    def take(self, num_prompts):
        return self.rows[:num_prompts]

    def observe(self, rows, rates):
        assert len(rows) == len(rates)

    def metrics(self):
        return {}


def test_the_noise_of_a_training_step_depends_on_the_step():
    client = ScriptedClient()
    collector = collector_of(length, [client], plan=StepPlan(Sampler(), 2, 2, SamplingParams(3)))
    seeds = []
    for step in (1, 2, 1):
        collector.take(9, TrainerState(step, 10, 0.0))
        seeds.append(sorted(request.params.seed for request in client.calls[-1][0]))
    assert seeds[0] == seeds[2]
    assert not set(seeds[0]) & set(seeds[1])


# ----------------------------------------------------------------------------------------------------------- batch


@RANKS
def test_samples_are_in_the_order_of_their_prompts(num_ranks, keep):
    collected = rollout(length, num_ranks=num_ranks, keep=keep)
    assert isinstance(collected.batch, BatchRef if keep else Batch)
    batch = loaded(collected.batch)
    assert batch["completion"] == ["ab", "c", "aaa", "bc"]
    assert batch["group"].tolist() == [0, 0, 1, 1]
    assert batch["trajectory"].tolist() == [0, 1, 2, 3]
    assert batch["rewards"].tolist() == [2.0, 1.0, 3.0, 2.0]


PROMPTS = [PromptRow(i, str(i), prompt(length, start=3 + i), {}) for i, length in enumerate((4, 9, 1, 6, 4))]


def of_real_engines(num_ranks, keep=False, functions=length):
    clients = [EngineClient(inplace(max_num_seqs=3).ready().engine) for _ in range(num_ranks)]
    collector = collector_of(functions, clients, keep=keep, decode=letters)
    return collector.rollout(PROMPTS, 3, SamplingParams(7), 1, STATE, purpose="train/1")


@pytest.mark.parametrize(("num_ranks", "keep"), [(2, True), (7, False)])
def test_any_number_of_ranks_makes_the_same_samples(num_ranks, keep):
    """5 prompts dealt over engines of their own, ranks without a prompt among them: same tokens in the same order."""
    alone, dealt = of_real_engines(1), of_real_engines(num_ranks, keep)
    mine, theirs = loaded(alone.batch), loaded(dealt.batch)
    assert set(mine) == set(theirs)
    assert len({tuple(row.tolist()) for row in mine["completion_ids"]}) > 10
    for name in ("completion_ids", "prompt_ids"):
        assert torch.equal(mine[name].values, theirs[name].values)
        assert torch.equal(mine[name].offsets, theirs[name].offsets)
    for name in ("group", "trajectory", "rewards", "oldest_version", "completion_length", "prompt_length"):
        assert torch.equal(mine[name], theirs[name])
    for name in ("prompt", "completion", "row", "extra", "function_rewards", "finish_reason"):
        assert mine[name] == theirs[name]
    # The last bits depend on the shapes of matrix products.
    torch.testing.assert_close(mine["rollout_logprobs"].values, theirs["rollout_logprobs"].values, rtol=0, atol=1e-5)
    assert alone.metrics == pytest.approx(dealt.metrics)


def test_generations_are_the_samples_one_by_one():
    third = generations_of(rollout(None, is_scored=False, num_ranks=2).batch)[2]
    assert (third.prompt, third.completion, third.completion_ids) == (ROWS[1].prompt, "aaa", [1, 1, 1])
    assert (third.logprobs, third.finish_reason) == ([-0.5] * 3, "length")


# --------------------------------------------------------------------------------------------------------- rewards


def only_c(completion_ids, **_):
    return [1.0 if ids == [3] else NAN for ids in completion_ids]


@RANKS
def test_failed_samples_are_masked_counted_and_shown(caplog, num_ranks, keep):
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        collected = rollout(only_c, share=0.75, num_ranks=num_ranks, keep=keep)
    assert [math.isnan(reward) for reward in collected.batch["rewards"].tolist()] == [True, False, True, True]
    assert collected.batch["rewards"].dtype == torch.float64
    assert collected.metrics["rewards/num_failed"] == 3
    assert collected.metrics["reward"] == 1.0
    assert "test: 3 samples have no reward and are masked" in caplog.text
    assert "reward only_c: 3 samples returned NaN or infinity (trajectories 0, 2, 3)" in caplog.text


@RANKS
def test_samples_that_are_scored_again_alone_are_counted_and_told_once(caplog, num_ranks, keep):
    """A reward that cannot take several: nothing failed, but the function was called more often than it had to be."""

    def one_at_a_time(completion_ids, **_):
        if len(completion_ids) > 1:
            raise ValueError("one at a time")
        return [1.0]

    collector = collector_of(one_at_a_time, [ScriptedClient() for _ in range(num_ranks)], keep=keep)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        for _ in range(2):
            metrics = collector.rollout(ROWS, 2, SamplingParams(3), 9, STATE, purpose="test").metrics
            assert (metrics["rewards/num_failed"], metrics["rewards/num_retried"]) == (0, 4)
    assert caplog.text.count("a call of reward function 'one_at_a_time' failed") == 1
    assert "(ValueError: one at a time), so it was made again for 4 samples, one by one " in caplog.text


@RANKS
def test_too_many_failures_stop_the_run(num_ranks, keep):
    """The share is of the whole step: on the rank with the second prompt every sample failed."""
    with pytest.raises(RewardError, match=r"step 3: 3 of 4 samples \(75\.0%\) have no reward"):
        rollout(only_c, share=0.74, num_ranks=num_ranks, keep=keep)


@pytest.mark.parametrize(("num_ranks", "keep"), [(1, False), (2, True)])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_function_that_asks_the_program_to_end_ends_the_run(error, num_ranks, keep):
    def judge(completions, completion_ids, **_):
        if [3] in completion_ids:
            raise error("enough")
        return [1.0] * len(completions)

    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else RewardError) as raised:
        rollout(judge, share=1.0, num_ranks=num_ranks, keep=keep)
    told = str(raised.value)
    assert told.startswith(f"step 3: reward function 'judge' raised {error.__name__}: enough") and "in judge" in told


# --------------------------------------------------------------------------------------------------------- metrics


@RANKS
def test_metrics_by_hand(num_ranks, keep):
    collected = rollout(
        [length, lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids]],
        weights=[1, 10],
        num_ranks=num_ranks,
        keep=keep,
    )
    # length 2, 1, 3, 2; first token 1, 3, 1, 2; reward 12, 31, 13, 22.
    expected = {
        "completions/mean_length": 2.0,
        "completions/min_length": 1.0,
        "completions/max_length": 3.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 5 / 3,
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 2.0,
        "rewards/length/mean": 2.0,
        "rewards/length/std": math.sqrt(2 / 3),
        "rewards/<lambda>/mean": 1.75,
        "rewards/<lambda>/std": math.sqrt(2.75 / 3),
        "reward": 19.5,
        "reward_std": math.sqrt((7.5**2 + 11.5**2 + 6.5**2 + 2.5**2) / 3),
        "frac_reward_zero_std": 0.0,
        "rewards/num_failed": 0.0,
        "rewards/num_retried": 0.0,
    }
    assert collected.metrics == pytest.approx(expected)
    assert set(collected.timings.seconds) == {"rollout", "reward"}


def test_slots_of_a_rank_that_has_ended_stay_empty_until_the_last_one_ends():
    """By hand: 10 steps of 6 slots, in which 30 tokens were decoded, and 5 steps of 4 slots with 15."""
    tally = Tally(1.0, 0)
    for uses in ([SlotUse(10, 4, 20), SlotUse(6, 2, 10)], [SlotUse(5, 4, 15)]):
        note_use(tally, SlotUse.of_ranks(uses))
    assert tally.use() == pytest.approx({"engine/steps": 15.0, "engine/idle_share": 1 - 45 / 80})
    assert not Tally(1.0, 0).use()  # what has not been counted is not said


def test_trajectories_that_were_begun_in_an_earlier_step_have_numbers_that_can_be_looked_up():
    """samples.jsonl counts from the first trajectory of a batch. Those of the call begin at 8; others were held."""
    columns = {"trajectory": torch.tensor([4, 5, 8]), "turn": torch.zeros(3, dtype=torch.int64)}
    columns |= {"group": torch.tensor([2, 2, 4]), "rewards": torch.tensor([1.0, math.nan, 1.0], dtype=torch.float64)}
    failure = RewardFailure("length", SampleKey(5, 0), "raised", "broken")
    call = RolloutCall(2, SamplingParams(3), 1, STATE, "train/1", 8)
    with pytest.raises(RewardError, match=r"\(trajectory 1\b"):
        Tally(0.0, 8).add(Batch(columns), [RolloutReport({}, [failure])], call)


def test_groups_need_not_be_numbered_from_zero_nor_lie_together():
    groups = torch.tensor([70, 12, 70, 12, 99])
    rewards = torch.tensor([1.0, 2.0, 1.0, 3.0, 5.0], dtype=torch.float64)
    columns = {"group": groups, "rewards": rewards, "function_rewards": [[]] * 5}
    metrics = reward_metrics(Batch(columns), ())
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)  # 70, and 99 which is alone
    assert metrics["reward"] == pytest.approx(12 / 5)


def test_a_column_that_does_not_apply_is_left_out_of_its_mean():
    collected = rollout(
        [lambda completion_ids, **_: [None if len(ids) == 2 else 4.0 for ids in completion_ids], length]
    )
    assert collected.metrics["rewards/<lambda>/mean"] == 4.0
    assert collected.batch["rewards"].tolist() == [2.0, 5.0, 7.0, 2.0]


@RANKS
def test_what_functions_log_is_joined_over_ranks(num_ranks, keep):
    def reward(completion_ids, log_extra, log_metric, **_):
        log_extra("first", [ids[0] for ids in completion_ids])
        log_metric("longest", max(len(ids) for ids in completion_ids))
        return [0.0] * len(completion_ids)

    collected = rollout(reward, num_ranks=num_ranks, keep=keep)
    assert loaded(collected.batch)["extra"] == [{"first": 1}, {"first": 3}, {"first": 1}, {"first": 2}]
    # On one rank one call of four samples, on two two of two: longest 3, or 2 and 3.
    assert collected.logged == {"longest": 3.0 if num_ranks == 1 else 2.5}


def test_without_rewards_there_are_only_samples():
    for functions in (None, length):
        collected = rollout(functions, is_scored=False)
        assert "rewards" not in collected.batch
        assert all(name.startswith("completions/") for name in collected.metrics)
        assert collected.logged == {}


def test_lengths_are_those_of_trajectories_without_what_the_environment_said():
    """Trajectory 5 made 2 + 3 tokens in two samples, 6 made 4, 7 none, 8 made 1 and 9 made 6."""
    reasons = ["stop", "stop", "turns", "time", "error", "length"]
    batch = Batch(
        {
            "trajectory": torch.tensor([5, 5, 6, 7, 8, 9]),
            "turn": torch.tensor([0, 1, 0, 0, 0, 0]),
            "completion_length": torch.tensor([20, 30, 40, 50, 60, 70]),
            "policy_length": torch.tensor([2, 3, 4, 0, 1, 6]),
            "finish_reason": reasons,
        }
    )
    assert length_metrics(batch) == {
        "completions/mean_length": 16 / 5,
        "completions/min_length": 0.0,
        "completions/max_length": 6.0,
        "completions/clipped_ratio": 3 / 5,
        "completions/mean_terminated_length": 5.0,
        "completions/min_terminated_length": 5.0,
        "completions/max_terminated_length": 5.0,
    }


def test_no_completion_that_ended_has_no_mean_length():
    metrics = rollout(length, [([1], "length")] * 4).metrics
    assert metrics["completions/clipped_ratio"] == 1.0
    assert "completions/mean_terminated_length" not in metrics


# ---------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_saved_rollout_in_the_place_of_a_new_one(tmp_path, num_ranks):
    """Whatever version made it, it counts as of the present one; the rest is what was saved, in its order."""
    made = rollout(length)
    for rank in range(num_ranks):
        part = made.batch.select(range(rank, 4, num_ranks))
        save_rollout(tmp_path, 3, rank, num_ranks, part)
    found = replayed(tmp_path, 3, 2, 2, ["length"], version=17)
    assert found.batch["oldest_version"].tolist() == [17] * 4
    assert set(found.batch) == set(made.batch)
    for name in ("completion_ids", "rollout_logprobs", "policy_version"):
        assert torch.equal(found.batch[name].values, made.batch[name].values)
    assert torch.equal(found.batch["rewards"], made.batch["rewards"])
    assert found.batch["completion"] == made.batch["completion"]
    assert found.metrics == made.metrics == length_metrics(made.batch) | reward_metrics(made.batch, ["length"])
    assert set(found.timings.seconds) == {"rollout"} and found.logged == {}


def test_a_saved_rollout_of_several_turns(tmp_path):
    """Group sizes, metrics of rewards and lengths are of trajectories."""
    made = rollout(length).batch
    cut = cut_in_turns(made)
    assert cut["completion_length"].tolist() == [1, 2, 1, 1, 1, 1, 1]  # of 2, 1, 3 and 2; the last turns first
    for rank, half in enumerate((cut.select([6, 1, 2, 5]), cut.select([0, 3, 4]))):
        save_rollout(tmp_path, 3, rank, 2, half)
    found = replayed(tmp_path, 3, 2, 2, ["length"], version=17)
    assert found.batch["trajectory"].tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert found.batch["turn"].tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert reward_metrics(found.batch, ["length"]) == reward_metrics(made, ["length"])
    assert found.metrics["completions/mean_length"] == 8 / 4  # of a trajectory
    with pytest.raises(DataError, match=r"has \[2\] samples per prompt, but num_generations=4"):
        replayed(tmp_path, 3, 2, 4, ["length"], version=1)
    save_rollout(tmp_path, 4, 0, 1, Batch.concat([made, made]))
    with pytest.raises(DataError, match="rollout of step 4: two samples are turn 0 of trajectory 0"):
        replayed(tmp_path, 4, 2, 2, ["length"], version=1)


def test_the_turns_that_ranks_made_come_in_order_and_count_once(caplog):
    """Two ranks answer with the trajectories of their prompts, cut in turns; one of 4 trajectories has failed."""

    class Turns(Workers):
        def rollout(self, tasks, call):
            batch, reports = super().rollout(tasks, call)
            return cut_in_turns(batch), reports

    runner = RewardRunner(lambda completion_ids, **_: [NAN if len(ids) == 3 else 1.0 for ids in completion_ids])
    workers = Turns([CompletionStream(ScriptedClient(), runner, decode, seed=11) for _ in range(2)], keep=False)
    collector = Collector(workers, ("f",), None, max_failure_share=0.25)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        made = collector.rollout(ROWS, 2, SamplingParams(3), 9, STATE, purpose="test")
    assert made.batch["trajectory"].tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert made.batch["turn"].tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert made.metrics["rewards/num_failed"] == 1 and made.metrics["reward"] == 1.0
    assert "test: 1 sample has no reward" in caplog.text and "(trajectory 2)" in caplog.text


@pytest.mark.parametrize(
    ("size", "names", "columns", "says"),
    [
        ((4, 2), ["length"], {}, " has 2 prompts, but prompts_per_step=4; set it to 2"),
        ((2, 3), ["length"], {}, r" has \[2\] samples per prompt, but num_generations=3"),
        ((2, 2), ["length", "other"], {}, r" was scored by 1 reward functions, but 2 are given \(length, other\)"),
        # As an older version wrote it. To take the configuration's temperature would give wrong ratios without a word.
        ((2, 2), ["length"], {"temperature": None}, ": the batch has no column temperature.*add the column"),
        (
            (2, 2),
            ["length"],
            {"temperature": [0.7, 0.7, 1.0, 0.7]},
            r": .* temperatures \[0.7, 1.0\]; train on one",
        ),
        ((2, 2), ["length"], {"temperature": [0.0] * 4}, ": .* at the temperature 0.0; logits are"),
        ((2, 2), ["length"], {"temperature": [-0.7] * 4}, ": .* at the temperature -0.7; logits are"),
        ((2, 2), ["length"], {"temperature": [math.inf] * 4}, ": .* at the temperature inf; logits are"),
        ((2, 2), ["length"], {"trajectory": None}, ": the batch has no column trajectory, which"),
    ],
)
def test_a_saved_rollout_that_does_not_fit_is_refused(tmp_path, size, names, columns, says):
    batch = rollout(length).batch.without(*columns)
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items() if values}
    # Not by `save_rollout`, which refuses samples without names.
    save_batch(tmp_path / "step-000003-rank-0000-of-0001.safetensors", batch.with_columns(**columns))
    with pytest.raises(DataError, match=f"the rollout of step 3{says}"):
        replayed(tmp_path, 3, *size, names, version=1)


def test_a_rollout_that_is_not_there_is_refused(tmp_path):
    save_rollout(tmp_path, 3, 0, 1, rollout(length).batch)
    with pytest.raises(DataError, match=r"has no rollout of step 4; it has steps \[3\]"):
        replayed(tmp_path, 4, 2, 2, ["length"], version=1)
    with pytest.raises(DataError, match="does not exist"):
        replayed(tmp_path / "nowhere", 3, 2, 2, ["length"], version=1)
