"""The in-place engine beyond the contract: every family, an independent sampler, memory, the zero-byte handoff."""

import copy
import gc
import weakref

import psutil
import pytest
import torch

from hybrid_rl.compat.native import keyed_uniform_torch
from hybrid_rl.compat.transformers import attention_name
from hybrid_rl.engines.base import KV_CACHE, TAGS
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.errors import HandoffError
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.tensor import TensorSource
from tests.support.engines.engine_settings import inplace_settings
from tests.support.inside.engines import cache_of
from tests.unit.engines.engines import IN_PLACE, TOKEN_BYTES, forward_logprobs, inplace, request
from tests.unit.models.families import SUPPORTED

pytestmark = pytest.mark.slow
COMPILED = ("qwen2", "mistral", "gemma2")


def by_full_forwards(module, sent):
    """The completion of a request without any cache: one whole forward a token, its draw inverted by hand."""
    tokens = list(sent.prompt_ids)
    for position in range(sent.params.max_tokens):
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        cumulative = logits.double().softmax(0).cumsum(0)
        coarse, fine = keyed_uniform_torch(torch.tensor([sent.params.seed]), torch.tensor([position]), 2)[0].tolist()
        tokens.append(int((cumulative < coarse + (fine - 0.5) * 2.0**-23).sum()))
    return tokens[len(sent.prompt_ids) :]


def greedy_of_the_model(module, sent):
    prompt_ids = torch.tensor([sent.prompt_ids])
    own = module.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=sent.params.max_tokens,
        min_new_tokens=sent.params.max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return own[0, len(sent.prompt_ids) :].tolist()


# Compiled attention meets every kind of it: plain, windows, a soft cap; and each family in the sweep.
OFTEN = [(family, name) for family in SUPPORTED for name in IN_PLACE if name == "inplace" or family in COMPILED]
RARELY = [(family, name) for family in SUPPORTED for name in IN_PLACE if (family, name) not in OFTEN]


@pytest.mark.parametrize(
    ("family", "make"),
    [
        pytest.param(family, IN_PLACE[name], id=f"{family}-{name}", marks=[pytest.mark.sweep] * (pairs is RARELY))
        for pairs in (OFTEN, RARELY)
        for family, name in pairs
    ],
)
def test_every_family_samples_and_decodes_greedily_as_its_own_forward_does(family, make):
    """Over the edges of blocks and windows, in prompts and in completions, and with a prompt in chunks."""
    rig = make(family, max_num_batched_tokens=20).ready()
    sampled = [request(i, 3 + 12 * (i // 2), 7, group=i // 2) for i in range(3)]
    greedy = [request(8, 14, 36, temperature=0.0), request(9, 33, 17, temperature=0.0)]
    answers = rig.run([*sampled, *greedy])
    for sent, sample in zip([*sampled, *greedy], answers, strict=True):
        expected = forward_logprobs(rig.module, sent, sample)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-5)
    for sent, sample in zip(sampled, answers[:3], strict=True):
        assert sample.completion_ids == by_full_forwards(rig.module, sent)
    for sent, sample in zip(greedy, answers[3:], strict=True):
        assert sample.completion_ids == greedy_of_the_model(rig.module, sent)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_bfloat16_gives_the_logprobs_of_a_full_forward_but_for_its_rounding(family):
    rig = inplace(family, block_size=16, dtype=torch.bfloat16).ready()
    sent = [request(i, 5 + 20 * i, 20) for i in range(2)]
    exact = copy.deepcopy(rig.module).float()
    for one, sample in zip(sent, rig.run(sent), strict=True):
        gap = torch.tensor(sample.logprobs) - forward_logprobs(exact, one, sample)
        own = forward_logprobs(rig.module, one, sample) - forward_logprobs(exact, one, sample)
        assert gap.norm() < 2 * own.norm()  # no further from fp32 than the model's own bfloat16 forward, about


def cache_tensors(engine):
    cache = cache_of(engine)
    return [tensor for layer in cache.layers for tensor in cache.memory(layer)]


def test_sleep_frees_the_storage_of_the_cache_and_wake_brings_as_much():
    rig = inplace(kv_cache_memory_bytes=600 * 4 * TOKEN_BYTES).ready()
    rig.run([request(0)])
    tensors = cache_tensors(rig.engine)
    num_bytes = rig.engine.stats().kv_cache_bytes
    assert num_bytes == sum(t.nbytes for t in tensors) == 600 * 4 * TOKEN_BYTES
    assert {t.untyped_storage().nbytes() for t in tensors} == {num_bytes}  # one, as every size is a multiple of 256
    storages = [weakref.ref(t.untyped_storage()) for t in tensors]
    references = [weakref.ref(t) for t in tensors]
    del tensors
    rig.engine.sleep({KV_CACHE})
    gc.collect()
    assert [r() for r in references] == [None] * len(references)
    assert [r() for r in storages] == [None] * len(storages)
    assert (rig.engine.stats().kv_cache_bytes, rig.engine.kv_cache_bytes) == (0, num_bytes)
    rig.engine.wake(TAGS)
    assert rig.engine.stats().kv_cache_bytes == num_bytes


def test_a_handoff_writes_no_byte_and_shows_every_tensor():
    rig = inplace()
    rig.engine.wake(TAGS)
    report = rig.publish(1)
    assert report.num_bytes == 0
    assert report.num_tensors == len(list(rig.module.named_parameters())) + len(list(rig.module.named_buffers()))


def rebind(module):
    parameter = module.model.norm.weight
    parameter.data = parameter.data.clone()


def replace_parameter(module):
    module.model.norm.weight = torch.nn.Parameter(module.model.norm.weight.detach().clone())


def replace_module(module):
    module.lm_head = torch.nn.Linear(32, 97, bias=False)


def replace_buffer(module):
    rotary = module.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.clone()


@pytest.mark.parametrize("change", [rebind, replace_parameter, replace_module, replace_buffer])
def test_weights_that_the_engine_does_not_read_are_refused(change):
    rig = inplace().ready()
    source = TensorSource({name: tensor.detach() for name, tensor in TensorSource.of(rig.module).tensors.items()})
    change(rig.module)
    with pytest.raises(HandoffError):
        rig.engine.update_weights(source, 2)
    assert rig.engine.policy_version == 1
    if change is not rebind:  # a rebound parameter is still the very object that the engine reads
        with pytest.raises(
            HandoffError, match="modules or parameters of the model were replaced .* make a new Trainer"
        ):
            rig.publish(2)


def test_a_source_of_another_model_is_refused():
    rig = inplace().ready()
    with pytest.raises(HandoffError, match="is not the trainer's own tensor"):
        rig.engine.update_weights(TensorSource.of(inplace().module), 2)


@pytest.mark.parametrize(
    ("free_bytes", "settings", "num_blocks"),
    [
        (10**12, {"max_num_seqs": 8}, 8 * 3),  # room for 8 sequences of 40 tokens, 3 blocks of 16 each
        (10**6, {"max_num_seqs": 500}, 400_000 // (16 * TOKEN_BYTES)),  # 40 % of a megabyte
        (1000, {"max_num_seqs": 8}, 3),  # never less than one whole sequence
        (1000, {"kv_cache_memory_bytes": 50_000}, 50_000 // (16 * TOKEN_BYTES)),
        (1000, {"kv_cache_memory_bytes": 1}, 1),
    ],
)
def test_the_size_of_the_cache(free_bytes, settings, num_blocks, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": free_bytes}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rig = inplace()
    engine = InPlaceEngine(CausalLM(rig.module), inplace_settings(**settings), max_length=40)
    engine.wake(TAGS)
    assert engine.stats().kv_cache_bytes == num_blocks * 16 * TOKEN_BYTES


def test_generation_leaves_no_graph_and_no_trace_on_the_module():
    rig = inplace().ready()
    name = attention_name(rig.module.config)
    rig.run([request(0)])
    assert {attention_name(child.config) for child in rig.module.modules() if hasattr(child, "config")} == {name}
    assert all(parameter.grad is None for parameter in rig.module.parameters())
    assert not any(tensor.requires_grad for tensor in cache_tensors(rig.engine))
