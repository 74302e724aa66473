"""What the contract tests know of an engine: how to make one. A new engine joins by one line in FACTORIES."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hybrid_rl.engines.base import TAGS, Beginning, FinishedSample, RolloutRequest, SamplingParams
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.engines.guards import RolloutEngine
from hybrid_rl.engines.hf.hf_engine import HFEngine
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.base import HandoffReport
from hybrid_rl.resharding.handoff.tensor import TensorSource
from tests.support.engines.engine_settings import hf_settings, inplace_settings
from tests.unit.models.families import VOCABULARY, build


@dataclass
class Rig:
    """An engine beside the trainer's model whose weights it gets. remembers_prefixes: it finds prompts that begin alike
    in its cache, from blocks of 4 tokens on. counts_shared: it tells what the members of a group share; else the prompt
    counts as computed by each of them."""

    engine: RolloutEngine
    module: Any
    remembers_prefixes: bool = True
    counts_shared: bool = True

    def publish(self, version: int) -> HandoffReport:
        return self.engine.update_weights(TensorSource.of(self.module), version)

    def ready(self, version: int = 1) -> Rig:
        self.engine.wake(TAGS)
        self.publish(version)
        return self

    def run(self, requests: list[RolloutRequest], version: int = 1) -> list[FinishedSample]:
        return EngineClient(self.engine).generate(requests, version)

    def perturb(self) -> None:
        """An optimizer step: every weight moves, in place."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))


def inplace(
    family: str = "qwen2", *, dtype: torch.dtype = torch.float32, num_layers: int | None = None, **settings: Any
) -> Rig:
    """Blocks of 4 tokens: more of them, and attention in PyTorch. num_layers: None = as many as the family has here."""
    module = build(family, dtype=dtype, **({} if num_layers is None else {"num_hidden_layers": num_layers}))
    config = inplace_settings(**{"block_size": 4, "max_num_seqs": 16, **settings})
    engine = InPlaceEngine(CausalLM(module), config, max_length=48, decode=decode)
    return Rig(engine, module)


def inplace_compiled(family: str = "qwen2", **settings: Any) -> Rig:
    """Blocks of 16 tokens, which the compiled attention needs."""
    return inplace(family, **{"block_size": 16, **settings})


def hf(family: str = "qwen2", *, dtype: torch.dtype = torch.float32, block_size: int = 4, **settings: Any) -> Rig:
    """Through the module's own forward; its cache has no blocks. Memory is given in tokens of the in-place rig."""
    module = build(family, dtype=dtype)
    if "kv_cache_memory_bytes" in settings:
        settings["kv_cache_memory_bytes"] = settings["kv_cache_memory_bytes"] // TOKEN_BYTES * (2 * 2 * (8 + 8) * 4)
    settings.pop("enable_prefix_caching", None)
    config = hf_settings(**{"max_num_seqs": 16, **settings})
    engine = HFEngine(CausalLM(module, "unpacked"), config, max_length=48, decode=decode)
    return Rig(engine, module, remembers_prefixes=False)


def decode(token_ids: Sequence[int]) -> str:
    """The text of token ids: a letter per token, in turn."""
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


# Bytes of a token of the qwen2 rig in the cache: layers, key heads, dims of key and padded value, fp32.
TOKEN_BYTES = 2 * 2 * (8 + 16) * 4

IN_PLACE: dict[str, Callable[..., Rig]] = {"inplace": inplace, "inplace compiled": inplace_compiled}
FACTORIES = IN_PLACE | {"hf": hf}

# (prompt length, most tokens): ragged, and around the block sizes 1, 4 and 16.
SHAPES = [(1, 5), (4, 9), (5, 1), (8, 4), (16, 7), (17, 12), (3, 16)]


def prompt(length: int, start: int = 2) -> tuple[int, ...]:
    return tuple((start + 7 * i) % (VOCABULARY - 2) + 2 for i in range(length))


def request(
    identity: int, length: int = 4, max_tokens: int = 6, *, group: int | None = None, **params
) -> RolloutRequest:
    params = {"seed": 100 + identity, **params}
    return RolloutRequest(identity, prompt(length), SamplingParams(max_tokens, **params), group)


def mixed_requests() -> list[RolloutRequest]:
    """Groups of three over all shapes, and a greedy and a truncated sample among them."""
    requests = [
        request(3 * number + member, length, max_tokens, group=number)
        for number, (length, max_tokens) in enumerate(SHAPES)
        for member in range(3)
    ]
    return [
        *requests,
        request(90, 6, 8, temperature=0.0),
        request(91, 6, 8, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
    ]


def break_off(rig: Rig, requests: list[RolloutRequest]) -> list[RolloutRequest]:
    """End these requests, of which none has finished; those that go on where they were."""
    rig.engine.abort([sent.id for sent in requests])
    made = {event.id: event for event in rig.engine.step()}
    assert {event.finish_reason for event in made.values()} == {"abort"}
    columns = {
        identity: (tuple(event.completion_ids), tuple(event.logprobs), tuple(event.versions))
        for identity, event in made.items()
    }
    return [replace(sent, begun=Beginning(*columns[sent.id])) for sent in requests]


def finish(engine: RolloutEngine, limit: int = 500) -> list[FinishedSample]:
    """Step until nothing is unfinished; the samples by id."""
    events: list[FinishedSample] = []
    for _ in range(limit):
        if not engine.num_unfinished:
            return sorted(events, key=lambda event: event.id)
        events += engine.step()
    raise AssertionError(f"{engine.num_unfinished} requests are unfinished after {limit} steps")


def same_samples(mine: list[FinishedSample], theirs: list[FinishedSample]) -> None:
    """Equal but for the last bits of the logprobs, which depend on the shape of a matrix product."""
    for left, right in zip(mine, theirs, strict=True):
        assert (left.id, left.completion_ids, left.finish_reason) == (
            right.id,
            right.completion_ids,
            right.finish_reason,
        )
        torch.testing.assert_close(torch.tensor(left.logprobs), torch.tensor(right.logprobs), rtol=1e-5, atol=1e-5)


def forward_logprobs(
    module: PreTrainedModel, sent: RolloutRequest, sample: FinishedSample, temperature: float = 1.0
) -> torch.Tensor:
    """ln p of a sample's tokens by one plain forward over the whole sequence."""
    token_ids = torch.tensor([*sent.prompt_ids, *sample.completion_ids])
    with torch.no_grad():
        logits = module(input_ids=token_ids[None], use_cache=False).logits[0]
    first = len(sent.prompt_ids)
    log_p = (logits[first - 1 : -1] / temperature).log_softmax(1)
    return log_p.gather(1, token_ids[first:, None])[:, 0]
