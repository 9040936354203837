"""Names the vLLM settings that cannot change the bytes of a KV block, and why.

The namespace contains all other settings. The rule: a setting is harmless if it has no influence on
the model's computation, or if it only decides which tokens are computed in one step (vLLM's own
prefix cache shares blocks across such differences within one server, too). Unknown settings are not
harmless: if a field of a newer vLLM is set, the server gets a separate namespace, and
`tests/offload/connector/model/test_identity_sweep.py` fails until a developer has classified it
(docs/decisions/0044).

The tables map each reason to the names that it applies to, separated by spaces.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from functools import cache

ALL = "*"

_NAMED = "has its own field in the namespace"
_MEMORY = "how much memory is used, and how many blocks there are"
_STEPS = "which tokens are computed together in a step"
_KEPT = "which blocks are kept and found"
_AFTER = "acts after the last layer: sampling, log-probabilities and the response"
_TOKENS = "acts before the first layer: keys are hashes of token ids"
_FETCH = "where and how fast bytes are fetched, not which bytes"
_WATCH = "logs, metrics and profiles"
_PROCESSES = "processes, ports and networks"
_SUMS = "the order in which ranks or threads add up, which also differs with the size of a step"
_GRAPHS = "graph capture pads and replays the same kernels"
_DERIVED = "follows from what is in the namespace"
_OURS = "what happens to finished blocks"
_BUILD = "building and installing vLLM; its version is in the namespace"
_CACHES = "where reproducible files are kept"
_CHECKS = "checks and limits that refuse or end a request"
_KEYED = "is part of the keys"

FIELDS: Mapping[str, Mapping[str, str]] = {
    "VllmConfig": {
        _DERIVED: "quant_config",
        _NAMED: "speculative_config weight_transfer_config",
        _PROCESSES: "instance_id shutdown_timeout",
    },
    "ModelConfig": {
        _NAMED: "model model_weights revision code_revision dtype quantization quantization_config "
        "hf_config hf_text_config hf_config_path hf_overrides model_class_overrides model_impl "
        "disable_sliding_window multimodal_config max_model_len generation_config "
        "override_generation_config tokenizer tokenizer_revision tokenizer_mode",
        _AFTER: "max_logprobs logprobs_mode use_fp64_gumbel logits_processors return_sampling_mask "
        "enable_trace_replay seed",
        _TOKENS: "skip_tokenizer_init allowed_local_media_path allowed_media_domains "
        "served_model_name io_processor_plugin renderer_num_workers",
        _FETCH: "hf_token",
        _MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
        "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
        _DERIVED: "spec_target_max_model_len is_submodel_config "
        "word_embeddings_untied_by_checkpoint",
        _CHECKS: "allow_deprecated_quantization",
        "no longer has any effect": "disable_cascade_attn",
    },
    "CacheConfig": {
        _NAMED: "cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_cache_mode prefix_caching_hash_algo kv_cache_layout hash_block_size block_size "
        "user_specified_block_size mamba_block_size mamba_page_size_padded skip_page_size_padded "
        "sliding_window is_attention_free _block_size_resolved effective_attention_block_size",
        _MEMORY: "gpu_memory_utilization num_gpu_blocks num_gpu_blocks_override num_cpu_blocks "
        "kv_cache_memory_bytes kv_cache_size_tokens kv_cache_max_concurrency kv_offloading_size "
        "kv_offloading_backend simple_cpu_offload_num_blocks",
        _KEPT: "enable_prefix_caching prefix_match_unit prefix_cache_retention_interval "
        "cache_hit_alignment_tokens enable_mamba_shared_prefix_checkpoint",
    },
    "ParallelConfig": {
        _NAMED: "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
        "data_parallel_size",
        _DERIVED: "is_moe_model world_size",
        _STEPS: "dp_sync_interval enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold",
        _SUMS: "disable_custom_all_reduce",
        _AFTER: "enable_batch_sharded_sampling",
        _MEMORY: "elastic_ep_max_dp_size",
        _FETCH: "enable_ep_weight_filter max_parallel_loading_workers",
        _PROCESSES: "data_parallel_size_local data_parallel_rank data_parallel_rank_local "
        "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port "
        "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb "
        "data_parallel_index _data_parallel_master_port_list _coord_store_port "
        "disable_nccl_for_dp_synchronization enable_shm_tensor_arena ray_workers_use_nsight "
        "ray_runtime_env placement_group distributed_executor_backend worker_cls "
        "worker_extension_cls master_addr master_port rank node_rank nnodes numa_bind "
        "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds _allow_auto_resolve_cp_interleave_size "
        "_api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config",
    },
    "EPLBConfig": {_WATCH: "log_balancedness log_balancedness_interval"},
    "SchedulerConfig": {
        _STEPS: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive "
        "enable_chunked_prefill max_num_encoder_input_tokens policy disable_chunked_mm_input "
        "scheduler_cls scheduler_reserve_full_isl prefill_schedule_interval async_scheduling",
        _MEMORY: "encoder_cache_size watermark",
        _CHECKS: "max_num_queued_reqs max_num_queued_tokens",
        _DERIVED: "runner_type is_multimodal_model disable_hybrid_kv_cache_manager",
        _AFTER: "stream_interval",
    },
    "DeviceConfig": {_NAMED: "device_type", _DERIVED: "device"},
    "LoadConfig": {
        _NAMED: "load_format model_loader_extra_config",
        _FETCH: "download_dir safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "device use_tqdm_on_load pt_load_map_location",
    },
    "AttentionConfig": {_NAMED: "backend indexer_kv_dtype"},
    "AuxOutputConfig": {_AFTER: ALL},
    "KernelConfig": {
        _CACHES: "enable_cutedsl_warmup enable_jit_warmup",
    },
    "LoRAConfig": {
        _MEMORY: "max_loras max_cpu_loras",
        _KEYED: "default_mm_loras",
        _GRAPHS: "specialize_active_lora",
        _AFTER: "max_lora_cls_labels",
    },
    "SpeculativeConfig": {
        _NAMED: "model method kv_cache_dtype draft_model_config draft_load_config revision "
        "code_revision quantization max_model_len",
        _DERIVED: "target_model_config target_parallel_config draft_parallel_config "
        "tensor_parallel_size",
        _AFTER: "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
        "draft_sample_method use_local_argmax_reduction prompt_lookup_max prompt_lookup_min "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
        "draft_lm_head_quantization xpress_topc fly_window_size fly_entropy_threshold "
        "fly_entropy_top_k",
    },
    "WatermarkConfig": {_AFTER: ALL},
    "StructuredOutputsConfig": {_AFTER: ALL},
    "ReasoningConfig": {_AFTER: ALL},
    "ObservabilityConfig": {_WATCH: ALL},
    "LoggingConfig": {_WATCH: ALL},
    "ProfilerConfig": {_WATCH: ALL},
    "WatchdogConfig": {_WATCH: ALL},
    "KVTransferConfig": {_OURS: ALL},
    "KVEventsConfig": {_OURS: ALL},
    "FaultToleranceConfig": {_PROCESSES: ALL},
    "ECTransferConfig": {
        _PROCESSES: "engine_id ec_buffer_device ec_buffer_size ec_role ec_ip ec_port",
        _DERIVED: "mm_encoder_output_widths",
    },
    "MultiModalConfig": {
        _MEMORY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "skip_mm_profiling mm_ipc_gpu_memory_gb",
        _PROCESSES: "mm_tensor_ipc",
        _KEYED: "mm_hasher_algorithm",
        _TOKENS: "interleave_mm_strings",
    },
    "CompilationConfig": {
        _CACHES: "debug_dump_path cache_dir compile_cache_save_format local_cache_dir",
        _GRAPHS: "cudagraph_mode cudagraph_mm_encoder cudagraph_num_of_warmups "
        "cudagraph_capture_sizes max_cudagraph_capture_size cudagraph_copy_inputs "
        "cudagraph_specialize_lora encoder_cudagraph_token_budgets "
        "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch "
        "decoder_replay_cudagraph_capture_sizes",
        _STEPS: "compile_sizes compile_ranges_endpoints",
        _WATCH: "enabled_custom_ops disabled_custom_ops traced_files compilation_time "
        "encoder_compilation_time",
        _DERIVED: "static_forward_context static_all_moe_layers fast_moe_cold_start",
    },
    "PassConfig": {_SUMS: "fuse_allreduce_rms fi_allreduce_fusion_max_size_mb"},
}

VARIABLES: Mapping[str, str] = {
    _BUILD: "VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION MAX_JOBS NVCC_THREADS VLLM_USE_PRECOMPILED "
    "VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT "
    "VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG CMAKE_BUILD_TYPE VERBOSE "
    "VLLM_SKIP_VERSION_SUFFIX CUDA_HOME VLLM_NCCL_INCLUDE_PATH VLLM_HAS_FLASHINFER_CUBIN",
    _CACHES: "VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_DEBUG_DUMP_PATH VLLM_XLA_CACHE_PATH "
    "VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_FORCE_AOT_LOAD "
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_DEEP_GEMM_WARMUP "
    "VLLM_ENABLE_STARTUP_PLAN VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB VLLM_ASSETS_CACHE "
    "VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB "
    "VLLM_MEDIA_CACHE_TTL_HOURS VLLM_LORA_RESOLVER_CACHE_DIR",
    _PROCESSES: "VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_NCCL_SO_PATH LD_LIBRARY_PATH "
    "VLLM_CUDART_SO_PATH LOCAL_RANK CUDA_VISIBLE_DEVICES VLLM_ENGINE_READY_TIMEOUT_S "
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM "
    "VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND "
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING "
    "VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_DP_RANK VLLM_DP_RANK_LOCAL "
    "VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_RAY_DP_PACK_STRATEGY "
    "VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_LOOPBACK_IP "
    "VLLM_PROCESS_NAME_PREFIX VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_RINGBUFFER_WARNING_INTERVAL "
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_SKIP_P2P_CHECK "
    "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_USE_SPINLOOP_EXT "
    "VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS VLLM_ENABLE_CUDA_COMPATIBILITY "
    "VLLM_CUDA_COMPATIBILITY_PATH VLLM_DEEPEP_BUFFER_SIZE_MB "
    "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL "
    "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DBO_COMM_SMS",
    _OURS: "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST "
    "VLLM_P2P_SIDE_CHANNEL_PORT VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S "
    "VLLM_P2P_IDLE_TIMEOUT_S VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT "
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_STORE_TIER_LOG "
    "VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO "
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_PREFERRED_SEGMENT "
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES "
    "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_USE_SIMPLE_KV_OFFLOAD",
    _WATCH: "VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE "
    "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM "
    "VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL "
    "VLLM_TRACE_FUNCTION VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_LOG_BATCHSIZE_INTERVAL "
    "VLLM_PATTERN_MATCH_DEBUG VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING "
    "VLLM_GC_DEBUG VLLM_DEBUG_WORKSPACE VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS "
    "VLLM_DISABLE_LOG_LOGO VLLM_GPU_SYNC_CHECK VLLM_XLA_CHECK_RECOMPILATION "
    "VLLM_REQUEST_BODY_LOG_LEVEL",
    _TOKENS: "VLLM_USE_FASTOKENS VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_API_KEY "
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH "
    "VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_DISABLE_REQUEST_ID_RANDOMIZATION "
    "VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API VLLM_SKIP_MODEL_NAME_VALIDATION "
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS "
    "VLLM_SYSTEM_START_DATE VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_MEDIA_LOADING_THREAD_COUNT "
    "VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_CHAT_TEMPLATE_FUEL",
    _AFTER: "VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL "
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS "
    "VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY "
    "VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS "
    "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
    _CHECKS: "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS "
    "VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB "
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_EMBED_DECODE_BYTES VLLM_HTTP_MAX_REQUEST_BODY_SIZE "
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB",
    _FETCH: "S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL VLLM_FASTSAFETENSORS_QUEUE_SIZE "
    "VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT "
    "VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_LORA_RESOLVER_HF_REPO_LIST "
    "VLLM_MODEL_REDIRECT_PATH",
    _MEMORY: "VLLM_CPU_KVCACHE_SPACE VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_ENABLE_CUDAGRAPH_GC "
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_WSL2_ENABLE_PIN_MEMORY "
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY",
    "affects runs at start-up that no request uses": "VLLM_RANDOMIZE_DP_DUMMY_INPUTS",
    _SUMS: "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU "
    "VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_ALLREDUCE_USE_SYMM_MEM "
    "VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_USE_NCCL_SYMM_MEM "
    "VLLM_DISABLE_PYNCCL",
    _STEPS: "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_XPU_PP_MICROBATCH",
    _NAMED: "VLLM_KV_CACHE_LAYOUT",
}

OTHER_VARIABLES = (
    "VLLM_TRITON_FORCE_FIRST_CONFIG AITER_BF16_FP8_MOE_BOUND "
    "CUBLASLT_WORKSPACE_SIZE CUBLAS_WORKSPACE_CONFIG FLASH_ATTENTION_TRITON_AMD_ENABLE FLA_CI_ENV "
    "FLA_COMPILER_MODE FLA_TRIL_PRECISION FLA_USE_CUDA_GRAPH FLA_USE_FAST_OPS FLA_USE_TMA "
    "FORCE_NUM_KV_SPLITS GDN_RECOMPUTE_SUPPRESS_LEVEL HIP_ONLINE_TUNING INKLING_GFX950_GLUON "
    "INKLING_MULTIMEM_AR INKLING_SPLIT_KV LAMPORT_RS_SCONV NVIDIA_TF32_OVERRIDE "
    "ONEDNN_DEFAULT_FPMATH_MODE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_COMPILE_DISABLE "
    "TORCHDYNAMO_DISABLE TRITON_INTERPRET USE_DEFAULT_FLA_NORM USE_FLAGOS XHS_VIDEO_JPEG_QUALITY "
    "XPU_USE_TRITON_KERNEL FA_CLC FA_DISABLE_2CTA FLASH_ATTENTION_ARCH FLASH_ATTENTION_NUM_SMS "
    "FMHA_SM100_BLACKWELL_PREFILL FMHA_SM100_DECODE_Q8KV4_ARCH FMHA_SM100_KVOUTER_CPP "
    "MINIMAX_KERNELS_KVOUTER_CPP MINIMAX_KERNELS_KVOUTER_COUNT_REPLICAS "
    "MINIMAX_KVFP4_FP8_PAIR_DEQUANT MSA_Q8KV4_SPLIT_MODE VLLM_MINIMAX_M3_MSA_CUTLASS_MIN_BATCH"
)
"""Variables that vLLM does not list but that affect its computation: kernels and precision."""

FILES: Mapping[str, str] = {
    _NAMED: "*.safetensors *.bin *.pt *.pth *.gguf *.ckpt *.tensors",
    _CACHES: "*.pyc *.lock *.incomplete",
    "documents": "*.md *.rst *.pdf *.png *.jpg *.jpeg *.gif *.svg *.webp README* LICENSE* LICENCE* "
    "NOTICE* COPYING* USE_POLICY* CITATION*",
    "training": "trainer_state.json all_results.json train_results.json eval_results.json *.log "
    "*.tfevents.*",
}
"""Files of a model's folder, by pattern; hidden files are left out, too."""

FILES_UNLESS_READ: Mapping[str, str] = {
    "tokenizer": "tokenizer* *tokenizer.json vocab.* merges.txt *.tiktoken *.jinja chat_template* "
    "special_tokens_map.json added_tokens.json tekken.json spiece.model sentencepiece*.model",
    "image_processor video_processor feature_extractor AutoProcessor": "*preprocessor_config.json "
    "processor_config.json",
    "generation_config": "generation_config.json",
}
"""Files by words: these files are harmless, too, unless a name in the model's code contains one of
the words. KV keys are hashes of token ids, media files matter only for models that take media, and
generation settings affect only the sampler."""

TRAINING_WEIGHTS = "training_args.bin optimizer.bin optimizer.pt scheduler.pt scaler.pt rng_state*"
"""Files with names like those of weights, which vLLM does not load."""


@cache
def fields_of(class_name: str) -> frozenset[str] | None:
    """The harmless fields of one of vLLM's configuration classes; ``None`` stands for all
    fields."""
    names = " ".join(FIELDS.get(class_name, {}).values()).split()
    return None if ALL in names else frozenset(names)


@cache
def variables() -> frozenset[str]:
    """The names of harmless environment variables."""
    return frozenset(" ".join(VARIABLES.values()).split())


def is_harmless_file(name: str, may_read: Callable[..., bool]) -> bool:
    """True if a file of a model's folder cannot change KV.

    ``name`` has no folder part; ``may_read(*words)`` returns whether the model's code may contain a
    name with one of the words.
    """
    patterns = " ".join(FILES.values()).split()
    for words, more in FILES_UNLESS_READ.items():
        patterns += [] if may_read(*words.split()) else more.split()
    return name.startswith(".") or matches(name, patterns)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if a file's name matches one of these patterns. Upper and lower case differ."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
