"""A checkpoint folder of NeMo 2, and the part of NeMo's reader that the CPU stack has no packages for.

`nemo.lightning` imports what only the container has (fiddle and more). Its `load_context` is stood in for;
all of NeMo-Aligner's code around it is the real one.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import yaml
from support.converted import Answer, answer_all

from tepo_nemo.config.schema import Config
from tepo_nemo.rollout.protocol import GenerationRequest


def silu() -> None:
    """NeMo-Aligner takes an activation by its name."""


def write_context(folder: Path, tokenizer: Path, **config: Any) -> None:
    """The `context/` of a folder whose weights are there; `config` is what its io.json describes."""
    (folder / "context").mkdir()
    (folder / "context" / "io.json").write_text(json.dumps(config))
    target = "nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer"
    model = {"tokenizer": {"_target_": target, "pretrained_model_name": str(tokenizer)}}
    (folder / "context" / "model.yaml").write_text(yaml.safe_dump(model))


def answer_with_nemo2(
    rank: int, world_size: int, config: Config, tokens: Any, request: GenerationRequest
) -> Answer:
    """What the host makes of such a folder, where it can be read."""
    _seat_reader()
    return answer_all(rank, world_size, {"": config}, tokens, request)[""]


def answer_without_reader(
    rank: int, world_size: int, config: Config, tokens: Any, request: GenerationRequest
) -> Answer:
    """The same as the CPU stack is."""
    return answer_all(rank, world_size, {"": config}, tokens, request)[""]


def _seat_reader() -> None:
    def load_context(path: Any, subpath: str) -> types.SimpleNamespace:
        if subpath != "model.config":
            raise ValueError("not in this context")
        config = json.loads((Path(path) / "context" / "io.json").read_text())
        return types.SimpleNamespace(**config, activation_func=silu)

    io = types.ModuleType("nemo.lightning.io")
    io.load_context = load_context
    pl = types.ModuleType("nemo.lightning.io.pl")
    pl.ckpt_to_weights_subdir = lambda path, is_saving: Path(path) / "weights"
    utils = types.ModuleType("nemo.lightning.ckpt_utils")
    utils.ckpt_to_context_subdir = lambda path: Path(path) / "context"
    lightning = types.ModuleType("nemo.lightning")
    lightning.__path__, lightning.io = [], io
    sys.modules |= {module.__name__: module for module in (lightning, io, pl, utils)}
