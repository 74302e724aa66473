"""Trajectories per second of a rollout of agents whose tools are heavy-tailed: by itself each, against in lock-step.

Every trajectory has eight turns on the embedded engine, with a tool call between two; tools only wait. Ours is
`TrajectoryStream`. In lock-step every turn of all trajectories is generated as one batch, then all tools are called at
once and all are awaited. `--compare one-by-one` calls the tools of a batch one after the other, as TRL calls tools that
are not coroutines; `--compare trl` runs TRL's own loop of tools with the same model, if TRL can be had. The two sides
take turns, rollout by rollout. Prints one line of JSON per number of threads.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, report  # noqa: E402
from benchmarks.side import Job  # noqa: E402
from benchmarks.workload import CHARACTERS, SPECIALS, Work, build_model, build_tokenizer, save_model  # noqa: E402
from hybrid_rl.agents.client import Limits  # noqa: E402
from hybrid_rl.agents.episode import Episode  # noqa: E402
from hybrid_rl.agents.plain_text import PlainText  # noqa: E402
from hybrid_rl.config import AgentConfig  # noqa: E402
from hybrid_rl.config.schema import InPlaceRolloutConfig  # noqa: E402
from hybrid_rl.data.prompts import PromptRow  # noqa: E402
from hybrid_rl.engines.base import TAGS, EngineStats, RolloutRequest, SamplingParams  # noqa: E402
from hybrid_rl.engines.engine_client import EngineClient  # noqa: E402
from hybrid_rl.engines.inplace.engine import InPlaceEngine  # noqa: E402
from hybrid_rl.models import CausalLM  # noqa: E402
from hybrid_rl.resharding.handoff.tensor import TensorSource  # noqa: E402
from hybrid_rl.rewards import TrainerState  # noqa: E402
from hybrid_rl.rollout.call import RolloutCall, RolloutTask  # noqa: E402
from hybrid_rl.rollout.episodes import EpisodeSettings  # noqa: E402
from hybrid_rl.rollout.trajectory_stream import TrajectoryStream  # noqa: E402

TURNS = 8
SHORTEST, LONGEST = 8, 40  # tokens of an answer, and of what a tool returns
PROMPT_TOKENS = 32
MAX_LENGTH = PROMPT_TOKENS + TURNS * 2 * LONGEST
STATE = TrainerState(global_step=0, max_steps=1, epoch=0.0)


@dataclass(frozen=True)
class Plan:
    """What happens in a rollout, whoever runs it; trajectory by trajectory, turn by turn.

    prompts: token ids, one for each group; answers: tokens, int64 [N, 8]; told: token ids that each tool returns;
    delays: seconds of each tool, float64 [N, 7].
    """

    prompts: list[tuple[int, ...]]
    answers: npt.NDArray[np.int64]
    told: list[list[tuple[int, ...]]]
    delays: npt.NDArray[np.float64]

    @property
    def group_size(self) -> int:
        """Trajectories of each prompt."""
        return len(self.answers) // len(self.prompts)

    @property
    def least_prefill(self) -> int:
        """Prompt tokens that must be computed: each prompt once, what tools return, and the last token of each answer
        that is followed by another, whose keys nobody has computed."""
        returned = sum(1 + len(ids) for row in self.told for ids in row)
        return returned + sum(map(len, self.prompts))


class Rollout(NamedTuple):
    """One rollout of one side. prefill_share: computed prompt tokens by the least; hit_share: of all prompt tokens,
    those that the cache held; None if the side does not count them."""

    wall_seconds: float
    cpu_seconds: float
    prefill_share: float | None
    hit_share: float | None


def arguments() -> Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--compare", choices=("lock-step", "one-by-one", "trl"), default="lock-step")
    parser.add_argument(
        "--trl-python", type=Path, help="interpreter that has TRL; left out = .venv-trl, made if need be"
    )
    parser.add_argument("--prompts", type=report.positive, default=32)
    parser.add_argument("--generations", type=report.positive, default=8, help="trajectories of a prompt")
    parser.add_argument("--running", type=report.positive, default=128, help="sequences that the engine runs at once")
    parser.add_argument(
        "--cache-sequences",
        type=report.positive,
        help="of full length that the cache holds; left out = all of a rollout",
    )
    parser.add_argument("--tool-seconds", type=float, help="mean of a tool; left out = that of a turn of all at once")
    parser.add_argument("--sigma", type=float, default=1.5, help="of the logarithm of a tool's seconds")
    parser.add_argument("--rounds", type=report.positive, default=3, help="rollouts of each side")
    return parser.parse_args()


def plan_of(given: Namespace, number: int, tool_seconds: float) -> Plan:
    """Return the plan of a round. Seconds are lognormal; their mean is `tool_seconds`."""
    noise = np.random.default_rng((given.seed, number))
    count = given.prompts * given.generations

    def words(length: int) -> tuple[int, ...]:
        return tuple(int(token) for token in len(SPECIALS) + noise.integers(len(CHARACTERS), size=length))

    delays = noise.lognormal(-(given.sigma**2) / 2, given.sigma, (count, TURNS - 1))
    return Plan(
        prompts=[words(PROMPT_TOKENS) for _ in range(given.prompts)],
        answers=noise.integers(SHORTEST, LONGEST + 1, (count, TURNS)),
        told=[[words(int(noise.integers(SHORTEST, LONGEST + 1))) for _ in range(TURNS - 1)] for _ in range(count)],
        delays=tool_seconds * delays,
    )


class Sides:
    """The ways to run a plan on one engine. As in training every rollout has a new policy version."""

    def __init__(self, given: Namespace, model: Qwen2ForCausalLM) -> None:
        self._source = TensorSource.of(model)
        shape, num_tokens = model.config, MAX_LENGTH * (given.cache_sequences or given.prompts * given.generations)
        head_dim = shape.hidden_size // shape.num_attention_heads
        token_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_dim * 4
        config = InPlaceRolloutConfig(max_num_seqs=given.running, kv_cache_memory_bytes=num_tokens * token_bytes)
        self._engine = InPlaceEngine(CausalLM(model), config, max_length=MAX_LENGTH)
        self._engine.wake(TAGS)
        self._client = EngineClient(self._engine)
        self._plan: Plan | None = None
        self._begun: Counter[int] = Counter()  # trajectories of each prompt
        chat, limits = PlainText(build_tokenizer()), Limits(MAX_LENGTH - PROMPT_TOKENS, MAX_LENGTH)
        settings = EpisodeSettings(chat, self._agent, limits, AgentConfig(), given.seed, given.running)
        self._rollout = TrajectoryStream(self._client, None, settings)

    def close(self) -> None:
        """End the agents' thread and the engine."""
        self._rollout.close()
        self._client.close()

    def timed(self, run: Callable[[Plan], None], plan: Plan) -> Rollout:
        """Run a plan on new weights."""
        self._engine.update_weights(self._source, self._engine.policy_version + 1)
        before: EngineStats = self._client.stats()
        wall, cpu = time.perf_counter(), time.process_time()
        run(plan)
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        after = self._client.stats()
        generated = after.num_generated_tokens - before.num_generated_tokens
        if generated != plan.answers.sum():
            raise peers.SideFailed(f"{generated} tokens were generated instead of {plan.answers.sum()}")
        computed = after.num_prompt_tokens - before.num_prompt_tokens
        return Rollout(*seconds, computed / plan.least_prefill, after.prefix_hit_share(before))

    # ---------------------------------------------------------------------------------------------------- ours

    def by_themselves(self, plan: Plan) -> None:
        """Every trajectory goes on as soon as its tool has returned."""
        self._plan, self._begun = plan, Counter()
        tasks = [
            RolloutTask(place, PromptRow(place, "", ids, {"place": place})) for place, ids in enumerate(plan.prompts)
        ]
        params = SamplingParams(MAX_LENGTH - PROMPT_TOKENS)
        version = self._engine.policy_version
        call = RolloutCall(plan.group_size, params, version, STATE, "benchmark", 0, is_scored=False)
        self._rollout.run(tasks, call)

    async def _agent(self, episode: Episode) -> None:
        """Eight turns and the tools between them."""
        plan = self._plan
        assert plan is not None
        place = episode.row["place"]
        number = place * plan.group_size + self._begun[place]
        self._begun[place] += 1
        ids = [*plan.prompts[place]]
        for turn in range(TURNS):
            answer = await episode.client.generate(ids, max_tokens=int(plan.answers[number, turn]))
            if turn < TURNS - 1:
                await asyncio.sleep(plan.delays[number, turn])
                ids += [*answer.token_ids, *plan.told[number][turn]]

    # ----------------------------------------------------------------------------------------------- lock-step

    def lock_step(self, plan: Plan) -> None:
        """Every turn is a batch; all tools of it run at once, and the slowest is awaited."""
        self._in_batches(plan, lambda delays: float(delays.max()))

    def one_by_one(self, plan: Plan) -> None:
        """Every turn is a batch; its tools run one after the other."""
        self._in_batches(plan, lambda delays: float(delays.sum()))

    def without_tools(self, plan: Plan) -> None:
        """Every turn is a batch, and no tool takes any time."""
        self._in_batches(plan, lambda delays: 0.0)

    def _in_batches(self, plan: Plan, waited: Callable[[npt.NDArray[np.float64]], float]) -> None:
        count = len(plan.answers)
        prompts: list[Sequence[int]] = [plan.prompts[number // plan.group_size] for number in range(count)]
        with self._client.session():
            for turn in range(TURNS):
                requests = [
                    RolloutRequest(
                        number,
                        tuple(prompts[number]),
                        SamplingParams(int(plan.answers[number, turn]), seed=turn * count + number),
                        group=number // plan.group_size,
                    )
                    for number in range(count)
                ]
                answers = self._client.generate(requests, self._engine.policy_version)
                if turn < TURNS - 1:
                    time.sleep(waited(plan.delays[:, turn]))
                    prompts = [
                        (*prompt, *answer.completion_ids, *results[turn])
                        for prompt, answer, results in zip(prompts, answers, plan.told, strict=True)
                    ]


def main() -> None:
    """Measure with every number of threads."""
    options = arguments()
    for threads in options.threads:
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as folder:
            measure(options, threads, Path(folder))


def measure(given: Namespace, threads: int, folder: Path) -> None:
    """Run both sides in turns and print the line."""
    work = Work(
        "agents", prompt_length=PROMPT_TOKENS, prompts_per_step=given.prompts, num_generations=given.generations
    )
    model = build_model(work, given.seed, max_positions=MAX_LENGTH)
    with ExitStack() as stack:
        sides = Sides(given, model)
        stack.callback(sides.close)
        turn_seconds = turn_of(sides, given)
        tool_seconds = turn_seconds if given.tool_seconds is None else given.tool_seconds
        report.progress(f"a turn of all takes {turn_seconds:.3f} s; tools take {tool_seconds:.3f} s on average")
        versions = {}
        if given.compare == "trl":
            save_model(model, folder)
            num_steps = given.rounds + 1  # it answers when it comes back for the next
            job = Job(work, str(folder), str(folder), num_steps, threads, given.seed, 1e-6, num_turns=TURNS)
            side = stack.enter_context(peers.trl_agents(job, peers.trl_python(given.trl_python)))
            side.wait_ready()
            versions = side.ready["versions"]

            def other(plan: Plan) -> Rollout:
                return by_trl(side, plan)
        else:
            in_batches = {"lock-step": sides.lock_step, "one-by-one": sides.one_by_one}[given.compare]

            def other(plan: Plan) -> Rollout:
                return sides.timed(in_batches, plan)

        ours, theirs, floors = take_turns(sides, other, given, tool_seconds)
    count = given.prompts * given.generations
    rates = [[count / rollout.wall_seconds for rollout in side] for side in (ours, theirs)]
    report.print_line(
        "agents",
        ours=float(np.median(rates[0])),
        peer=float(np.median(rates[1])),
        ratio=report.ratio_of_medians(*rates),
        unit="trajectories per second",
        hardware=report.hardware(threads, versions),
        settings=report.settings(
            given, threads=threads, turns=TURNS, hidden_size=work.hidden_size, num_layers=work.num_layers
        ),
        details={
            "turn_seconds": turn_seconds,
            "tool_seconds": tool_seconds,
            "hybrid_rl": summary(ours),
            given.compare: summary(theirs),
            "ratio_of_pairs": report.spread([a / b for a, b in zip(*rates, strict=True)]),
            "slowest_trajectory_seconds": report.spread(floors),
        },
    )


def by_trl(side: peers.Side, plan: Plan) -> Rollout:
    """Have TRL follow a plan. It computes every prompt again in every turn, which nothing counts."""
    words = [[list(ids) for ids in row] for row in plan.told]
    reply = side.follow(answers=plan.answers.tolist(), delays=plan.delays.tolist(), told=words)
    if reply["num_turns"] != TURNS:
        raise peers.SideFailed(f"TRL made {reply['num_turns']} turns instead of {TURNS}")
    return Rollout(reply["wall_seconds"], reply["cpu_seconds"], None, None)


def turn_of(sides: Sides, given: Namespace) -> float:
    """Return the seconds of a turn of all trajectories as one batch, without tools: the median of three rollouts."""
    rollouts = [sides.timed(sides.without_tools, plan_of(given, number, 0.0)) for number in range(3)]
    return float(np.median([rollout.wall_seconds for rollout in rollouts])) / TURNS


def take_turns(
    sides: Sides, other: Callable[[Plan], Rollout], given: Namespace, tool_seconds: float
) -> tuple[list[Rollout], list[Rollout], list[float]]:
    """The rollouts of both sides, and how long the slowest trajectory of each waits for its tools: no rollout can take
    less."""
    ours: list[Rollout] = []
    theirs: list[Rollout] = []
    floors = []
    for number in range(given.rounds):
        plan = plan_of(given, number, tool_seconds)
        ours.append(sides.timed(sides.by_themselves, plan))
        theirs.append(other(plan))
        floors.append(float(plan.delays.sum(1).max()))
        prefill = [f"{done[-1].prefill_share:.4f}" for done in (ours, theirs) if done[-1].prefill_share is not None]
        report.progress(
            f"round {number + 1} of {given.rounds}: ours {ours[-1].wall_seconds:.2f} s, {given.compare} "
            f"{theirs[-1].wall_seconds:.2f} s, slowest trajectory's tools {floors[-1]:.2f} s; prefill by the least: "
            f"{', '.join(prefill)}"
        )
    return ours, theirs, floors


def summary(rollouts: list[Rollout]) -> dict[str, Any]:
    """What one side did."""
    columns = {name: [getattr(rollout, name) for rollout in rollouts] for name in Rollout._fields}
    return {name: report.spread(values) for name, values in columns.items() if None not in values}


if __name__ == "__main__":
    peers.run_script(main)
