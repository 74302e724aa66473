"""The rule of what a step delivers and holds, by hand; and what is held, in the files of a checkpoint. That no token is
older than the bound in any setting is proved by `stream_machine`."""

import json
import random
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.config import resolve
from hybrid_rl.config.load import load_config
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import Beginning, FinishedSample, SamplingParams
from hybrid_rl.errors import CheckpointError, ConfigError, RewardError
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout.call import RolloutCall
from hybrid_rl.rollout.completion_stream import CompletionGroup
from hybrid_rl.rollout.held_files import load_held, save_held
from hybrid_rl.rollout.held_json import plain
from hybrid_rl.rollout.hold_rule import HeldPrompt, HoldRule
from hybrid_rl.rollout.trajectory_stream import TrajectoryGroup

ROW = PromptRow(3, [{"role": "user", "content": "ü"}], (4, 5), {"answer": 1.5, "tags": ["a", None]})


def group(number, *, born=1, oldest=None, is_whole=False):
    """A group of one sample with two tokens, the first of version `oldest`; None: it has no token yet."""
    found = CompletionGroup(ROW, number, born, (4, 5), SamplingParams(8), {number: 0})
    if is_whole:
        found.take(FinishedSample(number, [6, 1], [-0.5, -1.0], [oldest, oldest], "stop"))
    elif oldest is not None:
        found.take(FinishedSample(number, [6, 7], [-0.5, -1.0], [oldest, oldest + 1], "abort"))
    return found


def taken(rule, groups, version):
    standing = [rule.standing(groups, version)]
    keys = [rule.key(one, version) for one in groups if one.is_whole]
    return rule.is_over(standing, version), rule.chosen(keys, standing, version)


def test_a_step_delivers_now_what_the_next_steps_could_not_deliver_in_time():
    """By hand: 2 groups a step, 2 versions at most. At version 1 four groups began at version 0 and are due at version
    2. The step there delivers two, so two of the four are needed now, although two newer ones are whole."""
    rule = HoldRule(num_groups=2, max_staleness=2, order="freshest")
    held = [group(number, oldest=0, is_whole=number == 0) for number in range(4)]
    new = [group(number, born=2, oldest=1, is_whole=True) for number in (4, 5)]
    assert taken(rule, held + new, 1)[0] is False
    held[2] = group(2, oldest=0, is_whole=True)
    assert taken(rule, held + new, 1) == (True, {0, 2})
    assert taken(HoldRule(2, 3, order="freshest"), held + new, 1) == (True, {4, 5})  # with three versions there is time
    assert taken(HoldRule(2, 3), held + new, 1) == (True, {0, 2})  # the oldest first
    assert taken(HoldRule(2, 3, ahead=2), held + new, 1) == (True, {0, 2})
    assert taken(HoldRule(2, 3, ahead=3), held + new, 1)[0] is False  # 4 are whole, 5 are asked for


def test_the_end_is_decided_by_the_groups_of_all_ranks():
    rule = HoldRule(num_groups=3, max_staleness=1)
    ranks = [[group(0, oldest=0, is_whole=True), group(1, oldest=0)], [group(2, oldest=1, is_whole=True)]]
    standings = [rule.standing(groups, 1) for groups in ranks]
    assert [found[:3] for found in standings] == [(1, 1, {1: (1, 1)}), (1, 0, {})]
    assert not rule.is_over(standings, 1)
    ranks[1].append(group(3, oldest=1, is_whole=True))
    assert not rule.is_over([rule.standing(groups, 1) for groups in ranks], 1)  # three are whole, but group 1 is due
    ranks[0][1] = group(1, oldest=0, is_whole=True)
    assert rule.is_over([rule.standing(groups, 1) for groups in ranks], 1)


def test_what_a_checkpoint_holds_must_fit_into_the_steps_to_come():
    """Four groups of version 0 at version 1, two a step: the last two train at version 2."""
    held = [HeldPrompt(ROW, 1, 1.0, 0)] * 4
    HoldRule(2, 2).check(held, 1)
    HoldRule(4, 1).check(held, 1)
    with pytest.raises(
        ConfigError, match=r"max_staleness=1 is too small for the 4 groups .* set max_staleness to at least 2"
    ):
        HoldRule(2, 1).check(held, 1)
    with pytest.raises(ConfigError, match=r"set max_staleness to at least 4, or prompts_per_step as it was"):
        HoldRule(1, 1).check(held, 1)


def test_held_groups_come_back_from_a_checkpoint_as_they_were(tmp_path):
    seeds = {number: 2**62 + number for number in (7, 8)}
    params = SamplingParams(8, stop_token_ids=(1,))
    kept = CompletionGroup(ROW, 9, 2, (4, 5), params, seeds, whole_in=TrainerState(2, 5, 1 / 3))
    experts = np.arange(-1, 15, dtype=np.int16).reshape(4, 2, 2)
    kept.take(FinishedSample(8, [6, 1], [-0.1, -1e-40], [0, 1], "stop", experts))
    kept.take(FinishedSample(7, [6], [-0.3], [1], "abort"))
    save_held(tmp_path, 0, [group(11), kept])
    save_held(tmp_path, 1, [group(10)])
    found = load_held(tmp_path, 0, 2, CompletionGroup)[1]
    assert vars(found) == vars(kept)
    again = found.finished[8].routed_experts
    assert again.dtype == np.int16 and np.array_equal(again, experts)
    assert [request.begun for request in found.remaining()] == [Beginning((6,), (-0.3,), (1,))]
    # As many ranks read what they wrote, in its order; others deal all groups out.
    shares = [[load_held(tmp_path, rank, ranks, CompletionGroup) for rank in range(ranks)] for ranks in (2, 3, 1)]
    ids = [[[one.group for one in share] for share in of_ranks] for of_ranks in shares]
    assert ids == [[[11, 9], [10]], [[9], [10], [11]], [[9, 10, 11]]]
    (tmp_path / "held-0002.json").write_text((tmp_path / "held-0001.json").read_text())
    with pytest.raises(CheckpointError, match=r"held-0002.json is damaged: group 10 is there twice"):
        load_held(tmp_path, 0, 1, CompletionGroup)


GONE = object()


def edited(found, path, value):
    """A copy of what a file holds, with another value at a path."""
    found = json.loads(json.dumps(found))
    place = found
    for name in path[:-1]:
        place = place[name]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return found


OF_COMPLETIONS = [
    ((), {}, "the file is {}, not a list"),
    ((0,), 3, "group 0: it is 3, not an object with keys"),
    ((0, "group"), GONE, "group 0: group is missing"),
    ((0, "group"), "9", "group 0: group is '9', not a whole number"),
    ((0, "born"), 1.5, "group 0: born is 1.5, not a whole number"),
    ((0, "place"), 3, "group 0: place is no key of it"),
    ((0, "row", "prompt"), 3, "group 0: row.prompt is 3, not a list"),
    ((0, "row", "prompt_ids"), [4, -5], "group 0: row.prompt_ids is -5, not 0 or above"),
    ((0, "row", "columns"), [], "group 0: row.columns is [], not an object with keys"),
    ((0, "prompt_ids"), [], "group 0: prompt_ids is (), not at least one token"),
    ((0, "prompt_ids"), [4, "5"], "group 0: prompt_ids[1] is '5', not a whole number"),
    ((0, "params", "top_p"), 2.0, "group 0: params: top_p=2.0 must be"),
    ((0, "params", "stop_token_ids"), 1, "group 0: params.stop_token_ids is 1, not a list"),
    ((0, "seeds"), {}, "group 0: seeds is {}, not"),
    ((0, "seeds", "8"), 2**63, "seed=9223372036854775808 must be"),
    ((0, "seeds", "eight"), 1, "group 0: a key of seeds is 'eight', not a whole number"),
    ((0, "finished", "8"), [], "group 0: finished.8 is [], not an object with keys"),
    ((0, "finished", "8", "id"), 7, "group 0: finished.8.id is 7, not"),
    ((0, "finished", "8", "logprobs"), [-0.1], "group 0: finished.8.completion_ids is [6, 1], not as long as"),
    ((0, "finished", "8", "versions"), [0, True], "group 0: finished.8.versions[1] is True, not a whole number"),
    ((0, "finished", "8", "logprobs"), [-0.1, float("nan")], "finished.8.logprobs[1] is nan, not a finite number"),
    ((0, "finished", "8", "completion_ids"), [6, -1], "finished.8.completion_ids is -1, not 0 or above"),
    ((0, "finished", "8", "versions"), [0, -1], "a version of finished.8.completion_ids is -1, not 0 or above"),
    ((0, "finished", "8", "logprobs"), [-0.1, 10**400], "too large"),
    ((0, "finished", "8", "finish_reason"), "abort", "finished.8.finish_reason is 'abort', not that of a whole"),
    ((0, "finished", "8", "finish_reason"), "tired", "finished.8.finish_reason is 'tired', not one of stop"),
    ((0, "begun", "7", "versions"), [], "group 0: begun.7.token_ids is (6,), not as long as"),
    ((0, "begun", "8"), {"token_ids": [], "logprobs": [], "versions": []}, "group 0: begun.8 is"),
    ((0, "whole_in"), {"global_step": 2}, "group 0: whole_in.max_steps is missing"),
    ((0, "expected"), "long", "group 0: expected is 'long', not a whole number or null"),
]
OF_TRAJECTORIES = [
    ((0, "call"), GONE, "group 0: call is missing"),
    ((0, "call", "params", "temperature"), None, "group 0: call.params.temperature is None, not a finite number"),
    ((0, "call", "state", "global_step"), "1", "group 0: call.state.global_step is '1', not a whole number"),
    ((0, "call", "hold"), 3, "group 0: call.hold is 3, not an object with keys"),
    ((0, "row", "prompt_ids"), [-1], "group 0: row.prompt_ids is -1, not 0 or above"),
    ((0, "row", "prompt"), [3], "group 0: row.prompt[0] is 3, not an object with keys"),
]


@pytest.mark.parametrize(
    ("has_agents", "path", "value", "says"),
    [*((False, *row) for row in OF_COMPLETIONS), *((True, *row) for row in OF_TRAJECTORIES)],
)
def test_a_file_that_was_edited_is_refused_by_its_name_and_key(has_agents, path, value, says, tmp_path):
    if has_agents:
        call = RolloutCall(2, SamplingParams(8, stop_strings=("a",)), 3, TrainerState(2, 5, 0.5), "train/2", 40)
        kept = TrajectoryGroup(1, ROW, call)
    else:
        kept = CompletionGroup(ROW, 9, 2, (4, 5), SamplingParams(8), {7: 7, 8: 8}, whole_in=TrainerState(2, 5, 1 / 3))
        kept.take(FinishedSample(8, [6, 1], [-0.1, -0.2], [0, 1], "stop"))
        kept.take(FinishedSample(7, [6], [-0.3], [1], "abort"))
    save_held(tmp_path, 0, [kept])
    (found,) = load_held(tmp_path, 0, 1, type(kept))
    assert vars(found) == vars(kept)
    file = tmp_path / "held-0000.json"
    file.write_text(json.dumps(edited([plain(kept)], path, value) if path else value))
    with pytest.raises(CheckpointError) as raised:
        load_held(tmp_path, 0, 1, type(kept))
    assert says in str(raised.value) and str(file) in str(raised.value)


@pytest.mark.parametrize("has_agents", [True, False])
def test_groups_of_a_run_with_other_arguments_are_refused_by_these(has_agents, tmp_path):
    """A file of the other kind is not damaged: every checkpoint of the run would say the same."""
    of_agents = {"place": 0, "row": {}, "call": {}}
    of_others = {"row": {}, "group": 0, "params": {}, "seeds": {}}
    (tmp_path / "held-0000.json").write_text(json.dumps([of_others if has_agents else of_agents]))
    made, now = ("without", "with") if has_agents else ("with", "without")
    group = TrajectoryGroup if has_agents else CompletionGroup
    with pytest.raises(ConfigError, match=f"begun {made} tools=, .*; this run is one {now} them: pass the same"):
        load_held(tmp_path, 0, 1, group)


def test_rewards_whose_call_ended_in_an_error_are_asked_for_again():
    """A reward runner that is closed answers so."""
    found, scoring = group(1, oldest=0, is_whole=True), Future()
    assert not found.is_scored
    found.scoring = scoring
    assert found.is_scored  # it will be
    scoring.set_exception(RewardError("gone"))
    assert not found.is_scored


@given(st.integers(0, 2**32))
@settings(max_examples=80, derandomize=True)
def test_no_token_is_older_than_the_bound_with_any_setting_that_validate_allows(seed):
    """Groups become whole in a random order, one or several between two looks; which have begun is random too."""
    rng = random.Random(seed)
    rule, num_extra = rule_of(rng)
    held, number = [], 0
    for version in range(12):
        groups = [*held]
        while len(groups) < rule.num_groups + num_extra:
            groups.append(group(number, born=version + 1))
            number += 1
        for place, one in enumerate(groups):
            if not one.begun and not one.finished and rng.random() < 0.7:
                groups[place] = group(one.group, born=one.born, oldest=version)
        while not taken(rule, groups, version)[0]:
            place = rng.choice([place for place, one in enumerate(groups) if not one.is_whole])
            oldest = groups[place].oldest_version
            groups[place] = group(
                groups[place].group,
                born=groups[place].born,
                oldest=version if oldest is None else oldest,
                is_whole=True,
            )
        batch = taken(rule, groups, version)[1]
        assert len(batch) == rule.num_groups
        for one in groups:
            if one.group in batch:
                assert one.is_whole and version - one.oldest_version <= rule.max_staleness
        held = [one for one in groups if one.group not in batch]
        assert len(held) == num_extra


def rule_of(rng):
    """A rule as `resolve` settles it from keys that it accepts, and how many groups are held."""
    size, ahead = rng.randint(1, 5), rng.randint(0, 3)
    keys = {"prompts_per_step": size, "rollout.async_level": ahead, "learning_rate": 1e-3, "max_steps": 9}
    if not ahead or rng.random() < 0.5:
        keys |= {"rollout.partial": True, "oversample": rng.choice((None, rng.randint(1, 3 * size)))}
    if not ahead:
        keys["buffer_order"] = rng.choice(("fifo", "freshest"))
    if rng.random() < 0.7:
        keys["max_staleness"] = rng.randint(1, 6)
    try:
        config = resolve(*load_config(keys)[:2])
    except ConfigError as error:
        assert "max_staleness" in str(error)
        del keys["max_staleness"]
        config = resolve(*load_config(keys)[:2])
    buffer, num_ahead = config.buffer, ahead * size
    rule = HoldRule(size, buffer.max_staleness, num_ahead, buffer.buffer_order)
    return rule, num_ahead + (buffer.oversample or 0)
