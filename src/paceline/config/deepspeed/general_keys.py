"""The keys outside of ``zero_optimization``; see ``keys.py``."""

from __future__ import annotations

from paceline.config.deepspeed.keys import noted, refused, used

_OWN_MESSAGES = "FSDP2 gathers and reduces by module, with messages of its own; the sums are equal."
_FLOAT32 = "Gradients are accumulated and summed in float32, which is more exact."
_PROFILER = "Nothing is profiled: use torch.profiler, or track.split_every for the time in a step."

BATCH = (
    used("train_batch_size", "whole", "batch.global_batch", auto="batch.global_batch"),
    used(
        "train_micro_batch_size_per_gpu",
        "whole",
        "batch.per_device_batch",
        auto="batch.per_device_batch",
    ),
    used("gradient_accumulation_steps", "whole", "batch.accumulate", auto="batch.accumulate"),
    refused(
        "managed_gradient_accumulation",
        "flag",
        "Accumulation is counted by the engine: step() updates at the boundary alone. Leave it "
        "out, or set gradient_accumulation_steps to 1 and accumulate with engine.no_sync().",
        True,
    ),
)

OPTIMIZER = (
    used("optimizer.type", "text", "optimizer.name"),
    used("optimizer.params", "mapping", "optimizer.lr, .weight_decay and .args"),
    noted("optimizer.legacy_fusion", "flag", "torch's own optimizers are used.", False),
    used("scheduler.type", "text", "schedule.name: the same formula, step by step"),
    used("scheduler.params", "mapping", "schedule.args"),
    noted(
        "zero_allow_untested_optimizer",
        "flag",
        "Every optimizer of torch works with ZeRO here: nothing needs to be allowed.",
        False,
        True,
    ),
    noted(
        "zero_force_ds_cpu_optimizer",
        "flag",
        "An offloaded optimizer is torch's own, working on copies on the CPU.",
    ),
    used("gradient_clipping", "number", "train.clip_norm; 0: none", auto="train.clip_norm"),
)

PRECISION = (
    used("fp16.enabled", "flag", "precision: fp16", auto="precision"),
    noted(
        "fp16.auto_cast",
        "flag",
        "Inputs may be of any format: autocast casts them where a layer needs it.",
        False,
        True,
    ),
    used("fp16.loss_scale", "number", "the loss scale; 0: a dynamic one", auto="a dynamic scale"),
    used("fp16.initial_scale_power", "whole", "the first dynamic scale, 2 to this power"),
    used("fp16.loss_scale_window", "whole", "steps without overflow before the scale doubles"),
    used("fp16.hysteresis", "whole", "overflows before the scale is halved"),
    used("fp16.consecutive_hysteresis", "flag", "a good step fills the hysteresis again"),
    used("fp16.min_loss_scale", "number", "the least scale; an overflow there is an error"),
    refused(
        "fp16.fp16_master_weights_and_grads",
        "flag",
        "Weights and their gradients are kept in float32. Leave it out; to save memory, use "
        "offload_optimizer.",
        False,
    ),
    used("bf16.enabled", "flag", "precision: bf16", auto="precision"),
    noted("bf16.immediate_grad_update", "flag", _FLOAT32, False, True),
    noted(
        "bf16.check_grad_overflow",
        "flag",
        "Gradients that are not finite are handled as train.nonfinite says.",
        True,
    ),
    refused(
        "bf16.bf16_master_weights_and_grads",
        "flag",
        "Weights and their gradients are kept in float32. Leave it out; to save memory, use "
        "offload_optimizer.",
        False,
    ),
    refused(
        "bf16.bf16_optimizer_states",
        "flag",
        "The optimizer's state is kept in float32. Leave it out; to save memory, use "
        "offload_optimizer.",
        False,
    ),
    used("torch_autocast.enabled", "flag", "precision: bf16 or fp16, by torch_autocast.dtype"),
    used("torch_autocast.dtype", "text", "precision"),
    noted(
        "torch_autocast.lower_precision_safe_modules",
        "list",
        "Autocast's own lists say what computes in low precision.",
    ),
    noted("data_types.grad_accum_dtype", "text", _FLOAT32, "fp32"),
    noted("data_types.param_dtype", "text", "Parameters are kept in float32.", "fp32"),
    noted(
        "data_types.keep_in_fp32_modules",
        "any",
        "Parameters and buffers are kept in float32; autocast alone computes in less.",
        "auto",
    ),
    noted("data_types.buffer_dtype", "text", "Buffers stay in the format they have."),
)

COMMUNICATION = (
    noted(
        "communication_data_type",
        "text",
        f"{_FLOAT32} Where the network is slow, compress: fp16 (or bf16) halves what is sent.",
        "fp32",
    ),
    noted("fp32_allreduce", "flag", _FLOAT32, True, False),
    noted("seq_parallel_communication_data_type", "text", _FLOAT32, "fp32"),
    refused(
        "gradient_allreduce_op",
        "text",
        "Gradients are averaged over the ranks. Multiply the learning rate, or the loss, by their "
        "number for a sum.",
        "mean",
    ),
    noted(
        "prescale_gradients",
        "flag",
        "Gradients are divided before they are summed in any case.",
        False,
        True,
    ),
    noted(
        "gradient_predivide_factor",
        "number",
        "The mean over the ranks is the same whatever is divided first: in float32 nothing "
        "overflows.",
        1.0,
    ),
    refused(
        "sparse_gradients",
        "flag",
        "There is no sparse sum of embeddings' gradients. Leave it out, and make the embeddings "
        "with sparse=False.",
        False,
    ),
    noted("disable_allgather", "flag", _OWN_MESSAGES, False),
    noted("allgather_size", "whole", _OWN_MESSAGES),
)

REPORTING = (
    noted("steps_per_print", "number", "The progress bar shows every step."),
    noted(
        "wall_clock_breakdown",
        "flag",
        "For the time of each part of a step, set track.split_every.",
        False,
    ),
    noted("memory_breakdown", "flag", "For the memory of each part, set track.memory.", False),
    noted("dump_state", "flag", "paceline config show prints what a config comes to.", False),
    noted("log_level", "text", "Paceline has no log levels.", "warning", "info"),
    noted("timers.throughput.enabled", "flag", "Samples per second are always measured.", True),
    noted("timers.throughput.synchronized", "flag", "Measured without waiting.", False, True),
    noted("tensorboard.enabled", "flag", "track.tensorboard, in runs of a config", False),
    noted("tensorboard.output_path", "text", "Files are in the run's folder: track.run_dir."),
    noted("tensorboard.job_name", "text", "Files are in the run's folder, by its name."),
    noted("csv_monitor.enabled", "flag", "track.csv, in runs of a config", False),
    noted("csv_monitor.output_path", "text", "metrics.csv is in the run's folder: track.run_dir."),
    noted("csv_monitor.job_name", "text", "metrics.csv is in the run's folder, by its name."),
    noted("wandb.enabled", "flag", "track.wandb, in runs of a config", False),
    noted("wandb.project", "text", "track.wandb.project, in runs of a config"),
    noted("wandb.team", "text", "track.wandb.entity, in runs of a config"),
    noted("wandb.group", "text", "Set WANDB_RUN_GROUP in the environment: launch.env."),
    noted("comet.enabled", "flag", "track.comet, in runs of a config", False),
    noted("comet.project", "text", "track.comet.project, in runs of a config"),
    noted("comet.workspace", "text", "track.comet.workspace, in runs of a config"),
    noted("comet.samples_log_interval", "whole", "Every step is logged."),
    noted("comet.experiment_name", "text", "The run's name is used."),
    refused(
        "comet.api_key",
        "text",
        "A config is kept and shown, so it may hold no credential. Set COMET_API_KEY.",
    ),
    noted("comet.experiment_key", "text", "Every run is an experiment of its own."),
    noted("comet.online", "flag", "track.comet.mode, in runs of a config", True),
    noted("comet.mode", "text", "Every run is an experiment of its own.", "create"),
    noted("flops_profiler.enabled", "flag", _PROFILER, False),
    noted("flops_profiler.recompute_fwd_factor", "number", _PROFILER, 0.0),
    noted("flops_profiler.profile_step", "whole", _PROFILER, 1),
    noted("flops_profiler.module_depth", "whole", _PROFILER, -1),
    noted("flops_profiler.top_modules", "whole", _PROFILER, 1),
    noted("flops_profiler.detailed", "flag", _PROFILER, True, False),
    noted("flops_profiler.output_file", "text", _PROFILER),
    noted("comms_logger.enabled", "flag", "engine.traffic() counts the bytes sent.", False),
    noted("comms_logger.verbose", "flag", "Single messages are not logged.", False),
    noted("comms_logger.prof_all", "flag", "Single messages are not logged.", True, False),
    noted("comms_logger.debug", "flag", "Single messages are not logged.", False),
    noted("comms_logger.prof_ops", "list", "Single messages are not logged.", []),
)

_COMPILE = (
    "disable",
    "passes",
    "autoep_non_moe",
    "free_activation",
    "free_activation_threshold",
    "offload_activation",
    "offload_activation_pin_memory",
    "offload_opt_states",
    "offload_parameters",
    "double_buffer",
    "symmetric_memory",
    "debug_log",
    "sync_before_reduce",
    "sync_after_reduce",
    "sync_before_allgather",
    "sync_after_allgather",
    "keep_int_input_tensors",
    "keep_all_input_tensors",
    "enabled",
    "backend",
    "kwargs",
)
_BY_MODEL = "checkpoint_activations decides that here, for every model: full, selective, or none."
MODEL = (
    noted("activation_checkpointing.partition_activations", "flag", _BY_MODEL, False),
    noted("activation_checkpointing.cpu_checkpointing", "flag", _BY_MODEL, False),
    noted("activation_checkpointing.contiguous_memory_optimization", "flag", _BY_MODEL, False),
    noted("activation_checkpointing.number_checkpoints", "whole", _BY_MODEL),
    noted("activation_checkpointing.synchronize_checkpoint_boundary", "flag", _BY_MODEL, False),
    noted("activation_checkpointing.profile", "flag", _PROFILER, False),
    noted("pipeline.stages", "any", "layout: pp=N, or PipelineModule(num_stages=N)", "auto"),
    noted("pipeline.partition", "text", "pipeline.cuts and .balance", "best"),
    noted("pipeline.seed_layers", "flag", "Every layout starts from one model.", False),
    noted("pipeline.activation_checkpoint_interval", "whole", _BY_MODEL, 0),
    noted("pipeline.pipe_partitioned", "flag", "Stages send whole activations.", True),
    noted("pipeline.grad_partitioned", "flag", "Stages send whole gradients.", True),
    noted("pipeline.use_reentrant", "flag", "Recomputation is never reentrant.", True, False),
    used("tensor_parallel.autotp_size", "whole", "layout: tp=N"),
    noted("tensor_parallel.tp_overlap_comm", "flag", "DTensor orders its own messages.", False),
    refused(
        "tensor_parallel.preset_model",
        "text",
        "The plan is the model's own or found by itself. Leave it out, or write tensor.plan.",
    ),
    refused(
        "tensor_parallel.partition_config",
        "mapping",
        "Write it as tensor.plan, from patterns of names to column, row and the like.",
    ),
    noted("tensor_parallel.dtype", "text", "Parameters are kept in float32."),
    noted("tensor_parallel.vocab_parallel_lm_head", "flag", "The plan says which layers are cut."),
    noted("tensor_parallel.vocab_parallel_ce_backend", "text", "torch computes it.", "torch"),
    refused(
        "tensor_parallel.injection_policy_tuple",
        "list",
        "Write it as tensor.plan, from patterns of names to column, row and the like.",
    ),
    noted("tensor_parallel.keep_module_on_host", "flag", "Each rank reads its own part.", False),
    noted("tensor_parallel.replace_with_kernel_inject", "flag", "The layers are torch's.", False),
    noted("tensor_parallel.tp", "any", "layout: tp=N says all there is to say."),
    used("dataloader_drop_last", "flag", "data.drop_last"),
    noted(
        "compile.deepcompile",
        "flag",
        "compile: true compiles with torch.compile; the passes are its own.",
        False,
    ),
    *(
        noted(f"compile.{name}", "any", "torch.compile has settings of its own.")
        for name in _COMPILE
    ),
    noted("checkpoint.tag_validation", "text", "Ranks agree on the name of a save by themselves."),
    noted("checkpoint.load_universal", "flag", "Every checkpoint loads at any layout.", False),
    refused(
        "checkpoint.use_node_local_storage",
        "flag",
        "A checkpoint is one folder that every rank reads. Name a shared folder, or a store: "
        "checkpoint.where.",
        False,
    ),
    noted("checkpoint.parallel_write.pipeline_stage", "flag", "All ranks write at once.", False),
    noted("checkpoint.checkpoint_serialization", "flag", "Tensors are written as they are."),
    noted("checkpoint.writer", "mapping", "Checkpoints are written in the background."),
    noted("disable_python_gc", "flag", "Python collects its garbage as ever.", False),
    noted("graph_harvesting", "flag", "No CUDA graphs are captured.", False),
    noted("use_data_before_expert_parallelism", "flag", "There are no experts.", False),
    noted("vocabulary_size", "whole", "The model says how many tokens it knows."),
)
