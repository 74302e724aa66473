"""A Hugging Face causal LM as the library uses it: packed rows in, hidden states, logits, logprobs or values out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.batch import lengths_to_offsets
from hybrid_rl.errors import ModelError
from hybrid_rl.models.attention import (
    NAME,
    AttentionContext,
    attention_configs,
    attention_functions,
    checkpoint_contexts,
)
from hybrid_rl.models.backends import AttentionNeeds, check_dtype, choose_backend
from hybrid_rl.models.blocks import APART, CompiledBlocks, transformer_blocks
from hybrid_rl.models.distribution import token_distribution
from hybrid_rl.models.linear import Linears
from hybrid_rl.models.logprobs import HeadOptions, head_logits, token_logprobs
from hybrid_rl.models.offload import activations_on_host
from hybrid_rl.models.row import Layout, PackedRow
from hybrid_rl.models.unpacked import UnpackedRow

# What a correct packed forward may differ from the model's own by: two orders of summation, relative to the largest
# logit. transformers' eager attention takes its softmax in float32, in float64 models too.
VERIFY_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1}
# The row that a model is verified on: two samples that share a prompt, and one on its own.
VERIFY_LAYOUT = Layout((5, 7), (2, 4), (0, 0))


# What carries more from token to token than attention does: linear attention, convolutions, state spaces.
REMEDY = 'if it is causal, rollout.engine=hf (Trainer(engine="hf")) runs it through its own forward, slower'


class CausalLM:
    """Wraps a module without copying or changing its weights. Dropout is switched off: ratios need the same network
    twice. The head is the module's language head, or the linear layer that a classification class (a critic, a reward
    model) has beside its backbone.

    attention: what training and scoring run on, a name of backends.py, auto, or unpacked (see unpacked.py). compile:
    training and scoring run transformer blocks through torch.compile, but for their attention. activation_offload: keep
    what the backward pass needs in host memory. Raises ConfigError where the attention cannot run here, ModelError for
    a module without such a head or with float16 parameters.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        attention: str = "auto",
        *,
        compile: bool = False,
        activation_offload: bool = False,
    ) -> None:
        self.module = module
        module.eval()
        self._configs = attention_configs(module)
        self._activation_offload = activation_offload
        _switch_off_noise(module)
        self._head = _output_head(module)
        self.is_language_model = self._head is module.get_output_embeddings()
        self._options = _head_options(module) if self.is_language_model else HeadOptions()
        check_dtype(self.device, self.dtype)
        self._linears = Linears(module if self.dtype == torch.float32 else nn.Module())
        self._compiled = CompiledBlocks(transformer_blocks(module) if compile else [])
        self.attention = choose_backend(attention, AttentionNeeds.of(module, self.device, self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self._head.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._head.weight.device

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return self._head.weight.shape[0]

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the position embedding was made for, None where the config does not say."""
        return getattr(self.module.config.get_text_config(), "max_position_embeddings", None)

    def check_length(self, max_length: int) -> None:
        """Raise ModelError where sequences of up to max_length tokens would change the model's own rotary frequencies.

        "longrope" and "dynamic" scaling choose them by the longest sequence of a forward pass: one long sample would
        then change the logprobs of the others that it is packed with.
        """
        config = self.module.config.get_text_config()
        scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        for rope in (scaling, *(value for value in scaling.values() if isinstance(value, dict))):
            kind = rope.get("rope_type", rope.get("type"))
            trained = rope.get("original_max_position_embeddings")
            limit = trained or getattr(config, "original_max_position_embeddings", self.max_positions)
            if kind in ("longrope", "dynamic") and limit is not None and max_length > limit:
                raise ModelError(
                    f"{kind} rotary scaling beyond {limit} tokens is not supported (prompt and completion may take "
                    f"{max_length}); lower max_prompt_length or max_completion_length"
                )

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass. Raises ModelError where the architecture cannot."""
        if not self.module.supports_gradient_checkpointing:
            raise ModelError(
                f"{type(self.module).__name__} cannot recompute activations; set gradient_checkpointing=false"
            )
        settings = {"use_reentrant": False, "context_fn": self._checkpoint_contexts}
        self.module.gradient_checkpointing_enable(settings)
        self.module.train()  # transformers checkpoints in training mode only; dropout is off in any mode

    def _checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first, again = checkpoint_contexts(self._configs, self._linears)
        return first, _both(again, self._compiled.active() if self._compiled.is_active else nullcontext())

    def own_forward(self, token_ids: Tensor, **arguments: Any) -> Any:
        """What the module's own backbone gives for sequences of one length, int64 [B, L], without padding or mask."""
        with self._linears.fast(token_ids.numel()):
            return self.module.base_model(input_ids=token_ids, **arguments)

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext | UnpackedRow) -> Tensor:
        """Last hidden states [T, H] of one packed row. token_ids, positions: int64 [T]."""
        if isinstance(attention, UnpackedRow):
            output = self.own_forward(attention.spread(token_ids), use_cache=False)
            return attention.collect(output.last_hidden_state)
        functions = [APART if self._compiled.is_active else NAME] * len(self._configs)
        num_rows = 0 if self._compiled.is_active else token_ids.shape[0]  # Inductor multiplies by its own means
        with attention_functions(self._configs, functions), self._linears.fast(num_rows):
            output = self.module.base_model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, attention_context=attention
            )
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [M, V] of hidden states [M, H]."""
        return head_logits(hidden, self._head.weight, self._head.bias, self._options)

    def token_logprobs(self, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """ln p(labels) and entropy, float32 [M], of hidden [M, H] and labels int64 [M], at a temperature;
        differentiable."""
        return token_logprobs(hidden, self._head.weight, self._head.bias, labels, temperature, self._options)

    @property
    def head(self) -> nn.Linear:
        """The linear layer on top of the backbone."""
        return self._head

    def row_logprobs(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """ln p and entropy of the labels of a row, given all tokens before them in their sequence.

        Returns two float32 tensors [M], in the order of the labels; differentiable.
        """
        with self._training():
            return self.token_logprobs(self._row_hidden(row), row.labels, temperature)

    def row_distribution(self, row: PackedRow, temperature: float) -> Tensor:
        """ln p of every entry of the vocabulary at the place of each label of a row, float32 [M, V]; differentiable."""
        with self._training():
            hidden = self._row_hidden(row)
            return token_distribution(hidden, self._head.weight, self._head.bias, temperature, self._options)

    def row_values(self, row: PackedRow) -> Tensor:
        """What a head of one number gives at the place before each label, float32 (float64 of a float64 model) [M]; the
        labels themselves are not looked at. Differentiable."""
        with self._training():
            hidden = self._row_hidden(row)
            if self._head.out_features != 1:
                raise ModelError(
                    f"the head of {type(self.module).__name__} gives {self._head.out_features} numbers, not one"
                )
            # In bfloat16 a value would be good to 3 digits; the head is too small for the precision to cost anything.
            precise = torch.promote_types(hidden.dtype, torch.float32)
            values = hidden.to(precise) @ self._head.weight[0].to(precise)
            return values if self._head.bias is None else values + self._head.bias.to(precise)

    def _row_hidden(self, row: PackedRow) -> Tensor:
        attention = self.attention.context(row.layout, self.device)
        return self.hidden_states(row.token_ids, row.positions, attention)[row.sources]

    def _training(self) -> AbstractContextManager[None]:
        return _both(activations_on_host() if self._activation_offload else nullcontext(), self._compiled.active())

    def packed_logprobs(
        self, token_ids: Tensor, lengths: Sequence[int], targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """ln p and entropy of chosen tokens given all tokens before them in their sequence.

        token_ids: int64 [T], sequences of `lengths` one after the other; targets: int64 [M], indices into token_ids,
        none the first of its sequence. Returns two float32 tensors [M]; differentiable.
        """
        layout = Layout(tuple(lengths))
        positions = layout.positions().to(token_ids.device)
        return self.row_logprobs(PackedRow(token_ids, positions, token_ids[targets], targets - 1, layout), temperature)

    @torch.no_grad()
    def verify(self) -> float:
        """Compare a packed forward of three sequences, two of which share a prompt, with the model's own forward of
        each; the largest relative gap.

        Raises ModelError where this architecture does not run under packed attention or its head is not the plain one:
        the numbers would be wrong, silently.
        """
        name = type(self.module).__name__
        layout = VERIFY_LAYOUT
        tokens = self.verify_row().token_ids
        context = self.attention.context(layout, self.device)
        try:
            mine = self._outputs(self.hidden_states(tokens, layout.positions().to(self.device), context))
        except ModelError as error:
            raise ModelError(f"{error}{self._remedy()}") from error
        except (TypeError, AttributeError, RuntimeError) as error:
            raise ModelError(f"{name} does not run with {self.attention.words}: {error}{self._remedy()}") from error
        segments: Any = tokens.split(layout.lengths)
        roots, children = segments[: len(layout.roots)], segments[len(layout.roots) :]
        # Eager attention defines an architecture: the others leave out what they lack, SDPA Gemma-2's soft-capping.
        with attention_functions(self._configs, ["eager"] * len(self._configs)):
            parts = [self._plain_outputs(root) for root in roots]
            for child, root in zip(children, layout.parents, strict=True):
                whole = self._plain_outputs(torch.cat([roots[root], child]))
                parts.append({what: output[-len(child) :] for what, output in whole.items()})
        gaps = {what: relative_gap(found, torch.cat([part[what] for part in parts])) for what, found in mine.items()}
        for what, gap in gaps.items():
            if not gap <= VERIFY_TOLERANCE.get(self.dtype, 1e-3):
                raise ModelError(
                    f"{name} gives other {what} with {self.attention.words} (relative gap {gap:.1e}); this "
                    f"architecture is not supported{self._remedy()}"
                )
        return max(gaps.values())

    def _remedy(self) -> str:
        return f"; {REMEDY}" if self.attention.is_packed else ""

    def _outputs(self, hidden: Tensor) -> dict[str, Tensor]:
        """What `verify` compares. A head that is still zero shows nothing of what is below it."""
        logits = {"logits": self.logits(hidden)}
        return logits if self.is_language_model else logits | {"hidden states": hidden}

    def _plain_outputs(self, token_ids: Tensor) -> dict[str, Tensor]:
        logits = {"logits": self.module(input_ids=token_ids[None], use_cache=False).logits[0]}
        if self.is_language_model:
            return logits
        hidden = self.module.base_model(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
        return logits | {"hidden states": hidden}

    def row_outputs(self, row: PackedRow) -> list[Tensor]:
        """What two models that hold the same weights are compared by: the logprobs of a row, or values and hidden
        states."""
        if self.is_language_model:
            return [self.row_logprobs(row, 1.0)[0]]
        context = self.attention.context(row.layout, self.device)
        return [self.row_values(row), self.hidden_states(row.token_ids, row.positions, context)]

    def verify_row(self) -> PackedRow:
        """The row that a model is verified on; its labels are the second tokens of its segments."""
        embeddings: Any = self.module.get_input_embeddings()
        num_embeddings = int(embeddings.weight.shape[0])
        tokens = (torch.arange(VERIFY_LAYOUT.num_tokens, device=self.device) * 7919 + 3) % num_embeddings
        first = lengths_to_offsets(VERIFY_LAYOUT.lengths)[:-1].to(self.device)
        return PackedRow(tokens, VERIFY_LAYOUT.positions().to(self.device), tokens[first + 1], first, VERIFY_LAYOUT)


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected number; NaN where a number is none."""
    return float((found - expected.to(found.dtype)).abs().max() / expected.abs().max().clamp(min=1e-6))


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


def _output_head(module: PreTrainedModel) -> nn.Linear:
    head = module.get_output_embeddings()
    if head is None and module.base_model is not module:
        beside = [child for child in module.children() if isinstance(child, nn.Linear)]
        head = beside[0] if len(beside) == 1 else None
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(module).__name__} has no linear output head ({head!r}); only causal language models, and "
            f"classification models with one linear layer beside their backbone, are supported"
        )
    return head


def _switch_off_noise(module: nn.Module) -> None:
    """Dropout and router jitter to 0, as modules and as plain numbers: some layers read those in training mode."""
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        for name, value in vars(child).items():
            if isinstance(value, float) and ("dropout" in name or "jitter" in name):
                setattr(child, name, 0.0)


def _head_options(module: PreTrainedModel) -> HeadOptions:
    config = module.config.get_text_config()
    scale = getattr(config, "logit_scale", getattr(config, "lm_head_multiplier", None))
    if scale is None and getattr(config, "logits_scaling", None):
        scale = 1 / config.logits_scaling
    return HeadOptions(
        scale=1.0 if scale is None else float(scale), softcap=getattr(config, "final_logit_softcapping", None)
    )
