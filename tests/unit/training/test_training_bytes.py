"""Bytes of training state per parameter, and their sum for a published model."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_rl.config import OptimizerConfig
from hybrid_rl.training.optimizer import Optimizer


def test_bf16_training_takes_18_bytes_per_parameter() -> None:
    """Parameter 2, fp32 master 4, Adam 8, and while an update is under way its gradient, 4 in float32. (16 would be
    with a bfloat16 gradient, which loses small micro-batches.)"""
    module = torch.nn.Linear(300, 100, bias=False, dtype=torch.bfloat16)
    optimizer = Optimizer(module, OptimizerConfig(), num_optimizer_steps=1)
    count = module.weight.numel()
    assert optimizer.num_bytes == count * (4 + 8) + 4  # and one step counter
    module(torch.ones(1, 300, dtype=torch.bfloat16)).sum().backward()
    optimizer.accumulate()
    (gradient,) = optimizer.gradients()
    assert gradient.element_size() == 4 and module.weight.grad is None
    assert module.weight.element_size() * count + optimizer.num_bytes - 4 + gradient.nbytes == 18 * count


def test_qwen_7b() -> None:
    """7.6156e9 parameters: 15.23 GB of weights in bf16, 121.8 GB at 16 bytes."""
    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Qwen2ForCausalLM(config).parameters())
    assert round(count / 1e9, 4) == 7.6156
    assert round(2 * count / 1e9, 2) == 15.23 and round(16 * count / 1e9, 1) == 121.8
