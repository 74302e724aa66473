"""The start-up check of a model: whether it runs packed, up to which length, and if not, why.

A few short forward passes, however long the sequences of the run will be: a survey of what layers ask of attention
(survey.py), the model's own forward of three sequences, and a packed forward of the same ones, whose numbers must
agree. The sequences are shorter than most windows: the survey finds how far a window reaches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.batch import lengths_to_offsets
from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention.attention_function import attention_functions, installed_views
from hybrid_rl.models.attention.survey import FARTHEST, LayerCall, surveyed
from hybrid_rl.models.attention.unpacked import UnpackedRow
from hybrid_rl.models.experts.routing import HeldRouting
from hybrid_rl.models.model_loading import first_line, vocabulary_size
from hybrid_rl.models.packed.held_blocks import HeldBlocks
from hybrid_rl.models.packed.packed_model import LengthLimit, PackedModel
from hybrid_rl.models.row import Layout, PackedRow

# What a correct packed forward may differ from the model's own by: two orders of summation, relative to the largest
# logit. transformers' eager attention takes its softmax in float32, in float64 models too.
VERIFY_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1}
# What a block in 16 bits may differ by, relative to what it adds to the residual stream: blocks of tiny and of real
# models differ by up to 0.02 (SmolLM2 0.011), an attention that is wrong at one place by 0.1.
BLOCK_TOLERANCE = 0.05
BLOCKS = "outputs of blocks"
# The row that a model is verified on: two samples that share a prompt, one on its own, and what fills a row up. All of
# them begin with the same token.
VERIFY_LAYOUT = Layout((2, 8, 2), (5, 2), (0, 0), is_filled=True, prefix=1)
TOKENWISE = ("mlp", "moe", "dense", "sparse")  # types of layers that see one token at a time
# Names of classes and parameters that mix tokens without attention, in every family so far.
MIXERS = re.compile("Attention|Attn|Mixer|LSTM|Recurrent")
STATEFUL = ("A_log", "time_decay", "recurrent_param")


@torch.no_grad()
def check_survey(model: PackedModel) -> LengthLimit | None:
    """Survey a model; return the length up to which its mask lets layers see what packed attention does, None for any.

    Raises ModelError if layers do not go through attention, or ask for what packed attention does not have.
    """
    name = type(model.module).__name__
    with named_failure(name, "in its own forward pass of token ids"):
        calls = surveyed(model.backbone, model.device)
    config: Any = model.module.config.get_text_config()
    _check_layers(name, model.backbone, calls, config)
    positions = getattr(config, "max_position_embeddings", None) or FARTHEST
    alike = {(call.rule, call.options.window): call for call in reversed(calls)}.values()
    differences = [(call.first_difference(positions), call) for call in alike]
    limits = [LengthLimit(first, _why(call, config)) for first, call in differences if first is not None]
    shortest = min(limits, default=None)
    if shortest is not None and shortest.num_tokens < VERIFY_LAYOUT.longest:
        raise ModelError(f"{name} is not supported: {shortest.why}")
    return shortest


def _check_layers(name: str, backbone: nn.Module, calls: Sequence[LayerCall], config: Any) -> None:
    """Raise ModelError unless every layer calls attention once."""
    called = [call.layer for call in calls]
    twice = next((call for call in calls if called.count(call.layer) > 1), None)
    if twice is not None:
        raise ModelError(
            f"{name} is not supported: {twice.attention} attends {called.count(twice.layer)} times in layer "
            f"{twice.layer}, whose keys and values have one place in a cache"
        )
    num_layers = getattr(config, "num_hidden_layers", max(called, default=0) + 1)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    kind_of = dict(enumerate(kinds)) if len(kinds) == num_layers else {}
    missing = [layer for layer in range(num_layers) if layer not in called and kind_of.get(layer) not in TOKENWISE]
    if not missing:
        return
    which = f"{', '.join(map(str, missing[:6]))}{' ...' if len(missing) > 6 else ''} (of {num_layers})"
    missing_kinds = sorted({kind_of[layer] for layer in missing}) if kind_of else []
    if missing_kinds and not any("attention" in kind and kind != "linear_attention" for kind in missing_kinds):
        # By type only, one family would be taken for another: to transformers, Mamba's layers are linear attention.
        there = (child for child in backbone.modules() if getattr(child, "layer_idx", None) in missing)
        mixers = sorted({type(child).__name__ for child in there if _carries_state(child) or _is_mixer(child)})
        of_class = f" ({', '.join(mixers)})" if mixers else ""
        raise ModelError(
            f"{name} is not supported: layers of type {', '.join(missing_kinds)}{of_class} carry a state from token to "
            f"token, and the samples of a packed row would mix; layers {which}"
        )
    own = [type(child).__name__ for child in backbone.modules() if _is_mixer(child)]
    raise ModelError(
        f"{name} is not supported: {own[0] if own else 'a layer that mixes tokens'} does not call attention through "
        f"transformers' interface, so the samples of a packed row would mix; layers {which}"
    )


def _is_mixer(module: nn.Module) -> bool:
    return MIXERS.search(type(module).__name__) is not None


def _why(call: LayerCall, config: Any) -> str:
    said = "no window" if call.options.window is None else f"a window of {call.options.window}"
    names = ("sliding_window", "attention_chunk_size")
    settings = [f"{name}={getattr(config, name)}" for name in names if getattr(config, name, None) is not None]
    config_says = f" ({', '.join(settings)})" if settings else ""
    return (
        f"{call.attention} of layer {call.layer} asks for {said}, but the model's own mask ends elsewhere{config_says}"
    )


@torch.no_grad()
def check_outputs(model: PackedModel, prompt_ids: Sequence[int] = ()) -> float:
    """Compare one forward of three sequences, two of which share a prompt, with the model's own forward of each; return
    the largest gap at a place, relative to the largest number there. A model that does not run packed lays them next to
    each other.

    Both use the experts of the model's own forward: if a router's scores are close, rounding alone sends a token to
    another expert, and nothing is wrong. Its scores are compared too. In 16 bits, where rounding moves some models
    further than a fault moves others, every block starts from the numbers of the model's own forward (held_blocks.py).
    prompt_ids: as of `verify_row`. Raises ModelError if numbers differ.
    """
    routing, gaps = HeldRouting(model.module), None
    if model.dtype.itemsize < 4:
        with suppress(ModelError):  # blocks are not known, or run several times in a pass
            gaps = _output_gaps(model, verify_row(model, prompt_ids), routing, HeldBlocks(model.module))
    if gaps is None:
        routing = HeldRouting(model.module)
        gaps = _output_gaps(model, verify_row(model, prompt_ids), routing, None)
    for subject, gap in gaps.items():
        if not gap <= (BLOCK_TOLERANCE if subject == BLOCKS else VERIFY_TOLERANCE.get(model.dtype, 1e-3)):
            raise ModelError(
                f"{type(model.module).__name__} gives other {subject} with {model.attention.words} (relative gap "
                f"{gap:.1e}){hint(model, routing)}"
            )
    return max(gaps.values())


def _output_gaps(
    model: PackedModel, row: PackedRow, routing: HeldRouting, blocks: HeldBlocks | None
) -> dict[str, float]:
    """Return the gaps of `check_outputs`, by what was compared. blocks: let every block start from equal numbers."""
    name = type(model.module).__name__
    sequences = whole_sequences(row)
    context = model.attention.context(row.layout, model.device)
    beside = context if isinstance(context, UnpackedRow) else None
    places, own = same_places(row, sequences)
    recording = blocks.recording() if blocks else nullcontext()
    named = named_failure(name, "in its own forward pass of token ids")
    with own_attention(model.module), routing.recording(), recording, named:
        passes = [_plain_outputs(model, torch.tensor([sequence], device=model.device)) for sequence in sequences]
    expected = {subject: torch.cat([outputs[subject] for outputs in passes]) for subject in passes[0]}
    # Beside each other sequences have more places than in a row.
    spread = own if beside is None else beside.spread(own).flatten()
    compared = places if beside is None else beside.places[places]
    repeating = blocks.repeating(spread) if blocks else nullcontext()
    with routing.repeating(spread), repeating, named_failure(name, f"with {model.attention.words}"):
        hidden = model.hidden_states(row.token_ids, row.positions, context)
    row_outputs = {"logits": model.logits(hidden), "hidden states": hidden}
    gaps = {
        subject: relative_gap(row_outputs[subject][places], numbers[own[places]])
        for subject, numbers in expected.items()
    }
    gaps |= routing.gaps(compared)
    if blocks:
        with own_attention(model.module):
            gaps = {BLOCKS: blocks.gap(compared, spread, BLOCK_TOLERANCE), **gaps}
    return gaps


def _plain_outputs(model: PackedModel, batch: Tensor) -> dict[str, Tensor]:
    """Return the numbers to compare, [tokens of the batch, ...]; hidden states too if the head may still be zero, and
    show nothing. The module runs once: every pass of its routers is recorded."""
    outputs: dict[str, Tensor] = {}

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        outputs["hidden states"] = output[0]

    with nullcontext() if model.is_language_model else model.backbone.register_forward_hook(keep):
        outputs["logits"] = model.module(input_ids=batch, use_cache=False).logits
    return {subject: numbers.flatten(0, 1) for subject, numbers in outputs.items()}


@torch.no_grad()
def check_weights(module: nn.Module) -> None:
    """Raise ModelError if weights are not finite: then no output is, and the architecture is not to blame."""
    parameters = dict(module.named_parameters())
    broken = [name for name, tensor in parameters.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise ModelError(
            f"{len(broken)} of {len(parameters)} weights of {type(module).__name__} are not finite, first {broken[0]}: "
            f"they have diverged in training, or were written so; take another checkpoint"
        )


@torch.no_grad()
def check_causal(model: PackedModel) -> None:
    """Raise ModelError for an encoder, whose numbers at a token depend on those after it: nothing here can train it.
    Called when another check has failed. The model's own forward shows it, whatever its config says."""
    name = type(model.module).__name__
    if getattr(model.module.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; only causal language models are supported")
    tokens = various_tokens(model.module, VERIFY_LAYOUT.longest).to(model.device)
    half = len(tokens) // 2
    other = torch.cat([tokens[:half], tokens[half:].roll(1)])
    try:
        with own_attention(model.module):
            passes = [_plain_outputs(model, line[None]) for line in (tokens, other)]
    except Exception:  # noqa: BLE001 - it does not run at all, which the caller reports
        return
    gaps = [relative_gap(passes[1][subject][:half], numbers[:half]) for subject, numbers in passes[0].items()]
    # The same sums in the same order, but for experts, which may get other tokens together.
    if max(gaps) > (2e-2 if model.dtype == torch.bfloat16 else 1e-4):
        raise ModelError(
            f"{name} is an encoder: what it gives for a token depends on those after it; only causal language models "
            f"are supported"
        )


def various_tokens(module: PreTrainedModel, num_tokens: int) -> Tensor:
    """Return token ids of the model that are as different as its vocabulary allows, int64 [num_tokens], on the CPU."""
    return (torch.arange(num_tokens) * 7919 + 3) % vocabulary_size(module)


def verify_row(model: PackedModel, prompt_ids: Sequence[int] = ()) -> PackedRow:
    """Return the row that a model is verified on; its labels are the second tokens of its segments.

    prompt_ids: a prompt of the run. Sequences begin as it does, with the tokens of its template that a trained model
    expects there, and go on with different parts of it: equal samples would hide that they see each other.
    """
    tokens = various_tokens(model.module, VERIFY_LAYOUT.num_tokens)
    for place, token in zip((0, 1, 2, *range(4, 11), *range(13, 20)), prompt_ids, strict=False):
        tokens[place] = token
    for token in prompt_ids[1:2]:
        tokens[3] = token
    tokens = tokens.to(model.device)
    filler = slice(VERIFY_LAYOUT.num_root_tokens - VERIFY_LAYOUT.roots[-1], VERIFY_LAYOUT.num_root_tokens)
    tokens[filler] = tokens[0]
    first = lengths_to_offsets(VERIFY_LAYOUT.lengths)[:-1].to(model.device)
    return PackedRow(tokens, VERIFY_LAYOUT.positions().to(model.device), tokens[first + 1], first, VERIFY_LAYOUT)


def whole_sequences(row: PackedRow) -> list[list[int]]:
    """Return the sequences of a row but what fills it up, each with its prompt; those that share none come first."""
    layout, tokens = row.layout, row.token_ids.cpu()
    whole = [tokens[places].tolist() for places in layout.seen()]
    last_root = layout.first_child - layout.is_filled
    return [*whole[layout.first_root + layout.num_shared : last_root], *whole[layout.first_child :]]


def same_places(row: PackedRow, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the places of a row whose tokens are in the sequences too, after the same tokens, int64 [P]; and for every
    place of the row the place of that token in all sequences one after the other, int64 [T], 0 if there is none."""
    starts = accumulate(map(len, sequences), initial=0)
    known = {
        tuple(sequence[: place + 1]): start + place
        for sequence, start in zip(sequences, starts, strict=False)
        for place in range(len(sequence))
    }
    tokens, lengths = row.token_ids.cpu(), row.layout.lengths
    whole = [tokens[places].tolist() for places in row.layout.seen()]
    asked = [
        known.get(tuple(sequence[: len(sequence) - length + place + 1]))
        for sequence, length in zip(whole, lengths, strict=True)
        for place in range(length)
    ]
    places = [place for place, sequence_place in enumerate(asked) if sequence_place is not None]
    device = row.token_ids.device
    return torch.tensor(places, device=device), torch.tensor(
        [sequence_place or 0 for sequence_place in asked], device=device
    )


def own_attention(module: PreTrainedModel) -> AbstractContextManager[None]:
    """Run a module inside the block as its architecture is defined: with eager attention. Others leave out what they do
    not have, as SDPA does Gemma-2's soft-capping."""
    return attention_functions(installed_views(module), "eager")


@contextmanager
def named_failure(name: str, how: str) -> Iterator[None]:
    """Raise a ModelError that says how the architecture does not run, for any error inside the block."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{name} is not supported: {error}") from None
    except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
        raise ModelError(f"{name} does not run {how}: {first_line(error)}") from error


def hint(model: PackedModel, routing: HeldRouting) -> str:
    """Say what may make the numbers differ."""
    stateful = sorted({type(child).__name__ for child in model.module.modules() if _carries_state(child)})
    if stateful and model.attention.is_packed:
        return f"; {', '.join(stateful[:3])} carries a state from token to token, and the samples of a packed row mix"
    if routing.num_free and model.dtype == torch.bfloat16:
        return (
            f"; its {routing.num_free} routers decide again in every pass, and in bfloat16 rounding may send tokens to "
            f"other experts: set dtype=float32"
        )
    return "; this architecture is not supported"


def _carries_state(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return any(isinstance(child, nn.Conv1d) for child in module.children()) or any(n in own for n in STATEFUL)


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference at a place of [places, ...], relative to the largest expected number there, but no
    less than a hundredth of the largest of all, and to that one if a place has one number. NaN if a number is NaN."""
    found, expected = found.detach(), expected.detach()
    difference = (found - expected.to(found.dtype)).abs()
    if difference[0].numel() == 1:
        return float(difference.max() / expected.abs().max().clamp(min=1e-6))
    largest = expected.abs().flatten(1).amax(1)
    return float((difference.flatten(1).amax(1) / largest.clamp(min=max(float(largest.max()) / 100, 1e-6))).max())
