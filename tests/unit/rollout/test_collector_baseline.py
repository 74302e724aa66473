"""ReMax's greedy baseline, and batches of demonstrations: what the collector asks of the ranks, and makes of it."""

import math

import pytest
import torch

from hybrid_rl.batch import Batch, BatchRef
from hybrid_rl.batch.rollout_files import save_rollout
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import DataError, RewardError
from hybrid_rl.rollout.collector import Collector, StepPlan
from hybrid_rl.rollout.demonstrations import DemonstrationEncoder, Demonstrations
from hybrid_rl.rollout.reward_metrics import baseline_metrics
from tests.support.tiny import EOS_ID, build_tokenizer, ids_of
from tests.unit.rollout.refilling import PARAMS, ListSampler, Rig, row_of, worth
from tests.unit.rollout.scripted import STATE, replayed

NAN = math.nan
RANKS = pytest.mark.parametrize(("num_ranks", "keep"), [(1, False), (2, False), (1, True), (2, True)])


def values(tensor):
    return [None if math.isnan(value) else value for value in tensor.tolist()]


# ------------------------------------------------------------------------------------------------------------- greedy


@RANKS
def test_every_sample_gets_the_reward_of_its_prompts_greedy_one(num_ranks, keep):
    rows = [row_of(0, 1.0, 0.0, greedy=0.25), row_of(1, 1.0, 1.0, greedy=NAN), row_of(2, 0.0, 0.5, greedy=0.75)]
    rig = Rig(rows, num_ranks=num_ranks, keep=keep)
    collected = rig.collect(3, max_refills=0, greedy_baseline=True)
    batch = collected.batch
    assert isinstance(batch, BatchRef if keep else Batch)
    assert batch["baseline_rewards"].dtype == torch.float64
    assert values(batch["baseline_rewards"]) == [0.25, 0.25, None, None, 0.75, 0.75]
    assert batch["rewards"].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 0.5]
    assert collected.metrics["baseline/reward"] == 0.5
    assert collected.metrics["reward"] == pytest.approx(3.5 / 6)
    assert "collect/num_rollouts" not in collected.metrics
    for client in rig.clients:
        sampled, greedy = client.calls
        assert {request.params.temperature for request in sampled} == {1.0}
        assert {request.params.temperature for request in greedy} == {0.0}
        assert [r.prompt_ids for r in greedy] == [r.prompt_ids for r in sampled[::2]]
        assert all(r.params.max_tokens == PARAMS.max_tokens for r in greedy)
        assert not {r.id for r in greedy} & {r.id for r in sampled}


def test_only_prompts_of_the_batch_get_a_greedy_sample():
    rows = [row_of(i, 1.0, float(i % 2 == 0), greedy=float(i)) for i in range(8)]
    rig = Rig(rows)
    collected = rig.collect(3, greedy_baseline=True)
    assert rig.rolled() == [[0, 1, 2], [3, 4, 5], [1, 3, 5]]
    assert collected.batch["baseline_rewards"].tolist() == [1.0, 1.0, 3.0, 3.0, 5.0, 5.0]
    assert collected.metrics["baseline/reward"] == 3.0
    assert collected.metrics["collect/num_rollouts"] == 2


def test_failed_greedy_samples_count_like_others():
    """1 of 4 samples, then 1 of 2 greedy ones: 2 of 6."""
    rows = [row_of(0, 1.0, NAN, greedy=NAN), row_of(1, 0.0, 1.0, greedy=1.0)]
    collected = Rig(rows, share=0.34).collect(2, max_refills=0, greedy_baseline=True)
    assert collected.metrics["rewards/num_failed"] == 1
    with pytest.raises(RewardError, match=r"step 3: 2 of 6 samples \(33.3%\) have no reward"):
        Rig(rows, share=0.3).collect(2, max_refills=0, greedy_baseline=True)


def test_greedy_samples_log_nothing_and_are_no_part_of_the_means():
    def logs(completion_ids, scores, greedy, log_metric, **_):
        log_metric("token", sum(ids[0] for ids in completion_ids) / len(completion_ids))
        return worth(completion_ids, scores, greedy)

    collected = Rig([row_of(0, 1.0, 0.0, greedy=9.0)], logs).collect(1, greedy_baseline=True)
    assert collected.logged == {"token": 1.5}
    assert collected.metrics["collect/reward_all"] == 0.5
    assert collected.metrics["rewards/logs/mean"] == 0.5


def test_the_mean_baseline_counts_a_prompt_once():
    columns = {"group": torch.tensor([4, 4, 4, 2]), "baseline_rewards": torch.tensor([1.0, 1, 1, 0]).double()}
    assert baseline_metrics(Batch(columns)) == {"baseline/reward": 0.5}


def test_a_saved_rollout_has_its_baseline(tmp_path):
    rows = [row_of(0, 1.0, 0.0, greedy=0.25), row_of(1, 0.0, 1.0, greedy=NAN)]
    made = Rig(rows).collect(2, max_refills=0, greedy_baseline=True)
    save_rollout(tmp_path, 3, 0, 1, made.batch)
    found = replayed(tmp_path, 3, 2, 2, ["worth"], version=1, greedy_baseline=True)
    assert values(found.batch["baseline_rewards"]) == [0.25, 0.25, None, None]
    assert found.metrics["baseline/reward"] == 0.25
    save_rollout(tmp_path, 4, 0, 1, made.batch.without("baseline_rewards"))
    assert "baseline/reward" not in replayed(tmp_path, 4, 2, 2, ["worth"], version=1).metrics
    with pytest.raises(DataError, match="step 4 was made without a greedy baseline"):
        replayed(tmp_path, 4, 2, 2, ["worth"], version=1, greedy_baseline=True)


# ----------------------------------------------------------------------------------------------------- demonstrations


class Teachers:
    """Ranks that have demonstrations; what they were asked."""

    def __init__(self):
        tokenizer = build_tokenizer()
        self.demonstrations_of = Demonstrations(DemonstrationEncoder(tokenizer), tokenizer.decode)
        self.calls = []

    def demonstrations(self, tasks, call):
        self.calls.append(call)
        parts = [self.demonstrations_of.run(tasks[rank::2], call) for rank in range(2)]
        return Batch.concat([batch for batch, _ in parts]), [report for _, report in parts]


def test_a_batch_of_demonstrations():
    """Dealt to two ranks, it comes back in the order of the sampler."""
    rows = [PromptRow(i, f"{i}+1=", tuple(ids_of(f"{i}+1=")), {"completion": str(i + 1)}) for i in range(6)]
    workers = Teachers()
    plan = StepPlan(ListSampler(rows), 3, 1, SamplingParams(3, stop_token_ids=(EOS_ID,)), demonstrates=True)
    collector = Collector(workers, ["demonstration"], plan, max_failure_share=0.0)
    first = collector.take(5, STATE)
    assert [ids.tolist() for ids in first.batch["completion_ids"]] == [[*ids_of(str(i)), EOS_ID] for i in (1, 2, 3)]
    assert first.batch["group"].tolist() == first.batch["trajectory"].tolist() == [0, 1, 2]
    assert first.metrics["completions/mean_length"] == 2 and not {"reward", "pass@1"} & {*first.metrics}
    assert set(first.timings.seconds) == {"rollout", "reward"}
    second = collector.take(5, STATE)
    assert second.batch["group"].tolist() == [3, 4, 5]
    assert [call.num_generations for call in workers.calls] == [1, 1]
