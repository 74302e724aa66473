"""A whole training step of every supported architecture against a plain forward and a loss written out."""

import copy

import pytest
import torch
import transformers

from tests.support.tiny import build_tokenizer
from tests.unit.models.families import FAMILIES, MIXTURES, VISION, build, build_vision

TEMPERATURE = 1.3


def plain_gradient_norm(model: torch.nn.Module, batch) -> float:
    """Norm of the gradient of GRPO's loss at ratio 1: -mean over all tokens of advantage * ln p, sample by sample."""
    num_tokens = batch["completion_ids"].values.numel()
    for prompt, completion, advantage in zip(
        batch["prompt_ids"], batch["completion_ids"], batch["advantages"], strict=True
    ):
        logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0] / TEMPERATURE
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, completion[:, None])[:, 0]
        (-(advantage * logprobs).sum() / num_tokens).backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(torch.cat(gradients).norm())


def step(make_trainer, model, *, rel: float, plain=None, **keys) -> dict[str, float]:
    """The metrics of a step, whose gradient must be that of the model's own forward, or of another plain model. A
    load-balancing loss, if there is one, has separate tests."""
    before = copy.deepcopy(model) if plain is None else plain
    batch, metrics = make_trainer(model, temperature=TEMPERATURE, router_aux_loss_coef=0.0, **keys).step()
    assert metrics["grad_norm"] > 1e-3 and metrics["skipped_updates"] == 0
    assert metrics["grad_norm"] == pytest.approx(plain_gradient_norm(before, batch), rel=rel)
    return metrics


def often(names, *always):
    """The names as cases of a matrix: those of `always` in every run of the tests, the others in the long one."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.sweep) for name in names]


# Plain, with windows, with a soft cap, with learned positions, with a scale, with biases; tests/unit/models/ has all.
KINDS = ("qwen2", "mistral", "gemma2", "gpt2", "cohere", "phi")


@pytest.mark.parametrize("name", often(FAMILIES, *KINDS, *MIXTURES))
def test_a_step_has_the_gradient_of_the_plain_model(name: str, make_trainer) -> None:
    metrics = step(make_trainer, build(name), rel=1e-4, tokens_per_micro_batch=40, max_completion_length=9)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4  # engine and trainer, both fp32


@pytest.mark.parametrize("name", often(FAMILIES, *MIXTURES))
def test_a_step_in_bfloat16_is_near_the_one_in_float32(name: str, make_trainer) -> None:
    """As near as 8 bits are; of experts, which are chosen otherwise by rounding, the engine and the trainer agree."""
    metrics = step(make_trainer, build(name, dtype=torch.bfloat16), rel=0.3, plain=build(name))
    assert metrics["sampling/sampling_logp_difference/mean"] < 0.05


@pytest.mark.parametrize("name", often(VISION, "qwen2.5-vl"))
def test_a_vision_language_model_learns_text_from_its_folder_and_from_its_checkpoint(
    name: str, make_trainer, tmp_path
) -> None:
    """On text: the tower stays as it was."""
    module = build_vision(name)
    module.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    before = {key: value.clone() for key, value in module.state_dict().items()}
    trainer = make_trainer(str(tmp_path / "model"), max_steps=1, save_steps=1)
    trainer.fit()
    saved = trainer.run_folder / "checkpoint-1"
    again = make_trainer(str(saved), max_steps=1)
    _, metrics = again.step()
    assert metrics["grad_norm"] > 0 and metrics["sampling/sampling_logp_difference/max"] < 1e-4
    trained = dict(transformers.AutoModelForImageTextToText.from_pretrained(saved).state_dict())
    changed = {key for key, value in trained.items() if not torch.equal(value, before[key])}
    assert changed and not any("visual" in key or "vision" in key or "projector" in key for key in changed)
    resumed = make_trainer(str(tmp_path / "model"), max_steps=2, resume=str(saved))
    resumed.fit()
