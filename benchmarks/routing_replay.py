"""The mismatch of engine and trainer in mixtures of experts, with and without replay of the engine's choices.

A random model generates in place, groups of eight completions over a prompt, with chunks of prompts and too little
cache for all, so that sequences make room and are computed again. The trainer then computes the same tokens as packed
rows. Prints one line of JSON per model: KL (k3) of the engine against the trainer per token, and how many choices
differ.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from hybrid_rl.batch import Jagged  # noqa: E402
from hybrid_rl.config.engine_keys import InPlaceArgs  # noqa: E402
from hybrid_rl.config.schema import InPlaceRolloutConfig  # noqa: E402
from hybrid_rl.engines.base import TAGS, FinishedSample, RolloutRequest, SamplingParams  # noqa: E402
from hybrid_rl.engines.engine_client import EngineClient  # noqa: E402
from hybrid_rl.engines.inplace.engine import InPlaceEngine  # noqa: E402
from hybrid_rl.models import CausalLM  # noqa: E402
from hybrid_rl.resharding.handoff.tensor import TensorSource  # noqa: E402

GROUP, PROMPT, BLOCK = 8, 24, 16
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 512, "bos_token_id": None}
SHAPE |= {"moe_intermediate_size": 32, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 64, "num_key_value_heads": 2, "head_dim": 16, "norm_topk_prob": True},
    "deepseek_v3": {"n_routed_experts": 64, **LATENT, **GROUPS},
}


def arguments() -> Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--layers", type=report.positive, default=6)
    parser.add_argument("--top-k", type=report.positive, default=4, help="experts of a token")
    parser.add_argument("--choices", type=report.positive, default=1_000_000, help="of tokens and layers, at least")
    parser.add_argument("--completion", type=report.positive, default=128)
    return parser.parse_args()


def main() -> None:
    """Measure every model."""
    options = arguments()
    for name in options.models:
        for threads in options.threads:
            torch.set_num_threads(threads)
            measure(name, options, threads)


def measure(name: str, options: Namespace, threads: int) -> None:
    """Generate, compute again, and print the line."""
    torch.manual_seed(options.seed)
    sizes = {**SHAPE, **MODELS[name], "num_hidden_layers": options.layers, "num_experts_per_tok": options.top_k}
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)  # of that of a start, so that experts differ in what they make of a token
    model = CausalLM(module.to(getattr(torch, options.dtype)))
    length = PROMPT + options.completion
    args = InPlaceArgs(max_num_batched_tokens=40, block_size=BLOCK)
    config = InPlaceRolloutConfig(max_num_seqs=64, engine_args=args)
    whole = InPlaceEngine(model, config, max_length=length)
    bytes_of_sequence = whole.kv_cache_bytes // whole.kv_cache_tokens * length
    whole.close()
    config = InPlaceRolloutConfig(max_num_seqs=64, engine_args=args, kv_cache_memory_bytes=24 * bytes_of_sequence)
    engine = InPlaceEngine(model, config, max_length=length, records_experts=True)
    engine.wake(TAGS)
    engine.update_weights(TensorSource.of(module), 1)
    client = EngineClient(engine)
    kl: dict[str, list[torch.Tensor]] = {"replayed": [], "free": []}
    num_choices = num_wrong = num_forced = num_changed = 0
    prompts = torch.Generator().manual_seed(options.seed)
    while num_choices < options.choices:
        requests = []
        for place in range(8 * GROUP):
            if place % GROUP == 0:
                prompt = tuple(torch.randint(2, SHAPE["vocab_size"], (PROMPT,), generator=prompts).tolist())
            params = SamplingParams(options.completion, seed=num_choices + place)
            requests.append(RolloutRequest(num_choices + place, prompt, params, group=num_choices + place // GROUP))
        samples = sorted(client.generate(requests, 1), key=lambda sample: sample.id)
        for start in range(0, len(samples), 2 * GROUP):
            part = slice(start, start + 2 * GROUP)
            recorded, wrong, gaps = compare(model, requests[part], samples[part])
            num_choices, num_wrong = num_choices + recorded, num_wrong + wrong
            for side, values in gaps.items():
                kl[side].append(values)
    num_forced, num_changed = model.choices.take_counts()
    means = {side: float(torch.cat(values).mean()) for side, values in kl.items()}
    report.print_line(
        f"routing_replay/{name}",
        ours=means["replayed"],
        peer=means["free"],
        ratio=means["free"] / max(means["replayed"], 1e-300),
        unit="KL per token",
        hardware=report.hardware(threads, {}),
        settings=report.settings(options),
        details={
            "choices": num_choices,
            "choices_that_differ": num_wrong,
            "share_that_the_router_would_change": num_changed / num_forced,
            "preemptions": engine.stats().num_preemptions,
            "shared_prompt_tokens": engine.stats().num_shared_prompt_tokens,
        },
    )


def compare(
    model: CausalLM, requests: list[RolloutRequest], samples: list[FinishedSample]
) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Return the choices that were recorded, those of them that the trainer made otherwise, and the KL of each
    token."""
    prompts = Jagged.from_rows([list(request.prompt_ids) for request in requests], torch.int64)
    completions = Jagged.from_rows([sample.completion_ids for sample in samples], torch.int64)
    experts = Jagged.from_rows([torch.from_numpy(sample.routed_experts) for sample in samples])
    engines = torch.tensor([logprob for sample in samples for logprob in sample.logprobs], dtype=torch.float64)
    gaps, wrong = {}, torch.zeros(())
    is_recorded = (experts.values >= 0).all(-1)
    for side, record in (("free", None), ("replayed", experts)):
        row = model.row_of(prompts, completions, record)
        with torch.no_grad():
            ratio = model.row_logprobs(row, 1.0)[0].double() - engines
        gaps[side] = ratio.exp() - 1 - ratio
    used = row.of_samples(model.chosen_experts, experts.lengths.tolist(), -1)
    wrong = (used.sort().values != experts.values.long().sort().values).any(-1) & is_recorded
    return int(is_recorded.sum()), int(wrong.sum()), gaps


if __name__ == "__main__":
    main()
