"""The routers of a mixture-of-experts model, found, and their choices repeated in another pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.compat.transformers import OutputRecorder, router_recorders


def find_routers(module: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Find every router of a model, with the index of the logits in its output."""
    owners = [owner for owner in module.modules() if isinstance(owner, PreTrainedModel)]
    indices: dict[nn.Module, int] = {}
    for owner in owners:
        for recorder in router_recorders(owner):
            indices |= _recorded(owner, recorder)
    return [(child, indices[child]) for child in module.modules() if child in indices]


def _recorded(owner: nn.Module, recorder: OutputRecorder) -> dict[nn.Module, int]:
    """Find the modules that a recorder is meant for, as transformers finds them."""
    part = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else ""
    return {
        child: recorder.index
        for name, child in owner.named_modules()
        if recorder.target_class is not None and isinstance(child, recorder.target_class) and part in f".{name}."
    }


class HeldRouting:
    """The outputs of the routers of a module in one pass, repeated in another pass of the same tokens.

    A router is held if all of its outputs run along its tokens; the others (which sort the tokens of a pass by expert)
    decide again, there are num_free of them.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._routers = find_routers(module)
        self._given: dict[int, list[list[Tensor]]] = {}  # by router, of every pass: its tensors, [tokens, ...]
        self._scores: dict[int, tuple[Tensor, Tensor]] = {}  # by held router: its own in the second pass, and the first
        self._free: set[int] = set()

    @property
    def num_free(self) -> int:
        """Routers that are not held."""
        return len(self._free)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what routers give inside the block, one pass after the other."""

        def keep(number: int, index: int, _: nn.Module, __: Any, output: Any) -> None:
            scores = output[index] if isinstance(output, tuple) else output
            leads = [(tensor, _lead(tensor, scores.numel() // scores.shape[-1])) for tensor in tensors_of(output)]
            flat = [tensor.flatten(0, lead) for tensor, lead in leads if lead is not None]
            if len(flat) < len(leads):
                self._free.add(number)
            self._given.setdefault(number, []).append(flat)

        with hooked(self._routers, keep):
            yield

    @contextmanager
    def repeating(self, own: Tensor) -> Iterator[None]:
        """Let routers give the recorded outputs inside the block. own: int64 [T], for each token of the pass its place
        among all tokens of the passes that were recorded."""

        def replace(number: int, index: int, _: nn.Module, __: Any, output: Any) -> Any:
            if number not in self._given or number in self._free:
                return None
            then = [torch.cat(parts)[own] for parts in zip(*self._given[number], strict=True)]
            now = tensors_of(output)
            scores = output[index] if isinstance(output, tuple) else output
            which = next(place for place, tensor in enumerate(now) if tensor is scores)
            self._scores[number] = (scores.reshape(then[which].shape), then[which])
            repeated = iter([old.reshape(new.shape) for old, new in zip(then, now, strict=True)])
            if isinstance(output, tuple):
                return tuple(next(repeated) if isinstance(part, Tensor) else part for part in output)
            return next(repeated)

        with hooked(self._routers, replace):
            yield

    def gaps(self, places: Tensor) -> dict[str, float]:
        """Return how far the scores of held routers were from the recorded ones at these tokens, relative to the
        largest one; nothing without such routers."""
        gaps = []
        for now, then in self._scores.values():
            mine, theirs = now[places].detach().float(), then[places].detach().float()
            differ = torch.where(mine == theirs, torch.zeros_like(mine), mine - theirs)  # scores may be -inf
            largest = theirs[theirs.isfinite()].abs().max() if bool(theirs.isfinite().any()) else theirs.new_ones(())
            gaps.append(float(differ.abs().max() / largest.clamp(min=1e-6)))
        return {"router scores": max(gaps)} if gaps else {}


RouterHook = Callable[[int, int, nn.Module, Any, Any], Any]


@contextmanager
def hooked(routers: list[tuple[nn.Module, int]], hook: RouterHook) -> Iterator[None]:
    """Call the hook inside the block with what each router gives: its number, the index of the scores in its output,
    the router, its arguments and the output. What it returns, unless None, replaces the output."""
    with ExitStack() as stack:
        for number, (router, index) in enumerate(routers):
            stack.callback(router.register_forward_hook(partial(hook, number, index)).remove)
        yield


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors in the output of a router, in order."""
    return [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, Tensor)]


def _lead(tensor: Tensor, num_tokens: int) -> int | None:
    """Return the last of the leading dimensions that run along the tokens, None if there are none."""
    sizes = list(accumulate(tensor.shape[:-1], mul))
    return next((place for place, size in enumerate(sizes) if size == num_tokens), None)
