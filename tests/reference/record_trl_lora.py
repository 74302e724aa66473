"""Record what TRL's GRPOTrainer with a `peft_config` computes on the batch of `grpo_case.py`: loss, KL, the reference's
logprobs and the gradient of the adapters.

Run it with a Python that has TRL and peft (see README.md beside this file):

    python tests/reference/record_trl_lora.py            write trl_lora.json and trl_lora.safetensors
    python tests/reference/record_trl_lora.py --check    compare with the files, write nothing

As in record_trl_grpo.py TRL runs its own code from `training_step` downwards, its reference included, which is the
policy with the adapter switched off. The adapters have values by formula, so that all of them show.
"""

import argparse
import json
import tempfile
from typing import Any

import grpo_case as reference
import peft
import record_trl_grpo as plain
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import load_file, save
from trl import GRPOConfig, GRPOTrainer

BETA = 0.3
CASES: dict[str, dict[str, Any]] = {
    "all_linear": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
    "rslora": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"], "use_rslora": True}
    | {"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"down_proj": 7}},
    "dora": {"r": 3, "lora_alpha": 6, "target_modules": r".*\.(v_proj|gate_proj)", "use_dora": True},
    "norm_whole": {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["model.norm"]},
}


def adapted_logprobs(keys: dict[str, Any]) -> list[list[float]]:
    """Logprobs of an older policy, around those of the model with these adapters."""
    model = peft.get_peft_model(
        reference.build_model(torch.float64), peft.LoraConfig(**keys), autocast_adapter_dtype=False
    )
    reference.fill_adapters(model)
    with torch.no_grad():
        now = reference.sample_logprobs(model, reference.build_samples())
    return reference.perturbed_logprobs(now, "old")


def run_case(keys: dict[str, Any], folder: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The JSON entry, and the gradients by name."""
    samples = reference.build_samples()
    config = GRPOConfig(
        output_dir=folder + "/out",
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
        gradient_checkpointing=False,
        per_device_train_batch_size=len(samples),
        max_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **(plain.COMMON_OPTIONS | {"beta": BETA}),
    )

    def reward(index: list[int], **_: Any) -> list[float]:
        return [samples[i].reward for i in index]

    dataset = Dataset.from_list([{"prompt": "a"}])  # never read: the batch is given to training_step
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", **keys)
    trainer = GRPOTrainer(model=folder, reward_funcs=reward, args=config, train_dataset=dataset, peft_config=adapter)
    reference.fill_adapters(trainer.model)
    old = adapted_logprobs(keys)
    seen = plain.replace_inputs(trainer, plain.Case("lora"), {"old": old})
    batch = [
        {"prompt": "".join(plain.letter(token) for token in sample.prompt_ids), "index": index}
        for index, sample in enumerate(samples)
    ]
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer.training_step(trainer.model, batch, None).item()
    rows = seen["ref_per_token_logps"].tolist()
    entry = {
        "lora": keys,
        "old_logprobs": old,
        "ref_logprobs": [row[: len(sample.completion_ids)] for row, sample in zip(rows, samples, strict=True)],
        "loss": loss,
        "kl": trainer._metrics["train"]["kl"][0],
    }
    named = {name.removeprefix("base_model.model."): p for name, p in trainer.model.named_parameters()}
    return entry, {name: p.grad.clone() for name, p in named.items() if p.requires_grad}


def record() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Run everything. Returns the contents of the two files."""
    entries, gradients = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        reference.build_model().save_pretrained(folder)
        plain.build_tokenizer().save_pretrained(folder)
        for case, keys in CASES.items():
            entries[case], found = run_case(keys, folder)
            gradients |= {f"{case}/{name}": gradient for name, gradient in found.items()}
            print(f"{case:12s} loss {entries[case]['loss']:+.7f}  kl {entries[case]['kl']:.6f}  {len(found)} tensors")
    versions = {"trl": trl.__version__, "peft": peft.__version__, "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    options = plain.COMMON_OPTIONS | {"beta": BETA}
    return {"versions": versions, "options": options, "cases": entries}, gradients


def main() -> None:
    """Command line: record, or compare with what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the recorded files instead of writing them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    contents, gradients = record()
    if not arguments.check:
        reference.RECORDED_LORA.write_text(reference.as_json(contents))
        reference.RECORDED_LORA_GRADIENTS.write_bytes(save(gradients))
        return
    before, old = json.loads(reference.RECORDED_LORA.read_text()), load_file(reference.RECORDED_LORA_GRADIENTS)
    worst = max(abs(contents["cases"][case]["loss"] - before["cases"][case]["loss"]) for case in CASES)
    worst = max(worst, *(float((gradients[name] - old[name]).abs().max()) for name in old))
    print(f"largest difference from the recorded values: {worst:.2e}")
    if gradients.keys() != old.keys() or not worst <= plain.TOLERANCE:
        raise SystemExit(f"TRL now differs from the recorded values by {worst:.2e}, more than {plain.TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
