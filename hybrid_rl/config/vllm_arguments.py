"""Arguments of vLLM that cannot be given as rollout.vllm.NAME: why, or what to set instead.

They would change nothing here, or what the engine generates without the trainer knowing of it. Those of all versions
that are supported; which of the others exist is vLLM's to say, once it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_rl.errors import ConfigError

_REASONS: dict[str, str] = {
    "it is the trainer's own": "model",
    "vLLM reads the trainer's own config.json; change the config of the model itself": "hf_overrides hf_config_path "
    "config_format",
    "the model is read by the trainer; set model.path": "revision code_revision hf_token",
    "set model.dtype": "dtype",
    "it follows from seed": "seed",
    "set model.trust_remote_code": "trust_remote_code",
    "it follows from max_prompt_length and max_completion_length": "max_model_len",
    "the engine takes and gives token ids": "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
    "enable_prompt_embeds reasoning_parser reasoning_parser_plugin reasoning_config structured_outputs_config",
    "the engine generates from a causal language model": "runner convert pooler_config diffusion_config",
    "set kv_cache_memory_bytes": "gpu_memory_utilization num_gpu_blocks_override",
    "keys of old weights in it would outlive a handoff": "kv_offloading_size kv_offloading_backend kv_transfer_config "
    "kv_events_config ec_transfer_config ec_manager_config",
    "its scales would be those of weights that are not loaded yet": "calculate_kv_scales",
    "the engine lives in the trainer's processes": "distributed_executor_backend master_addr master_port nnodes "
    "node_rank device_ids numa_bind numa_bind_nodes numa_bind_cpus ray_workers_use_nsight distributed_timeout_seconds "
    "cpu_distributed_timeout_seconds enable_shm_tensor_arena max_parallel_loading_workers enable_fault_tolerance "
    "fault_tolerance_config",
    "the engine is parallel over tensors, and over replicas": "pipeline_parallel_size prefill_context_parallel_size "
    "decode_context_parallel_size dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
    "cp_kv_cache_interleave_size",
    "it is num_ranks / tensor_parallel_size": "data_parallel_size",
    "replicas are engines that know nothing of each other": "data_parallel_rank data_parallel_start_rank "
    "data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
    "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend dp_sync_interval "
    "disable_nccl_for_dp_synchronization prefill_schedule_interval enable_dbo ubatch_size dbo_decode_token_threshold "
    "dbo_prefill_token_threshold",
    "experts are cut over the ranks of a replica like all matrices, not spread": "enable_expert_parallel "
    "all2all_backend enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy enable_elastic_ep "
    "elastic_ep_max_dp_size enable_hc_sp",
    "the trainer hands its weights over": "load_format model_loader_extra_config model_weights download_dir "
    "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size ignore_patterns "
    "pt_load_map_location use_tqdm_on_load weight_transfer_config sleep_preserve_parameter_names",
    "handoffs write the engine's weights where they are; memory.offload moves the trainer's": "offload_backend "
    "cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params",
    "engines compute in model.dtype; plain_weights says how CPUs hold weights": "quantization quantization_config "
    "allow_deprecated_quantization",
    "the engine sleeps if its platform can": "enable_sleep_mode enable_cumem_allocator",
    "it follows from the platform": "worker_cls",
    "the worker is the library's own": "worker_extension_cls",
    "logprobs are those of the distribution that was sampled from": "logprobs_mode",
    "a sample has the logprobs of its own tokens and no others": "max_logprobs return_sampling_mask",
    "nothing reads what vLLM would return": "enable_return_routed_experts aux_output_config",
    "samples are drawn as the keys of rollout and eval say": "generation_config override_generation_config",
    "the trainer could not tell how likely its samples were": "logits_processors watermark_config enable_trace_replay",
    "drafted tokens are not supported": "speculative_config spec_method spec_model spec_tokens "
    "per_request_spec_decode_metrics",
    "the engine counts for itself": "disable_log_stats aggregate_engine_logging kv_cache_metrics "
    "kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_mfu_metrics enable_mm_processor_stats "
    "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces",
    "nothing starts vLLM's profiler": "profiler_config",
    "the log is the process's: set the level of the logger vllm": "logging_config log_level log_config_file",
    "it is for servers": "served_model_name max_num_queued_reqs max_num_queued_tokens tokens_only shutdown_timeout "
    "io_processor_plugin renderer_num_workers fail_on_environ_validation _api_process_count _api_process_rank",
    "requests have no priority": "scheduling_policy",
    "tokens are taken as they are drawn": "stream_interval",
    "samples are texts": "allowed_local_media_path allowed_media_domains language_model_only limit_mm_per_prompt "
    "enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb "
    "mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
    "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
    "mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc "
    "mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize disable_chunked_mm_input",
    "it follows from the section lora; rollout.vllm.lora_handoff=adapter uses vLLM's own slots": "enable_lora "
    "max_loras max_cpu_loras max_lora_rank lora_dtype lora_target_modules default_mm_loras enable_tower_connector_lora "
    "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels specialize_active_lora",
    "the adapter is read back as it is cut without it": "fully_sharded_loras",
}
RESERVED: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_OF_GRAPHS = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def check_arguments(config: Any, device: str) -> None:
    """Raise ConfigError for an argument of vLLM that is not the user's to give, or that would do nothing.

    config: a VLLMConfig. device: cpu or cuda; on CPUs the engine has no CUDA graphs unless it is told to compile.
    """
    is_eager = device == "cpu" if config.enforce_eager is None else config.enforce_eager
    for name in config.engine_args:
        if name in RESERVED:
            raise ConfigError(f"rollout.vllm.{name} cannot be set: {RESERVED[name]}")
        if is_eager and name in _OF_GRAPHS:
            raise ConfigError(f"rollout.vllm.{name} would do nothing: the engine has no CUDA graphs (enforce_eager)")
        if config.tensor_parallel_size == 1 and name == "disable_custom_all_reduce":
            raise ConfigError(f"rollout.vllm.{name} would do nothing with tensor_parallel_size=1; leave it out")
