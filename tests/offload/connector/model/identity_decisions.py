"""Decisions about vLLM's settings: the settings listed here count, because they were not shown to
be harmless.

They are given as fields of each class of vLLM's configuration, and as variables of its environment.
A setting that is neither here nor in `offload.connector.model.cannot_change_kv` has not been
examined: it counts, and `tests.offload.connector.model.test_identity_sweep` fails.
"""

from __future__ import annotations

import vllm

FIELDS: dict[str, str] = {
    "AttentionConfig": "minimax_m3_msa_decode_backend backend_per_kind flash_attn_version "
    "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
    "tq_max_kv_splits_for_cuda_graph use_trtllm_attention "
    "disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization "
    "indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa "
    "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n "
    "flex_attn_q_block_size flex_attn_kv_block_size trtllm_ragged_backend "
    "indexer_tp_shard_min_rows minimax_m3_indexer_cp",
    "CacheConfig": "replayssm_buffer_len use_replayssm use_kda_recoverssm "
    "kv_sharing_fast_prefill swa_bounded_replay",
    "CompilationConfig": "mode backend custom_ops ir_enable_torch_wrap splitting_ops "
    "compile_mm_encoder cudagraph_decoder_replay decoder_replay_trim_threshold "
    "inductor_compile_config inductor_passes use_inductor_graph_partition pass_config "
    "dynamic_shapes_config",
    "DiffusionConfig": "canvas_length max_denoising_steps",
    "DynamicShapesConfig": "type evaluate_guards assume_32_bit_indexing",
    "ECTransferConfig": "ec_connector ec_connector_extra_config ec_connector_module_path",
    "EPLBConfig": "window_size step_interval num_redundant_experts use_async policy communicator "
    "enable_migration_batching",
    "EncoderCacheManagerConfig": "encoder_cache_manager_cls manager_config",
    "EngramConfig": "cpu_offload embedding_across_dp dp_shared_memory use_thp",
    "HiSparseConfig": "device_buffer_size eager_host_mirror",
    "IrOpPriorityConfig": "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
    "KernelConfig": "ir_op_priority enable_flashinfer_autotune "
    "enable_rocm_segmented_attn_autotune moe_backend sparse_indexer_topk_backend "
    "linear_backend linear_backend_per_quant monokernel",
    "LoRAConfig": "max_lora_rank fully_sharded_loras lora_dtype target_modules "
    "enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
    "LoadConfig": "safetensors_load_strategy ignore_patterns",
    "MambaConfig": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds "
    "ssu_algorithm",
    "ModelConfig": "runner convert trust_remote_code enforce_eager enable_prompt_embeds "
    "config_format pooler_config",
    "MultiModalConfig": "language_model_only limit_per_prompt enable_mm_embeds media_io_kwargs "
    "mm_processor_kwargs mm_device_do_normalize mm_encoder_only mm_encoder_tp_mode "
    "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
    "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin video_pruning_rate "
    "video_pruning_method allow_missing_mm_embeddings",
    "OffloadConfig": "offload_backend uva prefetch",
    "ParallelConfig": "enable_hc_sp enable_expert_parallel enable_eplb eplb_config "
    "expert_placement_strategy all2all_backend enable_elastic_ep dcp_comm_backend "
    "dcp_q_replicate",
    "PassConfig": "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops "
    "enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding "
    "fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache "
    "rope_kvcache_fusion_max_token_num",
    "PoolerConfig": "task pooling_type seq_pooling_type tok_pooling_type use_activation "
    "enable_flash_late_interaction dimensions enable_chunked_processing max_embed_len "
    "logit_mean logit_sigma step_tag_id returned_token_ids",
    "PrefetchOffloadConfig": "offload_group_size offload_num_in_group offload_prefetch_step "
    "offload_params",
    "SpeculativeConfig": "enforce_eager num_speculative_tokens draft_tensor_parallel_size "
    "moe_backend attention_backend index_share_for_mtp_iteration disable_padded_drafter_batch "
    "disable_eagle_block_drop use_heterogeneous_vocab parallel_drafting "
    "num_speculative_tokens_per_batch_size enable_adaptive_verification dspark_draft_topk "
    "disable_lookahead_block_hashes",
    "UVAOffloadConfig": "cpu_offload_gb cpu_offload_params",
    "VllmConfig": "model_config cache_config parallel_config scheduler_config device_config "
    "load_config offload_config attention_config aux_output_config engram_config mamba_config "
    "kernel_config lora_config watermark_config diffusion_config structured_outputs_config "
    "observability_config logging_config compilation_config profiler_config "
    "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config "
    "reasoning_config watchdog_config additional_config optimization_level performance_mode",
}

VARIABLES = (
    "VLLM_FLOAT32_MATMUL_PRECISION VLLM_BATCH_INVARIANT VLLM_REPLICATE_EMBED "
    "VLLM_TRITON_USE_TD VLLM_USE_MODELSCOPE VLLM_USE_STANDALONE_COMPILE "
    "VLLM_ENABLE_PREGRAD_PASSES VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_AOT_COMPILE "
    "VLLM_USE_BYTECODE_HOOK VLLM_USE_MEGA_AOT_ARTIFACT VLLM_PP_LAYER_PARTITION "
    "VLLM_CPU_CI_ENV VLLM_CPU_ATTN_SPLIT_KV VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_CPU_INT4_W4A8 "
    "VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS "
    "VLLM_VIDEO_LOADER_BACKEND VLLM_MEDIA_CONNECTOR VLLM_XLA_USE_SPMD "
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_TEST_FORCE_LOAD_FORMAT VLLM_PLUGINS "
    "VLLM_USE_TRITON_AWQ VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_DISABLED_KERNELS "
    "VLLM_USE_HW_AGNOSTIC VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_GDN_DECODE_KERNEL "
    "VLLM_USE_OINK_OPS VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD "
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_LINEAR "
    "VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_SITUV2 "
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_AITER_MOE_DISPATCH_POLICY "
    "VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_AITER_MLA_DCP_VERIFY "
    "VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_FP4_ASM_GEMM "
    "VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_TRITON_ROPE "
    "VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FP4BMM "
    "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS "
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_MONO_DECODE "
    "VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_SKINNY_GEMM VLLM_ROCM_FP8_PADDING "
    "VLLM_ROCM_MOE_PADDING VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT "
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 "
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB "
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_USE_LAYERNAME VLLM_MLA_DISABLE "
    "VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG "
    "VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM VLLM_HUMMING_MOE_GEMM_TYPE "
    "VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_TPU_USING_PATHWAYS VLLM_USE_DEEP_GEMM "
    "VLLM_MOE_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES "
    "VLLM_DCP_Q_REPLICATE VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_MOE_SKIP_PADDING "
    "VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_KIMI_K3_AUX_ATTN_RES_STREAM "
    "VLLM_KIMI_K3_GEMM_AR VLLM_ENABLE_GEMM_RS VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER "
    "VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_USE_FLASHINFER_MOE_INT4 "
    "VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE "
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE "
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_SSM_CONV_STATE_LAYOUT "
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_ROCM_FP8_MFMA_PAGE_ATTN "
    "VLLM_TUNED_CONFIG_FOLDER VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION "
    "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING "
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION "
    "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD "
    "VLLM_USE_V2_MODEL_RUNNER VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_LORA_DISABLE_PDL "
    "VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND VLLM_USE_DIRECT_DCP_A2A "
    "VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_LORA_ENABLE_DUAL_STREAM "
    "VLLM_ENABLE_HPC_OPS VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD "
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE "
    "VLLM_STEP5_SHARD_SP_SHARED_EXPERT"
)

NEW_IN_33 = (
    "AttentionConfig.trtllm_ragged_backend AttentionConfig.indexer_tp_shard_min_rows "
    "AttentionConfig.minimax_m3_indexer_cp CacheConfig.simple_cpu_offload_num_blocks "
    "KernelConfig.monokernel SpeculativeConfig.disable_lookahead_block_hashes "
    "SpeculativeConfig.draft_lm_head_quantization SpeculativeConfig.xpress_topc "
    "SpeculativeConfig.fly_window_size SpeculativeConfig.fly_entropy_threshold "
    "SpeculativeConfig.fly_entropy_top_k VllmConfig.watchdog_config WatchdogConfig "
    "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_CHAT_TEMPLATE_FUEL "
    "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_HTTP_MAX_REQUEST_BODY_SIZE "
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB "
    "VLLM_REQUEST_BODY_LOG_LEVEL VLLM_ROCM_MUSE_MOE_ONLINE_QUANT "
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_STEP5_SHARD_SP_SHARED_EXPERT "
    "CompilationConfig.cudagraph_num_of_warmups "
    "model_executor/kernels/attention/dsa/candidate_blocks.py"
)
"""Names that vLLM 0.32 lacks: fields, classes, variables, settings that a model reads, files."""

GONE_IN_33 = (
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_DCP_VERIFY "
    "VLLM_ROCM_MONO_DECODE VLLM_ROCM_USE_AITER_FP4_ASM_GEMM "
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM "
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM"
)
"""Names that vLLM 0.33 lacks."""

ABSENT = frozenset((NEW_IN_33 if vllm.__version_tuple__[:2] < (0, 33) else GONE_IN_33).split())
"""Names that the installed version lacks."""

WHOLE = (
    "AudioDummyOptions BaseDummyOptions ImageDummyOptions VideoDummyOptions "
    "ModelArchitectureConfig QuantSpec QuantizationConfigArgs Range SpeechToTextConfig "
    "SpeechToTextParams WeightTransferConfig"
)
"""Classes beside vLLM's configuration objects whose fields are not examined one by one: values that
count as a whole, derived values, or values of a request."""

OTHERS_HARMLESS: dict[str, str] = {
    "where things are kept or found": "CONDA_PREFIX CRIU_CUDA_PLUGIN_DIR CUDA_PATH "
    "FLASHINFER_CUBINS_REPOSITORY FLYDSL_RUNTIME_CACHE_DIR LD_PRELOAD MODELSCOPE_API_TOKEN "
    "OUTLINES_CACHE_DIR ROCM_PATH TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR XDG_CACHE_HOME "
    "XDG_CONFIG_HOME VLLM_PRECOMPILED_WHEEL_LOCATION AWS_ENDPOINT_URL RUNAI_STREAMER_S3_ENDPOINT",
    "processes, devices, networks": "ARCH MASTER_ADDR MASTER_PORT NCCL_RAS_ENABLE WORLD_SIZE "
    "CCL_ATL_TRANSPORT CUDA_DEVICE_ORDER EP_DISABLE_GIN "
    "GPU_PINNED_MIN_XFER_SIZE HIP_VISIBLE_DEVICES JAX_PLATFORMS LOCAL_WORLD_SIZE "
    "MORI_SHMEM_HEAP_SIZE NCCL_ASYNC_ERROR_HANDLING NCCL_GRAPH_REGISTER NCCL_LAUNCH_MODE "
    "NCCL_MAX_CTAS NCCL_NO_CACHE PYTORCH_NVML_BASED_CUDA_CHECK RANK RAY_ADDRESS "
    "RAY_CGRAPH_get_timeout RAY_USAGE_STATS_ENABLED UCX_MEMTYPE_CACHE UCX_RCACHE_MAX_UNRELEASED "
    "VLLM_DIST_IDENT VLLM_SNAPSHOT_TIMEOUT_S VLLM_CUSTOM_ALLREDUCE_ALGO",
    "other connectors": "LMCACHE_CONFIG_FILE LMCACHE_FORCE_SKIP_SAVE LMCACHE_USE_UPSTREAM_MP "
    "MOONCAKE_CONFIG_PATH VLLM_MORIIO_TRANSFER_TIMEOUT_S",
    "logs, traces and metrics": "DO_NOT_TRACK LLGUIDANCE_LOG_LEVEL "
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT PROMETHEUS_MULTIPROC_DIR TRACEPARENT TRACESTATE "
    "TRITON_PRINT_AUTOTUNING traceparent tracestate",
    "memory": "PYTORCH_CUDA_ALLOC_CONF",
    "the kernels of third parties: caches, compilers, traces and their own tests": "CUDACXX "
    "COMPILE_ONLY CUDA_MPS_PIPE_DIRECTORY CUTE_CUBIN_PATH CUTE_DSL_DUMP_DIR CUTE_DSL_KEEP_CUBIN "
    "CUTE_DSL_KEEP_PTX CUTE_DSL_PTXAS_PATH CUTE_DSL_PTXAS_VERBOSE DG_USE_NVIDIA_TOOLS "
    "FA_LOG_LEVEL FLASH_ATTENTION_CUTE_DSL_CACHE_DIR FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED "
    "FMHA_GMEM_CHECK GPU_TRACE MINFER_FMHA_CACHE_DIR MINIMAX_KERNELS_CUTE_AOT_CACHE "
    "MINIMAX_KERNELS_KVOUTER_DEBUG_ARTIFACTS MINIMAX_LOG_COMPILE MM_SPARSE_ATTN_AOT_CACHE "
    "MM_SPARSE_ATTN_AOT_DISABLE PATH PROTON_LAUNCH_METADATA_NOSYNC PYTORCH_ROCM_ARCH "
    "SKIP_COMPUTE_SANITIZER SM_TIMING TORCH_EXTENSIONS_DIR",
    "compiling": "TILELANG_CLEANUP_TEMP_FILES TORCHINDUCTOR_COMPILE_THREADS "
    "TRITON_CACHE_AUTOTUNING",
    "threads add up in another order, as at another step size": "NUMEXPR_MAX_THREADS "
    "VLLM_CPU_SIM_MULTI_NUMA "
    "OMP_NUM_THREADS TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "is the hash's own field": "PYTHONHASHSEED",
}
"""Variables that vLLM reads without listing them and that cannot change KV."""

READ_BY_MODELS: dict[str, str] = {
    "how long a buffer, workspace or table is": "SchedulerConfig.max_num_batched_tokens "
    "SchedulerConfig.max_num_seqs SchedulerConfig.max_num_encoder_input_tokens "
    "SchedulerConfig.async_scheduling CompilationConfig.cudagraph_capture_sizes "
    "CompilationConfig.max_cudagraph_capture_size",
    "whether a kernel is compiled, captured or split at this moment": "KernelConfig."
    "enable_jit_warmup CompilationConfig.cudagraph_num_of_warmups "
    "CompilationConfig.cudagraph_mode CompilationConfig.fast_moe_cold_start "
    "ParallelConfig.enable_dbo ParallelConfig.ubatch_size",
    "which layers exist, and where": "CompilationConfig.static_forward_context DeviceConfig.device "
    "LoadConfig.device ModelConfig.enable_sleep_mode ParallelConfig.data_parallel_rank "
    "VllmConfig.quant_config",
    "what is loaded from where": "LoadConfig.download_dir ModelConfig.hf_token",
    "checks and messages": "CacheConfig.enable_prefix_caching "
    "SchedulerConfig.enable_chunked_prefill ModelConfig.served_model_name "
    "ModelConfig.skip_tokenizer_init",
}
"""Harmless settings that the code of some models reads, grouped by what the code does with them."""

_BACKENDS = "v1/attention/backends"
LENGTH_OUTSIDE_MODELS: dict[str, str] = {
    "chooses the frequencies of long RoPE, of which the namespace takes care": "model_executor/"
    "layers/rotary_embedding/phi3_long_rope_scaled_rope.py",
    "how long a buffer, workspace or table is": "model_executor/layers/attention/mla_attention.py "
    "model_executor/layers/attention/sparse_mla_attention.py "
    "model_executor/layers/attention/static_sink_attention.py "
    "model_executor/kernels/attention/dsa/candidate_blocks.py "
    "model_executor/layers/indexer_topk.py "
    "model_executor/layers/quantization/modelopt_block_quant.py "
    "model_executor/layers/rocm_paged_mxfp4_indexer.py "
    "model_executor/layers/sparse_attn_indexer.py "
    f"{_BACKENDS}/b12x.py {_BACKENDS}/flashinfer.py {_BACKENDS}/flex_attention.py "
    f"{_BACKENDS}/hpc_attn.py {_BACKENDS}/mla/flashmla_sparse.py {_BACKENDS}/mla/indexer.py "
    f"{_BACKENDS}/mla/rocm_aiter_mla.py {_BACKENDS}/mla/rocm_aiter_mla_sparse.py "
    f"{_BACKENDS}/mla/rocm_paged_mxfp4_indexer.py {_BACKENDS}/mla/sparse_swa.py "
    f"{_BACKENDS}/mla/sparse_utils.py {_BACKENDS}/mla/triton_mla.py "
    f"{_BACKENDS}/mla/xpu_mla_sparse.py {_BACKENDS}/rocm_attn.py {_BACKENDS}/triton_attn.py "
    f"{_BACKENDS}/rocm_segmented_attn.py {_BACKENDS}/turboquant_attn.py "
    f"{_BACKENDS}/ultraquant_attn.py {_BACKENDS}/utils.py "
    "v1/attention/ops/flydsl_turboquant_decode.py v1/attention/ops/rocm_aiter_mla_sparse.py "
    "v1/attention/ops/rocm_paged_mxfp4_indexer.py",
    "how many tokens a step may have": "platforms/cpu.py",
    "a check, which changes nothing": "platforms/interface.py",
}
"""Code outside the models that mentions ``max_model_len``, grouped by what it does with it."""
