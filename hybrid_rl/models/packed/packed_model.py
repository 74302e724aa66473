"""A Hugging Face model that runs packed rows: hidden states, logits, logprobs or values of their tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.algos.masked import take
from hybrid_rl.batch import Jagged
from hybrid_rl.compat.transformers import attention_name
from hybrid_rl.errors import ModelError
from hybrid_rl.models.activation_offload import activations_on_host
from hybrid_rl.models.attention.attention_function import (
    NAME,
    AttentionContext,
    attention_functions,
    installed_views,
    same_attention,
)
from hybrid_rl.models.attention.backends import AttentionNeeds, check_dtype, choose_backend
from hybrid_rl.models.attention.unpacked import UnpackedRow
from hybrid_rl.models.exact import ExactFunctions
from hybrid_rl.models.experts.expert_choices import NO_EXPERT, ExpertChoices
from hybrid_rl.models.fused import FusedLayers
from hybrid_rl.models.heads.distribution import token_distribution
from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.logprobs import head_logits, logit_logprobs, token_logprobs
from hybrid_rl.models.linear import Linears
from hybrid_rl.models.lora.model_weights import weights_of
from hybrid_rl.models.packed.repeated_layers import APART, CompiledBlocks, transformer_blocks
from hybrid_rl.models.row import Layout, PackedRow
from hybrid_rl.weights.plain import running

logger = logging.getLogger("hybrid_rl")


class LengthLimit(NamedTuple):
    """The longest sequences that run packed as the model itself would run them. why: what forbids longer ones."""

    num_tokens: int
    why: str


class PackedModel:
    """Wraps a module without copying or changing its weights. Dropout is switched off: ratios need the same network
    twice. The head is the module's language head, or the linear layer that a classification class (a critic, a reward
    model) has on top of its backbone.

    attention: what training and scoring run on, a name of backends.py, auto, or unpacked (see unpacked.py). compile:
    training and scoring run transformer blocks through torch.compile, but for their attention. activation_offload: keep
    what the backward pass needs in host memory. float32_head: logits of a bfloat16 model are float32 products of its
    bfloat16 hidden states and head, not rounded to bfloat16. exact: no number of a token depends on what it is computed
    with (exact.py); CPUs only, by the compiled operators. Raises ConfigError if the attention cannot run here,
    ModelError for a module without such a head or with float16 parameters.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        attention: str = "auto",
        *,
        compile: bool = False,
        activation_offload: bool = False,
        float32_head: bool = False,
        exact: bool = False,
    ) -> None:
        self.module = module
        self.weights = weights_of(module)
        self.backbone = _backbone(module)
        self.masked_from: LengthLimit | None = None  # found by `check_survey`
        module.eval()
        self._configs = installed_views(module)
        self._activation_offload = activation_offload
        _switch_off_noise(module)
        self.is_language_model = self.head is running(module.get_output_embeddings())
        self.has_float32_head = float32_head
        self._options = replace(
            _head_options(module) if self.is_language_model else HeadOptions(),
            in_float32=float32_head,
            is_exact=exact,
        )
        check_dtype(self.device, self.dtype)
        is_float32 = self.dtype == torch.float32
        self.is_exact = exact
        self._linears = Linears(module if is_float32 and not exact else nn.Module())
        self._fused = FusedLayers(module if is_float32 and self.device.type == "cpu" else nn.Module())
        self._compiled = CompiledBlocks(transformer_blocks(module) if compile else [])
        self._choices: ExpertChoices | None = None
        self._chosen: Tensor | None = None
        needs = AttentionNeeds.of(module, self.device, self.dtype)
        if exact:  # which widens bfloat16
            attention, needs = "compiled", replace(needs, dtype=torch.float32)
        self.attention = choose_backend(attention, needs)
        if not self.attention.is_packed:
            _keep_soft_capping(module, self._configs)

    @property
    def head(self) -> nn.Linear:
        """The linear layer on top of the backbone: another one if the adapters are taken out that train it whole."""
        return _output_head(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.head.weight.device

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return self.head.weight.shape[0]

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the position embedding was made for, None if the config does not say."""
        return getattr(self.module.config.get_text_config(), "max_position_embeddings", None)

    @property
    def idle_token(self) -> int:
        """A token to compute with if there is nothing to compute: not the one of padding, whose embedding may be
        zeros. There some norms have an infinite slope, and a loss of weight 0 a gradient of NaN."""
        return int(getattr(self.module.get_input_embeddings(), "padding_idx", None) == 0)

    @property
    def length_limit(self) -> LengthLimit | None:
        """The longest sequences that may run, None if nothing limits them: the model's positions, or fewer."""
        positions = self.max_positions
        own = None if positions is None else LengthLimit(positions, f"the model has {positions} positions")
        limits = (own, rotary_limit(self.module.config.get_text_config(), positions), self.masked_from)
        return min((limit for limit in limits if limit is not None), default=None, key=lambda limit: limit.num_tokens)

    def check_length(self, max_length: int) -> None:
        """Raise ModelError if sequences of up to max_length tokens would not run as the model itself runs them."""
        limit = self.length_limit
        if limit is not None and max_length > limit.num_tokens:
            raise ModelError(
                f"sequences of more than {limit.num_tokens} tokens are not supported: {limit.why}. Prompt and "
                f"completion may take {max_length}; lower max_prompt_length or max_completion_length"
            )

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass. Raises ModelError if the architecture cannot."""
        if not self.module.supports_gradient_checkpointing:
            raise ModelError(
                f"{type(self.module).__name__} cannot recompute activations; set gradient_checkpointing=false"
            )
        settings = {"use_reentrant": False, "context_fn": self._checkpoint_contexts}
        self.module.gradient_checkpointing_enable(settings)
        # transformers checkpoints what is in training mode. The rest is not: some routers choose by chance there.
        for child in self.module.modules():
            if getattr(child, "gradient_checkpointing", False):
                child.training = True

    def _checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        linears = self._linears.fast(self._linears.num_rows)
        compiled = self._compiled.active() if self._compiled.is_active else nullcontext()
        fused = self._fused.active(self._fused.is_active)
        choices = nullcontext() if self._choices is None else self._choices.again()
        return nullcontext(), _nested(same_attention(), linears, compiled, fused, choices, self._functions())

    @property
    def choices(self) -> ExpertChoices:
        """The experts that the routers choose. When they are asked for first, the model runs once, on all ranks if it
        is sharded. Raises ModelError for a model whose choices cannot be replaced."""
        if self._choices is None:
            tokens = torch.full((2,), self.idle_token, dtype=torch.int64, device=self.device)
            last = torch.ones(1, dtype=torch.int64, device=self.device)
            self._choices = ExpertChoices(self.module, lambda: self.packed_logprobs(tokens, [2], last, 1.0))
        return self._choices

    @property
    def chosen_experts(self) -> Tensor:
        """The experts of the tokens of the row that ran last without gradients, of those that name experts, int64
        [T, L, K]."""
        assert self._chosen is not None, "no row has named experts"
        return self._chosen

    def _functions(self) -> AbstractContextManager[Any]:
        return ExactFunctions() if self.is_exact else nullcontext()

    def own_forward(self, token_ids: Tensor, **arguments: Any) -> Any:
        """Run the module's own backbone on sequences of one length, int64 [B, L], without padding or mask."""
        with self._linears.fast(token_ids.numel()), self._fused.active():
            output = self.backbone(input_ids=token_ids, **arguments)
        # Backbones that add up in float32 (Mamba) leave the rounding to the next layer.
        output.last_hidden_state = output.last_hidden_state.to(self.dtype)
        return output

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext | UnpackedRow) -> Tensor:
        """Return last hidden states [T, H] of one packed row. token_ids, positions: int64 [T]."""
        if isinstance(attention, UnpackedRow):
            output = self.own_forward(attention.spread(token_ids), use_cache=False)
            return attention.collect(output.last_hidden_state)
        function = APART if self._compiled.is_active else NAME
        is_eager = not self._compiled.is_active  # Inductor chooses how to multiply, and what to fuse
        linears = self._linears.fast(token_ids.shape[0] if is_eager else 0)
        fused, functions = self._fused.active(is_eager), self._functions()
        with attention_functions(self._configs, function, attention), linears, fused, functions:
            output = self.backbone(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [M, V] of hidden states [M, H]."""
        return head_logits(hidden, self.head.weight, self.head.bias, self._options)

    def chosen_logprobs(self, logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
        """Return ln p of a token in each row of float32 logits [M, V], as `token_logprobs` computes it, for float32
        temperatures [M], of which 0 counts as 1; tokens: int64 [M]. Returns float32 [M]."""
        logprobs = torch.empty_like(temperatures)
        for temperature in temperatures.unique().tolist():
            rows = (temperatures == temperature).nonzero()[:, 0]
            is_all = len(rows) == len(logits)
            some = (logits, tokens) if is_all else (logits[rows], tokens[rows])
            logprobs[rows] = logit_logprobs(*some, temperature or 1.0)[0]
        return logprobs

    def token_logprobs(self, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return ln p(labels) and entropy, float32 [M], of hidden [M, H] and labels int64 [M], at a temperature;
        differentiable."""
        return token_logprobs(hidden, self.head.weight, self.head.bias, labels, temperature, self._options)

    def row_of(self, prompts: Jagged, completions: Jagged, experts: Jagged | None = None) -> PackedRow:
        """Lay samples out as one row for this model (`PackedRow.of`). Raises ModelError for a completion without a
        prompt: nothing predicts its first token."""
        if bool(((prompts.lengths == 0) & (completions.lengths > 0)).any()):
            raise ModelError("a sample has a completion, but a prompt of 0 tokens; give every prompt at least one")
        return PackedRow.of(prompts, completions, self.device, self.attention.least_saved(self.device), experts)

    def run_row(self, row: PackedRow) -> Tensor:
        """Return last hidden states [T, H] of a row. Its tokens go to the experts that it names."""
        context = self.attention.context(row.layout, self.device)
        if row.experts is None:
            return self.hidden_states(row.token_ids, row.positions, context)
        beside = context if isinstance(context, UnpackedRow) else None
        experts = row.experts
        if beside is not None:
            experts = beside.spread(experts).flatten(0, 1)
            experts[beside.is_padding] = NO_EXPERT
        with self.choices.choosing(experts) as noted:
            hidden = self.hidden_states(row.token_ids, row.positions, context)
        if not torch.is_grad_enabled():
            self._chosen = noted.experts if beside is None else noted.experts[beside.places]
        return hidden

    def row_logprobs(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """Return ln p and entropy of the labels of a row, given all tokens before them in their sequence.

        Returns two float32 tensors [M], in the order of the labels; differentiable.
        """
        with self._training():
            if row.distinct is None:
                return self.token_logprobs(self._row_hidden(row), row.labels, temperature)
            first, which = row.distinct
            once = row.at(first)
            logprobs, entropy = self.token_logprobs(self._row_hidden(once), once.labels, temperature)
            return take(logprobs, which), take(entropy, which)

    def row_distribution(self, row: PackedRow, temperature: float) -> Tensor:
        """Return ln p of every entry of the vocabulary at the place of each label of a row, float32 [M, V];
        differentiable."""
        with self._training():
            hidden = self._row_hidden(row)
            return token_distribution(hidden, self.head.weight, self.head.bias, temperature, self._options)

    def row_values(self, row: PackedRow) -> Tensor:
        """Return what a head of one number gives at the place before each label, float32 (float64 of a float64 model)
        [M]; the labels themselves are not looked at. Differentiable."""
        with self._training():
            hidden = self._row_hidden(row)
            if self.head.out_features != 1:
                raise ModelError(
                    f"the head of {type(self.module).__name__} gives {self.head.out_features} numbers, not one"
                )
            # In bfloat16 a value would be good to 3 digits; the head is too small for the precision to cost anything.
            precise = torch.promote_types(hidden.dtype, torch.float32)
            values = hidden.to(precise) @ self.head.weight[0].to(precise)
            return values if self.head.bias is None else values + self.head.bias.to(precise)

    def _row_hidden(self, row: PackedRow) -> Tensor:
        return take(self.run_row(row), row.sources)

    def _training(self) -> AbstractContextManager[None]:
        return _nested(activations_on_host() if self._activation_offload else nullcontext(), self._compiled.active())

    def packed_logprobs(
        self, token_ids: Tensor, lengths: Sequence[int], targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return ln p and entropy of chosen tokens given all tokens before them in their sequence.

        token_ids: int64 [T], sequences of `lengths` one after the other; targets: int64 [M], indices into token_ids,
        none the first of its sequence. Returns two float32 tensors [M]; differentiable.
        """
        layout = Layout(tuple(lengths))
        positions = layout.positions().to(token_ids.device)
        return self.row_logprobs(PackedRow(token_ids, positions, token_ids[targets], targets - 1, layout), temperature)

    def row_outputs(self, row: PackedRow) -> list[Tensor]:
        """Return the numbers by which two models of the same weights are compared: the logprobs of a row, or values and
        hidden states."""
        if self.is_language_model:
            return [self.row_logprobs(row, 1.0)[0]]
        context = self.attention.context(row.layout, self.device)
        return [self.row_values(row), self.hidden_states(row.token_ids, row.positions, context)]


@contextmanager
def _nested(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _backbone(module: PreTrainedModel) -> PreTrainedModel:
    """Return the module without its head, also if the class gives it a wrong name (Llama-4)."""
    named: Any = module.base_model
    inner = [child for child in module.children() if isinstance(child, PreTrainedModel)]
    backbone: PreTrainedModel = inner[0] if named is module and len(inner) == 1 else named
    return backbone


def _output_head(module: PreTrainedModel) -> nn.Linear:
    head = running(module.get_output_embeddings())
    if head is None and module.base_model is not module:
        linear = [child for child in map(running, module.children()) if isinstance(child, nn.Linear)]
        head = linear[0] if len(linear) == 1 else None
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(module).__name__} has no linear output head ({head!r}); only causal language models, and "
            f"classification models with one linear layer on top of their backbone, are supported"
        )
    return head


def _switch_off_noise(module: nn.Module) -> None:
    """Set dropout and router jitter to 0, as modules and as plain numbers: some layers read those in training mode.

    Phi-3.5-MoE's router_jitter_noise is not noise: its router reads it as a threshold, in evaluation too.
    """
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        for name, value in vars(child).items():
            if isinstance(value, float) and ("dropout" in name or "jitter" in name) and name != "router_jitter_noise":
                setattr(child, name, 0.0)


def rotary_limit(config: Any, max_positions: int | None) -> LengthLimit | None:
    """Return the length up to which rotary frequencies are the same for all sequences.

    "longrope" and "dynamic" scaling choose them by the longest sequence of a forward pass: one long sample would change
    the logprobs of the others that it is packed with.
    """
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in (scaling, *(value for value in scaling.values() if isinstance(value, dict))):
        kind = rope.get("rope_type", rope.get("type"))
        trained = rope.get("original_max_position_embeddings")
        limit = trained or getattr(config, "original_max_position_embeddings", max_positions)
        if kind in ("longrope", "dynamic") and limit is not None:
            return LengthLimit(limit, f"{kind} rotary scaling changes the frequencies of a whole pass beyond it")
    return None


def _head_options(module: PreTrainedModel) -> HeadOptions:
    config = module.config.get_text_config()
    scale = getattr(config, "logit_scale", getattr(config, "lm_head_multiplier", None))
    if scale is None and getattr(config, "logits_scaling", None):
        scale = 1 / config.logits_scaling
    return HeadOptions(
        scale=1.0 if scale is None else float(scale), softcap=getattr(config, "final_logit_softcapping", None)
    )


def _keep_soft_capping(module: PreTrainedModel, configs: Sequence[Any]) -> None:
    """Let a module that runs through its own forward run eager if its attention is soft-capped: SDPA, transformers'
    default, would leave the capping out."""
    capped = getattr(module.config.get_text_config(), "attn_logit_softcapping", None)
    if capped and any(attention_name(config) == "sdpa" for config in configs):
        module.set_attn_implementation("eager")
        logger.warning(
            "%s caps its attention at %g, which SDPA leaves out: it runs with attn_implementation=eager",
            *(type(module).__name__, capped),
        )
