"""Checkpoint folders of NeMo 2: what NeMo-Aligner's reader of them leaves out or keeps to itself.

NeMo-Aligner reads a folder's `context/`, makes a configuration of NeMo 1 of it, and leaves that in the folder
as `model_config.yaml`. It takes numbers, words and switches alone, and treats any fault as "not of NeMo 2".
"""

import os
from pathlib import Path

from nemo_aligner.utils.utils import load_2_0_checkpoint_model_config
from omegaconf import DictConfig, OmegaConf

from tepo_nemo.conversion.archive import CONFIG
from tepo_nemo.conversion.families import ROPE_SCALING_FIELDS
from tepo_nemo.errors import UserError


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint folder of NeMo 2."""
    return (path / "context" / "io.json").is_file() and (path / "weights").is_dir()


def model_config(path: Path) -> DictConfig:
    """The configuration that NeMo-Aligner makes of a folder.

    Raises:
        UserError: it makes none, or the model attends to a window, which would be lost.
    """
    config = load_2_0_checkpoint_model_config(str(path))
    if config is None:
        raise UserError(
            f"model.restore_from_path={path}: is a checkpoint of NeMo 2, and NeMo-Aligner cannot read it: "
            f"{_why_not(path)}"
        )
    from nemo.lightning import io

    window = getattr(io.load_context(path, subpath="model.config"), "window_size", None)
    if window is not None:
        raise UserError(
            f"model.restore_from_path={path}: its layers attend to a window of {list(window)}, which is not "
            "supported in a checkpoint of NeMo 2 (convert the model from Hugging Face with tepo-nemo convert)"
        )
    return OmegaConf.create(config)


def _why_not(path: Path) -> str:
    try:
        from nemo.lightning import io
    except ImportError as error:
        return f"its reader cannot be imported ({error}; the NeMo container has what it takes)"
    if not os.access(path, os.W_OK) and not (path / CONFIG).exists():
        return f"it wants to write {CONFIG} into the folder (give it write access, or a copy)"
    try:
        io.load_context(path, subpath="model.config")
    except Exception as error:  # the context may name any class, and building one may raise anything
        return f"its context cannot be loaded ({type(error).__name__}: {error})"
    return "its tokenizer or its configuration is of a kind that it does not know"


def translated(saved: DictConfig) -> DictConfig:
    """Keys of NeMo 1 that follow from keys of NeMo 2 and that NeMo-Aligner does not translate.

    NeMo 2 scales the rotary embedding of every model that has Llama 3.1's numbers; NeMo 1 needs a switch.
    """
    keys = {}
    if all(key in saved for key in ROPE_SCALING_FIELDS):
        keys["scale_positional_embedding"] = True
    if "rotary_percent" in saved:
        keys["rotary_percentage"] = saved.rotary_percent
    return OmegaConf.create(keys)
