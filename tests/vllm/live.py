"""vLLM itself, built with our loader and nothing else of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams

from hybrid_rl.resharding.trace import Trace
from hybrid_rl.vllm.build_engine import tear_down
from hybrid_rl.vllm.loader import LOAD_FORMAT, LOADING, LoadedWeights, Loading
from hybrid_rl.vllm.process_state import process_kept
from hybrid_rl.weights.views import checkpoint_views

PROMPT = list(range(3, 20))
QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}


class Live:
    """vLLM and the model whose weights it takes."""

    def __init__(self, module: PreTrainedModel, folder: Path, quantization: str | None) -> None:
        self.module, self.views = module, checkpoint_views(module)
        module.config.architectures = [type(module).__name__]
        module.config.save_pretrained(folder)
        loading = Loading(self.views)
        with process_kept(QUIET):
            self.llm = LLM(
                str(folder),
                skip_tokenizer_init=True,
                dtype="float32",
                load_format=LOAD_FORMAT,
                model_loader_extra_config={LOADING: loading},
                quantization=quantization,
                enforce_eager=True,
                max_model_len=64,
                kv_cache_memory_bytes=2**24,
            )
        assert loading.weights is not None
        self.weights: LoadedWeights = loading.weights

    def close(self) -> None:
        """vLLM 0.25.1 leaves its process groups, in which a later engine of the process would then live."""
        with process_kept():
            tear_down(self.llm.llm_engine, with_all_groups=True)

    def write(self) -> None:
        """The handoff as its definition says it: copy by copy."""
        write_by(self.weights.trace, dict(self.module.state_dict()), self.weights.destinations)
        self.llm.reset_prefix_cache()

    @torch.no_grad()
    def gap(self) -> float:
        """The largest difference of logprobs, of a prompt and of what vLLM generates after it."""
        settings = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0, logprobs=0, detokenize=False)
        with torch.compiler.set_stance("force_eager"):  # vLLM compiles how it ranks logprobs, which takes ten seconds
            [output] = self.llm.generate([{"prompt_token_ids": PROMPT}], settings, use_tqdm=False)
        generated = output.outputs[0]
        tokens = PROMPT + list(generated.token_ids)
        logprobs = torch.log_softmax(self.module(torch.tensor([tokens])).logits[0].double(), -1)
        wanted = [float(logprobs[i - 1, token]) for i, token in enumerate(tokens) if i > 0]
        rows: list[Any] = [*output.prompt_logprobs[1:], *generated.logprobs]
        found = [row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)]
        return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


def randomise(module: PreTrainedModel, scale: float) -> None:
    """Change every weight, so far that logprobs notice it."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


def write_by(trace: Trace, values: dict[str, torch.Tensor], destinations: list[torch.Tensor]) -> None:
    """Carry out a trace from whole tensors."""
    copies = trace.copies
    for i in range(len(copies)):
        source = values[trace.sources[copies.source[i]].name]
        bounds = zip(copies.low[i, : source.dim()], copies.high[i, : source.dim()], strict=True)
        box = source[tuple(slice(int(low), int(high)) for low, high in bounds)]
        target = destinations[int(copies.destination[i])]
        strides = copies.strides[i, : source.dim()].tolist()
        target.as_strided(box.shape, strides, target.storage_offset() + int(copies.offset[i])).copy_(box)
    trace.fill(destinations)
