"""vLLM's side of a comparison of rollouts; started by peers.py if vllm is installed."""

from __future__ import annotations

import os

# Read by vllm when it is imported: everything in this process, threads left to the operating system, 1 GiB of cache.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from benchmarks.side import Driver, Job  # noqa: E402
from benchmarks.workload import EOS_ID, MAX_POSITIONS  # noqa: E402


def main() -> None:
    """Generate, one rollout per command."""
    driver = Driver()
    job = Job.of(driver.receive())
    work = job.work
    engine = LLM(
        model=job.folder,
        dtype="float32",
        seed=job.seed,
        max_model_len=MAX_POSITIONS,
        max_num_seqs=256,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(
        n=work.num_generations,
        temperature=1.0,
        max_tokens=work.max_completion_length,
        stop_token_ids=[EOS_ID],
        detokenize=False,
    )
    driver.send(versions={"vllm": vllm.__version__})
    while True:
        prompts = [{"prompt_token_ids": ids} for ids in driver.receive()["prompts"]]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        driver.send(lengths=[len(sample.token_ids) for output in outputs for sample in output.outputs])


if __name__ == "__main__":
    main()
