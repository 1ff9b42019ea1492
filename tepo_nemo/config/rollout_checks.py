"""What the sections of `rollout` must agree on, and what an engine of TensorRT-LLM can be built for.

TensorRT-LLM drops in silence what the engine's class does not know. So only what was compared, layer by
layer, is let through.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tepo_nemo.config.messages import shown
from tepo_nemo.config.rollout import CheckConfig, CorrectionConfig, TensorRTLLMConfig
from tepo_nemo.errors import UserError

if TYPE_CHECKING:
    from tepo_nemo.config.schema import Config

_OTHERWISE = "set rollout=megatron or rollout=server"
# A key of NeMo's model configuration, what it must be, and why. Keys that are not given are not looked at: a
# checkpoint may have them, and is asked when it is loaded.
_ARCHITECTURE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "qk_layernorm",
        (False,),
        "TensorRT-LLM has no engine that normalizes queries and keys, as Qwen3 does, before its release 1.0, "
        "which NeMo 2.2 cannot use",
    ),
    ("normalization", ("rmsnorm",), "its engine of the Llama family has no other normalization"),
    ("activation", ("swiglu", "fast-swiglu"), "its engine of the Llama family has no other activation"),
    ("position_embedding_type", ("rope",), "its engine of the Llama family has no other position embedding"),
    ("bias", (False,), "its engine of the Llama family has biases in queries, keys and values alone"),
    ("rotary_percentage", (1, 1.0), "its engine of the Llama family rotates whole heads"),
    (
        "share_embeddings_and_output_weights",
        (False,),
        "releases of TensorRT-LLM differ in how they refit a tied embedding",
    ),
    ("seq_len_interpolation_factor", (), "only Llama 3.1's scaling of positions has been compared"),
    ("window_size", (), "the exporter hands no sliding window on"),
)


def check_rollout(config: "Config") -> None:
    """Raises UserError on the first mistake."""
    _check_thresholds(config.rollout.check)
    _check_correction(config.rollout.correction)
    if config.rollout.backend == "trtllm":
        _check_trtllm(config)
    else:
        because = f"rollout.backend={config.rollout.backend}"
        _refuse_without_effect("rollout.trtllm", config.rollout.trtllm, TensorRTLLMConfig(), because)


def check_engine_architecture(model: Mapping[str, Any]) -> None:
    """Refuse a model that the engine would not be the same as. Raises UserError.

    Args:
        model: NeMo's model configuration, or ours.
    """
    for key, allowed, reason in _ARCHITECTURE:
        value = model.get(key)
        if value is not None and value not in allowed:
            raise UserError(
                f"model.{key}={shown(value)}: rollout.backend=trtllm cannot generate with it, since {reason} "
                f"({_OTHERWISE})"
            )


def check_engine_vocabulary(vocab_size: int | None, tensor_parallel: int) -> None:
    """Refuse a vocabulary that the exporter cannot share out. Raises UserError; None is not looked at.

    Megatron pads it. In an engine nothing would keep the columns of the padding from being drawn.
    """
    if vocab_size is not None and vocab_size % tensor_parallel:
        raise UserError(
            f"model.tensor_model_parallel_size={tensor_parallel}: must divide model.vocab_size={vocab_size} "
            f"with rollout.backend=trtllm (set a size that does, or {_OTHERWISE})"
        )


def _check_trtllm(config: "Config") -> None:
    model = config.model
    check_engine_architecture(model.model_dump() | (model.model_extra or {}) | model.extra)
    if config.hardware.accelerator == "cpu":
        raise UserError(f"rollout.backend=trtllm: needs GPUs, and hardware.accelerator=cpu ({_OTHERWISE})")
    if config.rollout.batch_size is None:
        raise UserError(
            "rollout.batch_size=null: an engine of TensorRT-LLM is built for a number of sequences (set "
            "rollout.batch_size=128, or as many as the memory has room for)"
        )
    check_engine_vocabulary(model.vocab_size, model.tensor_model_parallel_size)
    if model.pipeline_model_parallel_size > 1 and model.precision == "bf16" and not model.megatron_amp_O2:
        raise UserError(
            "model.megatron_amp_O2=false: with model.pipeline_model_parallel_size="
            f"{model.pipeline_model_parallel_size} the exporter of rollout.backend=trtllm gathers weights in "
            "bf16, and they are in fp32 (set model.megatron_amp_O2=true and "
            "trainer.optimizer.name=distributed_adam)"
        )


def _check_thresholds(check: CheckConfig) -> None:
    for kind in ("gap", "error"):
        warn, stop = getattr(check, f"warn_{kind}"), getattr(check, f"stop_{kind}")
        if warn > stop:
            raise UserError(
                f"rollout.check.warn_{kind}={warn}: is above rollout.check.stop_{kind}={stop}, so that no "
                "warning would ever be given (lower it)"
            )


def _check_correction(correction: CorrectionConfig) -> None:
    if correction.icepop_low >= correction.icepop_high:
        raise UserError(
            f"rollout.correction.icepop_low={correction.icepop_low}: must be below "
            f"rollout.correction.icepop_high={correction.icepop_high} (set the bounds of a ratio)"
        )
    uses = {"none": (), "truncated": ("truncation",), "icepop": ("icepop_low", "icepop_high")}
    others = {"truncation", "icepop_low", "icepop_high"} - set(uses[correction.token_weight])
    _refuse_without_effect(
        "rollout.correction",
        correction,
        CorrectionConfig(),
        f"rollout.correction.token_weight={correction.token_weight}",
        others,
    )


def _refuse_without_effect(
    prefix: str, given: Any, default: Any, because: str, keys: set[str] | None = None
) -> None:
    for key in type(given).model_fields:
        if (keys is None or key in keys) and getattr(given, key) != getattr(default, key):
            raise UserError(
                f"{prefix}.{key}={shown(getattr(given, key))}: has no effect with {because} (remove it)"
            )
