"""NeMo's `model_config.yaml` for a converted model."""

from pathlib import Path
from typing import Any

import yaml

from tepo_nemo.conversion.archive import CONFIG, ORIGIN, Checkpoint
from tepo_nemo.conversion.families import Architecture
from tepo_nemo.conversion.weights import padded
from tepo_nemo.errors import UserError

_PRECISIONS = {"float32": 32, "bfloat16": "bf16", "float16": 16}


def nemo_config(architecture: Architecture, *, tokenizer: Path, sequence_length: int | None) -> str:
    """The text of `model_config.yaml`.

    Args:
        tokenizer: the folder that NeMo takes it from.
        sequence_length: longest sequence to train on; None for as long as the model can.

    Raises:
        UserError: the model attends to fewer positions than that.
    """
    length = sequence_length or architecture.nemo["max_position_embeddings"]
    check_length(architecture, length, "--sequence-length")
    return yaml.safe_dump(
        {
            "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
            "mcore_gpt": True,
            "transformer_engine": True,
            "encoder_seq_length": length,
            **architecture.nemo,
            # The rows of the embedding, the same at every tensor-parallel size of the form 2^n.
            "override_vocab_size": padded(architecture.sizes.vocabulary),
            "make_vocab_size_divisible_by": 128,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "ffn_dropout": 0.0,
            "apply_query_key_layer_scaling": False,
            "tokenizer": {
                "library": "huggingface",
                "type": str(tokenizer),
                "use_fast": True,
                "model": None,
                "vocab_file": None,
                "merge_file": None,
            },
            "precision": _PRECISIONS[architecture.dtype],
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "micro_batch_size": 1,
            "global_batch_size": 1,
        },
        sort_keys=False,
    )


def check_length(architecture: Architecture, length: int, key: str) -> None:
    """Refuse sequences in which Hugging Face attends to a window alone, and NeMo to everything."""
    window = architecture.sliding_window
    if window is not None and length > window:
        raise UserError(
            f"{key}={length}: the model attends to the last {window} positions (sliding_window of its "
            f"config.json), NeMo to all (set {key}={window} or less)"
        )


def read_architecture(checkpoint: Checkpoint) -> Architecture:
    """What the `config.json` that a checkpoint keeps describes, held against its `model_config.yaml`.

    Raises:
        UserError: it keeps none, or the two describe different models.
    """
    name = f"{ORIGIN}/config.json"
    if name not in checkpoint.names():
        raise UserError(
            f"{checkpoint.path}: keeps no {name}, so it does not descend from a model of Hugging Face (give "
            "a checkpoint that tepo-nemo convert made, or one trained from it)"
        )
    architecture = Architecture.of(checkpoint.read(name), f"{checkpoint.path}: {name}")
    saved = read_nemo_config(checkpoint)
    for key, value in architecture.nemo.items():
        if key in saved and saved[key] is not None and saved[key] != value:
            raise UserError(
                f"{checkpoint.path}: {CONFIG} has {key}={saved[key]} and {name} means {value} (the "
                "checkpoint was trained as another model; restore the one or the other)"
            )
    return architecture


def read_nemo_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """`model_config.yaml` of a checkpoint."""
    try:
        config = yaml.safe_load(checkpoint.read(CONFIG))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{checkpoint.path}: {CONFIG} cannot be read; give a whole checkpoint") from error
    if not isinstance(config, dict):
        raise UserError(f"{checkpoint.path}: {CONFIG} is empty; give a whole checkpoint")
    return config
