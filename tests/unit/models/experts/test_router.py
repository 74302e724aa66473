"""Router scores of packed rows are those that the model itself gives for padded sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import JambaConfig, JambaForCausalLM, PreTrainedModel

from hybrid_rl.batch import Jagged
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.experts.routing import find_routers
from hybrid_rl.models.packed.router import Routers
from tests.support.float64 import KeepFloat64
from tests.support.libraries.torch_names import forward_hooks
from tests.unit.models.checkpoints import build_stored
from tests.unit.models.families import BASE, build

PROMPTS = [[5, 9, 2, 14], [5, 9, 2, 14], [7, 3], [22, 8, 41], [5, 9, 2, 14]]  # the first and the last are shared
COMPLETIONS = [[11, 6, 30], [12, 4], [60, 61, 62, 63, 64], [9], [11, 6, 31, 70]]
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3 moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral": {},
    "deepseek v3": {"num_hidden_layers": 3},
}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}


def moe(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    module = build_stored(name, **SETTINGS[name])
    module.set_experts_implementation("eager")  # grouped products are not made for float64
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.3)
    return module.to(dtype)


def packed() -> PackedRow:
    prompts, completions = (Jagged.from_rows(rows, torch.int64) for rows in (PROMPTS, COMPLETIONS))
    return PackedRow.of(prompts, completions, torch.device("cpu"))


def plain_logits(module: PreTrainedModel) -> Tensor:
    """Router logits [M, L, E] at the place before each completion token, from a padded batch."""
    sequences = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    width = max(map(len, sequences))
    ids = torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences])
    layers = module.base_model(input_ids=ids, attention_mask=mask, output_router_logits=True).router_logits
    found = []
    for index, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        for token in range(len(completion)):
            place = index * width + len(prompt) + token - 1
            found.append(torch.stack([layer.reshape(-1, layer.shape[-1])[place] for layer in layers]))
    return torch.stack(found)


def chosen(router: Any, logits: list[float]) -> set[int]:
    """The two experts of one token: the likeliest; in DeepSeek those of highest biased sigmoid in the better group."""
    scores, allowed = logits, range(len(logits))
    if hasattr(router, "e_score_correction_bias"):
        bias = router.e_score_correction_bias.tolist()
        scores = [1 / (1 + math.exp(-logit)) + shift for logit, shift in zip(logits, bias, strict=True)]
        groups = (range(4), range(4, 8))
        allowed = max(groups, key=lambda group: sum(sorted(scores[expert] for expert in group)[-2:]))
    return set(sorted(allowed, key=lambda expert: scores[expert])[-2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", SETTINGS)
def test_scores_are_those_of_a_padded_batch(name: str, dtype: torch.dtype) -> None:
    module = moe(name, dtype)
    model, row = CausalLM(module), packed()
    routers = Routers(model)
    with torch.no_grad(), KeepFloat64():
        expected = plain_logits(module)
        with routers.reading(row) as own:
            logprobs, _ = model.row_logprobs(row, 1.0)
        asked = torch.randint(expected.shape[-1], (len(row.labels), routers.num_layers, 3))
        with routers.reading(row, asked) as others:
            model.row_logprobs(row, 1.0)
    assert expected.shape[:2] == (15, routers.num_layers) and routers.num_layers == 2
    for token, layers in enumerate(expected.tolist()):
        for layer, logits in enumerate(layers):
            assert set(own.expert_ids[token, layer].tolist()) == chosen(find_routers(model.module)[layer][0], logits)
    for reading in (own, others):
        found = expected.log_softmax(-1).gather(-1, reading.expert_ids)
        torch.testing.assert_close(reading.logprobs, found, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(others.expert_ids, asked) and own.expert_ids.dtype == torch.int64
    plain, _ = model.row_logprobs(row, 1.0)
    torch.testing.assert_close(plain.float(), logprobs.float(), rtol=0, atol=1e-5)


def test_scores_are_float32_without_gradient_and_hooks_are_gone() -> None:
    module = moe("mixtral", torch.bfloat16)
    model, row = CausalLM(module), packed()
    routers = Routers(model)
    with routers.reading(row) as reading:
        model.row_logprobs(row, 1.0)
    assert reading.logprobs.dtype == torch.float32 and not reading.logprobs.requires_grad
    assert not any(forward_hooks(child) for child in module.modules())
    with pytest.raises(KeyError), routers.reading(row):
        raise KeyError
    assert not any(forward_hooks(child) for child in module.modules())


def test_a_recomputation_is_not_read() -> None:
    """Checkpointing runs blocks again in the backward pass; what comes first counts, and the numbers are the same."""
    row, readings, gradients = packed(), [], []
    for checkpointing in (False, True):
        model = CausalLM(moe("mixtral", torch.float32))
        routers = Routers(model)
        if checkpointing:
            model.enable_gradient_checkpointing()
        calls = []
        find_routers(model.module)[0][0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with routers.reading(row) as reading:
            logprobs, _ = model.row_logprobs(row, 1.0)
            before = reading.logprobs
            logprobs.sum().backward()
        assert len(calls) == (2 if checkpointing else 1) and torch.equal(reading.logprobs, before)
        readings.append(reading)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.module.parameters()]))
    assert torch.equal(readings[0].logprobs, readings[1].logprobs) and torch.equal(*gradients)
    other = CausalLM(moe("mixtral", torch.float32))
    routers = Routers(other)
    with torch.no_grad(), routers.reading(row) as reading:
        other.row_logprobs(row, 1.0)
        find_routers(other.module)[0][0].weight.neg_()
        other.row_logprobs(row, 1.0)
    assert torch.equal(reading.logprobs, readings[0].logprobs)


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM has no routers .* use a loss without router scores"):
        Routers(CausalLM(build("qwen3")))


def test_routers_that_give_scores_alone_are_refused() -> None:
    """Jamba's are plain linear layers, found by their name."""
    config = JambaConfig(**BASE, num_experts=4, num_experts_per_tok=2, mamba_d_state=4, mamba_dt_rank=4)
    model = CausalLM(JambaForCausalLM(config))
    with pytest.raises(ModelError, match=r"JambaForCausalLM cannot be read: Linear gives \[\(\d+, 4\)\], of which"):
        Routers(model)


def test_routers_that_hide_their_choice_are_refused() -> None:
    model = CausalLM(moe("mixtral"))
    router = model.module.base_model.layers[1].mlp.gate
    router.register_forward_hook(lambda *call: (call[-1][0], call[-1][2], call[-1][2]))
    with pytest.raises(ModelError, match="MixtralTopKRouter gives .* not exactly one names the experts"):
        Routers(model)
    assert not any(forward_hooks(child) for child in model.module.modules() if child is not router)


def test_a_router_that_does_not_run_is_missed() -> None:
    model, row = CausalLM(moe("mixtral")), packed()
    routers = Routers(model)
    with routers.reading(row) as reading:
        pass
    with pytest.raises(ModelError, match="2 of 2 routers did not run"):
        reading.logprobs  # noqa: B018


def test_experts_of_another_shape_are_refused() -> None:
    reading = Routers(CausalLM(moe("mixtral"))).reading(packed(), torch.zeros(15, 3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"must be \[M, L, K\] for 15 tokens and 2 layers, not \(15, 3, 2\)"), reading:
        pass
