"""model.exact: the logprobs of the engine are those of the trainer, and those of the engine at any batch size."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Jagged
from hybrid_rl.compat import native
from hybrid_rl.engines.base import FinishedSample, RolloutRequest, SamplingParams
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.errors import BrokenModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.exact import missing_operators
from tests.support.engines.engine_settings import inplace_settings
from tests.unit.engines.engines import Rig
from tests.unit.models.families import FAMILIES, VOCABULARY, build

pytestmark = pytest.mark.skipif(not native.is_available() or bool(missing_operators()), reason="extension not built")
SHORT = [("qwen2", torch.float32), ("gemma2", torch.bfloat16), ("qwen3-moe", torch.float32)]
LONGEST = 48
# Waves of few sequences, drafts, chunks of prompts, and a cache so small that sequences wait and are computed again.
SETTINGS: list[dict[str, Any]] = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 5, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    {"max_num_seqs": 16, "speculation": "on"},
]


def requests(chance: random.Random, num_groups: int) -> list[RolloutRequest]:
    """Groups of three, some of whose prompts begin like the one before."""
    made: list[RolloutRequest] = []
    for group in range(num_groups):
        prompt = tuple(chance.randrange(2, VOCABULARY) for _ in range(chance.randint(1, 22)))
        if group % 3 == 1:
            prompt = made[-1].prompt_ids[:16] + prompt[:8]
        for _ in range(3):
            params = SamplingParams(chance.randint(1, 18), seed=len(made), temperature=0.7)
            made.append(RolloutRequest(len(made), prompt, params, group))
    return made


def generated(model: CausalLM, sent: list[RolloutRequest], **settings: Any) -> list[FinishedSample]:
    config = inplace_settings(**{"block_size": 16, "max_num_seqs": 16, **settings})
    rig = Rig(InPlaceEngine(model, config, max_length=LONGEST), model.module).ready()
    return sorted(rig.run(sent), key=lambda sample: sample.id)


def scored(model: CausalLM, sent: list[RolloutRequest], samples: list[FinishedSample]) -> list[float]:
    """The trainer's logprobs of samples in one row."""
    prompts, completions = (
        Jagged.from_rows([list(tokens) for tokens in rows], torch.int64)
        for rows in ([request.prompt_ids for request in sent], [sample.completion_ids for sample in samples])
    )
    row = model.row_of(prompts, completions)
    logprobs: list[float] = model.row_logprobs(row, 0.7)[0].tolist()
    return logprobs


def check(model: CausalLM, chance: random.Random, num_groups: int, settings: list[dict[str, Any]]) -> int:
    """Compare the bits of engine, engine with other settings, and trainer; return the number of samples."""
    sent = requests(chance, num_groups)
    samples = generated(model, sent)
    columns = [(sample.completion_ids, sample.logprobs) for sample in samples]
    for each in settings:
        again = generated(model, chance.sample(sent, len(sent)), **each)
        assert [(sample.completion_ids, sample.logprobs) for sample in again] == columns, each
    order = chance.sample(range(len(sent)), len(sent))
    for places in (range(len(sent)), order, *([place] for place in order[:4])):
        mine = [samples[place] for place in places]
        expected = [logprob for sample in mine for logprob in sample.logprobs]
        assert scored(model, [sent[place] for place in places], mine) == expected
    return len(sent)


@pytest.mark.parametrize(("family", "dtype"), SHORT)
def test_engine_and_trainer_are_equal_to_the_bit(family: str, dtype: torch.dtype) -> None:
    model = CausalLM(build(family, dtype=dtype), exact=True)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.5)
    check(model, random.Random(1), 4, SETTINGS)


def test_a_small_cache_changes_nothing() -> None:
    """Sequences that outgrow it wait, and are computed again in other chunks."""
    model = CausalLM(build("qwen2"), exact=True)
    sent = [RolloutRequest(i, (3, 5 + i), SamplingParams(40, seed=i, temperature=0.7), i) for i in range(6)]
    bytes_of_block = 16 * 2 * 2 * 16 * 4 * 2
    small = generated(model, sent, kv_cache_memory_bytes=7 * bytes_of_block)
    assert [sample.logprobs for sample in small] == [sample.logprobs for sample in generated(model, sent)]


def test_truncated_requests_change_nothing_of_the_others() -> None:
    """What is cut off is a matter of a request: the others get the tokens and logprobs that they get alone."""
    model = CausalLM(build("qwen2"), exact=True)
    plain = [RolloutRequest(i, (3, 5 + i), SamplingParams(20, seed=i, temperature=0.7), i) for i in range(6)]
    plain[5] = replace(plain[5], params=replace(plain[5].params, temperature=0.0))
    cut = [
        RolloutRequest(6 + i, (3, 5 + i), SamplingParams(20, seed=i, temperature=0.7, **keys), 6 + i)
        for i, keys in enumerate([{"top_p": 0.9}, {"top_k": 5}])
    ]
    alone = [(sample.completion_ids, sample.logprobs) for sample in generated(model, plain)]
    together = generated(model, [*plain, *cut])
    assert [(sample.completion_ids, sample.logprobs) for sample in together[:6]] == alone
    assert [logprob for _, row in alone[:5] for logprob in row] == scored(model, plain[:5], together[:5])
    # What was cut off belongs to the rest: the tokens that are left have higher logprobs than without.
    for sample, request in zip(together[6:], cut, strict=True):
        own = scored(model, [request], [sample])
        assert all(a > b - 1e-5 for a, b in zip(sample.logprobs, own, strict=True)) and sum(sample.logprobs) > sum(own)


def test_logits_that_are_no_distribution_are_found() -> None:
    model = CausalLM(build("qwen2", tie_word_embeddings=False), exact=True)
    with torch.no_grad():
        model.head.weight[7] = torch.nan
    with pytest.raises(BrokenModelError, match="logits are not finite in 1 of 1 rows"):
        generated(model, [RolloutRequest(0, (3, 5), SamplingParams(4), 0)])


def test_without_it_they_are_not() -> None:
    with pytest.raises(AssertionError):
        check(CausalLM(build("qwen2")), random.Random(1), 4, SETTINGS[:1])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_equal_to_the_bit(family: str, dtype: torch.dtype) -> None:
    check(CausalLM(build(family, dtype=dtype), exact=True), random.Random(2), 9, SETTINGS)


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "dtype"), [*SHORT, ("deepseek-v3", torch.bfloat16)])
def test_ten_thousand_samples_are_equal_to_the_bit(family: str, dtype: torch.dtype) -> None:
    """In random batches, orders, chunks and caches."""
    model, chance, num_samples = CausalLM(build(family, dtype=dtype), exact=True), random.Random(3), 0
    while num_samples < 2500:
        settings = {
            "max_num_seqs": chance.randint(1, 40),
            "max_num_batched_tokens": chance.randint(1, 200),
            "enable_prefix_caching": chance.random() < 0.5,
            "speculation": chance.choice(["off", "on"]),
            "kv_cache_memory_bytes": chance.randint(8, 200) * 16 * 1024,
        }
        num_samples += check(model, chance, chance.randint(2, 40), [settings])
