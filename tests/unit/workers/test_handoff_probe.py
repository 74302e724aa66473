"""The probe of a handoff: the trainer's half by a plain forward, and what is compared with it."""

import math

import pytest
import torch

from hybrid_rl.config import load_config, resolve
from hybrid_rl.engines.base import FinishedSample
from hybrid_rl.errors import HandoffError
from hybrid_rl.models import CausalLM
from hybrid_rl.workers.handoff_probe import NOISE_FACTOR, PROBE_TOLERANCE, HandoffProbe
from tests.support.libraries.torch_names import forward_hooks
from tests.support.tiny import build_model, ids_of

PROMPT = tuple(ids_of("1+2="))


def probe_of(**keys) -> HandoffProbe:
    return HandoffProbe(PROMPT, resolve(*load_config({"num_generations": 2} | keys)), torch.float32)


def answer(tokens: list[int], logprobs: list[float]) -> FinishedSample:
    return FinishedSample(-1, tokens, logprobs, [0] * len(tokens), "length")


def test_the_trainers_half_is_a_greedy_continuation() -> None:
    module = build_model()
    (rows,) = probe_of(max_completion_length=3).expected(CausalLM(module))  # one pass in fp32
    tokens, expected = [*PROMPT], []
    for _ in range(3):
        with torch.no_grad():
            expected.append(module(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1))
        tokens.append(int(expected[-1].argmax()))
    torch.testing.assert_close(rows, torch.stack(expected), rtol=0, atol=1e-5)
    assert probe_of().expected(CausalLM(module)).shape[:2] == (1, 4)


def test_tokens_count_up_to_the_first_that_the_trainer_would_not_have_chosen() -> None:
    rows = torch.tensor([[[-0.5, -1.5], [-2.0, -0.25], [-0.75, -1.0]]])
    probe = probe_of(handoff={"probe_tolerance": 0.2})
    assert probe.compare(rows, answer([0, 1, 0], [-0.5, -0.375, -0.75]), 1, None) == 0.125
    # The second token is another one: its own logprob still counts, what follows does not.
    assert probe.compare(rows, answer([0, 0, 0], [-0.5, -2.0625, -9.0]), 1, None) == 0.0625
    with pytest.raises(HandoffError, match="policy version 3: engine and trainer differ by 0.5 in the logprobs"):
        probe.compare(rows, answer([0, 0], [-0.5, -2.5]), 3, None)
    for gaps in ([math.nan, -0.25], [-0.5, math.nan]):
        with pytest.raises(HandoffError, match="not finite"):
            probe.compare(rows, answer([0, 1], gaps), 1, None)


def bf16_probe(**keys) -> HandoffProbe:
    return HandoffProbe(PROMPT, resolve(*load_config({"num_generations": 2} | keys)), torch.bfloat16)


def test_in_16_bits_the_trainers_half_shows_what_one_rounding_does() -> None:
    module = build_model().bfloat16()
    rows, moved = bf16_probe().expected(CausalLM(module))
    assert rows.shape == moved.shape == (4, module.config.vocab_size)
    assert 0 < (rows - moved).abs().max() < 0.1
    assert not forward_hooks(module.get_input_embeddings())
    again = bf16_probe().expected(CausalLM(module))
    assert torch.equal(again[1], moved)  # on every rank the same


def test_the_tolerance_in_16_bits_is_that_of_the_models_own_noise() -> None:
    """Two tokens whose logprobs one rounding moves by 0.1 and not at all: 0.1 / sqrt(2) on the average of squares."""
    rows = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    expected = torch.stack([rows, rows + torch.tensor([[0.1], [0.0]])])
    limit = NOISE_FACTOR * 0.1 / math.sqrt(2)
    assert limit > PROBE_TOLERANCE[torch.bfloat16]
    gap = bf16_probe().compare(expected, answer([0, 0], [-1.0, -1.0 - limit + 0.01]), 1, None)
    assert gap == pytest.approx(limit - 0.01)
    with pytest.raises(HandoffError, match="in the logprobs of the probe prompt"):
        bf16_probe().compare(expected, answer([0, 0], [-1.0, -1.0 - limit - 0.01]), 1, None)
    with pytest.raises(HandoffError, match="tolerance 0.25"):
        bf16_probe().compare(rows[None].expand(2, -1, -1), answer([0], [-1.3]), 1, None)
    with pytest.raises(HandoffError, match="tolerance 0.1"):
        bf16_probe(handoff={"probe_tolerance": 0.1}).compare(expected, answer([0], [-1.2]), 1, None)
