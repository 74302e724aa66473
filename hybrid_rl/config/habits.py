"""Key names of other libraries, with the advice for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_UPPER = "set correction_cap (of correction=tis) or correction_high (of correction=mis)"
_MICRO = "set tokens_per_micro_batch: micro-batches are cut by tokens"
_NO_ADAPTERS = "adapters (LoRA) and quantised weights are not supported yet: all weights are trained"
_REWARDS = "pass reward functions, and names or folders of reward models, as the second argument"
_LOWER_CLIP = "set epsilon, which is the lower bound (1 - epsilon) if epsilon_high is given as well"
_CHECKPOINTS = "every checkpoint is kept; save_steps sets how often one is written"
_NO_SERVER = "there is no server: rollout.engine=vllm runs in the trainer's processes"
_TRUNCATED = (
    "truncated sampling biases importance ratios, so training samples from the full distribution; evaluation has eval"
)

# Keys that users of other libraries type, and what to do here: leaf names -> advice.
_ADVICE = {
    "per_device_train_batch_size": (
        "sizes are global here: set prompts_per_step (prompts, not completions) and tokens_per_micro_batch"
    ),
    "gradient_accumulation_steps": "micro-batches are cut by tokens_per_micro_batch and never change the gradient",
    "steps_per_generation": "set prompts_per_mini_batch (optimizer steps per batch) or num_iterations",
    "generation_batch_size train_batch_size batch_size rollout_batch_size": "set prompts_per_step, in prompts",
    "ppo_mini_batch_size num_mini_batches mini_batch_size": "set prompts_per_mini_batch, in prompts",
    "ppo_epochs num_ppo_epochs max_epochs": "set num_iterations",
    "n n_samples_per_prompt rollout_n n_resp_per_prompt num_samples_per_prompt": "set num_generations",
    "max_response_length max_new_tokens response_length max_tokens generate_max_len": "set max_completion_length",
    "num_epochs total_epochs num_episodes": "set num_train_epochs",
    "lr actor_learning_rate": "set learning_rate",
    "processing_class": "pass tokenizer=",
    "args": "pass config= (a YAML file, a mapping or a TrainerConfig) or keywords",
    "reward_func": "pass functions as the second argument",
    "ref_model": "the reference is the model as it was before training; set beta > 0",
    "model_init_kwargs": "pass a module with tokenizer=, or set model.dtype and the other keys of model",
    "device_map": "set device=cuda or cpu; with several ranks each has its own GPU",
    "torch_dtype": "set dtype=bfloat16 or float32",
    "fp16": "float16 is not supported; set dtype=bfloat16 or float32",
    "stop": "set stop_strings (texts) or stop_token_ids",
    "adv_estimator advantage_estimator": "set advantage",
    "loss_mode policy_loss_type": "set policy_loss",
    "cliprange clip_ratio eps_clip eps_clip_low_high clip_eps": "set epsilon (and epsilon_high)",
    "kl_ctrl": "set kl_target and kl_horizon for a weight that follows the measured KL",
    "vllm_importance_sampling_correction": "set correction: tis, mis, icepop, kl_rejection or none",
    "vllm_importance_sampling_mode": (
        "set correction: tis truncates, mis leaves out; correction_level is token or sequence"
    ),
    "vllm_importance_sampling_cap vllm_importance_sampling_clip_max": _UPPER,
    "rollout_is_threshold vllm_is_truncated_threshold": _UPPER,
    "vllm_importance_sampling_clip_min": (
        "set correction_floor (of correction=tis) or correction_low (of mis and icepop)"
    ),
    "rollout_is": "set correction=tis with correction_level and correction_cap",
    "rollout_is_batch_normalize": "weights of a correction are not normalised",
    "rollout_rs": "set correction=kl_rejection with correction_threshold",
    "rollout_rs_threshold": "set correction_threshold (of correction=kl_rejection) or correction_high (of mis)",
    "rollout_token_veto_threshold": "set correction_veto",
    "tis_imp_ratio_cap": "set correction=tis with correction_cap",
    "use_adaptive_entropy": "set entropy_target",
    "sync_ref_model": "set ref_model_sync_steps, with ref_model_mixup_alpha",
    "disable_dropout": "dropout is always off: ratios need the same network twice",
    "shuffle_dataset": "set shuffle",
    "max_prompt_len prompt_length prompt_max_len": "set max_prompt_length",
    "vllm_max_model_length": "it follows from the data; set max_prompt_length and max_completion_length",
    "vllm_enable_sleep_mode free_cache_engine": "vLLM sleeps while the policy trains; nothing need be set",
    "vllm_server_base_url vllm_server_host vllm_server_port": _NO_SERVER,
    "use_transformers_paged": "the in-place engine has a paged cache of its own",
    "use_liger_kernel": "logprobs are computed without holding all logits; nothing need be set",
    "log_unique_prompts num_completions_to_print": "set log_completions, a number",
    "remove_unused_columns": "rewards get every column of the data",
    "ds3_gather_for_generation": "there is no DeepSpeed here; each rank gathers the weights for a rollout",
    "clip_ratio_low epsilon_low eps_clip_low clip_eps_low eps_low": _LOWER_CLIP,
    "clip_ratio_high eps_clip_high clip_eps_high eps_high": "set epsilon_high",
    "clip_ratio_c": "set dual_clip (of policy_loss=clip); clip_ratio_c is a key of policy_loss=dppo",
    "norm_adv_by_std_in_grpo": "set scale_rewards=group or none",
    "kl_loss_type": "set kl_estimator: k1, k2 (verl's mse), k3, abs or exact (full)",
    "kl_penalty": "set kl_estimator: k1 (verl's kl), k2 (mse), k3 or abs",
    "critic_warmup freezing_actor_steps": "set critic_warmup_steps",
    "use_dynamic_bsz": "micro-batches are always cut by tokens_per_micro_batch",
    "ppo_max_token_len_per_gpu": "set tokens_per_micro_batch",
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size micro_rollout_batch_size": _MICRO,
    "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu": _MICRO,
    "local_rollout_forward_batch_size ppo_max_token_len": _MICRO,
    "use_rollout_log_probs": "set old_logprobs=rollout",
    "total_training_steps": "set max_steps",
    "save_freq save_strategy": "set save_steps",
    "test_freq eval_strategy": "set eval_steps",
    "loss_agg_mode": "set loss_type",
    "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio": "set warmup_steps, a number of optimizer steps",
    "vllm_mode": "set rollout.engine=vllm; it shares the GPUs with the trainer",
    "tensor_parallel_size": "the in-place engine has none; set rollout.engine=vllm",
    "world_size": "set num_ranks",
    "nproc_per_node actor_num_nodes actor_num_gpus_per_node": "set num_ranks, over all nodes",
    "n_gpus_per_node": "set num_ranks, over all nodes; auto takes all GPUs",
    "nnodes": "set num_ranks, over all nodes, and controller.address",
    "num_gpus": "set num_ranks; auto takes all GPUs",
    "strategy zero_stage fsdp_size": "several ranks train with FSDP2; see the keys of fsdp",
    "bnpo": "with global denominators bnpo is loss_type=dapo",
    "kl_coef kl_loss_coef init_kl_coef": "set beta",
    "use_vllm": "set rollout.engine=vllm",
    "vllm_tensor_parallel_size": "set rollout.engine=vllm and tensor_parallel_size",
    "vllm_gpu_memory_utilization gpu_memory_utilization": "the cache of an engine is sized by kv_cache_memory_bytes",
    "generation_kwargs": "set temperature, stop_strings, max_completion_length ... as keys of their own",
    "top_p": f"{_TRUNCATED}_top_p",
    "top_k": f"{_TRUNCATED}_top_k",
    "min_p": f"{_TRUNCATED}_min_p",
    "repetition_penalty": (
        "it changes the distribution that importance ratios assume, so training samples without it; evaluation has "
        "eval_repetition_penalty"
    ),
    "aux_loss_coef moe_aux_loss_coeff": "set router_aux_loss_coef",
    "entropy_coeff entropy_loss_coef ent_coef": "set entropy_coef",
    "use_kl_loss": "set kl=loss and beta",
    "use_kl_in_reward": "set kl=reward and beta",
    "vf_coef": "the critic is a model of its own with critic_learning_rate",
    "filter_groups dynamic_filtering max_num_gen_batches": "set max_refills",
    "bf16": "set dtype=bfloat16",
    "logging_steps": "every training step is logged",
    "resume_from_checkpoint resume_mode load_checkpoint": "set resume",
    "max_length max_len max_seq_length": "set max_prompt_length and max_completion_length",
    "total_episodes": "set max_steps, or num_train_epochs",
    "use_kl_estimator_k3": "set kl_estimator=k3",
    "value_clip": "set cliprange_value",
    "lambd gae_lambda": "set lam",
    "no_advantage_std_norm": "set scale_rewards=none",
    "overlong_buffer_len overlong_buffer_cfg": "set overlong_buffer, a number of tokens",
    "enable_vllm_is_correction": "set correction=tis",
    "lr_warmup_steps": "set warmup_steps",
    "grad_clip max_norm": "set max_grad_norm",
    "l2": "set weight_decay",
    "optim": "the optimizer is AdamW; set learning_rate, weight_decay and the others of its section",
    "model_name_or_path model_name pretrain sft_model_path": "set model.path",
    "train_files prompt_data dataset_name": "set train_path, to a file or a saved dataset",
    "val_files": "set eval_path",
    "val_batch_size eval_batch_size per_device_eval_batch_size": (
        "evaluation is batched by the engine; nothing need be set"
    ),
    "prompt_key input_key": "set prompt_column",
    "prompt_data_probs": "name the datasets in train_path, and set dataset_weights",
    "label_key": "all other columns of the data reach the reward functions by their names",
    "filter_overlong_prompts truncation": "set overlong_prompts",
    "reward_pretrain reward_model_path reward_manager remote_rm_url": _REWARDS,
    "default_local_dir save_path ckpt_path": "set output_dir",
    "experiment_name project_name": "set run_name",
    "logger use_wandb use_tensorboard wandb_project": "set report_to",
    "save_total_limit max_actor_ckpt_to_keep max_ckpt_num": _CHECKPOINTS,
    "push_to_hub hub_model_id": "nothing is uploaded; upload the folder of a checkpoint",
    "val_before_train": "set eval_on_start",
    "data_seed": "set seed",
    "attn_implementation flash_attn": "set attention",
    "enable_gradient_checkpointing": "set gradient_checkpointing",
    "param_offload optimizer_offload adam_offload": "set cpu_offload",
    "packing_samples use_remove_padding": "samples are always packed; nothing need be set",
    "colocate_all_models": "trainer and engine always share the GPUs; nothing need be set",
    "vllm_num_engines": "set num_ranks; with vLLM tensor_parallel_size of them share an engine",
    "ref_num_nodes ref_num_gpus_per_node": "set reference_ranks",
    "vllm_sync_backend": "set transport",
    "calculate_log_probs": "the engine's logprobs are always kept; nothing need be set",
    "use_peft lora_r lora_rank lora_alpha load_in_4bit load_in_8bit": _NO_ADAPTERS,
    "ulysses_sequence_parallel_size ring_attn_size": "each sequence is on one rank as a whole",
}
HABITS: Mapping[str, str] = MappingProxyType(
    {name: advice for names, advice in _ADVICE.items() for name in names.split()}
)

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

# Advice for names that exist, or mean something else, in another section: end of a path -> advice.
PATH_HABITS: Mapping[str, str] = MappingProxyType(
    {
        "controller.device": "set device (model.device); it holds for all ranks",
        "rollout.name": "set rollout.engine",
        "optim.lr": "set learning_rate",
        "critic.optim.lr": "set critic_learning_rate (of an advantage with a critic)",
        "critic.model.path": "set critic_path (of an advantage with a critic)",
        "actor_rollout_ref.model.path": "set model.path",
        "reward_model.path": _REWARDS,
        "reward_model.enable": _REWARDS,
        "custom_reward_function.path": _REWARDS,
        "custom_reward_function.name": _REWARDS,
        "filter_groups.enable": "set max_refills",
        "overlong_buffer.enable": "set overlong_buffer, a number of tokens",
        "overlong_buffer.len": "set overlong_buffer, a number of tokens",
        "val_kwargs.n": "set num_generations_eval",
        "val_kwargs.temperature": "set eval_temperature",
        "val_kwargs.top_p": "set eval_top_p",
        "val_kwargs.top_k": "set eval_top_k",
    },
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

# Values from other libraries: (path, value) -> advice.
VALUE_HABITS: Mapping[tuple[str, object], str] = MappingProxyType(
    {
        ("algorithm.loss_type", "bnpo"): "with global denominators bnpo is loss_type=dapo",
        ("algorithm.loss_type", "luspo"): "set algorithm=luspo",
        ("algorithm.loss_type", "cispo"): _CISPO,
        ("algorithm.loss_type", "sapo"): "set policy_loss=sapo",
        ("algorithm.loss_type", "vespo"): "set policy_loss=vespo",
        **{("model.dtype", word): _FLOAT16 for word in ("float16", "fp16", "half")},
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
