"""The keys of ``zero_optimization`` and of the fast disks it may use; see ``keys.py``."""

from __future__ import annotations

from paceline.config.deepspeed.keys import Key, noted, refused, used

_MESSAGES = "FSDP2 gathers and reduces by module, with messages of its own; the sums are equal."
_UNITS = "sharding.units says which modules are gathered at once; by default every block."
_STATE = "The optimizer's whole state is kept on the CPU."
_DISK = "Nothing is kept on disks."
_NO_NVME = (
    "device nvme is not there: parameters and optimizer state are kept on the device or in the "
    "memory of the CPU. Use cpu."
)

_OWN = (
    used("stage", "whole", "layout: zero=N", auto="layout"),
    noted("allgather_partitions", "flag", _MESSAGES, True),
    noted("allgather_bucket_size", "whole", _MESSAGES),
    noted("overlap_comm", "flag", _MESSAGES, True, False),
    noted("reduce_scatter", "flag", _MESSAGES, True),
    noted("reduce_bucket_size", "whole", _MESSAGES),
    noted("use_multi_rank_bucket_allreduce", "flag", _MESSAGES, True),
    noted("contiguous_gradients", "flag", _MESSAGES, True, False),
    noted("grad_hooks", "flag", _MESSAGES, True),
    noted("round_robin_gradients", "flag", _MESSAGES, False),
    noted("legacy_stage1", "flag", _MESSAGES, False),
    noted("sub_group_size", "whole", _MESSAGES),
    noted("parameter_alignment", "flag", _MESSAGES, False),
    noted("compute_grad_norm", "flag", "The norm of gradients is computed for clipping.", True),
    noted("memory_efficient_linear", "flag", "torch's own linear layers are used.", True),
    noted("load_from_fp32_weights", "flag", "Checkpoints hold float32 weights.", True),
    noted("elastic_checkpoint", "flag", "Every checkpoint loads at any layout.", False, True),
    noted("ignore_unused_parameters", "flag", "Unused parameters are found out.", True, False),
    used(
        "offload_param.device",
        "text",
        "sharding.offload: parameters (cpu); none",
        auto="sharding.offload",
    ),
    refused("offload_param.nvme_path", "text", _NO_NVME, ""),
    noted("offload_param.buffer_count", "whole", _DISK, 5),
    noted("offload_param.buffer_size", "whole", _DISK),
    noted("offload_param.max_in_cpu", "whole", _DISK),
    noted("offload_param.pin_memory", "flag", "Memory is pinned on a GPU.", True, False),
    used(
        "offload_optimizer.device",
        "text",
        "sharding.offload: optimizer (cpu); none",
        auto="sharding.offload",
    ),
    refused("offload_optimizer.nvme_path", "text", _NO_NVME, ""),
    noted("offload_optimizer.buffer_count", "whole", _DISK, 4),
    noted("offload_optimizer.pin_memory", "flag", "Memory is pinned on a GPU.", True, False),
    noted("offload_optimizer.pipeline", "flag", _DISK, False),
    noted("offload_optimizer.pipeline_read", "flag", _DISK, False),
    noted("offload_optimizer.pipeline_write", "flag", _DISK, False),
    noted("offload_optimizer.fast_init", "flag", _DISK, False),
    noted("offload_optimizer.ratio", "number", _STATE, 1.0),
    noted("offload_optimizer.super_offload", "flag", _STATE, False),
    noted("offload_optimizer.cpuadam_cores_perc", "number", "torch uses the cores it has.", 0.8),
    used("cpu_offload", "flag", "sharding.offload: optimizer"),
    used("cpu_offload_param", "flag", "sharding.offload: parameters"),
    used("cpu_offload_params", "flag", "sharding.offload: parameters"),
    noted("cpu_offload_use_pin_memory", "flag", "Memory is pinned on a GPU.", True, False),
    noted("stage3_max_live_parameters", "whole", _UNITS),
    noted("stage3_max_reuse_distance", "whole", _UNITS),
    noted("stage3_prefetch_bucket_size", "whole", _UNITS),
    noted("stage3_param_persistence_threshold", "whole", _UNITS),
    noted("stage3_model_persistence_threshold", "whole", _UNITS),
    noted("stage3_module_granularity_threshold", "whole", _UNITS, 0),
    noted("stage3_use_all_reduce_for_fetch_params", "flag", _MESSAGES, False),
    noted("stage3_allgather_sequential", "flag", _MESSAGES, False),
    noted(
        "stage3_gather_16bit_weights_on_model_save",
        "flag",
        "save_16bit_model and paceline checkpoint export gather the weights whenever asked.",
        True,
        False,
    ),
    noted(
        "stage3_gather_fp16_weights_on_model_save",
        "flag",
        "save_16bit_model and paceline checkpoint export gather the weights whenever asked.",
        True,
        False,
    ),
    used("zero_hpz_partition_size", "whole", "sharding.reshard: N (1: nothing)"),
    refused(
        "zero_quantized_weights", "flag", "Weights are gathered as they are. Leave it out.", False
    ),
    refused(
        "zero_quantized_nontrainable_weights",
        "flag",
        "Weights are gathered as they are. Leave it out.",
        False,
    ),
    refused(
        "zero_quantized_gradients",
        "flag",
        "With ZeRO gradients are reduced in float32. Leave it out; with stage 0, compress: int8 "
        "sends them quantized.",
        False,
    ),
    refused("zeropp_loco_param", "mapping", "Gradients are reduced in float32. Leave it out."),
    refused(
        "mics_shard_size",
        "whole",
        "It makes groups of ranks with a whole copy each: write layout: replicas=R, where R is the "
        "number of ranks divided by it, and leave it out.",
        -1,
        0,
    ),
    noted("mics_hierarchical_params_gather", "flag", _MESSAGES, False),
    noted("pipeline_loading_checkpoint", "flag", "Each rank reads what it holds.", False),
    noted("override_module_apply", "flag", "Module.apply is left as it is.", True),
    noted("log_trace_cache_warnings", "flag", "Nothing is traced.", False),
    noted("enable_sanity_checks", "flag", "Ranks are always compared.", False, True),
    noted("save_muon_momentum_buffer_in_memory", "flag", "torch's own optimizers are used.", False),
    noted("leaf_module.classes", "list", _UNITS),
    noted("leaf_module.names", "list", _UNITS),
    noted("leaf_module.name_suffixes", "list", _UNITS),
    refused("zenflow", "mapping", "Every step updates every parameter. Leave it out."),
)

_AIO = (
    "block_size",
    "queue_depth",
    "thread_count",
    "intra_op_parallelism",
    "single_submit",
    "overlap_events",
    "use_gds",
)

ZERO: tuple[Key, ...] = (
    *(
        Key(
            f"zero_optimization.{key.name}", key.fate, key.takes, key.becomes, key.nothing, key.auto
        )
        for key in _OWN
    ),
    *(noted(f"aio.{name}", "any", _DISK) for name in _AIO),
)
