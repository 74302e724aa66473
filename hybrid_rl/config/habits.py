"""Names that users know from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_UPPER = "set correction_cap (of correction=tis) or correction_high (of correction=mis)"
_NO_SERVER = "there is no server: rollout.engine=vllm runs in the trainer's processes"

# What users type by habit from elsewhere, and what to do about it here. Leaf name -> advice.
HABITS: Mapping[str, str] = MappingProxyType(
    {
        "per_device_train_batch_size": "sizes are global here: set prompts_per_step (prompts, not completions) and "
        "tokens_per_micro_batch",
        "gradient_accumulation_steps": "micro-batches are cut by tokens_per_micro_batch and never change the gradient",
        "steps_per_generation": "set prompts_per_mini_batch (optimizer steps per batch) or num_iterations",
        "generation_batch_size": "set prompts_per_step, in prompts",
        "train_batch_size": "set prompts_per_step, in prompts",
        "ppo_mini_batch_size": "set prompts_per_mini_batch, in prompts",
        "ppo_epochs": "set num_iterations",
        "n": "set num_generations",
        "n_samples_per_prompt": "set num_generations",
        "max_response_length": "set max_completion_length",
        "max_new_tokens": "set max_completion_length",
        "num_epochs": "set num_train_epochs",
        "total_epochs": "set num_train_epochs",
        "lr": "set learning_rate",
        "batch_size": "set prompts_per_step, in prompts",
        "processing_class": "pass tokenizer=",
        "args": "pass config= (a YAML file, a mapping or a TrainerConfig) or keywords",
        "reward_func": "pass functions as the second argument",
        "ref_model": "the reference is the model as it was before training; set beta > 0",
        "model_init_kwargs": "pass a module with tokenizer=, or set model.dtype and the other keys of model",
        "device_map": "set device=cuda or cpu; with several ranks each has a GPU of its own",
        "torch_dtype": "set dtype=bfloat16 or float32",
        "fp16": "float16 is not supported; set dtype=bfloat16 or float32",
        "stop": "set stop_strings (texts) or stop_token_ids",
        "adv_estimator": "set advantage",
        "loss_mode": "set policy_loss",
        "cliprange": "set epsilon (and epsilon_high)",
        "kl_ctrl": "set kl_target and kl_horizon for a weight that follows the measured KL",
        "vllm_importance_sampling_correction": "set correction: tis, mis, icepop, kl_rejection or none",
        "vllm_importance_sampling_mode": "set correction: tis truncates, mis leaves out; correction_level is token or "
        "sequence",
        "vllm_importance_sampling_cap": _UPPER,
        "vllm_importance_sampling_clip_max": _UPPER,
        "vllm_importance_sampling_clip_min": "set correction_floor (of correction=tis) or correction_low "
        "(of mis and icepop)",
        "rollout_is": "set correction=tis with correction_level and correction_cap",
        "rollout_is_threshold": _UPPER,
        "rollout_is_batch_normalize": "weights of a correction are not normalised",
        "rollout_rs": "set correction=kl_rejection with correction_threshold",
        "rollout_rs_threshold": "set correction_threshold (of correction=kl_rejection) or correction_high (of mis)",
        "rollout_token_veto_threshold": "set correction_veto",
        "tis_imp_ratio_cap": "set correction=tis with correction_cap",
        "use_adaptive_entropy": "set entropy_target",
        "sync_ref_model": "set ref_model_sync_steps, with ref_model_mixup_alpha",
        "cast_lm_head_to_fp32": "not offered: the head has the dtype of the model; logits and logprobs are float32",
        "disable_dropout": "dropout is off always: ratios need the same network twice",
        "shuffle_dataset": "set shuffle",
        "max_prompt_len": "set max_prompt_length",
        "vllm_max_model_length": "it follows from the data; set max_prompt_length and max_completion_length",
        "vllm_enable_sleep_mode": "vLLM sleeps while the policy trains; nothing need be set",
        "vllm_server_base_url": _NO_SERVER,
        "vllm_server_host": _NO_SERVER,
        "vllm_server_port": _NO_SERVER,
        "use_transformers_paged": "the in-place engine has a paged cache of its own",
        "use_liger_kernel": "logprobs are computed without holding all logits; nothing need be set",
        "log_unique_prompts": "set log_completions, a number",
        "num_completions_to_print": "set log_completions, a number",
        "remove_unused_columns": "rewards get every column of the data",
        "ds3_gather_for_generation": "there is no DeepSpeed here; each rank gathers the weights for a rollout",
        "max_tool_calling_iterations": "not offered: a completion is one turn",
        "clip_ratio_low": "set epsilon",
        "clip_ratio_high": "set epsilon_high",
        "clip_ratio_c": "set dual_clip (of policy_loss=clip); clip_ratio_c is a key of policy_loss=dppo",
        "norm_adv_by_std_in_grpo": "set scale_rewards=group or none",
        "kl_loss_type": "set kl_estimator: k1, k2 (verl's mse), k3, abs or exact (full)",
        "kl_penalty": "set kl_estimator: k1 (verl's kl), k2 (mse), k3 or abs",
        "critic_warmup": "set critic_warmup_steps",
        "use_dynamic_bsz": "micro-batches are cut by tokens_per_micro_batch always",
        "ppo_max_token_len_per_gpu": "set tokens_per_micro_batch",
        "ppo_micro_batch_size": "set tokens_per_micro_batch: micro-batches are cut by tokens",
        "ppo_micro_batch_size_per_gpu": "set tokens_per_micro_batch: micro-batches are cut by tokens",
        "use_rollout_log_probs": "set old_logprobs=rollout",
        "total_training_steps": "set max_steps",
        "save_freq": "set save_steps",
        "test_freq": "set eval_steps",
        "loss_agg_mode": "set loss_type",
        "warmup_ratio": "set warmup_steps, a number of optimizer steps",
        "vllm_mode": "set rollout.engine=vllm; it shares the GPUs with the trainer",
        "tensor_parallel_size": "the in-place engine has none; set rollout.engine=vllm",
        "world_size": "set num_ranks",
        "nproc_per_node": "set num_ranks, over all nodes",
        "n_gpus_per_node": "set num_ranks, over all nodes; auto takes all GPUs",
        "nnodes": "set num_ranks, over all nodes, and controller.address",
        "num_gpus": "set num_ranks; auto takes all GPUs",
        "strategy": "several ranks train with FSDP2; see the keys of fsdp",
        "bnpo": "with global denominators bnpo is loss_type=dapo",
        "clip_ratio": "set epsilon (and epsilon_high)",
        "kl_coef": "set beta",
        "kl_loss_coef": "set beta",
        "use_vllm": "set rollout.engine=vllm",
        "vllm_tensor_parallel_size": "set rollout.engine=vllm and tensor_parallel_size",
        "vllm_gpu_memory_utilization": "the cache of an engine is sized by kv_cache_memory_bytes",
        "gpu_memory_utilization": "the cache of an engine is sized by kv_cache_memory_bytes",
        "generation_kwargs": "set temperature, stop_strings, max_completion_length ... as keys of their own",
        "top_p": "truncated sampling biases importance ratios, so training samples from the full distribution; "
        "evaluation has eval_top_p",
        "top_k": "truncated sampling biases importance ratios, so training samples from the full distribution; "
        "evaluation has eval_top_k",
        "min_p": "truncated sampling biases importance ratios, so training samples from the full distribution; "
        "evaluation has eval_min_p",
        "repetition_penalty": "it changes the distribution that importance ratios assume, so training samples without "
        "it; evaluation has eval_repetition_penalty",
        "aux_loss_coef": "set router_aux_loss_coef",
        "moe_aux_loss_coeff": "set router_aux_loss_coef",
        "entropy_coeff": "set entropy_coef",
        "use_kl_loss": "set kl=loss and beta",
        "use_kl_in_reward": "set kl=reward and beta",
        "vf_coef": "the critic is a model of its own with critic_learning_rate",
        "filter_groups": "set max_refills",
        "bf16": "set dtype=bfloat16",
        "save_strategy": "set save_steps",
        "eval_strategy": "set eval_steps",
        "logging_steps": "every training step is logged",
        "resume_from_checkpoint": "set resume",
    }
)

# The same for names that exist, in a section where they do not: path -> advice.
PATH_HABITS: Mapping[str, str] = MappingProxyType(
    {"controller.device": "set device (model.device); it holds for all ranks"},
)

_FLOAT16 = (
    "float16 is not supported: its gradients overflow and vanish without loss scaling; set dtype=bfloat16 or float32"
)

# Values of keys that users know from elsewhere: (path, value) -> advice.
VALUE_HABITS: Mapping[tuple[str, object], str] = MappingProxyType(
    {
        ("algorithm.loss_type", "bnpo"): "with global denominators bnpo is loss_type=dapo",
        ("algorithm.loss_type", "luspo"): "set algorithm=luspo",
        (
            "algorithm.loss_type",
            "cispo",
        ): "set policy_loss=cispo (its bound epsilon_high counts from 1: 4 is a ratio of 5)",
        ("algorithm.loss_type", "sapo"): "set policy_loss=sapo",
        ("algorithm.loss_type", "vespo"): "set policy_loss=vespo",
        ("model.dtype", "float16"): _FLOAT16,
        ("model.dtype", "fp16"): _FLOAT16,
        ("model.dtype", "half"): _FLOAT16,
        ("model.dtype", "bf16"): "set dtype=bfloat16",
        ("model.dtype", "fp32"): "set dtype=float32",
        ("model.device", "gpu"): "set device=cuda",
        ("model.device", "mps"): "GPUs are used through CUDA alone; set device=cpu",
        ("num_ranks", "all"): "set num_ranks=auto, which takes all GPUs",
        **{
            ("model.device", f"cuda:{n}"): f"set device=cuda; CUDA_VISIBLE_DEVICES={n} chooses the GPU"
            for n in range(16)
        },
    }
)
