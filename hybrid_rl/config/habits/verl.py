"""Keys of verl (trainer/config/ppo_trainer.yaml and the scripts of its examples)."""

from __future__ import annotations

from hybrid_rl.config.habits.records import records

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_MICRO = ("tokens_per_micro_batch", "in tokens, not samples; or leave it out")
_CRITIC_ADAPTER = ("lora_critic", "the critic's adapter has the rank, alpha and layers of the policy's")
_NO_MEGATRON = "there is no Megatron; several ranks train with FSDP2, and experts are not spread over ranks"
_OFFLOAD = ("cpu_offload", "or memory.offload, which moves single residents while they are not needed")
_GRADIENTS = "gradients are freed after every step; cpu_offload keeps them in host memory"
_REWARDS = "pass reward functions, and names or folders of reward models, as reward_funcs="
_TRUNCATED = "training samples from the full distribution: truncated sampling biases importance ratios"
_OWN_LOOP = "pass tools=, environment_factory=, rollout_func= or agent= to Trainer"
_WHOLE = "each sequence is on one rank as a whole"
_PROFILE = "there is no profiler key; trainer.plan() and the metrics timing and memory show where a step goes"
_ENGINES = "the engines are inplace, vllm and hf"
_COLUMNS = "all columns of the data reach reward functions by their names"

VERL = tuple(
    records(
        "verl",
        same=f"""data.max_prompt_length data.shuffle data.seed data.trust_remote_code {_MODEL}.trust_remote_code
            {_ACTOR}.optim.weight_decay {_ACTOR}.optim.lr_scheduler_type {_ROLLOUT}.temperature
            {_ROLLOUT}.enable_prefix_caching {_ROLLOUT}.enforce_eager {_ROLLOUT}.max_num_seqs
            {_ROLLOUT}.max_num_batched_tokens {_ACTOR}.fsdp_config.reshard_after_forward
            {_ACTOR}.policy_loss.clip_cov_ratio {_ACTOR}.policy_loss.clip_cov_lb {_ACTOR}.policy_loss.clip_cov_ub
            {_ACTOR}.policy_loss.kl_cov_ratio critic.cliprange_value algorithm.gamma algorithm.lam
            {_MODEL}.lora_alpha {_MODEL}.target_modules {_MODEL}.exclude_modules""",
        other_name={
            "algorithm.adv_estimator": ("advantage", "or algorithm, a preset: grpo, ppo, rloo, remax and others"),
            "algorithm.norm_adv_by_std_in_grpo": "scale_rewards=group or none",
            "algorithm.use_kl_in_reward": "kl=reward and beta",
            "algorithm.kl_penalty": ("kl_estimator", "k1 (verl's kl), k2 (mse), k3 (low_var_kl), abs or exact (full)"),
            "algorithm.kl_ctrl.kl_coef": "beta",
            "algorithm.kl_ctrl.type algorithm.kl_ctrl.target_kl": "kl_target",
            "algorithm.kl_ctrl.horizon": "kl_horizon",
            "algorithm.rollout_correction.rollout_is": (
                "correction=tis",
                "with correction_level and correction_cap; with bounds such as 0.5_5.0 it is icepop (token) or mis",
            ),
            "algorithm.rollout_correction.rollout_is_threshold": (
                "correction_cap (of correction=tis)",
                "of bounds such as 0.5_5.0: correction_low and correction_high of icepop or mis",
            ),
            "algorithm.rollout_correction.rollout_rs": (
                "correction=kl_rejection",
                "the mean of k1 or k3 is correction_estimator=k1 or k3; tokens and sums are bounded by mis",
            ),
            "algorithm.rollout_correction.rollout_rs_threshold": (
                "correction_threshold (of correction=kl_rejection)",
                "in nats per token: of k3 the same number, of k1, a bound u of the ratio in verl, ln(u)",
            ),
            "algorithm.rollout_correction.bypass_mode": "old_logprobs=rollout",
            "algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches": "max_refills",
            "data.train_files": ("train_path", "verl's own files will do; or pass train_dataset="),
            "data.val_files": ("eval_path", "likewise, or pass eval_dataset="),
            "data.train_batch_size data.gen_batch_size": ("prompts_per_step", "prompts, as in verl"),
            "data.prompt_key": ("prompt_column", "only if it is another one than verl's own"),
            "data.max_response_length": "max_completion_length",
            f"{_ROLLOUT}.prompt_length": "max_prompt_length",
            f"{_ROLLOUT}.response_length": "max_completion_length",
            "data.filter_overlong_prompts": "overlong_prompts=drop",
            "data.truncation": ("overlong_prompts", "error, drop or truncate (which keeps the last tokens)"),
            "data.apply_chat_template_kwargs": "chat_template_kwargs",
            f"{_MODEL}.path": "model.path",
            f"{_MODEL}.custom_chat_template": ("chat_template_path", "a Jinja file"),
            f"{_MODEL}.enable_gradient_checkpointing": "gradient_checkpointing",
            f"{_MODEL}.enable_activation_offload": "activation_offload",
            f"{_MODEL}.lora_rank": ("lora.r", "with lora_alpha=16 if verl's default was meant"),
            f"{_MODEL}.lora_adapter_path": ("model.path", "the folder of an adapter, which names its base"),
            "critic.model.lora_rank critic.model.lora_alpha critic.model.target_modules": _CRITIC_ADAPTER,
            f"{_ACTOR}.optim.lr": "learning_rate",
            f"{_ACTOR}.optim.warmup_style": "lr_scheduler_type",
            f"{_ACTOR}.optim.lr_warmup_steps": "warmup_steps",
            f"{_ACTOR}.optim.lr_warmup_steps_ratio": ("warmup_steps", "a number of optimizer steps"),
            f"{_ACTOR}.optim.betas": "adam_beta1 and adam_beta2",
            f"{_ACTOR}.optim.clip_grad {_ACTOR}.grad_clip": "max_grad_norm",
            f"{_ACTOR}.optim.total_training_steps": "max_steps",
            f"{_ACTOR}.ppo_mini_batch_size critic.ppo_mini_batch_size": (
                "prompts_per_mini_batch",
                "prompts, as in verl",
            ),
            f"{_ACTOR}.ppo_epochs critic.ppo_epochs": "num_iterations",
            f"{_ACTOR}.ppo_micro_batch_size {_ACTOR}.ppo_micro_batch_size_per_gpu": _MICRO,
            f"{_ACTOR}.ppo_max_token_len_per_gpu critic.ppo_max_token_len_per_gpu": "tokens_per_micro_batch",
            "critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu": _MICRO,
            f"{_ROLLOUT}.log_prob_micro_batch_size": _MICRO,
            f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu {_ROLLOUT}.log_prob_max_token_len_per_gpu": _MICRO,
            f"{_REF}.log_prob_micro_batch_size {_REF}.log_prob_micro_batch_size_per_gpu": _MICRO,
            f"{_REF}.log_prob_max_token_len_per_gpu critic.forward_max_token_len_per_gpu": _MICRO,
            "critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu": _MICRO,
            f"{_ACTOR}.clip_ratio": "epsilon (and epsilon_high)",
            f"{_ACTOR}.clip_ratio_low": "epsilon, which is the lower bound (1 - epsilon) if epsilon_high is given too",
            f"{_ACTOR}.clip_ratio_high": "epsilon_high",
            f"{_ACTOR}.clip_ratio_c": "dual_clip (of policy_loss=clip)",
            f"{_ACTOR}.policy_loss.loss_mode": (
                "policy_loss",
                "clip, clip_cov, kl_cov and others; gspo is an algorithm",
            ),
            f"{_ACTOR}.policy_loss.ppo_kl_coef": "kl_cov_coef (of policy_loss=kl_cov)",
            f"{_ACTOR}.tau_pos": "sapo_temperature_pos (of policy_loss=sapo)",
            f"{_ACTOR}.tau_neg": "sapo_temperature_neg (of policy_loss=sapo)",
            f"{_ACTOR}.loss_agg_mode": ("loss_type", "token-mean is dapo, seq-mean-token-mean is grpo"),
            f"{_ACTOR}.entropy_coeff": "entropy_coef",
            f"{_ACTOR}.use_kl_loss": ("kl=loss and beta", "with use_bias_correction_kl=false: verl has no such weight"),
            f"{_ACTOR}.kl_loss_coef": "beta",
            f"{_ACTOR}.kl_loss_type": (
                "kl_estimator",
                "k2 (verl's mse, and all with a plus), k3 (low_var_kl, which verl stops at 10), abs or exact (full)",
            ),
            f"{_ACTOR}.use_torch_compile {_REF}.use_torch_compile": ("torch_compile", "of the blocks of the model"),
            f"{_ACTOR}.fsdp_config.param_offload {_ACTOR}.fsdp_config.optimizer_offload": _OFFLOAD,
            f"{_REF}.fsdp_config.param_offload critic.model.fsdp_config.param_offload": _OFFLOAD,
            f"critic.model.fsdp_config.optimizer_offload {_ACTOR}.fsdp_config.offload_policy": _OFFLOAD,
            f"{_ACTOR}.fsdp_config.fsdp_size": (
                "dp_replicate",
                "num_ranks / fsdp_size copies, each on fsdp_size ranks",
            ),
            f"{_ACTOR}.fsdp_config.model_dtype {_ACTOR}.fsdp_config.dtype {_ROLLOUT}.dtype": "dtype",
            f"{_ACTOR}.data_loader_seed critic.data_loader_seed {_ACTOR}.fsdp_config.seed": "seed",
            f"{_REF}.fsdp_config.seed critic.model.fsdp_config.seed": "seed",
            f"{_REF}.fsdp_config.reshard_after_forward critic.model.fsdp_config.reshard_after_forward": (
                "reshard_after_forward"
            ),
            "critic.optim.weight_decay": ("weight_decay", "of policy and critic"),
            "critic.optim.lr_scheduler_type": ("lr_scheduler_type", "of policy and critic"),
            "critic.model.trust_remote_code": "trust_remote_code",
            "data.response_key data.prompt_dict_keys data.response_dict_keys": (
                "algorithm=sft",
                "it learns from the columns named prompt and completion",
            ),
            "data.micro_batch_size_per_gpu data.micro_batch_size": _MICRO,
            f"{_ROLLOUT}.name": "rollout.engine",
            f"{_ROLLOUT}.n": "num_generations",
            f"{_ROLLOUT}.tensor_model_parallel_size": ("tensor_parallel_size", "with rollout.engine=vllm"),
            f"{_ROLLOUT}.gpu_memory_utilization": (
                "kv_cache_memory_bytes",
                "the size of the cache, which is all that the engine has for itself",
            ),
            f"{_ROLLOUT}.top_p": ("eval_top_p", f"for evaluation; {_TRUNCATED}"),
            f"{_ROLLOUT}.top_k": ("eval_top_k", f"for evaluation; {_TRUNCATED}"),
            f"{_ROLLOUT}.val_kwargs.n": "num_generations_eval",
            f"{_ROLLOUT}.val_kwargs.temperature {_ROLLOUT}.val_kwargs.do_sample": "eval_temperature",
            f"{_ROLLOUT}.val_kwargs.top_p": "eval_top_p",
            f"{_ROLLOUT}.val_kwargs.top_k": "eval_top_k",
            f"{_ROLLOUT}.engine_kwargs.vllm {_ROLLOUT}.engine_kwargs.vllm.*": (
                "rollout.vllm",
                "give an argument of vLLM as rollout.vllm.NAME=VALUE",
            ),
            f"{_ROLLOUT}.multi_turn.max_assistant_turns": ("max_tool_calling_iterations", "rounds of tool calls"),
            f"{_ROLLOUT}.multi_turn.format": "tool_call_format",
            f"{_ROLLOUT}.skip_dump_dir trainer.rollout_data_dir": ("save_rollouts", "they are in the run folder"),
            "critic.optim.lr": "critic_learning_rate (of an advantage with a critic)",
            "critic.model.path": "critic_path (of an advantage with a critic)",
            "critic.enable": ("advantage=gae, or another with a critic", "the others have none"),
            "reward_model.reward_kwargs.overlong_buffer_cfg.enable overlong_buffer.enable": "overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg.len overlong_buffer.len": (
                "overlong_buffer",
                "a number of tokens",
            ),
            "trainer.critic_warmup": "critic_warmup_steps (of an advantage with a critic)",
            "trainer.total_epochs": "num_train_epochs",
            "trainer.total_training_steps": "max_steps",
            "trainer.logger": ("report_to", "the console and metrics.jsonl are always there"),
            "trainer.experiment_name": "run_name",
            "trainer.project_name": ("tracker_arguments", "{wandb: {project: P}}"),
            "trainer.log_val_generations": "log_completions",
            "trainer.nnodes": ("num_ranks", "over all nodes, and controller.address"),
            "trainer.n_gpus_per_node": ("num_ranks", "over all nodes; auto takes all GPUs"),
            "trainer.save_freq": "save_steps",
            "trainer.test_freq": "eval_steps",
            "trainer.val_before_train": "eval_on_start",
            "trainer.resume_mode trainer.resume_from_path": ("resume", "auto, with run_name, or a checkpoint folder"),
            "trainer.default_local_dir": "output_dir",
            "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep": "save_total_limit",
            "trainer.device": "device",
            "trainer.ray_wait_register_center_timeout": "start_timeout_seconds",
        },
        not_needed={
            f"{_MODEL}.use_remove_padding critic.model.use_remove_padding {_ACTOR}.use_remove_padding": (
                "samples are always packed"
            ),
            f"{_MODEL}.use_liger {_MODEL}.use_fused_kernels {_ACTOR}.use_fused_kernels": (
                "logprobs are computed without holding all logits"
            ),
            f"{_ACTOR}.entropy_from_logits_with_chunking {_ACTOR}.entropy_checkpointing": (
                "entropies are computed without holding all logits"
            ),
            f"{_ACTOR}.use_dynamic_bsz {_ROLLOUT}.log_prob_use_dynamic_bsz {_REF}.log_prob_use_dynamic_bsz": (
                "micro-batches are always cut by tokens_per_micro_batch"
            ),
            "critic.use_dynamic_bsz": "micro-batches are always cut by tokens_per_micro_batch",
            f"trainer.balance_batch {_ACTOR}.use_prefix_grouper": "ranks always get parts of equal cost",
            f"{_ACTOR}.strategy {_REF}.strategy critic.strategy": "ranks train with FSDP2; see the keys of fsdp",
            f"wrap_policy.* {_ACTOR}.fsdp_config.use_orig_params": "FSDP2 shards every block",
            f"{_ACTOR}.fsdp_config.strategy {_ACTOR}.fsdp_config.forward_only": "ranks train with FSDP2",
            f"{_REF}.fsdp_config.strategy {_REF}.fsdp_config.forward_only": "ranks train with FSDP2",
            "critic.model.fsdp_config.strategy critic.model.fsdp_config.forward_only": "ranks train with FSDP2",
            f"{_ACTOR}.fsdp_config.grad_offload {_REF}.fsdp_config.grad_offload": (_GRADIENTS),
            "critic.model.fsdp_config.grad_offload": (_GRADIENTS),
            f"{_ACTOR}.loss_scale_factor": "denominators are always those of the whole batch, over all ranks",
            f"{_ACTOR}.sum_pi_squared_checkpointing {_MODEL}.fused_kernel_options.*": "logits are never held whole",
            "data.validation_shuffle": "the order of evaluation does not matter",
            "data.image_patch_size": "it is read from the model",
            f"{_ACTOR}.fsdp_config.forward_prefetch": "FSDP2 prefetches by itself",
            f"{_ACTOR}.shuffle critic.shuffle": "mini-batches are shuffled by the seed",
            f"{_ACTOR}.calculate_entropy": "the entropy is always a metric",
            f"{_ACTOR}.calculate_sum_pi_squared": "it is computed where the algorithm needs it",
            f"{_ROLLOUT}.calculate_log_probs {_ROLLOUT}.logprobs_mode": "the engine's logprobs are always kept",
            f"{_ROLLOUT}.load_format {_ROLLOUT}.layered_summon": (
                "the engine gets the trainer's weights, and every handoff is proved"
            ),
            f"{_ROLLOUT}.free_cache_engine {_ROLLOUT}.multi_stage_wake_up": "vLLM sleeps while the policy trains",
            f"{_ROLLOUT}.enable_chunked_prefill": "long prompts are always computed in chunks",
            f"{_ROLLOUT}.max_model_len": "it follows from max_prompt_length and max_completion_length",
            f"{_ROLLOUT}.mode": "agents run beside the engine, without a key for it",
            f"{_ROLLOUT}.checkpoint_engine.*": "weights are handed over in place, or by transport",
            f"{_ROLLOUT}.disable_log_stats {_ROLLOUT}.skip_tokenizer_init {_ROLLOUT}.scheduling_policy": (
                "the engine's own settings; with rollout.engine=vllm any argument of vLLM is given as rollout.vllm"
            ),
            f"{_ROLLOUT}.do_sample": "training always samples",
            "actor_rollout_ref.hybrid_engine": "trainer and engine always share the GPUs",
            "data.reward_fn_key data.image_key data.video_key": _COLUMNS,
            "data.return_raw_chat data.return_full_prompt data.return_raw_input_ids": _COLUMNS,
            "data.return_multi_modal_inputs": _COLUMNS,
            "data.val_batch_size": "evaluation is batched by the engine",
            "data.filter_overlong_prompts_workers data.dataloader_num_workers": "prompts are tokenised once",
            "data.tokenizer": "pass tokenizer=; a model's folder has its own",
            "reward_model.num_workers reward_model.launch_reward_fn_async reward_model.use_reward_loop": (
                "rewards are always computed while others are generated; reward_processes is the number of processes"
            ),
            f"{_MODEL}.use_shm data.use_shm": "ranks read a part of the weights each",
            "trainer.validation_data_dir": "samples of evaluations are in the run folder",
            "trainer.use_legacy_worker_impl transfer_queue.*": "there is one kind of worker",
        },
        missing={
            f"{_MODEL}.lora.* critic.model.lora.*": (
                "there is no Megatron; adapters of models that FSDP2 shards have the keys of lora"
            ),
            "megatron.*": _NO_MEGATRON,
            "custom_reward_function.path custom_reward_function.name reward_manager.*": _REWARDS,
            "reward_model.reward_manager reward_model.enable reward_model.path reward_model.model.*": _REWARDS,
            "reward_model.rollout.* reward_model.reward_kwargs.* reward_model.*": _REWARDS,
            f"{_ROLLOUT}.multi_turn.* {_ROLLOUT}.agent.* data.tool_config_path": _OWN_LOOP,
            f"{_ACTOR}.ulysses_sequence_parallel_size {_REF}.ulysses_sequence_parallel_size": _WHOLE,
            f"critic.ulysses_sequence_parallel_size {_ROLLOUT}.pipeline_model_parallel_size": _WHOLE,
            f"{_ROLLOUT}.expert_parallel_size {_ROLLOUT}.data_parallel_size": (
                "every replica of the engine holds the whole model; set tensor_parallel_size to spread it"
            ),
            f"{_ROLLOUT}.over_sample_rate": (
                "set partial=true and unfinished=drop, and oversample to a number of prompts"
            ),
            f"{_ROLLOUT}.enable_rollout_routing_replay router_replay.*": "routes of experts are not replayed",
            f"{_ROLLOUT}.quantization {_ROLLOUT}.quantization_config_file": "engines hold the trainer's own weights",
            f"mtp.* tiled_mlp.* {_ROLLOUT}.mtp": "models run as transformers defines them",
            f"{_ROLLOUT}.engine_kwargs.sglang {_ROLLOUT}.engine_kwargs.trtllm": _ENGINES,
            f"{_ROLLOUT}.engine_kwargs.sglang.* {_ROLLOUT}.engine_kwargs.trtllm.*": _ENGINES,
            f"{_ROLLOUT}.cudagraph_capture_sizes": "a few sizes are captured; set cuda_graphs=false for none",
            f"{_ROLLOUT}.ignore_eos": "a completion ends at the end-of-text token",
            f"{_ROLLOUT}.skip_rollout": "set mode=train and rollouts_path, to train on saved rollouts",
            f"{_ROLLOUT}.prometheus.* {_ROLLOUT}.trace.*": "metrics are in metrics.jsonl, samples in samples.jsonl",
            "actor_rollout_ref.nccl_timeout": "set watchdog_seconds, the time without progress of a rank that hangs",
            "algorithm.rollout_correction.loss_type": "set policy_loss, and old_logprobs=rollout for verl's bypass",
            f"{_MODEL}.external_lib {_MODEL}.override_config {_MODEL}.hf_config_path {_MODEL}.tokenizer_path": (
                "pass a module as model=, with its tokenizer="
            ),
            f"{_ACTOR}.freeze_vision_tower": "switch off requires_grad on a module, and pass that",
            f"{_ACTOR}.optim.optimizer {_ACTOR}.optim.optimizer_impl {_ACTOR}.optim.override_optimizer_config": (
                "the optimizer is AdamW; its options are keys of their own"
            ),
            "override_optimizer_config.*": "the optimizer is AdamW; its options are keys of their own",
            f"{_ACTOR}.optim.min_lr_ratio {_ACTOR}.optim.num_cycles": (
                "schedules have no options: lr_scheduler_type and warmup_steps"
            ),
            "checkpoint.*": "a checkpoint always has weights, optimizer and position in the data",
            "algorithm.rollout_correction.rollout_is_batch_normalize": "weights of a correction are not normalised",
            "algorithm.use_pf_ppo algorithm.pf_ppo.*": "samples are not drawn again by their rewards",
            "algorithm.filter_groups.metric": "max_refills replaces groups whose rewards are all equal",
            "data.train_max_samples data.val_max_samples": "cut the file, or pass train_dataset= with fewer rows",
            "data.custom_cls.* data.sampler.* data.datagen.*": "pass train_dataset=, any list of dicts or Dataset",
            "reward_model.sandbox_fusion.*": "a reward function may call any service itself",
            "profiler.* global_profiler.*": _PROFILE,
            "trainer.val_only": "call evaluate(), and not fit()",
            "trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.esi_redundant_time": (
                "checkpoints are local folders"
            ),
            "ray_kwargs.*": "the keys of controller start Ray, or join a cluster",
        },
    )
)
