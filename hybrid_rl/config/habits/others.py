"""Keys of OpenRLHF, of earlier versions of TRL and verl, and words that people type for what has another name here."""

from __future__ import annotations

from hybrid_rl.config.habits.records import records

_MICRO = ("tokens_per_micro_batch", "micro-batches are cut by tokens, always")
_REWARDS = "pass reward functions, and names or folders of reward models, as reward_funcs="
_LOWER_CLIP = "epsilon, which is the lower bound (1 - epsilon) if epsilon_high is given as well"
_NO_QUANTISED = (
    "weights of the trainer are not quantised (QLoRA): the engine would compute with others than it; with lora.r they "
    "are frozen, in dtype=bfloat16"
)

OTHERS = tuple(
    records(
        "others",
        other_name={
            "batch_size rollout_batch_size": ("prompts_per_step", "in prompts"),
            "num_mini_batches mini_batch_size": ("prompts_per_mini_batch", "in prompts"),
            "num_ppo_epochs max_epochs": "num_iterations",
            "n_samples_per_prompt rollout_n n_resp_per_prompt num_samples_per_prompt": "num_generations",
            "max_new_tokens max_tokens generate_max_len": "max_completion_length",
            "max_prompt_len prompt_max_len": "max_prompt_length",
            "max_length max_len max_seq_length": "max_prompt_length and max_completion_length",
            "num_epochs num_episodes epochs": "num_train_epochs",
            "total_episodes": ("max_steps", "or num_train_epochs"),
            "actor_learning_rate": "learning_rate",
            "lr_warmup_ratio": ("warmup_steps", "a number of optimizer steps"),
            "max_norm": "max_grad_norm",
            "l2": "weight_decay",
            "stop": ("stop_strings", "texts, or stop_token_ids"),
            "advantage_estimator": "advantage",
            "policy_loss_type": "policy_loss",
            "cliprange eps_clip eps_clip_low_high clip_eps": "epsilon (and epsilon_high)",
            "epsilon_low eps_clip_low clip_eps_low eps_low": _LOWER_CLIP,
            "eps_clip_high clip_eps_high eps_high": "epsilon_high",
            "value_clip": "cliprange_value",
            "lambd gae_lambda": "lam",
            "no_advantage_std_norm": "scale_rewards=none",
            "kl_ctrl": ("kl_target and kl_horizon", "for a weight that follows the measured KL"),
            "init_kl_coef": "beta",
            "use_kl_estimator_k3": "kl_estimator=k3",
            "entropy_loss_coef ent_coef": "entropy_coef",
            "aux_loss_coef moe_aux_loss_coeff": "router_aux_loss_coef",
            "vllm_is_truncated_threshold": "correction_cap (of correction=tis) or correction_high (of correction=mis)",
            "rollout_token_veto_threshold": "correction_veto",
            "tis_imp_ratio_cap": "correction=tis with correction_cap",
            "enable_vllm_is_correction": "correction=tis",
            "use_rollout_log_probs": "old_logprobs=rollout",
            "freezing_actor_steps": "critic_warmup_steps",
            "overlong_buffer_len overlong_buffer_cfg": ("overlong_buffer", "a number of tokens"),
            "filter_groups dynamic_filtering": "max_refills",
            "micro_train_batch_size micro_rollout_batch_size local_rollout_forward_batch_size": _MICRO,
            "ppo_max_token_len": _MICRO,
            "world_size": "num_ranks",
            "nproc_per_node actor_num_nodes actor_num_gpus_per_node": ("num_ranks", "over all nodes"),
            "num_gpus": ("num_ranks", "auto takes all GPUs"),
            "vllm_num_engines": ("num_ranks", "with vLLM tensor_parallel_size of them share an engine"),
            "ref_num_nodes ref_num_gpus_per_node": "reference_ranks",
            "vllm_sync_backend": "transport",
            "tensor_parallel_size": ("rollout.engine=vllm", "the in-place engine has no such key"),
            "controller.device": ("device (model.device)", "it holds for all ranks"),
            "model_name_or_path model_name pretrain sft_model_path": "model.path",
            "prompt_data dataset_name": ("train_path", "a file or a saved dataset"),
            "save_path ckpt_path": "output_dir",
            "load_checkpoint": "resume",
            "use_wandb use_tensorboard": "report_to",
            "flash_attn": "attention",
            "adam_offload": "cpu_offload",
            "prompt_data_probs": ("dataset_weights", "with the datasets named in train_path"),
            "max_ckpt_num": "save_total_limit",
            "input_key": "prompt_column",
            "use_peft": ("lora.r", "the rank of adapters; in Python also peft_config=, a LoraConfig"),
            "lora_r": ("lora.r", "with lora_alpha=32 if TRL's default was meant"),
            "peft_config": ("lora.r", "with the other keys of lora; in Python Trainer takes a LoraConfig"),
            "lora_target_modules": "target_modules",
            "lora_target_parameters": "target_parameters",
            "lora_modules_to_save": "modules_to_save",
        },
        not_needed={
            "eval_batch_size": "evaluation is batched by the engine",
            "data_collator": "samples are packed into batches by the library",
            "logging_dir": "all logs are in the run folder, which output_dir and run_name choose",
            "label_key": "all other columns of the data reach the reward functions by their names",
            "packing_samples": "samples are always packed",
            "colocate_all_models": "trainer and engine always share the GPUs",
            "bnpo": "with global denominators bnpo is loss_type=dapo",
            "ref_model": "the reference is the model as it was before training; set beta > 0",
            "lora_task_type": "adapters are those of a causal language model",
            "lora_dropout": "adapters have no dropout, because ratios need the same network twice",
        },
        missing={
            "compute_metrics": "pass reward functions as reward_funcs=, which may log metrics of their own",
            "optimizers": "the optimizer is AdamW; set learning_rate, lr_scheduler_type and its other keys",
            "reward_func": "pass functions as reward_funcs=",
            "vf_coef": "the critic is a model of its own; set critic_learning_rate (of an advantage with a critic)",
            "zero_stage": "several ranks train with FSDP2; see the keys of fsdp",
            "reward_pretrain reward_model_path remote_rm_url reward_model": _REWARDS,
            "load_in_4bit load_in_8bit quantization_config bnb_4bit_quant_type bnb_4bit_quant_storage": _NO_QUANTISED,
            "use_bnb_nested_quant": _NO_QUANTISED,
            "lora.bias": "biases of the model are frozen, so that a handoff changes weights only",
            "lora.init_lora_weights": "adapters begin with A uniform and B zero, so that the first policy is the base",
            "ring_attn_size": "each sequence is on one rank as a whole",
        },
    )
)
