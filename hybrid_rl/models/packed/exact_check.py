"""The check of model.exact at the start: the bits of a token, after every layer, in rows with and without others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.batch import Jagged
from hybrid_rl.errors import ModelError
from hybrid_rl.models.packed.packed_model import PackedModel
from hybrid_rl.models.packed.startup_check import various_tokens
from hybrid_rl.models.row import Layout, PackedRow

LENGTHS = (3, 61, 2, 17, 40)  # together they are several times what PyTorch computes in one thread, in most layers


Call = tuple[str | None, int, bool]


@torch.no_grad()
def check_exact(model: PackedModel) -> None:
    """Raise ModelError, with the first layer that differs, if sequences give other bits alone than in one row, and also
    if samples do that share their prompt, or if the row does without gradients, as engines run it."""
    limit = model.length_limit
    lengths = [length if limit is None else min(length, limit.num_tokens) for length in LENGTHS]
    sequences = various_tokens(model.module, sum(lengths)).to(model.device).split(lengths)
    with torch.enable_grad():
        trained = _marks(model, sequences)
        for start, sequence in zip(accumulate(lengths, initial=0), sequences, strict=False):
            rows = {call: marks[start : start + len(sequence)] for call, marks in trained.items()}
            where = f"in a row of {sum(lengths)} tokens than in one of {len(sequence)}"
            _compare(model, _marks(model, [sequence]), rows, where, same_layers=True)
    generated = _marks(model, sequences)
    _compare(model, generated, trained, "with gradients than without", same_layers=False)
    _check_shared_prompt(model, max(sequences, key=len))


def _compare(
    model: PackedModel, marks: dict[Call, Tensor], others: dict[Call, Tensor], where: str, *, same_layers: bool
) -> None:
    """same_layers: those that must run in every row ran in both passes; adapters take other ways without gradients."""
    for call in dict.fromkeys([*marks, *others]):
        name, _, must_run = call
        is_both = call in marks and call in others
        if not torch.equal(marks[call], others[call]) if is_both else same_layers and must_run:
            layer = "the head" if name is None else f"{name} ({type(model.module.get_submodule(name)).__name__})"
            raise ModelError(
                f"exact=true: {layer} of {type(model.module).__name__} gives other numbers {where}; set exact=false"
            )


def _check_shared_prompt(model: PackedModel, tokens: Tensor) -> None:
    """Compare the logprobs of two samples of a prompt, whose tokens a row holds once, with those of each alone."""
    half = len(tokens) // 2
    samples = [(tokens[:half], completion) for completion in (tokens[half:], tokens[half:].flip(0))]
    together, *alone = (
        model.row_logprobs(model.row_of(*map(Jagged.from_rows, zip(*some, strict=True))), 1.0)[0]
        for some in (samples, samples[:1], samples[1:])
    )
    if not torch.equal(together, torch.cat(alone)):
        raise ModelError(
            f"exact=true: {type(model.module).__name__} gives other logprobs to samples that share a prompt of {half} "
            "tokens in one row than to each of them alone; set exact=false"
        )


def _marks(model: PackedModel, sequences: Sequence[Tensor]) -> dict[Call, Tensor]:
    """Run a row; return what marks the bits of each of its T tokens, int64 [T], by the name of a layer, the number of
    its call, and whether it must run in every row, in the order in which calls end, and at last of the logprobs, by
    None. Layers with other outputs than one of T rows are left out. A layer whose rows are no batch may be an expert,
    to which these T tokens have all gone, as others do not."""
    token_ids, layout = torch.cat(list(sequences)), Layout(tuple(map(len, sequences)))
    positions = layout.positions().to(token_ids.device)
    marks: dict[Call, Tensor] = {}
    num_calls = Counter[str]()

    def keep(name: str, _: nn.Module, __: Any, output: Any) -> None:
        num_calls[name] += 1
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        if isinstance(tensor, Tensor) and len(token_ids) in tensor.shape[:2] and tensor.shape[0] in (1, len(token_ids)):
            call = (name, num_calls[name], tensor.shape[0] == 1 and tensor.dim() == 3)  # or these may be heads
            marks[call] = _mark(tensor.detach().reshape(len(token_ids), -1))

    with _hooked(model.module, keep):
        row = PackedRow(token_ids, positions, token_ids, torch.arange(len(token_ids), device=token_ids.device), layout)
        logprobs = model.row_logprobs(row, 1.0)[0]
    return {**marks, (None, 1, True): _mark(logprobs.detach()[:, None])}


def _mark(rows: Tensor) -> Tensor:
    """Return a number for the bits of each row of floats [T, n], int64 [T]; the sign of a zero does not count."""
    whole = (rows + 0.0).contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
    factors = 2 * torch.arange(whole.shape[1], device=rows.device) * 0x9E3779B1 + 1
    return (whole.long() * factors).sum(1)


@contextmanager
def _hooked(module: nn.Module, keep: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for name, child in module.named_modules():
            stack.callback(child.register_forward_hook(partial(keep, name)).remove)
        yield
