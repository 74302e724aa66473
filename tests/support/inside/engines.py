"""What engines are made of: tests break it, or count what it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.support.inside.wrapping import Wrapper, wrap

if TYPE_CHECKING:
    import pytest
    from torch import Tensor


def model_of(engine: Any) -> Any:
    """The model that the engine's runner passes tokens through."""
    return engine._runner._model


def graphs_of(engine: Any) -> Any:
    """The CUDA graphs of the engine's runner."""
    return engine._runner._graphs


def cache_of(engine: Any) -> Any:
    """The engine's keys and values."""
    return engine._cache


def set_cache_region(engine: Any, region: Any) -> None:
    """Have the engine's keys and values, which have no memory yet, lie in a region."""
    engine._cache._region = region


def cache_pairs(engine: Any) -> Iterable[tuple[Tensor, Tensor]]:
    """Memory of keys and values, by layer."""
    pairs: Iterable[tuple[Tensor, Tensor]] = engine._cache._memory.values()
    return pairs


def set_model(engine: Any, model: Any) -> None:
    """Have an embedded engine believe that this is the model whose weights it is given."""
    engine._model = model


def compute_with(engine: Any, model: Any) -> None:
    """Have the engine's runner pass tokens through another model."""
    engine._runner._model = model


def free_blocks(pool: Any) -> Sequence[int]:
    """Blocks that nobody holds and that hold nothing to be found."""
    blocks: Sequence[int] = pool._free
    return blocks


def unheld_blocks(pool: Any) -> Sequence[int]:
    """All blocks that nobody holds."""
    return [*pool._free, *pool._unused]


def block_references(pool: Any) -> Sequence[int]:
    """How many sequences hold each block."""
    references: Sequence[int] = pool._references
    return references


def findable_blocks(pool: Any) -> Mapping[Any, int]:
    """Blocks by the one before and the tokens that they are found by."""
    found: Mapping[Any, int] = pool._found
    return found


def preempt(scheduler: Any, sequence: Any) -> None:
    """Take the blocks of a running sequence away."""
    scheduler._preempt(sequence)


def drawn_token(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Token and logprob of each row in one, in PyTorch."""
    from hybrid_rl.engines import sampling

    return sampling.in_one(*sampling._draw(logits, sampling._relative(logits, temperature), temperature, uniform))


def without_operator(patch: pytest.MonkeyPatch) -> None:
    """Have paged attention find no operator of its own."""
    from hybrid_rl.engines.inplace import paged_attention

    patch.setattr(paged_attention, "_operator", lambda cache: None)


def wrap_capture(patch: pytest.MonkeyPatch, graphs: Any, wrapper: Wrapper) -> None:
    """Have `wrapper(capture, graphs, size, memory, pool)` called where a graph is captured."""
    wrap(patch, type(graphs), "_capture", wrapper)


def wrap_extend(patch: pytest.MonkeyPatch, generator: type, wrapper: Wrapper) -> None:
    """Have `wrapper(extend, generator, generation, token, logprob)` called where a token is added."""
    wrap(patch, generator, "_extend", wrapper)


def num_unfinished_of_all(client: Any) -> int:
    """Requests of all ranks that share the engine, as far as this one knows."""
    count: int = client._num_unfinished
    return count


def thread_of(client: Any) -> Any:
    """The thread that steps the engine."""
    return client._thread._thread
