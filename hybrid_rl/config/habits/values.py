"""Values from other libraries, and switches that are off here anyway."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Switches of other libraries that are off here unless another key is set: as False they need no advice.
OFF_ANYWAY = frozenset(
    {
        *("sync_ref_model", "use_vllm", "use_kl_loss", "use_kl_in_reward", "use_adaptive_entropy", "fp16"),
        *("use_liger_kernel", "use_transformers_paged", "rollout_is_batch_normalize"),
        *("vllm_importance_sampling_correction", "enable_vllm_is_correction", "rollout_is", "use_rollout_log_probs"),
        *("use_peft", "load_in_4bit", "load_in_8bit", "push_to_hub", "use_wandb", "use_tensorboard"),
        *("param_offload", "optimizer_offload", "adam_offload", "enable_gradient_checkpointing"),
        *("dynamic_filtering", "filter_groups", "resume_from_checkpoint"),
    }
)

_FLOAT16 = (
    "float16 is not supported: its gradients overflow and vanish without loss scaling; set dtype=bfloat16 or float32"
)
_CISPO = "set policy_loss=cispo (its bound epsilon_high counts from 1: 4 is a ratio of 5)"
_NAMED = (
    "name the residents, such as [optimizer,critic] (hybrid-rl plan shows those of a run), or leave it out: "
    "then what the run would not fit without goes"
)
_NEWEST = "set resume=auto, with run_name, for the newest checkpoint of that run, or give the folder of a checkpoint"

_TRACKERS = {
    "all": "name the trackers: tensorboard, wandb, trackio, mlflow",
    "csv": "leave it out: metrics.jsonl is always written, and pandas.read_json(path, lines=True) reads it",
    "console": "leave it out: the console is always there (log_level)",
    "swanlab": "use tensorboard, wandb, trackio or mlflow",
    "comet_ml": "use tensorboard, wandb, trackio or mlflow",
}

# Values from other libraries: (path, value) -> advice.
VALUE_HABITS: Mapping[tuple[str, object], str] = MappingProxyType(
    {
        ("algorithm.loss_type", "bnpo"): "with global denominators bnpo is loss_type=dapo",
        ("algorithm.loss_type", "luspo"): "set algorithm=luspo",
        ("algorithm.loss_type", "cispo"): _CISPO,
        ("algorithm.loss_type", "sapo"): "set policy_loss=sapo",
        ("algorithm.loss_type", "vespo"): "set policy_loss=vespo",
        **{("model.dtype", word): _FLOAT16 for word in ("float16", "fp16", "half")},
        **{(f"report_to[{n}]", word): advice for n in range(4) for word, advice in _TRACKERS.items()},
        **{("log_level", word): "set log_level=normal or quiet" for word in ("info", "warning", "error", "critical")},
        ("model.dtype", "bf16"): "set dtype=bfloat16",
        ("model.dtype", "fp32"): "set dtype=float32",
        ("model.device", "gpu"): "set device=cuda",
        ("model.device", "mps"): "GPUs are supported only through CUDA; set device=cpu",
        **{("resume", word): _NEWEST for word in (True, "latest", "last", "newest", "true", "True")},
        ("resume", False): "leave it out to begin a new run",
        **{(f"memory.offload{place}", "all"): _NAMED for place in ("", *(f"[{n}]" for n in range(8)))},
        ("num_ranks", "all"): "set num_ranks=auto, which takes all GPUs",
        **{
            ("model.device", f"cuda:{n}"): f"set device=cuda; CUDA_VISIBLE_DEVICES={n} chooses the GPU"
            for n in range(16)
        },
    }
)
