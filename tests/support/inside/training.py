"""What learns: actors, critics and optimizers, beyond what a worker asks of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid_rl.training.actor import Actor
    from hybrid_rl.training.critic import Critic
    from hybrid_rl.training.host_optimizer import HostOptimizer


def learned_numbers(actor: Actor) -> Any:
    """The numbers that a policy loss learns beside the model."""
    return actor._numbers


def options_of(actor: Actor) -> Any:
    """What the actor's updates are computed with."""
    return actor._spec


def before_steps(trained: Actor | Critic, look: Callable[..., None]) -> None:
    """Call `look` with batch and micro-batches (and what else there is) before every optimizer step."""
    step = trained._take_step

    def looked_at(*arguments: Any, **options: Any) -> Any:
        look(*arguments, **options)
        return step(*arguments, **options)

    trained._take_step = looked_at  # type: ignore[method-assign]


def skip_first_look(critic: Critic) -> None:
    """As if the critic's head had been looked at, which is done once in a run."""
    critic._has_begun = True


def targets_of(optimizer: Any) -> Mapping[str, Tensor]:
    """What the optimizer steps change, by parameter: float32 copies or the parameters themselves."""
    targets: Mapping[str, Tensor] = optimizer._targets
    return targets


def adam_states(optimizer: Any) -> list[dict[str, Tensor]]:
    """Moments of each parameter."""
    return [optimizer._adamw.state[target] for target in optimizer._targets.values()]


def clipped_at(optimizer: Any) -> float | None:
    """The largest norm of gradients."""
    largest: float | None = optimizer._max_grad_norm
    return largest


def mesh_of(optimizer: Any) -> tuple[Any, int]:
    """The mesh over which parameters are sharded, and how many copies of them it holds."""
    return optimizer._mesh, optimizer._num_copies


def named_gradients(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Gradients by parameter, sharded as it is."""
    for name, gradient in zip(optimizer._parameters, optimizer.gradients(), strict=True):
        yield name, optimizer._wrapped(name, gradient.clone())


def num_slices(optimizer: HostOptimizer) -> int:
    """How many pieces a step of an optimizer on the host takes."""
    return len(optimizer._slices)


def sums_of(optimizer: HostOptimizer) -> Collection[Tensor]:
    """What holds the sums of gradients on the host."""
    return optimizer._sums.values()


def after_gradients(then: Callable[[Mapping[str, Tensor]], None]) -> None:
    """Call `then` with the targets of every optimizer of this process, from now on, when their gradients are whole."""
    from hybrid_rl.training.optimizer import Optimizer

    collect = Optimizer._collect

    def collected(self: Any) -> None:
        collect(self)
        then(self._targets)

    Optimizer._collect = collected  # type: ignore[method-assign]
