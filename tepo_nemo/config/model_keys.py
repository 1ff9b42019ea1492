"""Which keys the `model` section takes beside the typed ones, and why it refuses the others.

NeMo's model section has no schema: a misspelled key is ignored there. So a key must be one that NeMo's GPT
model reads, or a field of Megatron-core's TransformerConfig; anything else goes under `model.extra`,
deliberately.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from tepo_nemo.config.messages import shown
from tepo_nemo.errors import UserError

TRANSFORMER_CONFIG_FIELDS = tuple(
    """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split activation_func
    activation_func_fp8_input_store add_bias_linear add_qkv_bias apply_query_key_layer_scaling
    apply_residual_connection_post_layernorm apply_rope_fusion async_tensor_model_parallel_allreduce
    attention_backend attention_dropout attention_softmax_in_fp32 autocast_dtype barrier_with_L1_time
    batch_p2p_comm batch_p2p_sync bf16 bias_activation_fusion bias_dropout_fusion calculate_per_token_loss
    clone_scatter_output_in_embedding config_logger_dir context_parallel_size cp_comm_type cpu_offloading
    cpu_offloading_activations cpu_offloading_num_layers cpu_offloading_weights cross_entropy_loss_fusion
    cuda_graph_retain_backward_graph cuda_graph_use_single_mempool cuda_graph_warmup_steps
    deallocate_pipeline_outputs defer_embedding_wgrad_compute deterministic_mode
    disable_parameter_transpose_cache distribute_saved_activations enable_autocast enable_cuda_graph
    expert_model_parallel_size expert_tensor_parallel_size external_cuda_graph ffn_hidden_size
    finalize_model_grads_func flash_decode fp16 fp32_residual_connection fp8 fp8_amax_compute_algo
    fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin fp8_multi_head_attention
    fp8_wgrad gated_linear_unit grad_scale_func grad_sync_func gradient_accumulation_fusion hidden_dropout
    hidden_size hierarchical_context_parallel_sizes inference_rng_tracker init_method init_method_std
    kv_channels layernorm_epsilon layernorm_zero_centered_gamma masked_softmax_fusion
    memory_efficient_layer_norm microbatch_group_size_per_vp_stage moe_aux_loss_coeff
    moe_expert_capacity_factor moe_extended_tp moe_ffn_hidden_size moe_grouped_gemm moe_input_jitter_eps
    moe_layer_freq moe_layer_recompute moe_pad_expert_input_to_capacity moe_per_layer_logging
    moe_permute_fusion moe_router_bias_update_rate moe_router_enable_expert_bias moe_router_group_topk
    moe_router_load_balancing_type moe_router_num_groups moe_router_pre_softmax moe_router_score_function
    moe_router_topk moe_router_topk_limited_devices moe_router_topk_scaling_factor
    moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_token_dispatcher_type
    moe_token_drop_policy moe_token_dropping moe_use_legacy_grouped_gemm moe_z_loss_coeff
    multi_latent_attention no_sync_func normalization num_attention_heads num_layers
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    num_microbatches_with_partial_activation_checkpoints num_moe_experts num_query_groups
    output_layer_init_method overlap_p2p_comm overlap_p2p_comm_warmup_flush param_sync_func params_dtype
    perform_initialization persist_layer_norm pipeline_dtype pipeline_model_parallel_size
    pipeline_model_parallel_split_rank qk_layernorm recompute_granularity recompute_method
    recompute_num_layers rotary_interleaved sequence_parallel softmax_scale tensor_model_parallel_size
    test_mode timers tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad
    tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1
    tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
    tp_comm_split_rs tp_only_amax_red use_cpu_initialization use_ring_exchange_p2p use_te_rng_tracker
    variable_seq_lengths virtual_pipeline_model_parallel_size wgrad_deferral_limit window_size
    """.split()
)
"""The public fields of megatron.core.transformer.TransformerConfig, megatron-core 0.11."""

NEMO_KEYS = tuple(
    """
    apex_transformer_log_level apply_embedding_scaling async_grad_allreduce bias_dropout_add_fusion
    cluster_type do_layer_norm_weight_decay enable_megatron_timers gc_interval
    get_attention_mask_from_fusion grad_allreduce_chunk_size_mb grad_div_ar_fusion high_freq_factor
    low_freq_factor max_position_embeddings mcore_customization_config megatron_timer_kwargs nsys_profile
    old_context_len openai_gelu scale_factor scale_positional_embedding seq_len_interpolation_factor
    transformer_engine ub_tp_comm_bootstrap_backend ub_tp_comm_overlap ub_tp_comm_overlap_cfg
    use_scaled_init_method use_tp_pp_dp_mapping with_fp32_embedding_grads
    """.split()
)
"""Keys that NeMo 2.2 reads for a Megatron-core GPT model and that TransformerConfig does not have."""

SAID_ELSEWHERE = {
    "micro_batch_size": "trainer.micro_batch_size",
    "global_batch_size": "rollout.prompts_per_step and trainer.updates_per_rollout",
    "rampup_batch_size": "rollout.prompts_per_step",
    "optim": "trainer.optimizer",
    "seed": "seed",
    "data": "the data section",
    "resume_from_checkpoint": "model.restore_from_path",
    "restore_from_ckpt": "model.restore_from_path",
    "add_bias_linear": "model.bias",
    "add_qkv_bias": "model.qkv_bias",
    "activation_func": "model.activation",
    "gated_linear_unit": "model.activation",
    "layernorm_zero_centered_gamma": "model.normalization=layernorm1p",
    "bias_dropout_fusion": "model.bias_dropout_add_fusion",
    "tp_comm_overlap": "model.ub_tp_comm_overlap",
    "tp_comm_bootstrap_backend": "model.ub_tp_comm_bootstrap_backend",
    "init_method": "model.init_method_std",
    "output_layer_init_method": "model.use_scaled_init_method",
    **dict.fromkeys(
        ("fp16", "bf16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"),
        "model.precision",
    ),
    **dict.fromkeys(
        (
            "recompute_granularity", "recompute_method", "recompute_num_layers",
            "activations_checkpoint_method", "activations_checkpoint_num_layers",
            "activations_checkpoint_layers_per_pipeline",
        ),
        "model.activations_checkpoint_granularity",
    ),
}  # fmt: skip
"""Keys of NeMo or Megatron-core whose value follows from another key of ours."""

DECIDED_BY_HOST = frozenset(
    """
    apply_residual_connection_post_layernorm attention_softmax_in_fp32 batch_p2p_sync
    calculate_per_token_loss deallocate_pipeline_outputs distribute_saved_activations
    finalize_model_grads_func grad_scale_func grad_sync_func gradient_as_bucket_view mcore_gpt
    no_sync_func num_microbatches_with_partial_activation_checkpoints
    num_micro_batches_with_partial_activation_checkpoints param_sync_func perform_initialization test_mode
    timers use_ring_exchange_p2p variable_seq_lengths
    """.split()
)
"""Keys that NeMo overrides, that hold functions, or that the scaling of the loss rests on."""

_UNSUPPORTED = {
    "context parallelism": ("context_parallel", "hierarchical_context_parallel", "cp_comm_type"),
    "a virtual pipeline": ("virtual_pipeline", "microbatch_group_size_per_vp_stage"),
    "a mixture of experts": ("num_moe_experts", "expert_", "moe_"),
    "LoRA or another adapter": ("peft", "lora", "adapter"),
    "fp8": ("fp8", "tp_only_amax_red", "reduce_amax"),
    "FSDP": ("fsdp",),
    "multi-latent attention": ("multi_latent_attention",),
    "offloading to the CPU": ("cpu_offloading",),
    "uneven pipeline stages": ("num_layers_in_", "account_for_", "pipeline_model_parallel_split_rank"),
}
"""What is not built: how the names of its keys begin."""

PASSED_ON = frozenset({*TRANSFORMER_CONFIG_FIELDS, *NEMO_KEYS} - SAID_ELSEWHERE.keys() - DECIDED_BY_HOST)
"""Keys that go to NeMo as they are; those of unsupported features only switched off."""


def check_model_keys(section: Mapping[str, Any], typed: Collection[str]) -> None:
    """Refuse keys of the `model` section that nothing reads, and those of features that are not built.

    Raises UserError, with the nearest name that would do.
    """
    for key, value in section.items():
        if key not in typed:
            _check_key(str(key), value, typed)
    extra = section.get("extra")
    for key, value in extra.items() if isinstance(extra, Mapping) else ():
        if key in typed:
            raise UserError(f"model.extra.{key}={shown(value)}: is a known key (set model.{key} instead)")
        if key in PASSED_ON | SAID_ELSEWHERE.keys() | DECIDED_BY_HOST or _feature(str(key)):
            _check_key(str(key), value, typed)
            raise UserError(f"model.extra.{key}={shown(value)}: is a known key (set model.{key} instead)")


def _check_key(key: str, value: Any, typed: Collection[str]) -> None:
    if feature := _feature(key):
        if not _is_off(key, value):
            raise UserError(
                f"model.{key}={shown(value)}: needs {feature}, which is not supported (remove the key)"
            )
        return
    if key in SAID_ELSEWHERE:
        raise UserError(
            f"model.{key}={shown(value)}: follows from another key (set {SAID_ELSEWHERE[key]} instead)"
        )
    if key in DECIDED_BY_HOST:
        raise UserError(f"model.{key}={shown(value)}: is decided by the training code (remove the key)")
    if key not in PASSED_ON:
        near = get_close_matches(key, {*typed, *PASSED_ON}, n=1)
        meant = f"did you mean model.{near[0]}? " if near else ""
        raise UserError(
            f"model.{key}: unknown key ({meant}a key that only NeMo knows goes under model.extra)"
        )


def _feature(key: str) -> str | None:
    return next((name for name, starts in _UNSUPPORTED.items() if key.startswith(starts)), None)


def _is_off(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_off(key, part) for part in value.values())
    return value in (None, False, "none") or (key.endswith("_size") and value == 1)
