"""Sections that are refused as a whole, unless they are switched off; see ``keys.py``."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.deepspeed.keys import Key, refused


@dataclass(frozen=True)
class SwitchedSection:
    """A section with the names of its keys; ``enabled: false`` in it, and it asks for nothing.

    ``deep``: what is below it are further sections, each with a switch of its own.
    """

    key: Key
    keys: tuple[str, ...]
    deep: bool = False


def _section(name: str, why: str, keys: str, *, deep: bool = False) -> SwitchedSection:
    return SwitchedSection(refused(name, "mapping", why), tuple(keys.split()), deep)


SWITCHED = (
    _section(
        "amp",
        "Apex is not used. Write bf16 or fp16 with enabled: true instead.",
        "enabled opt_level loss_scale keep_batchnorm_fp32 master_weights cast_model_type "
        "patch_torch_functions min_loss_scale max_loss_scale verbosity num_losses",
    ),
    _section(
        "elasticity",
        "The global batch is fixed here, and a run goes on with other ranks at the same batch: "
        "write train_batch_size, and launch.nnodes: least:most.",
        "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time "
        "prefer_large_batch prefer_larger_batch version ignore_non_elastic_batch_info "
        "num_gpus_per_node model_parallel_size",
    ),
    _section(
        "autotuning",
        "Nothing is tuned by trial. Write the sizes that were found into the config.",
        "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric "
        "metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings "
        "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size model_info "
        "model_info_path",
    ),
    _section(
        "compression_training",
        "Nothing is quantized or pruned during training. Leave it out, and quantize the trained "
        "model with a library made for it, such as torchao.",
        "weight_quantization activation_quantization sparse_pruning row_pruning head_pruning "
        "channel_pruning layer_reduction",
        deep=True,
    ),
    _section(
        "quantize_training",
        "Nothing is quantized during training. Leave it out.",
        "enabled quantize_verbose quantizer_kernel quantize_type quantize_bits quantize_schedule "
        "quantize_groups fp16_mixed_quantize quantize_algo",
    ),
    _section(
        "weight_quantization",
        "Weights are not quantized. Leave it out.",
        "enabled quantized_initialization post_init_quant",
    ),
    _section(
        "data_efficiency",
        "Every sample comes once in an epoch, in an order of its own. Choose samples in the "
        "dataset, or give a sampler; there is no random-LTD.",
        "enabled seed data_sampling data_routing",
    ),
    _section(
        "curriculum_learning",
        "Every sample comes once in an epoch. Order or truncate samples in the dataset.",
        "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    ),
    _section(
        "progressive_layer_drop",
        "No layers are dropped. Write stochastic depth into the model.",
        "enabled theta gamma",
    ),
    _section(
        "eigenvalue",
        "It steers quantization during training, which is not there. Leave it out.",
        "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    ),
    _section(
        "sparse_attention",
        "The model's own attention is used. Write sparse attention into the model, for instance "
        "with torch.nn.attention.flex_attention.",
        "mode block different_layout_per_head num_local_blocks num_global_blocks attention "
        "horizontal_global_attention num_different_global_patterns num_random_blocks "
        "local_window_blocks global_block_indices global_block_end_indices "
        "num_sliding_window_blocks",
    ),
    _section(
        "hybrid_engine",
        "There are no kernels for generation. Leave it out: the model generates as it is, or "
        "export it for a server.",
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph",
    ),
    _section(
        "expert_parallel",
        "Experts are not spread over ranks. Leave it out: zero=3 shards them like other layers.",
        "enabled autoep_size expert_tensor_parallel_size preset_model use_grouped_mm "
        "disable_triton_grouped_mm moe_layer_pattern router_pattern expert_pattern score_func "
        "score_apply route_norm route_scale top_k routed_scaling_factor num_expert_groups "
        "num_limited_groups load_balance_coeff expert_w1 expert_w2 expert_w3 num_experts_attr "
        "top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern "
        "validate_folding_routing row_weighting_impl gate_up_impl expert_activation comm_backend "
        "comm_num_sm comm_qp_margin comm_max_tokens_per_rank combine_impl async_split_plan",
    ),
    _section(
        "nebula",
        "Checkpoints go to a folder or a store: checkpoint.where.",
        "enabled enable_nebula_load nebula_load_path load_path persistent_storage_path "
        "persistent_time_interval num_of_version_in_retention",
    ),
    _section(
        "datastates_ckpt",
        "Checkpoints are written in the background by Paceline itself. Leave it out.",
        "enabled host_cache_size parser_threads",
    ),
)
