"""The interface of algorithms: records, the columns that they take and return, what they need, and the registry.

A record is a frozen dataclass. Its fields are the options of an algorithm and become configuration keys, its properties
say what it needs and what it does not go with, and its method is the algorithm itself.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import torch

from hybrid_rl.algos.columns import check_ascending, check_columns, check_rewards, masked_log_ratio
from hybrid_rl.algos.options import field_types, key, range_error
from hybrid_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Needs(StrEnum):
    """Requirements of an estimator or a policy loss: most are columns of its inputs."""

    VALUES = "values"  # of a critic
    LOGPROBS = "logprobs"  # of the learner, at the start of the training step
    ROLLOUT_LOGPROBS = "rollout_logprobs"  # of the engine that sampled
    REF_LOGPROBS = "ref_logprobs"  # of a reference
    TEACHER_LOGPROBS = "teacher_logprobs"  # of a teacher, which the record's option teacher_path names
    SUM_PI_SQUARED = "sum_pi_squared"  # over the vocabulary, of the learner
    BASELINE_REWARDS = "baseline_rewards"  # of one greedy completion per prompt
    FUNCTION_REWARDS = "function_rewards"  # of each reward function by itself, with reward_weights
    DEMONSTRATIONS = "demonstrations"  # samples are the dataset's completions, without a rollout
    OLD_LOGPROBS = "old_logprobs"  # of the learner at the start of the step, even if one update uses the batch
    LOG_PROBS = "log_probs"  # of the whole vocabulary, with the token_ids
    OLD_TOP = "old_top"  # the best tokens of the old policy, as many as the record's option num_top says
    ROUTER_SCORES = "router_scores"  # of a mixture of experts, now and at the start of the step


OF_LOSSES = frozenset({Needs.OLD_LOGPROBS, Needs.LOG_PROBS, Needs.OLD_TOP, Needs.ROUTER_SCORES})
OF_ESTIMATORS = frozenset(Needs) - OF_LOSSES


def alone(value: Any) -> list[Any]:
    """Gather the value of a single rank."""
    return [value]


class _Columns:
    """Base of both kinds of inputs."""

    def needed(self, name: str) -> Tensor:
        """Return a column that is not always there. Raises ValueError if it is missing."""
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ValueError(
                f"the column {name} is None, but this algorithm cannot do without it; give {type(self).__name__}(..., "
                f"{name}=...). In a run the record's `needs` brings it"
            )
        return column

    def _given(self, *names: str) -> dict[str, Tensor]:
        return {name: column for name in names if (column := getattr(self, name)) is not None}


@dataclass(frozen=True)
class AdvantageInputs(_Columns):
    """The trajectories of one rank, whole groups, N of them with T completion tokens, trajectory after trajectory, each
    from its first turn to its last. Where an estimator says sample or completion, it means the whole trajectory.

    rewards: float64 [N], the total of a trajectory, NaN if it could not be scored. groups: int64 [N]. rows: int64 [T],
    ascending, the trajectory of each token. mask: bool [T], True if the policy made the token. token_rewards: float64
    [T], the part of `rewards` that belongs to single tokens (dense rewards, KL penalties), 0 elsewhere; the rest
    belongs to the whole trajectory.

    The others are there if an estimator's `needs` asks for them. logprobs (of the learner, at the start of the training
    step), rollout_logprobs, ref_logprobs, teacher_logprobs, values, sum_pi_squared (sum over the vocabulary of p^2):
    float64 [T]. baseline_rewards: float64 [N], NaN if it could not be scored. function_rewards: float64 [N, K], of each
    of K reward functions before they are weighed, NaN if one says nothing. reward_weights: float64 [K].

    gather: the same call on every rank gives the values of all ranks, in order; rank: this one's place there.

    Raises ValueError for columns of other shapes, a mask that is not bool, rows that do not ascend within 0..N-1, and
    infinite rewards.
    """

    rewards: Tensor
    groups: Tensor
    rows: Tensor
    mask: Tensor
    token_rewards: Tensor
    rollout_logprobs: Tensor | None = None
    logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    baseline_rewards: Tensor | None = None
    function_rewards: Tensor | None = None
    reward_weights: Tensor | None = None
    gather: Callable[[Any], list[Any]] = alone
    rank: int = 0

    def __post_init__(self) -> None:
        check_rewards(**self._given("rewards", "baseline_rewards"))
        if self.groups.shape != self.rewards.shape:
            raise ValueError(f"groups must be [{len(self.rewards)}] as rewards, not {tuple(self.groups.shape)}")
        learned = ("rollout_logprobs", "logprobs", "ref_logprobs", "teacher_logprobs", "values", "sum_pi_squared")
        check_columns(**self._given("rows", "mask", "token_rewards", *learned))
        check_ascending(self.rows, len(self.rewards))

    @property
    def scored(self) -> Tensor:
        """bool [N]: samples that have a reward."""
        return ~self.rewards.isnan()

    @property
    def learned(self) -> Tensor:
        """bool [T]: tokens that the policy made in samples that have a reward."""
        return self.mask & self.scored[self.rows]

    def per_token(self, per_sample: Tensor) -> Tensor:
        """Spread a number of each sample, [N], over its tokens that the policy made, 0 elsewhere: float64 [T]."""
        spread = per_sample.double()[self.rows]
        return torch.where(self.mask, spread, torch.zeros_like(spread))

    def everywhere(self, *columns: Tensor) -> tuple[list[Tensor], slice]:
        """Gather columns of all ranks, each joined along its first dimension, and the place of this rank's rows in
        them. Collective."""
        whole = self.gather(columns)
        start = sum(len(parts[0]) for parts in whole[: self.rank])
        return [torch.cat(parts) for parts in zip(*whole, strict=True)], slice(start, start + len(columns[0]))


@dataclass(frozen=True)
class Advantages:
    """advantages: float64 [T], 0 if masked or not scored. returns: float64 [T], targets of the critic, None for an
    estimator that makes none."""

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True)
class LossInputs(_Columns):
    """A micro-batch of whole samples: T completion tokens of `num_rows` samples. All columns are on one device.

    logprobs: float [T], with gradient. old_logprobs: float [T], of the policy that ratios compare with; without another
    policy, the detached logprobs themselves. advantages: float [T]. mask: bool [T], tokens in the loss. rows: int64
    [T], the sample of each token, in 0..num_rows-1.

    In a run: entropy, float [T] with gradient; rollout_logprobs, float [T], of the engine that sampled; token_versions,
    int64 [T], policy version that made each token, -1 if unknown, with version, of the learner at the start of the
    training step, and newest_version, the largest of token_versions (None if it is not known: looking it up would wait
    for the device); prepared, [T, ...], what `PolicyObjective.prepare` gave for these tokens.

    If `needs` asks for them: log_probs, float [T, V] with gradient, of the whole vocabulary; old_top_ids int64 and
    old_top_logprobs float [T, K], the K best tokens of the old policy; router_logprobs and old_router_logprobs, float
    [T, L, K], detached, of the K experts that the old policy's router chose in each of L layers. parameters: float64
    [P], learned in addition to the model, with gradient.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    rows: Tensor
    num_rows: int
    entropy: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    token_versions: Tensor | None = None
    version: int = 0
    newest_version: int | None = None
    prepared: Tensor | None = None
    log_probs: Tensor | None = None
    token_ids: Tensor | None = None
    old_top_ids: Tensor | None = None
    old_top_logprobs: Tensor | None = None
    router_logprobs: Tensor | None = None
    old_router_logprobs: Tensor | None = None
    parameters: Tensor | None = None

    def __post_init__(self) -> None:
        own = ("logprobs", "old_logprobs", "advantages", "mask", "rows")
        check_columns(**self._given(*own, "entropy", "rollout_logprobs", "token_versions", "token_ids"))

    @property
    def log_ratio(self) -> Tensor:
        """ln of policy / old policy, [T] with gradient, 0 where masked. Take `columns.ratio_of` of it, not exp, which
        overflows."""
        return masked_log_ratio(self.logprobs, self.old_logprobs, self.mask)

    def kept(self, values: Tensor) -> Tensor:
        """Return `values` [T], 0 where masked: in a loss that is one number per completion a NaN at a masked token
        would reach the gradient of all others."""
        return torch.where(self.mask, values, torch.zeros_like(values))


@dataclass(frozen=True)
class WholeMiniBatch:
    """All N trajectories of a mini-batch over all ranks, what `PolicyObjective.prepare` sees: detached, [T] each. Where
    a policy loss says sample or completion in it, it means the whole trajectory, its turns side by side.

    old_logprobs, advantages: float; mask: bool, tokens in the loss; rows: int64, ascending, the trajectory of each
    token; groups: int64 [N]; num_rows = N. seed: the same on all ranks, another one for every mini-batch of a run.
    """

    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    rows: Tensor
    num_rows: int
    groups: Tensor
    seed: int


@dataclass(frozen=True)
class PolicyLoss:
    """per_token: float [T], the loss before weighting. weight: float [T], policy / old at the level of the loss (token
    or sequence), with its gradient; ratio: the same, detached. clipped_low, clipped_high: bool [T], tokens whose
    gradient the objective stopped. per_sample: all tokens of a sample share one ratio, so that shares of what was
    clipped count samples. metrics: further numbers, float [T] each, whose mean over the tokens in the loss is logged.
    """

    per_token: Tensor
    weight: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    per_sample: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def unclipped(cls, per_token: Tensor, weight: Tensor, metrics: Mapping[str, Tensor] | None = None) -> PolicyLoss:
        """Return the loss of an objective that stops no gradient. per_token, weight: float [T]."""
        nothing = torch.zeros_like(per_token, dtype=torch.bool)
        return cls(per_token, weight, weight.detach(), nothing, nothing, metrics=dict(metrics or {}))


@dataclass(frozen=True)
class Record:
    """Base of all records. The options are checked when a record is made, by hand too: ConfigError for one of another
    type, or out of the range that its field declares. A `__post_init__` of a subclass calls this one."""

    def __post_init__(self) -> None:
        own: type = type(self)
        hints = field_types(own)
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            problem = _type_error(value, hints[item.name]) or range_error(value, item.metadata)
            if problem:
                raise ConfigError(f"{type(self).__name__}: {item.name}={value!r} {problem}")

    @property
    def inert_options(self) -> Mapping[str, str]:
        """Keys of options that have no effect with the values of the others, each with the reason: a configuration that
        sets one is refused."""
        return {}


def _type_error(value: Any, expected: Any) -> str:
    """Return what is wrong with the type of an option's value, empty if nothing is."""
    if typing.get_origin(expected) in (types.UnionType, typing.Union):
        problems = [_type_error(value, option) for option in typing.get_args(expected)]
        return "" if "" in problems else " or ".join(problems)
    if typing.get_origin(expected) is Literal:
        choices = typing.get_args(expected)
        return "" if value in choices else f"must be one of {', '.join(map(str, choices))}"
    kinds: dict[Any, type] = {int: Integral, float: Real, bool: bool, str: str, types.NoneType: types.NoneType}
    if expected not in kinds:
        return ""
    is_it = isinstance(value, kinds[expected]) and (expected is bool or not isinstance(value, bool))
    return "" if is_it else f"must be of type {expected.__name__}"


@dataclass(frozen=True)
class AdvantageEstimator(Record):
    """From rewards to advantages. A subclass sets its name in the field `estimator`; it overrides what
    is below with class attributes, or with properties if the values follow from its options."""

    estimator: str = key("", "the advantage estimator")
    # Whether no advantage is negative, whatever the rewards are.
    is_never_negative: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Needs]:
        """Columns of AdvantageInputs that it cannot do without."""
        return frozenset()

    @property
    def min_generations(self) -> int:
        """Size of the smallest group that it can compare."""
        return 1

    @property
    def needs_rewards(self) -> bool:
        """False if it learns without any reward."""
        return True

    @property
    def takes_kl_rewards(self) -> bool:
        """False if a KL penalty in the rewards would distort them (thresholds, steps), or would not be seen."""
        return True

    @property
    def tells_tokens_apart(self) -> bool:
        """True if the tokens of a completion may have different advantages whatever its rewards are."""
        return False

    @property
    def uses_step_rewards(self) -> bool:
        """True if rewards of single tokens, dense ones and those of a KL penalty, count at their tokens, not as their
        sum."""
        return False

    @property
    def needs_step_rewards(self) -> bool:
        """True if it is another estimator without rewards of single tokens."""
        return False

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages of all tokens, the same however samples are spread over ranks."""
        raise NotImplementedError


@dataclass(frozen=True)
class PolicyObjective(Record):
    """From advantages to a loss per token.

    In the equations of the subclasses p is the policy, p_old the policy that ratios compare with, p_roll the engine
    that sampled, w = p / p_old, A the advantage of the token, and sg a stopped gradient. A subclass sets its name in
    the field `objective`; the properties below are plain class attributes there, or properties if they follow from its
    options."""

    objective: str = key("", "the policy loss")
    # Numbers that are learned in addition to the model, by Adam at parameter_learning_rate: what they start from.
    initial_parameters: ClassVar[tuple[float, ...]] = ()
    # Size of the smallest group that it can learn from.
    min_generations: ClassVar[int] = 1
    # Whether it compares the engine, the start of the step and the policy.
    uses_proximal: ClassVar[bool] = False
    # Whether a sample whose advantages are all 0 has no gradient, whatever is in its other columns. Every subclass says
    # so itself: it may have added a term.
    follows_advantages: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.follows_advantages = vars(cls).get("follows_advantages", False)

    @property
    def needs(self) -> frozenset[Needs]:
        """Columns of LossInputs that it cannot do without."""
        return frozenset()

    @property
    def corrects_rollout(self) -> bool:
        """True if the loss itself weighs what the engine sampled, so that no correction may be added."""
        return False

    @property
    def uses_old_logprobs(self) -> bool:
        """False if it compares with the engine's policy only."""
        return True

    @property
    def is_per_completion(self) -> bool:
        """True if a completion has one ratio, through which each of its tokens gets the mean of all their advantages:
        it takes estimators that give a completion one advantage."""
        return False

    @property
    def parameter_learning_rate(self) -> float:
        """Learning rate of the numbers that are learned in addition to the model."""
        raise NotImplementedError

    @property
    def loss_options(self) -> Self:
        """The record itself: its options that no other loss has are entries of loss_options in a configuration."""
        return self

    def prepare(self, whole: WholeMiniBatch) -> Tensor | None:
        """Compute what must be known about the whole mini-batch before it is cut, [T, ...] for its tokens, or None.
        Every rank computes the same from the same."""
        return None

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the loss of each token, before `masked.token_weights` weighs tokens against each other."""
        raise NotImplementedError


# Declares an option that no other loss has.
own = functools.partial(key, within="loss_options")


@dataclass(frozen=True)
class KLTerm(Record):
    """Base of the KL penalties against the reference."""

    kl_in: str = key("", "where the KL penalty against the reference is added: none, loss or reward")
    in_loss: ClassVar[bool] = False
    in_reward: ClassVar[bool] = False


_registered: dict[str, dict[str, Any]] = {"estimator": {}, "objective": {}, "kl_in": {}, "correction_mode": {}}
ADVANTAGES: Mapping[str, type[AdvantageEstimator]] = MappingProxyType(_registered["estimator"])
POLICY_LOSSES: Mapping[str, type[PolicyObjective]] = MappingProxyType(_registered["objective"])
KL_TERMS: Mapping[str, type[KLTerm]] = MappingProxyType(_registered["kl_in"])
CORRECTIONS: Mapping[str, type[Any]] = MappingProxyType(_registered["correction_mode"])

R = TypeVar("R", bound=type[Record])


def register(record: R) -> R:
    """Make a record a choice of the configuration, under the name that its first field has; a decorator.

    Raises ValueError for a class that is not a frozen dataclass on one of the bases above, that has no name or one that
    is taken, an option without a description, and a need that does not exist.
    """
    fields = dataclasses.fields(record) if isinstance(record, type) and issubclass(record, Record) else ()
    home = _registered.get(fields[0].name) if fields else None
    if home is None:
        raise ValueError(
            f"{record!r} is not a record of an algorithm; subclass AdvantageEstimator, PolicyObjective, KLTerm or "
            "Correction"
        )
    if "__dataclass_params__" not in vars(record) or not vars(record)["__dataclass_params__"].frozen:
        raise ValueError(f"{record.__name__} is not a frozen dataclass; decorate it with @dataclass(frozen=True)")
    tag, name = fields[0].name, fields[0].default
    if not name or not isinstance(name, str):
        raise ValueError(f"{record.__name__} must begin with a field {tag!r} whose default is its name")
    bare = [item.name for item in fields if not item.metadata.get("doc")]
    if bare:
        raise ValueError(f"{record.__name__}: field {bare[0]!r} has no description; declare it with key(default, doc)")
    known = OF_ESTIMATORS if tag == "estimator" else OF_LOSSES
    unknown = sorted(getattr(record(), "needs", frozenset()) - known)
    if unknown:
        raise ValueError(f"{record.__name__}: needs {str(unknown[0])!r} is unknown; use {', '.join(sorted(known))}")
    if home.setdefault(name, record) is not record:
        raise ValueError(f"{tag} {name!r} is taken by {home[name].__name__}; choose another name")
    return record
