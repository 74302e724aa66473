"""The experts that the routers of a mixture choose: noted in one pass, forced in another.

Only the choice is forced. A router ends in one `torch.topk` over a number for each expert; its indices are replaced,
and its values taken from its own input at these. What the router makes of them, the weights of the chosen experts, is
its own and carries its gradient: routing replay as in R3 (arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hybrid_rl.errors import ModelError
from hybrid_rl.models.experts.routing import find_routers, tensors_of

TOP_K = (torch.topk, torch.Tensor.topk)
NO_EXPERT = -1  # in the place of an expert's number: no choice is recorded

Choose = Callable[[Tensor], Tensor]


class ExpertChoices:
    """The choices of the L routers of a model, in the order of its layers: K experts for each token of a pass.

    run: runs the model once on a few tokens; collective if it is sharded. Raises ModelError for a model without
    routers, and for routers whose choice cannot be replaced.

    num_layers, top_k: L and K.
    """

    def __init__(self, module: PreTrainedModel, run: Callable[[], object]) -> None:
        name = type(module).__name__
        self._routers = [_Router(router) for router, _ in find_routers(module)]
        self._forced: Tensor | None = None
        self.num_layers = len(self._routers)
        self._num_forced = self._num_changed = torch.zeros((), dtype=torch.int64)
        if not self._routers:
            raise ModelError(
                f"{name} has no routers that can be read: it is not a mixture of experts, or transformers does not "
                "name them; set routing_replay=off"
            )
        try:
            with torch.no_grad(), self.choosing(None) as noted:
                run()
            self.top_k = noted.experts.shape[-1]
        except ModelError as error:
            raise ModelError(f"the experts of {name} cannot be replayed: {error}") from None

    @contextmanager
    def choosing(self, experts: Tensor | None, *, is_recomputed: bool = False) -> Iterator[NotedChoices]:
        """Note the choices of the pass inside the block, and force those that are given. experts: integers [T, L, K],
        of the T tokens that the routers see; a token that has NO_EXPERT in a layer chooses itself there; None = all."""
        noted = NotedChoices(self.num_layers)

        def choose(layer: int, own: Tensor) -> Tensor:
            if experts is None:
                return noted.take(layer, own)
            wanted = experts[:, layer].to(own.dtype)
            if own.shape != wanted.shape:
                raise ModelError(
                    f"a router chose {list(own.shape)} experts [tokens, K], but {list(wanted.shape)} were recorded: "
                    "the samples are those of another model"
                )
            is_forced = (wanted >= 0).all(-1, keepdim=True)
            chosen = torch.where(is_forced, wanted, own)
            if not is_recomputed:
                self._num_forced = self._num_forced + is_forced.sum()
                self._num_changed = self._num_changed + (own.sort().values != chosen.sort().values).any(-1).sum()
            return noted.take(layer, chosen)

        before, self._forced = self._forced, experts
        try:
            with ExitStack() as stack:
                for layer, router in enumerate(self._routers):
                    stack.enter_context(router.choosing(partial(choose, layer)))
                yield noted
        finally:
            self._forced = before

    def take_counts(self) -> tuple[int, int]:
        """Return how many choices were forced since the last call, recomputation left out, and how many of them the
        routers would have made otherwise."""
        counts = int(self._num_forced), int(self._num_changed)
        self._num_forced = self._num_changed = torch.zeros((), dtype=torch.int64)
        return counts

    def again(self) -> AbstractContextManager[object]:
        """Return what a recomputation of the present pass has to run in."""
        return nullcontext() if self._forced is None else self.choosing(self._forced, is_recomputed=True)


class NotedChoices:
    """Choices of the L routers in one pass."""

    def __init__(self, num_layers: int) -> None:
        self._experts: list[Tensor | None] = [None] * num_layers

    def take(self, layer: int, experts: Tensor) -> Tensor:
        """Keep the choice of a layer, [T, K], and return it. What comes first counts: a recomputation follows its
        pass."""
        if self._experts[layer] is None:
            self._experts[layer] = experts
        return experts

    @property
    def experts(self) -> Tensor:
        """The choices, int64 [T, L, K]. Raises ModelError if a router did not run."""
        chosen = [experts for experts in self._experts if experts is not None]
        if len(chosen) < len(self._experts):
            raise ModelError(
                f"{len(self._experts) - len(chosen)} of {len(self._experts)} routers did not run as modules (as in "
                "compiled blocks); set routing_replay=off"
            )
        if len(sizes := sorted({experts.shape[-1] for experts in chosen})) > 1:
            raise ModelError(f"its routers choose different numbers of experts ({sizes}); set routing_replay=off")
        return torch.stack(chosen, dim=1)


class _Router:
    """A router, and which of its calls of topk is its choice."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._place: int | None = None

    @contextmanager
    def choosing(self, choose: Choose) -> Iterator[None]:
        """Let its choice be what `choose` returns inside the block, given its own choice, int64 [T, K]."""
        forward, attributes = self._module.forward, vars(self._module)
        own = attributes.get("forward")

        def run(*arguments: Any, **named: Any) -> Any:
            if self._place is None:
                self._place = self._learn(lambda: forward(*arguments, **named))
            with _TopK(choose, self._place):
                return forward(*arguments, **named)

        attributes["forward"] = run
        try:
            yield
        finally:
            attributes.pop("forward") if own is None else attributes.update(forward=own)

    def _learn(self, run: Callable[[], Any]) -> int:
        """Find the call whose indices it returns. Raises ModelError if there is not exactly one."""
        calls: list[Tensor] = []

        def keep(own: Tensor) -> Tensor:
            calls.append(own)
            return own

        with torch.no_grad(), _TopK(keep):
            returned = [part for part in tensors_of(run()) if not part.is_floating_point()]
        same = [place for place, own in enumerate(calls) if len(returned) == 1 and own is returned[0]]
        if not same:
            same = [
                place
                for place, own in enumerate(calls)
                if [own.shape] == [part.shape for part in returned] and torch.equal(own, returned[0])
            ]
        if len(same) != 1:
            raise ModelError(
                f"{type(self._module).__name__} does not return the indices of one torch.topk as its choice (it calls "
                f"it {len(calls)} times and returns {len(returned)} tensors of whole numbers); set routing_replay=off"
            )
        return same[0]


class _TopK(TorchFunctionMode):
    """Calls of topk whose indices `choose` decides: the one at this place among all calls, None = each."""

    def __init__(self, choose: Choose, place: int | None = None) -> None:
        super().__init__()
        self._choose, self._place, self._num_calls = choose, place, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if func not in TOP_K:
            return result
        place, self._num_calls = self._num_calls, self._num_calls + 1
        if self._place not in (None, place):
            return result
        chosen = self._choose(result.indices)
        if chosen is result.indices:
            return result
        scores = args[0] if args else named["input"]
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
