"""Forced experts against gates written out by hand, in value and gradient, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.batch import Jagged, lengths_to_offsets
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.experts.routing import find_routers
from hybrid_rl.models.row import PackedRow
from tests.support.tiny import build_model
from tests.unit.models.families import BASE, HEADS, MIXTURES, VOCABULARY, build, made

HYBRID = {**BASE, **HEADS, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}
HYBRID |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2}
HYBRID |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
GPT_OSS = {**BASE, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}
# Routers that do not end in one torch.topk whose indices they return.
REFUSED = ("llama4", "phimoe", "jetmoe")


def jagged(rows: list[list[int]]) -> Jagged:
    return Jagged.from_rows(rows, torch.int64)


def samples(seed: int = 0) -> tuple[Jagged, Jagged]:
    """Two groups: three samples of a prompt, of which two begin alike, and one of another."""
    numbers = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (count,), generator=numbers).tolist()

    prompt, begin = draw(5), draw(2)
    completions = [[*begin, *draw(4)], [*begin, *draw(2)], draw(5), draw(3)]
    return jagged([prompt, prompt, prompt, draw(3)]), jagged(completions)


def drawn_experts(model: CausalLM, prompts: Jagged, completions: Jagged, num_experts: int, seed: int) -> Jagged:
    """Other experts than the routers would choose, the same for samples of one prompt in the prompt and where they
    begin alike; -1 for the last token of each."""
    lengths = (prompts.lengths + completions.lengths).tolist()
    rows = []
    for prompt, completion, length in zip(prompts, completions, lengths, strict=True):
        row = torch.zeros(length, model.choices.num_layers, model.choices.top_k, dtype=torch.int16)
        for place in range(length):
            number = int(torch.cat([prompt, completion])[: place + 1].sum()) * 1000 + place + seed
            numbers = torch.Generator().manual_seed(number)
            for layer in range(model.choices.num_layers):
                chosen = torch.randperm(num_experts, generator=numbers)[: model.choices.top_k]
                row[place, layer] = chosen.sort().values.to(torch.int16)
        row[-1] = -1
        rows.append(row)
    return Jagged.from_rows(rows)


def gates(name: str, config: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """The weights of chosen experts, from the formulas of the models' papers and configs."""
    if name == "deepseek-v3":
        weights = logits.sigmoid().gather(1, ids)
        return weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
    if name == "gpt-oss":
        return logits.gather(1, ids).softmax(-1)
    weights = logits.softmax(-1).gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) if name == "mixtral" or config.norm_topk_prob else weights


def reference(name: str, module: PreTrainedModel, prompts: Jagged, completions: Jagged, experts: Jagged) -> Tensor:
    """Logprobs of each sample by itself, through the module's own forward with gates of our own."""
    parts = []
    for prompt, completion, chosen in zip(prompts, completions, experts, strict=True):
        handles = []
        for (router, _), wanted in zip(find_routers(module), chosen.long().unbind(1), strict=True):

            def replace(_: Any, __: Any, output: Any, wanted: Tensor = wanted) -> Any:
                logits, _, own = output
                ids = torch.where(wanted < 0, own, wanted)
                return logits, gates(name, module.config, logits, ids).to(output[1].dtype), ids

            handles.append(router.register_forward_hook(replace))
        logits = module(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        parts.append(logprobs.gather(1, completion[:, None])[:, 0])
    return torch.cat(parts)


def built(name: str, dtype: torch.dtype) -> PreTrainedModel:
    if name == "gpt-oss":
        return made("GptOssConfig", GPT_OSS, attention="eager", dtype=dtype)
    return build(name, dtype=dtype)


@pytest.mark.parametrize(("name", "num_experts"), [("qwen3-moe", 4), ("mixtral", 4), ("deepseek-v3", 8)])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_forced_experts_give_the_values_and_gradients_of_their_gates(name, num_experts, checkpoints):
    """In float64: of a row in which samples share what they have in common, and of its recomputation."""
    prompts, completions = samples()
    values, gradients = [], []
    for is_reference in (True, False):
        module = built(name, torch.float64)
        model = CausalLM(module, "sdpa")
        experts = drawn_experts(model, prompts, completions, num_experts, seed=7)
        if is_reference:
            logprobs = reference(name, module, prompts, completions, experts)
        else:
            if checkpoints:
                model.enable_gradient_checkpointing()
            row = model.row_of(prompts, completions, experts)
            assert row.layout.num_tokens < int((prompts.lengths + completions.lengths).sum())
            logprobs = model.row_logprobs(row, 1.0)[0]
            with torch.no_grad():
                model.row_logprobs(row, 1.0)
            noted = row.of_samples(model.chosen_experts, experts.lengths.tolist(), -1)
            is_forced = experts.values >= 0
            assert torch.equal(noted[is_forced], experts.values[is_forced].long())
        (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
        values.append(logprobs.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
        routers = [router.weight.grad for router, _ in find_routers(module)]
        assert all(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in routers)
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-6)  # the head adds up in float32
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*MIXTURES, "gpt-oss", "qwen3-next"])
def test_the_own_choice_of_a_model_forced_changes_nothing_to_the_bit(name):
    prompts, completions = samples(1)
    if name == "qwen3-next":
        model = CausalLM(made("Qwen3NextConfig", HYBRID, attention="eager"), "unpacked")
    else:
        model = CausalLM(built(name, torch.float32), "unpacked" if name == "gpt-oss" else "auto")
    lengths = prompts.lengths + completions.lengths
    shape = int(lengths.sum()), model.choices.num_layers, model.choices.top_k
    none = Jagged(torch.full(shape, -1, dtype=torch.int16), lengths_to_offsets(lengths))
    with torch.no_grad():
        free = model.row_logprobs(model.row_of(prompts, completions), 1.0)[0]
        row = model.row_of(prompts, completions, none)
        own = model.row_logprobs(row, 1.0)[0]
        chosen = row.of_samples(model.chosen_experts.to(torch.int16), lengths.tolist(), -1)
        assert model.choices.take_counts() == (0, 0)
        row = model.row_of(prompts, completions, none.with_values(chosen))
        forced = model.row_logprobs(row, 1.0)[0]
    assert bool((chosen >= 0).all())
    assert torch.equal(free, own) and torch.equal(own, forced)
    num_forced, num_changed = model.choices.take_counts()
    assert num_forced >= row.layout.num_tokens * model.choices.num_layers and num_changed == 0


def test_choices_that_the_router_would_not_make_are_counted():
    model = CausalLM(build("qwen3-moe"))
    prompts, completions = jagged([[5, 6]]), jagged([[7, 8]])
    with torch.no_grad():
        none = Jagged(torch.full((4, 2, 2), -1, dtype=torch.int16), torch.tensor([0, 4]))
        model.row_logprobs(model.row_of(prompts, completions, none), 1.0)
        experts = model.chosen_experts.to(torch.int16).clone()
        experts[1, 0] = (experts[1, 0] + 1) % 4
        experts[2] = experts[2].flip(-1)  # the same experts in another order
        experts[3] = -1
        changed = set(experts[1, 0].tolist()) != set(model.chosen_experts[1, 0].tolist())
        row = model.row_of(prompts, completions, none.with_values(experts))
        model.row_logprobs(row, 1.0)
    num_forced, num_changed = model.choices.take_counts()
    assert num_forced == 6 and 1 <= num_changed <= 3 and changed
    assert model.choices.take_counts() == (0, 0)


def test_tokens_are_shared_only_if_their_experts_are_the_same():
    prompts, completions = jagged([[5, 6, 7], [5, 6, 7]]), jagged([[8, 9], [8, 10]])
    experts = torch.zeros(10, 1, 2, dtype=torch.int16)
    offsets = torch.tensor([0, 5, 10])

    def lengths(values: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        row = PackedRow.of(prompts, completions, torch.device("cpu"), experts=Jagged(values, offsets))
        assert row.experts is not None and torch.equal(row.of_samples(row.experts, [5, 5], -1), values)
        return row.layout.roots, row.layout.children, row.layout.prefix

    assert lengths(experts) == ((4,), (1, 1), 0)
    other = experts.clone()
    other[8] = 1  # the token 8 of the second sample
    assert lengths(other) == ((3,), (2, 2), 0)
    other = experts.clone()
    other[6] = 1  # the second token of its prompt
    assert lengths(other) == ((4, 4), (), 1)


@pytest.mark.parametrize("name", REFUSED)
def test_routers_whose_choice_cannot_be_replaced_are_refused(name):
    with pytest.raises(ModelError, match=r"the experts of \w+ cannot be replayed: .*set routing_replay=off"):
        _ = CausalLM(build(name)).choices


def test_a_dense_model_has_no_choices():
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM has no routers that can be read: .*routing_replay=off"):
        _ = CausalLM(build_model()).choices


def test_experts_of_another_model_are_refused():
    model = CausalLM(build("qwen3-moe"))
    experts = Jagged(torch.zeros(4, 2, 3, dtype=torch.int16), torch.tensor([0, 4]))
    with pytest.raises(ModelError, match=r"a router chose \[4, 2\] experts \[tokens, K\], but \[4, 3\] were recorded"):
        model.row_logprobs(model.row_of(jagged([[5, 6]]), jagged([[7, 8]]), experts), 1.0)
    with pytest.raises(ModelError, match="experts are recorded for"):
        model.row_of(jagged([[5, 6]]), jagged([[7]]), experts)
