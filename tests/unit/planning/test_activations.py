"""Passes without memory against real ones."""

import warnings
import weakref

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybrid_rl.compat.torch import TorchDispatchMode, storage_id, tree_leaves
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.attention.unpacked import NAME as UNPACKED
from hybrid_rl.models.heads.value_head import value_model_of
from hybrid_rl.models.lora.inject import inject
from hybrid_rl.models.lora.peft_config import peft_config_of
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.planning import activations
from hybrid_rl.planning.activations import Counted
from hybrid_rl.planning.fullest_rows import Samples, learning_batch
from hybrid_rl.planning.models import RunModels, adapted
from hybrid_rl.training.critic import micro_batch_value_loss
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.sharding.fsdp import ShardOptions
from hybrid_rl.training.spec import LossSpec, MiniBatch
from hybrid_rl.weights.sources import StateSource
from tests.unit.models.families import build
from tests.unit.models.hybrids import build_hybrid
from tests.unit.planning.tiny_run import TINY, meta_model, settings

WIDE = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 500,
}


class RealStorages(TorchDispatchMode):
    """Follows the memory of real tensors, as an independent count."""

    def __init__(self, known):
        super().__init__()
        self.known = {storage_id(tensor) for tensor in known}
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and storage_id(tensor) not in {*self.known, *self.sizes}:
                storage = tensor.untyped_storage()
                self.sizes[storage_id(tensor)] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.forget, storage_id(tensor))
        self.peak = max(self.peak, self.now)
        return results

    def forget(self, number):
        self.now -= self.sizes.pop(number)


def peak_of_update(model, rows, config):
    """The most bytes that a real update of a model without gradients makes."""
    spec = LossSpec.of(config)
    batch = learning_batch(rows, config, spec)
    with RealStorages([*model.module.parameters(), *model.module.buffers()]) as real:
        micro_batch_loss(model, batch, spec, MiniBatch.of(batch, spec))[0].backward()
    return real.peak


def samples(num_tokens=512, **changes):
    given = {"prompt": 16, "completion": 48, "num_generations": 4, "num_samples": 64, "is_packed": True}
    return Samples.fullest(num_tokens, **(given | changes))


@pytest.mark.parametrize(
    ("dtype", "checkpoints", "is_first"),
    [(torch.float32, False, False), (torch.float32, True, True), (torch.bfloat16, True, False)],
)
def test_update_is_counted_to_a_thousandth(dtype, checkpoints, is_first):
    config = settings(dtype=str(dtype).removeprefix("torch."))
    torch.manual_seed(0)
    module = Qwen2ForCausalLM(Qwen2Config(**(TINY | WIDE))).to(dtype)
    model = CausalLM(module)
    if checkpoints:
        model.enable_gradient_checkpointing()
    spec = LossSpec.of(config)
    batch = learning_batch(samples(), config, spec)
    known = [*module.parameters(), *module.buffers()]
    if not is_first:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    with RealStorages([*known, *gradients]) as real:
        micro_batch_loss(model, batch, spec, MiniBatch.of(batch, spec))[0].backward()
    measured = real.peak + sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    counted = Counted(meta_model(dtype, **WIDE), config, "cpu", checkpoints=checkpoints)
    # Masks of sdpa, which bfloat16 takes on a CPU, are counted to some kilobytes.
    assert counted.update(samples(), is_first=is_first).fullest.total == pytest.approx(measured, rel=1e-3, abs=5_000)


def count(num_layers=2, num_tokens=512, device="cpu", **options):
    config = settings(dtype="bfloat16" if device == "cuda" else "float32")
    model = meta_model(
        torch.bfloat16 if device == "cuda" else torch.float32, **WIDE | {"num_hidden_layers": num_layers}
    )
    return Counted(model, config, device, **options).update(samples(num_tokens), is_first=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checkpoints": True},
        {"checkpoints": True, "offloads": True},
        {"sharding": ShardOptions(1, 2, torch.float32)},
    ],
)
def test_many_equal_layers_are_counted_on_few(options, monkeypatch):
    num_layers = activations.FEW_LAYERS + 3 + (activations.NUM_AHEAD if "offloads" in options else 0)
    quick = count(num_layers, 256, **options)
    monkeypatch.setattr(activations, "FEW_LAYERS", num_layers)
    whole = count(num_layers, 256, **options)
    assert (quick.fullest, quick.most_others) == (whole.fullest, whole.most_others)


def test_recomputed_and_offloaded_activations_take_less():
    plain, recomputed, offloaded = (
        count(4, 1024, "cuda", **o) for o in ({}, {"checkpoints": True}, {"offloads": True})
    )
    assert recomputed.fullest.others < plain.fullest.others
    assert offloaded.fullest.others < plain.fullest.others
    assert plain.host_bytes == recomputed.host_bytes == 0 < offloaded.host_bytes < plain.fullest.others


@pytest.mark.parametrize("syncs", [False, True])
def test_shards_gather_and_reduce_blocks(syncs):
    options = ShardOptions(1, 2, torch.float32, sync_every_micro_batch=syncs)
    model = meta_model(**WIDE)
    numel = sum(p.numel() for p in model.parameters())
    root = 500 * 64 + 64
    block = (numel - root) // 3
    counted = Counted(model, settings(num_ranks=2), "cpu", sharding=options)
    # At the end of the forward pass: embedding and head, and the buffer of the last block.
    most = counted.update(samples(2048), is_first=True).most_others
    assert (most.gathered, most.gradients) == ((root + block) * 4, 0)
    later = counted.update(samples(2048), is_first=False).most_others
    assert later.gradients == (numel // 2 if syncs else numel) * 4


def test_experts_are_counted_in_any_dtype():
    config = Qwen3MoeConfig(
        vocab_size=45, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=16,
    )  # fmt: skip
    recipe = ModelRecipe(StateSource({}), model_class=Qwen3MoeForCausalLM, config=config)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        counted = Counted(build_on_meta(recipe, dtype), settings(), "cpu", checkpoints=True)
        found.append(counted.update(samples(), is_first=True).fullest.others)
    assert found[1] < found[0] < 2.5 * found[1]


def test_adapted_experts_are_counted_as_in_a_real_pass():
    """peft folds adapters of experts into a copy of the weights in a block that asks for the weights' device type,
    which is "meta" here."""
    config, module = settings(**{"lora.r": 4}), build("qwen3-moe")
    with warnings.catch_warnings(action="ignore"):
        inject(module, peft_config_of(vars(config.lora)))
    counted = Counted(adapted(RunModels.of(build("qwen3-moe"), config).policy, config), config, "cpu")
    peak = peak_of_update(CausalLM(module), samples(), config)
    assert counted.update(samples(), is_first=True).fullest.total == pytest.approx(peak, rel=0.01)
    with pytest.raises(RuntimeError):  # outside of the plan torch refuses it as before
        torch.autocast("meta", enabled=False)


def test_fullest_row_is_filled_to_the_last_token():
    # Prompt 16 and 4 completions of 48 are 208 tokens: twice, then a prompt, one completion and 32 tokens of another.
    row = samples(512)
    assert row.num_tokens == 512 and row.completions == (48,) * 9 + (32,)
    assert row.groups == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2)
    apart = samples(512, is_packed=False)
    assert apart.completions == (48,) * 8 and len(set(apart.groups)) == 8
    assert len(samples(10_000, num_samples=5).prompts) == 5


def test_values_are_counted_to_a_thousandth():
    config = settings(algorithm="ppo", num_generations=1)
    torch.manual_seed(0)
    policy = Qwen2ForCausalLM(Qwen2Config(**(TINY | WIDE)))
    module = value_model_of(policy)
    rows = samples(num_generations=1)
    batch, model = learning_batch(rows, config, LossSpec.of(config)), CausalLM(module)
    mask = batch["completion_mask"].values
    with RealStorages([*module.parameters(), *module.buffers()]) as real:
        micro_batch_value_loss(model, batch, mask, 0.2, len(mask))[0].backward()
    critic = RunModels.of(policy, config).critic
    counted = Counted(critic, config, "cpu").update_values(rows, 0.2, is_first=True)
    assert counted.fullest.total == pytest.approx(real.peak, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "engine"),
    [("youtu", "inplace"), ("deepseek-v3", "inplace"), ("gpt2", "inplace"), ("llama", "hf"), ("mixtral", "hf")],
)
def test_passes_of_other_families_are_those_of_real_ones(family, engine):
    """Values of another width than keys; experts chosen with numbers in a buffer; a warning that reads tokens; and
    masks of the model's own."""
    config, packed = settings(engine=engine), engine == "inplace"
    module, rows = build(family), samples(is_packed=packed)
    peak = peak_of_update(CausalLM(module, "auto" if packed else UNPACKED), rows, config)
    counted = Counted(RunModels.of(module, config).policy, config, "cpu", is_packed=packed)
    assert counted.update(rows, is_first=True).fullest.total == pytest.approx(peak, rel=0.02)


def test_a_model_without_attention_has_no_pages():
    module = build_hybrid("mamba")
    config = settings()
    with pytest.raises(ModelError, match=r"MambaForCausalLM has no layer of attention .* rollout.engine=hf"):
        Counted(RunModels.of(module, config).policy, config, "cpu").layer_shapes()
