"""Every argument of vLLM is a key, passes through, or is refused with the reason: a new one must be looked at."""

from __future__ import annotations

import dataclasses

from vllm import EngineArgs

from hybrid_rl.config.engine_keys import VLLMArgs
from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.config.vllm_arguments import reserved
from hybrid_rl.vllm.versions import installed_version, numbers

# What passes through, and has an effect in the trainer's processes.
TAKEN: dict[str, str] = {
    "the model's code and kernels": "model_impl model_class_overrides attention_backend attention_config moe_backend "
    "linear_backend sparse_indexer_topk_backend kernel_config ir_op_priority enable_flashinfer_autotune "
    "gdn_prefill_backend kda_prefill_backend kda_decode_backend mamba_config mamba_backend mamba_ssu_algorithm "
    "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds engram_config additional_config "
    "override_attention_dtype disable_cascade_attn disable_custom_all_reduce use_fp64_gumbel "
    "enable_batch_sharded_sampling replayssm_buffer_len use_replayssm swa_bounded_replay kv_sharing_fast_prefill",
    "compiling and CUDA graphs": "compilation_config optimization_level performance_mode cudagraph_capture_sizes "
    "max_cudagraph_capture_size",
    "the cache": "block_size kv_cache_dtype kv_cache_dtype_skip_layers prefix_caching_hash_algo "
    "prefix_cache_retention_interval prefix_match_unit disable_sliding_window disable_hybrid_kv_cache_manager "
    "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint",
    "what runs in a pass": "async_scheduling enable_chunked_prefill long_prefill_token_threshold "
    "long_prefill_token_threshold_adaptive max_num_partial_prefills max_long_partial_prefills "
    "max_num_scheduled_tokens max_num_active_seqs scheduler_cls scheduler_reserve_full_isl watermark",
    "what is said and traced": "jit_monitor_mode jit_monitor_verbose enable_layerwise_nvtx_tracing "
    "enable_logging_iteration_details",
    "sleep": "sleep_mode_offload_cudagraph enable_nccl_comm_suspend",
}
OLD_ONLY = {"calculate_kv_scales"}
OF_ROLLOUT = {"quantization"}  # a key beside engine_args, with values of its own


def test_every_argument_is_a_key_passes_through_or_is_refused() -> None:
    keys = {item.name for kind in (VLLMArgs, VLLMRolloutConfig) for item in dataclasses.fields(kind)}
    own = {item.name for item in dataclasses.fields(EngineArgs)} - keys
    taken = {name for names in TAKEN.values() for name in names.split()}
    assert own - reserved().keys() - taken == set()
    assert taken & reserved().keys() == set()
    if numbers(installed_version() or "")[:2] == (0, 32):
        assert reserved().keys() - own == OLD_ONLY | OF_ROLLOUT
