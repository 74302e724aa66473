"""Keys of TRL's GRPOConfig and of the transformers.TrainingArguments that it extends."""

from __future__ import annotations

from hybrid_rl.config.habits.records import records

_TRUNCATED = "only evaluation can have it, because truncated sampling biases importance ratios in training"
_NO_SERVER = "there is no server: with rollout.engine=vllm it runs in the trainer's processes"
_ONE_BATCH = "the unit here is prompts over all ranks, not completions per device"
_UPPER = ("correction_cap (of correction=tis) or correction_high (of correction=mis)", "the upper bound of the weight")
_NO_HUB = "nothing is uploaded; upload the folder of a checkpoint"
_CHECKED = "what training does is fixed by its seed; no key asks for more"
_DATA = "prompts are short: they are tokenised once, in this process"
_FSDP = "several ranks train with FSDP2: set num_ranks, and see the keys of fsdp"
_EVALUATED = "evaluation is batched by the engine"
_PRECISION = ("dtype=bfloat16", "masters and gradients stay float32")
_NO_FLOAT16 = ("dtype=bfloat16 or float32", "float16 is not supported")

TRL = tuple(
    records(
        "TRL",
        same="""learning_rate trust_remote_code router_aux_loss_coef cast_lm_head_to_fp32 num_generations
            num_generations_eval max_completion_length temperature chat_template_kwargs beta num_iterations epsilon
            delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
            vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards
            loss_type mask_truncated_completions ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
            entropy_coef entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
            off_policy_mask_threshold use_bias_correction_kl log_completions""",
        other_name={
            "shuffle_dataset": "shuffle",
            "generation_batch_size": ("prompts_per_step", _ONE_BATCH),
            "steps_per_generation": ("prompts_per_mini_batch", "prompts of one optimizer step, or use num_iterations"),
            "use_vllm": "rollout.engine=vllm",
            "vllm_mode": ("rollout.engine=vllm", "it shares the GPUs with the trainer, as colocate does"),
            "vllm_tensor_parallel_size": ("tensor_parallel_size", "with rollout.engine=vllm"),
            "vllm_gpu_memory_utilization": (
                "kv_cache_memory_bytes",
                "the size of the cache, which is all that the engine has for itself",
            ),
            "sync_ref_model": "ref_model_sync_steps, with ref_model_mixup_alpha",
            "use_adaptive_entropy": "entropy_target",
            "vllm_importance_sampling_correction": (
                "correction",
                "tis, mis, icepop or kl_rejection; none, the default here, corrects nothing",
            ),
            "vllm_importance_sampling_mode": (
                "correction=tis or correction=mis",
                "truncate is tis, mask is mis; correction_level says token or sequence",
            ),
            "vllm_importance_sampling_clip_max vllm_importance_sampling_cap": _UPPER,
            "vllm_importance_sampling_clip_min": (
                "correction_floor (of correction=tis) or correction_low (of mis and icepop)",
                "the lower bound of the weight",
            ),
            "num_completions_to_print log_unique_prompts": ("log_completions", "a number"),
            "generation_kwargs": (
                "temperature, stop_strings and max_completion_length",
                "each is a key of its own; other sampling options belong to evaluation",
            ),
            "top_p": ("eval_top_p", _TRUNCATED),
            "top_k": ("eval_top_k", _TRUNCATED),
            "min_p": ("eval_min_p", _TRUNCATED),
            "repetition_penalty": (
                "eval_repetition_penalty",
                "only evaluation can have it: in training it would change what importance ratios assume",
            ),
            "model_init_kwargs": (
                "model.dtype and the other keys of model",
                "or pass a module as model=, with its tokenizer=",
            ),
        },
        not_needed={
            "disable_dropout": "dropout is always off, because ratios need the same network twice",
            "remove_unused_columns": "reward functions get every column of the data",
            "ds3_gather_for_generation": "there is no DeepSpeed; each rank gathers the weights for a rollout",
            "pad_to_multiple_of": "samples are packed, not padded",
            "cache_implementation": "the in-place engine has a paged cache of its own",
            "vllm_model_impl": "vLLM chooses its own; as an argument of vLLM it is rollout.vllm.model_impl",
            "vllm_enable_sleep_mode": "vLLM sleeps while the policy trains",
            "vllm_max_model_length": "it follows from max_prompt_length and max_completion_length",
            "use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config": (
                "the in-place engine batches continuously, over a paged cache"
            ),
            "log_multimodal": "prompts with images are shown as text",
        },
        missing={
            "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port": _NO_SERVER,
            "vllm_structured_outputs_regex": "completions cannot be forced into a pattern; reward the format instead",
            "log_completions_hub_repo": _NO_HUB,
        },
    )
)

TRANSFORMERS = tuple(
    records(
        "transformers",
        same="""output_dir num_train_epochs max_steps lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2
            adam_epsilon max_grad_norm gradient_checkpointing torch_compile report_to run_name eval_steps eval_on_start
            save_steps save_total_limit enable_jit_checkpoint seed
            load_best_model_at_end metric_for_best_model greater_is_better log_level""",
        other_name={
            "disable_tqdm": "log_level=quiet",
            "per_device_train_batch_size": ("prompts_per_step", f"{_ONE_BATCH}; tokens_per_micro_batch fits memory"),
            "warmup_ratio": ("warmup_steps", "a number of optimizer steps"),
            "bf16 bf16_full_eval": _PRECISION,
            "fp16 fp16_full_eval": _NO_FLOAT16,
            "torch_dtype": "dtype=bfloat16 or float32",
            "use_cpu": "device=cpu",
            "device_map": ("device=cuda or cpu", "with several ranks each has its own GPU"),
            "attn_implementation": "attention",
            "data_seed": "seed",
            "resume_from_checkpoint": ("resume", "auto finds the newest checkpoint of run_name"),
            "eval_strategy": "eval_steps",
            "save_strategy": "save_steps",
            "project trackio_space_id wandb_project": (
                "tracker_arguments",
                "{wandb: {project: P}}, {trackio: {space_id: S}}",
            ),
        },
        not_needed={
            "gradient_accumulation_steps": "tokens_per_micro_batch cuts micro-batches, which never change the gradient",
            "auto_find_batch_size": "micro-batches are cut by tokens_per_micro_batch",
            "average_tokens_across_devices": "denominators are always those of the whole batch, over all ranks",
            "use_liger_kernel liger_kernel_config": "logprobs are computed without holding all logits",
            "use_cache": "generation always has a cache, training never",
            "logging_strategy logging_steps logging_first_step log_on_each_node": "every training step is logged",
            "logging_nan_inf_filter": "updates that are not finite are skipped, counted and explained",
            "include_num_input_tokens_seen": "the metric num_tokens counts them",
            "per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches batch_eval_metrics": _EVALUATED,
            "prediction_loss_only include_for_metrics eval_use_gather_object": "evaluation means rewards here",
            "do_train do_eval do_predict": "fit() trains, evaluate() evaluates",
            "ignore_data_skip": "a resumed run goes on at the next prompt of the same order",
            "skip_memory_metrics": "memory is always measured; it costs next to nothing",
            "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers": _DATA,
            "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order": _DATA,
            "label_names length_column_name train_sampling_strategy": "samples are packed, whatever their lengths are",
            "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend": _FSDP,
            "local_rank accelerator_config parallelism_config": _FSDP,
            "save_on_each_node": "ranks write one checkpoint together",
            "torch_empty_cache_steps": "memory is given back between the phases of a step where that is needed",
            "restore_callback_states_from_checkpoint": "callbacks are objects of yours; keep their state there",
        },
        missing={
            "ddp_timeout": "set watchdog_seconds, the time without progress after which a rank counts as hung",
            "fsdp fsdp_config deepspeed": _FSDP,
            "optim optim_args optim_target_modules": "the optimizer is AdamW; its options are keys of their own",
            "lr_scheduler_kwargs": "schedules have no options: lr_scheduler_type and warmup_steps",
            "label_smoothing_factor neftune_noise_alpha": "this is for supervised training",
            "tf32": "set torch.backends.cuda.matmul.allow_tf32 before the Trainer is made",
            "gradient_checkpointing_kwargs": "blocks are recomputed without reentrance",
            "torch_compile_backend torch_compile_mode": "blocks are compiled with PyTorch's defaults",
            "eval_delay": "set eval_on_start=false and eval_steps",
            "save_only_model": "a checkpoint always has what a resumed run needs",
            "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision": _NO_HUB,
            "trackio_bucket_id trackio_static_space_id": _NO_HUB,
            "processing_class": "pass the tokenizer as tokenizer=",
            "full_determinism": _CHECKED,
            "debug": "set save_rollouts, or mode=rollout, to look at samples",
            "log_level_replica": "ranks write logs of their own, in the run folder",
        },
    )
)
