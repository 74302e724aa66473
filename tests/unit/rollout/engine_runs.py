"""Runs of `holding` over real engines: completions or agents, with weights whose version can be told from the logprobs
of the tokens that they make, and every move of a group compared with the picture on top of `rollout/stream.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.agents.client import Limits
from hybrid_rl.batch import Batch
from hybrid_rl.config import AgentConfig
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import TAGS
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.models import CausalLM
from hybrid_rl.rollout.episodes import EpisodeSettings
from hybrid_rl.rollout.hold_rule import Group, HoldRule, Key, Standing
from hybrid_rl.rollout.trajectory_stream import TrajectoryStream
from tests.support.engines.engine_settings import inplace_settings
from tests.support.inside.rollouts import is_idle
from tests.unit.engines.engines import Rig, decode
from tests.unit.models.families import build
from tests.unit.rollout.holding import Lengths, RankFailedError, Run, Setting, Step
from tests.unit.rollout.holding_agents import TOOL, Environments, Numbers

MakeRig = Callable[[int, int], Rig]  # of an engine with so many slots, before which so many requests may wait
TOLERANCE = 1e-4  # between the logprobs of an engine and those of the model's own forward pass


def policy() -> Any:
    """The model of runs over the in-place engine."""
    return build("qwen2", num_hidden_layers=1)


def inplace_rig(slots: int, max_num_waiting: int) -> Rig:
    """The in-place engine, with room for all of its slots."""
    module, memory = policy(), {"block_size": 16, "kv_cache_memory_bytes": 2**18}
    config = inplace_settings(max_num_seqs=slots, max_num_waiting=max_num_waiting, **memory)
    return Rig(InPlaceEngine(CausalLM(module), config, max_length=48, decode=decode), module)


class Versions:
    """Weights by version: each has noise of its own in the place of an optimizer's step."""

    def __init__(self, model: Any) -> None:
        self._model, self._first = model, {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self._made = dict[int, Mapping[str, Tensor]]()

    def __getitem__(self, version: int) -> Mapping[str, Tensor]:
        if version not in self._made:
            noise = torch.Generator().manual_seed(version)
            self._made[version] = {
                name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise) for name, tensor in self._first.items()
            }
        return self._made[version]

    @torch.no_grad()
    def logprobs(self, version: int, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """ln p of every token of these rows but the first, by the model's own forward pass."""
        self._model.load_state_dict(self[version])
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        log_p = (self._model(input_ids=ids, use_cache=False).logits[:, :-1].float() / temperature).log_softmax(-1)
        return log_p.gather(2, ids[:, 1:, None])[:, :, 0].tolist()


@dataclass
class Picture:
    """Where groups are in the picture of `rollout/stream.py`, as the looks of a step have seen them. states: 0 waiting,
    1 running, 2 whole, by group; may_fall_back: after a fault agents begin again; ended: how far all ranks were when it
    was enough."""

    states: dict[int, int] = field(default_factory=dict)
    may_fall_back: bool = False
    ended: Sequence[Standing] = ()

    def look(self, groups: Iterable[Group]) -> None:
        """Note where groups are. None goes back, and what a step has taken never comes again."""
        for group in groups:
            state = 2 if group.is_whole else int(group.oldest_version is not None)
            before = self.states.get(group.group, 0)
            assert 0 <= before <= state or (before > 0 and self.may_fall_back), f"{group.group}: {before} to {state}"
            self.states[group.group] = state

    def take(self, groups: Iterable[int]) -> None:
        """Note that a step trains on groups, which were whole."""
        for group in groups:
            assert self.states.get(group, 2) == 2, f"{group} is taken in state {self.states[group]}"
            self.states[group] = -1


@dataclass(frozen=True)
class WatchedRule(HoldRule):
    """A rule whose looks a picture sees. is_exact: what is enough is broken off at once; agents still get answers."""

    picture: Picture = field(default_factory=Picture, compare=False)
    is_exact: bool = True

    def standing(self, groups: Iterable[Group], version: int, **state: bool) -> Standing:
        """Let the picture look too."""
        self.picture.look(groups := list(groups))
        return super().standing(groups, version, **state)

    def is_over(self, everywhere: Sequence[Standing], version: int) -> bool:
        """Note how far all ranks are when it is enough."""
        if is_over := super().is_over(everywhere, version):
            self.picture.ended = everywhere
        return is_over

    def chosen(self, keys: Iterable[Key], everywhere: Sequence[Standing], version: int) -> set[int]:
        """Check what is taken: as many as are wanted, and none before another that comes first and is due as soon."""
        chosen = super().chosen(keys := list(keys), everywhere, version)
        assert len(chosen) == min(self.num_wanted, len(keys)) and chosen <= {group for _, _, group in keys}
        assert not self.is_exact or [one[:3] for one in everywhere] == [one[:3] for one in self.picture.ended]
        left = [key for key in keys if key[2] not in chosen]
        for deadline, *place in (key for key in keys if key[2] in chosen):
            assert not any(other <= deadline and others < place for other, *others in left)
        return chosen


@dataclass(frozen=True)
class EngineSetting(Setting):
    """A setting whose rule is watched. has_agents: samples are trajectories, some of whose tools take `tool_seconds`;
    max_open: that are under way at once."""

    has_agents: bool = False
    tool_seconds: float = 0.0
    max_open: int | None = None
    picture: Picture = field(default_factory=Picture, compare=False)

    @property
    def rule(self) -> HoldRule | None:
        rule = super().rule
        return None if rule is None else WatchedRule(**vars(rule), picture=self.picture, is_exact=not self.has_agents)


class EngineRun(Run):
    """A run over real engines. made: what was made of each sample that is held, by the step after which it is; of
    completions."""

    setting: EngineSetting
    stop_ids = (1, *range(60, 90))
    num_evaluated_tokens = 3

    def __init__(
        self,
        setting: EngineSetting,
        folder: Path,
        make_rig: MakeRig = inplace_rig,
        versions: Versions | None = None,
    ) -> None:
        self._make_rig, self._versions = make_rig, versions or Versions(policy())
        self.environments = Environments(self._seconds, lambda number: self.row(number).prompt_ids)
        self.made = dict[int, dict[int, list[Any]]]()
        super().__init__(setting, folder)

    def _seconds(self, prompt: int, turn: int) -> float:
        return self.setting.tool_seconds * ((prompt + turn) % 3 == 0)

    def row(self, number: int) -> PromptRow:
        return PromptRow(number, str(number), (2 + number // 90, 2 + number % 90), {"answer": number})

    def number_of(self, prompt_ids: Sequence[int]) -> int:
        return 90 * (prompt_ids[0] - 2) + prompt_ids[1] - 2

    def _start(self, num_ranks: int) -> None:
        self._rigs, self._clients = list[Rig](), list[EngineClient]()
        super()._start(num_ranks)

    def _engine(self, rank: int) -> Any:
        rig = self._make_rig(self.setting.slots, self.setting.max_num_waiting)
        rig.engine.wake(TAGS)
        step: Any = partial(type(rig.engine).step, rig.engine)

        def fallible() -> Any:
            if self.script.engine_steps.get(rank) is not None:
                self.script.engine_steps[rank] -= 1
                if not self.script.engine_steps[rank]:
                    raise RankFailedError(f"rank {rank}")
            return step()

        engine: Any = rig.engine
        engine.step = fallible
        self._rigs.append(rig)
        return engine

    def _rank(self, client: EngineClient, gather: Callable[[Any], list[Any]]) -> Any:
        self._clients.append(client)
        if not self.setting.has_agents:
            return super()._rank(client, gather)
        setting, rewards = self.setting, Lengths(self.setting.function)
        limits, config = Limits(setting.max_tokens, 10**4), AgentConfig(max_open_trajectories=setting.max_open)
        agents = EpisodeSettings(Numbers(), self.environments.agent, limits, config, 7, setting.slots)
        return TrajectoryStream(client, rewards, agents, gather=gather)

    def publish(self) -> None:
        for rig in self._rigs:
            if rig.engine.policy_version != self.step:
                rig.module.load_state_dict(self._versions[self.step])
                rig.publish(self.step)

    def close(self) -> None:
        """End what is alive. Nothing is left of agents."""
        for rank in self.ranks:
            rank.close()
        assert self.environments.num_rented == self.environments.num_open == 0

    def save(self) -> None:
        super().save()
        self._saved_states = dict(self.setting.picture.states)

    def kill(self, num_ranks: int | None = None, **settings: Any) -> None:
        self.close()
        super().kill(num_ranks, **settings)
        self._fall_back(self._saved_states)
        self.made = {step: made for step, made in self.made.items() if step <= self.step}

    def change(self, **settings: Any) -> None:
        super().change(**settings)
        if "function" in settings:
            self._fall_back(self.setting.picture.states)

    def _fall_back(self, states: Mapping[int, int]) -> None:
        """Go on from earlier states of groups: agents begin again, from the turns that they had finished."""
        self.setting.picture.states = dict(states)
        self.setting.picture.may_fall_back = self.setting.has_agents

    def one_step(self, *, scores: bool = True) -> None:
        states = dict(self.setting.picture.states)
        try:
            super().one_step(scores=scores)
        except BaseException:
            self.script.forgive()
            if self.pending is not None:  # its batch had come, and the next one is begun
                self.go_ahead()
            self._fall_back(states)
            raise
        self.script.forgive()
        self.setting.picture.may_fall_back = False

    def _checked(self, batch: Batch) -> Step:
        setting, taken = self.setting, super()._checked(batch)
        setting.picture.take({*batch["group"].tolist()})
        names = ("prompt_ids", "completion_ids", "rollout_logprobs", "policy_version")
        columns: list[list[list[Any]]] = [[row.tolist() for row in batch[name]] for name in names]
        before, trajectories = self.made.get(self.step, {}), batch["trajectory"].tolist()
        for key, trajectory, ids, logprobs, made in zip(taken.samples, trajectories, *columns[1:], strict=True):
            mine = [version for version in made if version >= 0]
            of_tools = [place for place, version in enumerate(made) if version < 0]
            assert setting.has_agents or not of_tools
            assert all((ids[place], logprobs[place]) == (TOOL, 0.0) for place in of_tools)
            assert mine == sorted(mine) and max(mine) <= self.step
            assert self.step - min(mine) <= setting.max_staleness, (self.step, made)
            limit = self.prompts.limits[key[0]]
            assert len(ids) <= limit and (setting.has_agents or ids[-1] in self.stop_ids or len(ids) == limit)
            assert setting.has_agents or not any(token in self.stop_ids for token in ids[:-1])
            known = before.get(trajectory, [])
            assert [*zip(ids, logprobs, made, strict=True)][: len(known)] == known
            function, whole_in = divmod(taken.samples[key][2] - len(ids), 1000)
            assert function == setting.function and whole_in * 64 <= self.step + 1
            taken.samples[key] = (*taken.samples[key], tuple(logprobs))
        if setting.max_refills:
            lengths = {(number, len(sample[0])) for (number, _), sample in taken.samples.items()}
            assert min(Counter(number for number, _ in lengths).values()) > 1  # others teach nothing
        self._check_logprobs(columns)
        return taken

    def _check_logprobs(self, columns: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Every token has the logprob that the weights of its version give it after what stands before it."""
        rows = [[*prompt, *ids] for prompt, ids in zip(columns[0], columns[1], strict=True)]
        for version in {version for made in columns[3] for version in made if version >= 0}:
            expected = self._versions.logprobs(version, rows, self.setting.temperature)
            for prompt, said, made, by_model in zip(columns[0], columns[2], columns[3], expected, strict=True):
                for place, (logprob, maker) in enumerate(zip(said, made, strict=True)):
                    gap = abs(logprob - by_model[len(prompt) - 1 + place])
                    assert maker != version or gap < TOLERANCE, (version, place, gap)

    def check(self) -> None:
        """Nothing is left in an engine, nothing is lost, nothing was generated twice, and what is held can be trained
        on in time."""
        setting, step = self.setting, self.step
        assert all(is_idle(client) for client in self._clients)
        if self.pending is not None:
            return
        self.check_prompts()
        held = [group for rank in self.ranks for group in rank.held(step)]
        oldest = [step if group.oldest_version is None else group.oldest_version for group in held]
        for place, version in enumerate(sorted(oldest)):
            assert step + place // setting.num_prompts <= version + setting.max_staleness
        if setting.has_agents:
            return
        before, now = self.made.get(step - 1, {}) | self.made.get(step, {}), dict[int, list[Any]]()
        for sample in (one for group in held for one in group.finished.values()):
            now[sample.id] = [*zip(sample.completion_ids, sample.logprobs, sample.versions, strict=True)]
        for key, begun in (pair for group in held for pair in group.begun.items()):
            now[key] = [*zip(begun.token_ids, begun.logprobs, begun.versions, strict=True)]
        assert all(tokens[: len(before.get(key, ()))] == before.get(key, []) for key, tokens in now.items())
        assert setting.is_apart or now == self.made.setdefault(step, now)  # a step that fails changes nothing
        self.made[step] = now
