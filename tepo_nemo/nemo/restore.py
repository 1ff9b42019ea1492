"""Loads the actor from a checkpoint: a `.nemo` file, its folder, or a checkpoint folder of NeMo 2."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch.trainer.trainer import Trainer
from nemo_aligner.utils.utils import (
    load_and_override_model_config,
    load_checkpoint_model_config,
    load_from_nemo,
)
from omegaconf import DictConfig, OmegaConf, open_dict

from tepo_nemo.config.schema import Config
from tepo_nemo.conversion.archive import ORIGIN, Checkpoint, is_compressed
from tepo_nemo.conversion.families import ROPE_SCALING_FIELDS, Architecture
from tepo_nemo.conversion.nemo_config import check_length
from tepo_nemo.errors import UserError
from tepo_nemo.nemo import nemo2
from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel
from tepo_nemo.nemo.host_trainer import create_trainer
from tepo_nemo.nemo.sharded import any_vocabulary_padding

# Keys that shape the weights or their use: what is said of them must be what the checkpoint has.
_OF_THE_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "activation",
    "bias",
    "qkv_bias",
    "qk_layernorm",
    "position_embedding_type",
    "rotary_base",
    "rotary_percentage",
    "scale_positional_embedding",
    *ROPE_SCALING_FIELDS,
    "share_embeddings_and_output_weights",
)


def restore(config: Config, cfg: DictConfig) -> tuple[MegatronGPTTEPOActorModel, Trainer]:
    """Build the actor with the weights of `model.restore_from_path`; called by all ranks.

    Args:
        cfg: NeMo's form of `config`; its model section is completed by what the checkpoint says.

    Raises:
        UserError: the checkpoint cannot be read, or is of another architecture than the configuration says.
    """
    path = config.model.restore_from_path
    if nemo2.is_folder(path):
        saved = nemo2.model_config(path)
        cfg.model = OmegaConf.merge(nemo2.translated(saved), cfg.model)
    else:
        saved = load_checkpoint_model_config(str(path))
    _check_model(config, saved)
    origin = _origin(path)
    if origin:
        length = config.model.encoder_seq_length or saved.encoder_seq_length
        architecture = Architecture.of(origin["config.json"], f"{path}: {ORIGIN}/config.json")
        check_length(architecture, length, "model.encoder_seq_length")
    cfg.model.context_parallel_size = 1  # whatever the checkpoint was trained at
    # The merge keeps keys of the checkpoint that ours lack; one optimizer's are of no use to another.
    cfg.model.overwrite_base_config = {"optim": True}
    cfg.model = load_and_override_model_config(str(path), cfg.model)
    named = cfg.model.tokenizer.type
    with _own_tokenizer(origin if config.model.tokenizer is None else {}) as folder:
        cfg.model.tokenizer.type = folder or named
        trainer = create_trainer(config, cfg)
        with any_vocabulary_padding():
            actor = load_from_nemo(
                MegatronGPTTEPOActorModel, cfg.model, trainer, strict=True, restore_path=str(path)
            )
    with open_dict(actor.cfg):
        actor.cfg.tokenizer.type = named
    actor.huggingface_files = origin
    return actor, trainer


def _check_model(config: Config, saved: DictConfig) -> None:
    path = config.model.restore_from_path
    for key in _OF_THE_MODEL:
        given = getattr(config.model, key, None)
        if given is not None and key in saved and saved[key] is not None and given != saved[key]:
            raise UserError(
                f"model.{key}={given}: {path} has {saved[key]}; set model.{key}={saved[key]} or"
                f" model.{key}=null, or give another checkpoint"
            )
    if saved.get("num_moe_experts"):
        raise UserError(
            f"model.restore_from_path={path}: is a mixture of experts, which is not supported (give a dense "
            "model)"
        )
    rows, size = saved.get("override_vocab_size"), config.model.tensor_model_parallel_size
    if config.model.vocab_size is None and rows is not None and rows % size:
        raise UserError(
            f"model.tensor_model_parallel_size={size}: must divide the {rows} rows of the embedding in "
            f"{path} (set a size that does, or model.vocab_size, which pads it anew)"
        )


def _origin(path: Path) -> dict[str, bytes]:
    """What the checkpoint keeps of a folder of Hugging Face; nothing where it comes from no such folder."""
    if is_compressed(path):
        return {}  # older than the files
    checkpoint = Checkpoint(path)
    return {Path(name).name: checkpoint.read(name) for name in checkpoint.names(ORIGIN)}


@contextmanager
def _own_tokenizer(origin: Mapping[str, bytes]) -> Iterator[str | None]:
    """A folder with the checkpoint's own tokenizer, to be read at once; None where it has none."""
    if not origin:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, content in origin.items():
            (Path(folder) / name).write_bytes(content)
        yield folder
