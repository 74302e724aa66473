"""Real architectures under packed attention: the same numbers as their own forward, and the user's model untouched."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from hybrid_rl.compat.transformers import attention_name
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM, PaddedAttention
from hybrid_rl.models.packed.startup_check import verify_row
from hybrid_rl.models.row import Layout
from tests.support.libraries.torch_names import no_recompiles
from tests.unit.models.families import SUPPORTED, VOCABULARY, build

LENGTHS = [9, 1, 5]
TARGETS = torch.tensor([1, 4, 8, 11, 14])  # index 9 starts, and is, the second sequence; 10 starts the third


def plain_logprobs(module, token_ids, temperature):
    """ln p and entropy of TARGETS by the model's own forward of every sequence alone."""
    logits = [module(input_ids=part[None], use_cache=False).logits[0] for part in token_ids.split(LENGTHS)]
    log_p = (torch.cat(logits) / temperature).log_softmax(1)[TARGETS - 1]
    return log_p.gather(1, token_ids[TARGETS, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def gradients(module, outputs):
    direction = torch.linspace(-1, 1, len(TARGETS), dtype=outputs[0].dtype)
    loss = sum((output * direction.roll(i)).sum() for i, output in enumerate(outputs))
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))


@pytest.fixture
def token_ids():
    return torch.randint(0, VOCABULARY, (sum(LENGTHS),))


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_families_pass_verification(name):
    assert CausalLM(build(name)).verify() < 2e-6  # fp32: two orders of summation


def test_verification_compares_with_the_architecture_not_with_what_sdpa_leaves_out_of_it():
    """transformers' SDPA ignores Gemma-2's soft-capping, and is its default."""
    model = CausalLM(build("gemma2", attention="sdpa"))
    assert model.verify() < 2e-6
    assert attention_name(model.module.config) == "sdpa"


def test_verification_of_an_fp64_model_bears_with_an_eager_softmax_in_fp32():
    assert CausalLM(build("qwen2", dtype=torch.float64)).verify() < 1e-6


def test_a_head_that_is_not_the_plain_one_is_refused():
    module = build("cohere")
    module.config.logit_scale = 1.0
    model = CausalLM(module)
    module.logit_scale = 0.25
    with pytest.raises(ModelError, match="gives other logits"):
        model.verify()


def test_a_model_without_output_head_is_refused():
    with pytest.raises(ModelError, match="no linear output head"):
        CausalLM(build("qwen2").model)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])  # all families with shared prompts: see test_shared_prompts.py
def test_logprobs_entropy_and_gradients_equal_the_models_own(name, token_ids):
    module = build(name, dtype=torch.float64)
    mine = CausalLM(module).packed_logprobs(token_ids, LENGTHS, TARGETS, 0.7)
    reference = plain_logprobs(module, token_ids, 0.7)
    # Eager attention takes its softmax in fp32: the reference is good to 1e-7 of the largest gradient only.
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)
    expected = gradients(module, reference)
    scale = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    for key, gradient in gradients(module, mine).items():
        torch.testing.assert_close(gradient, expected[key], rtol=0, atol=2e-6 * scale, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "cohere", "phi"])  # soft-capping, a scale, a bias
def test_the_whole_distribution_is_the_one_that_logprobs_and_entropy_are_of(name):
    model = CausalLM(build(name, dtype=torch.float64))
    row = verify_row(model)
    log_probs = model.row_distribution(row, 0.7)
    logprobs, entropy = model.row_logprobs(row, 0.7)
    torch.testing.assert_close(log_probs.gather(1, row.labels[:, None])[:, 0], logprobs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(-(log_probs.exp() * log_probs).sum(1), entropy, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(len(row.labels), dtype=torch.float64))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2", "nemotron", "phimoe"])
def test_gradient_checkpointing_changes_nothing(name, attention, token_ids):
    module = build(name, attention=attention)
    model = CausalLM(module)
    before = model.packed_logprobs(token_ids, LENGTHS, TARGETS, 1.0)
    expected = gradients(module, before)
    model.enable_gradient_checkpointing()
    recomputed = []
    kind = type(model.attention.context(Layout(tuple(LENGTHS)), model.device))
    attend = kind.attend

    def counted(self, layer, *arguments):
        recomputed.append(layer)
        return attend(self, layer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "attend", counted)
        after = model.packed_logprobs(token_ids, LENGTHS, TARGETS, 1.0)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        torch.testing.assert_close(gradients(module, after), expected, rtol=0, atol=0)
    assert recomputed == [0, 1, 1, 0]
    assert attention_name(module.config) == attention


def test_blocks_are_recomputed_in_whatever_thread_the_backward_pass_runs(token_ids):
    """Autograd has a separate thread for every GPU."""
    module = build("nemotron")
    model = CausalLM(module)
    expected = gradients(module, model.packed_logprobs(token_ids, LENGTHS, TARGETS, 1.0))
    model.enable_gradient_checkpointing()
    outputs = model.packed_logprobs(token_ids, LENGTHS, TARGETS, 1.0)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(gradients, module, outputs).result()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_gradient_checkpointing_leaves_the_users_own_training_step_alone(token_ids):
    module = build("qwen2", attention="sdpa")
    expected = gradients(module, plain_logprobs(module, token_ids, 1.0))
    CausalLM(module).enable_gradient_checkpointing()
    again = gradients(module, plain_logprobs(module, token_ids, 1.0))
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt2"])
def test_the_users_own_forward_and_generate_stay_as_they_were(name, attention, token_ids):
    module = build(name, attention=attention)

    def own():
        prompt = token_ids[None, :5]
        mask = torch.ones_like(prompt)
        logits = module(input_ids=token_ids[None]).logits
        return logits, module.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False)

    with torch.no_grad():
        before = own()
        model = CausalLM(module)
        model.verify()
        model.packed_logprobs(token_ids, LENGTHS, TARGETS, 1.0)
        torch.testing.assert_close(own(), before, rtol=0, atol=0)
        with pytest.raises(IndexError):
            model.hidden_states(torch.tensor([VOCABULARY]), torch.tensor([0]), PaddedAttention(Layout((1,))))
        torch.testing.assert_close(own(), before, rtol=0, atol=0)


def test_dropout_is_off_in_training_mode_too(token_ids):
    module = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model = CausalLM(module)
    module.train()
    twice = [model.packed_logprobs(token_ids, LENGTHS, TARGETS, 1.0)[0] for _ in range(2)]
    torch.testing.assert_close(*twice, rtol=0, atol=0)
    assert all(child.p == 0 for child in module.modules() if isinstance(child, nn.Dropout))


def test_what_looks_like_noise_and_is_none_stays():
    """Phi-3.5-MoE's router reads its "jitter" as a threshold, in evaluation too, and chooses by chance in training."""
    module, token_ids = build("phimoe", router_jitter_noise=0.3), torch.arange(2, 12)[None]
    expected = module(input_ids=token_ids).logits
    CausalLM(module).enable_gradient_checkpointing()
    for _ in range(2):
        torch.testing.assert_close(module(input_ids=token_ids).logits, expected)


def test_jitter_of_routers_is_off():
    module = build("mixtral", router_jitter_noise=0.5)
    assert module.model.layers[0].mlp.jitter_noise == 0.5
    assert CausalLM(module).module.model.layers[0].mlp.jitter_noise == 0.0


def test_weights_are_neither_copied_nor_changed():
    module = build("qwen2")
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    model = CausalLM(module)
    model.verify()
    assert (model.vocab_size, model.max_positions, model.dtype) == (VOCABULARY, 64, torch.float32)
    for name, parameter in module.named_parameters():
        pointer, values = before[name]
        assert parameter.data_ptr() == pointer
        torch.testing.assert_close(parameter.detach(), values, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the compiler takes its time, on a busy machine many times longer
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("qwen2", "eager"),
        pytest.param("qwen2", "aot_eager", marks=pytest.mark.sweep),
        pytest.param("gpt2", "aot_eager", marks=pytest.mark.sweep),
        pytest.param("qwen2", "inductor", marks=pytest.mark.sweep),
        pytest.param("gpt2", "inductor", marks=pytest.mark.sweep),
    ],
)
def test_compiled_blocks_change_nothing_and_are_compiled_once_for_all_lengths(name, backend, tmp_path, monkeypatch):
    """eager finds the blocks' graphs, and whether a length makes another one; aot_eager has the backward pass as well;
    inductor writes and compiles C++, which takes nine tenths of the time."""
    # What was compiled before may be for another processor: see test_processors.py.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    plain, compiled = CausalLM(build(name)), CausalLM(build(name), compile=True)
    prompt = torch.arange(5)[None]
    own = plain.module(input_ids=prompt).logits
    for lengths in (LENGTHS, [4, 20], [7, 6, 5, 12]):
        token_ids = torch.randint(0, VOCABULARY, (sum(lengths),))
        targets = torch.tensor([1, 2, 3, 5, 6])
        with no_recompiles():
            mine = compiled.packed_logprobs(token_ids, lengths, targets, 0.7)
            expected = plain.packed_logprobs(token_ids, lengths, targets, 0.7)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
        theirs = gradients(plain.module, expected)
        scale = max(float(gradient.abs().max()) for gradient in theirs.values())
        for key, gradient in gradients(compiled.module, mine).items():
            torch.testing.assert_close(gradient, theirs[key], rtol=0, atol=1e-5 * scale)
    # Neither the user's own call of the module nor an engine's runs, or compiles, anything but the module.
    with no_recompiles(), torch.inference_mode():
        assert torch.equal(compiled.module(input_ids=prompt).logits, own)
        compiled.hidden_states(prompt[0, :1], prompt[0, :1], PaddedAttention(Layout((1,))))
