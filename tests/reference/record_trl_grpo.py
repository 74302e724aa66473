"""Record what TRL's GRPOTrainer computes on the batch of `grpo_case.py`: advantages, loss, gradient and metrics.

Run it with a Python that has TRL (see README.md beside this file):

    python tests/reference/record_trl_grpo.py            write trl_grpo.json and trl_grpo.safetensors
    python tests/reference/record_trl_grpo.py --check    compare with the files, write nothing

TRL runs its own code from `training_step` downwards: tokenisation, padding, masks, rewards, advantages, splitting into
micro-batches, loss and backward. Three places are replaced from outside: generation returns the fixed completions, the
shuffle before the split keeps the order, and old and reference logprobs are the perturbed ones where a case asks.
"""

import argparse
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import grpo_case as reference  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from safetensors.torch import load_file, save  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer import grpo_trainer as trl_module  # noqa: E402

COMMON_OPTIONS: dict[str, Any] = {
    "loss_type": "dapo",
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "mask_truncated_completions": False,
    "temperature": 1.0,
    "num_generations": reference.NUM_GENERATIONS,
    "max_completion_length": reference.MAX_COMPLETION_LENGTH,
}
# How far every ratio must stay from a clip limit, so that rounding cannot move a token across it.
CLIP_MARGIN = 1e-3
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Case:
    """One configuration. `old` and `ref` name entries of the recorded logprobs, or are None (TRL decides)."""

    name: str
    old: str | None = "old"
    ref: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
CASES = (
    Case("grpo_detach", old=None, options={"loss_type": "grpo"}),
    Case("dapo_detach", old=None),
    Case("grpo", options={"loss_type": "grpo"}),
    Case("dapo"),
    Case("dr_grpo_unscaled", options={"loss_type": "dr_grpo", "scale_rewards": "none"}),
    Case("bnpo_batch_scale", options={"loss_type": "bnpo", "scale_rewards": "batch"}),
    Case("grpo_sequence", options=GSPO),
    Case("dapo_sequence", options={"importance_sampling_level": "sequence"}),
    Case("dapo_delta", options={"delta": 1.4}),
    Case("dapo_kl", ref="ref", options={"beta": 0.04}),
    Case("dapo_kl_uncorrected", ref="ref", options={"beta": 0.04, "use_bias_correction_kl": False}),
    Case("grpo_kl", ref="ref", options={"loss_type": "grpo", "beta": 0.04}),
    Case("grpo_sequence_kl", ref="ref", options=GSPO | {"beta": 0.04}),
    Case("grpo_mask_truncated", options={"loss_type": "grpo", "mask_truncated_completions": True}),
    Case("dapo_mask_truncated", options={"mask_truncated_completions": True}),
    Case("dr_grpo_mask_truncated", options={"loss_type": "dr_grpo", "mask_truncated_completions": True}),
    Case("dapo_temperature", old="old_temperature_0.7", options={"temperature": 0.7}),
)


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One letter per token id, so that prompts survive TRL's own tokenisation unchanged."""
    vocab = {"<pad>": reference.PAD_ID, "<eos>": reference.EOS_ID}
    vocab.update({letter(token): token for token in range(2, reference.VOCAB_SIZE)})
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def letter(token: int) -> str:
    """The text of an ordinary token id."""
    return chr(ord("a") + token - 2)


def current_logprobs(temperature: float) -> list[torch.Tensor]:
    """The policy's own logprobs in float64, N rows [T_n]."""
    model = reference.build_model(torch.float64)
    with torch.no_grad():
        return reference.sample_logprobs(model, reference.build_samples(), temperature)


def build_logprobs() -> dict[str, list[list[float]]]:
    """The perturbed logprobs, by the name that the cases use."""
    plain = current_logprobs(1.0)
    return {
        "old": reference.perturbed_logprobs(plain, "old"),
        "ref": reference.perturbed_logprobs(plain, "ref"),
        "old_temperature_0.7": reference.perturbed_logprobs(current_logprobs(0.7), "old"),
    }


def check_ratios(case: Case, old: list[list[float]]) -> None:
    """Refuse a case that does not clip on both sides, or where a ratio is too near to a limit."""
    options = COMMON_OPTIONS | case.options
    limits = [1 - options["epsilon"], 1 + options["epsilon_high"]] + ([options["delta"]] if options["delta"] else [])
    log_ratios = [
        now - torch.tensor(before, dtype=torch.float64)
        for now, before in zip(current_logprobs(options["temperature"]), old, strict=True)
    ]
    if options["importance_sampling_level"] == "sequence":
        log_ratios = [row.mean(0, keepdim=True) for row in log_ratios]
    ratios = torch.cat(log_ratios).exp()
    margin = min((ratios - limit).abs().min().item() for limit in limits)
    if margin < CLIP_MARGIN:
        raise ValueError(f"{case.name}: a ratio lies {margin:.1e} from a clip limit; change the perturbation")
    if ratios.min() > limits[0] or ratios.max() < limits[-1]:
        raise ValueError(f"{case.name}: ratios {ratios.min():.3f}..{ratios.max():.3f} do not reach {limits}")


def build_trainer(case: Case, folder: str) -> GRPOTrainer:
    """A real GRPOTrainer on the model and tokenizer saved in `folder`."""
    samples = reference.build_samples()
    config = GRPOConfig(
        output_dir=os.path.join(folder, "out"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
        gradient_checkpointing=False,
        per_device_train_batch_size=len(samples),
        max_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **(COMMON_OPTIONS | case.options),
    )

    def reward(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        if completion_ids != [samples[i].completion_ids for i in index]:
            raise ValueError("TRL handed other completions to the reward than the ones of the case")
        return [samples[i].reward for i in index]

    dataset = Dataset.from_list([{"prompt": "a"}])  # never read: the batch is given to training_step
    trainer = GRPOTrainer(model=folder, reward_funcs=reward, args=config, train_dataset=dataset)
    weights = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    for name, parameter in reference.build_model().named_parameters():
        if not torch.equal(weights[name], parameter):
            raise ValueError(f"TRL loaded other weights for {name} than the formula gives")
    return trainer


def pad_rows(rows: list[list[float]], width: int) -> torch.Tensor:
    """Right-padded float32 [N, width]; padding is 0 as in TRL's own logprobs."""
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows])


def replace_inputs(trainer: GRPOTrainer, case: Case, logprobs: dict[str, list[list[float]]]) -> dict[str, torch.Tensor]:
    """Fix generation, order and perturbed logprobs. Returns a dict that receives TRL's own generation batch."""
    samples = reference.build_samples()
    seen: dict[str, torch.Tensor] = {}
    original = trainer._generate_and_score_completions

    def generate(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        if prompt_ids != [sample.prompt_ids for sample in samples]:
            raise ValueError("TRL tokenised other prompts than the ones of the case")
        return [sample.completion_ids for sample in samples], None

    def generate_and_score(inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        output: dict[str, torch.Tensor] = original(inputs)
        width = output["completion_ids"].size(1)
        if case.old is not None:
            output["old_per_token_logps"] = pad_rows(logprobs[case.old], width)
        elif ("old_per_token_logps" in output) != ("num_iterations" in case.options):
            raise ValueError(f"{case.name}: TRL computed old logprobs, or did not, against what the case expects")
        if case.ref is not None:
            output["ref_per_token_logps"] = pad_rows(logprobs[case.ref], width)
        seen.update(output)
        return output

    trainer._generate_single_turn = generate
    trainer._generate_and_score_completions = generate_and_score
    trl_module.shuffle_sequence_dict = lambda batch: batch
    return seen


def run_case(case: Case, folder: str, logprobs: dict[str, list[list[float]]]) -> tuple[dict[str, Any], torch.Tensor]:
    """One gradient. Returns the JSON entry and the gradient [num_parameters] in float32."""
    if case.old is not None:
        check_ratios(case, logprobs[case.old])
    trainer = build_trainer(case, folder)
    seen = replace_inputs(trainer, case, logprobs)
    batch = [
        {"prompt": "".join(letter(token) for token in sample.prompt_ids), "index": index}
        for index, sample in enumerate(reference.build_samples())
    ]
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer.training_step(trainer.model, batch, None).item()
    metrics = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
    metrics = {name: value for name, value in metrics.items() if name not in ("step_time", "num_tokens")}
    if not all(math.isfinite(value) for value in [loss, *metrics.values()]):
        raise ValueError(f"{case.name}: loss or metrics are not finite: {loss} {metrics}")
    entry = {
        "options": case.options,
        "old_logprobs": case.old,
        "ref_logprobs": case.ref,
        "advantages": seen["advantages"].tolist(),
        "num_items_in_batch": int(seen["num_items_in_batch"]),
        "loss": loss,
        "metrics": metrics,
    }
    return entry, reference.flatten_gradient(trainer.model)


def record() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Run everything. Returns the contents of the JSON file and of the safetensors file."""
    logprobs = build_logprobs()
    entries: dict[str, Any] = {}
    gradients: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        reference.build_model().save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        for case in CASES:
            entries[case.name], gradients[case.name] = run_case(case, folder, logprobs)
            norm = gradients[case.name].norm().item()
            print(f"{case.name:24s} loss {entries[case.name]['loss']:+.7f}  gradient norm {norm:.6f}")
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    contents = {
        "versions": versions,
        "common_options": COMMON_OPTIONS,
        "logprobs": logprobs,
        "cases": entries,
    }
    return contents, gradients


def largest_difference(contents: dict[str, Any], gradients: dict[str, torch.Tensor]) -> float:
    """The largest distance of advantages, losses and gradients from the files."""
    recorded = json.loads(reference.RECORDED_JSON.read_text())
    if recorded["logprobs"] != contents["logprobs"] or recorded["common_options"] != contents["common_options"]:
        raise ValueError("the recorded inputs differ from the ones of grpo_case.py; record again")
    worst = 0.0
    old_gradients = load_file(reference.RECORDED_GRADIENTS)
    for name, entry in contents["cases"].items():
        before = recorded["cases"][name]
        pairs = zip([*entry["advantages"], entry["loss"]], [*before["advantages"], before["loss"]], strict=True)
        worst = max(worst, *(abs(now - then) for now, then in pairs))
        worst = max(worst, (gradients[name] - old_gradients[name]).abs().max().item())
    return worst


def main() -> None:
    """Command line: record, or compare with what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the recorded files instead of writing them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    contents, gradients = record()
    if arguments.check:
        worst = largest_difference(contents, gradients)
        print(f"largest difference from the recorded values: {worst:.2e}")
        if not worst <= TOLERANCE:
            raise SystemExit(f"TRL now differs from the recorded values by {worst:.2e}, more than {TOLERANCE:.0e}")
        return
    reference.RECORDED_JSON.write_text(reference.as_json(contents))
    reference.RECORDED_GRADIENTS.write_bytes(save(gradients))


if __name__ == "__main__":
    main()
