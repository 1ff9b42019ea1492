"""What a worker of vLLM learns: to take over weights from a folder, and to say which ones it has.

Runs in vLLM's own environment, which needs nothing of ours but this file:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL \
        --worker-extension-cls tepo_nemo.rollout.server.vllm_extension.WorkerExtension

The methods are called through `/collective_rpc`, in every worker of the server at once.
"""

import inspect
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_Weights = Iterable[tuple[str, torch.Tensor]]


class WorkerExtension:
    """A base class that vLLM adds to its worker; names begin with `tepo_nemo`, so that none is taken."""

    def tepo_nemo_load_weights(self, folder: str) -> None:
        """Take over the weights of a folder of Hugging Face, in place. They have no version yet.

        Raises:
            ValueError: the folder holds another set of weights than the model has; those that the worker has
                now may be neither the old nor the new ones.
        """
        self.tepo_nemo_version = None
        model = self.model_runner.get_model()
        with _watched(model) as loaded:
            _load(self.model_runner, model, _tensors(Path(folder)))
        missing = sorted({name for name, _ in model.named_parameters()} - loaded)
        if missing:
            raise ValueError(f"{folder}: weights of the model that got no value: {', '.join(missing)}")

    def tepo_nemo_name_weights(self, version: str) -> None:
        """Give a version to the weights that were loaded last, once nothing is left of earlier ones."""
        self.tepo_nemo_version = version

    def tepo_nemo_status(self) -> dict[str, Any]:
        """Which weights this worker has, which process it is, and what the server was started with."""
        if not hasattr(self, "tepo_nemo_instance"):
            self.tepo_nemo_instance = uuid.uuid4().hex
        config = self.vllm_config
        mode = config.model_config.logprobs_mode
        return {
            "version": getattr(self, "tepo_nemo_version", None),
            "instance": self.tepo_nemo_instance,
            "logprobs_mode": getattr(mode, "value", mode),  # an enumeration in some versions
            "max_model_len": config.model_config.max_model_len,
            "vocabulary": config.model_config.get_vocab_size(),
            "data_parallel_size": config.parallel_config.data_parallel_size,
        }


def _load(runner: Any, model: torch.nn.Module, weights: _Weights) -> None:
    """Through vLLM's own way to reload where it has one: there, layers may have packed their weights."""
    reload = getattr(runner, "reload_weights", None)
    if reload is not None and "weights_iterator" in inspect.signature(reload).parameters:
        reload(weights_iterator=weights)
    else:
        model.load_weights(weights)


@contextmanager
def _watched(model: torch.nn.Module) -> Iterator[set[str]]:
    """The names that `model.load_weights` gives a value to inside; vLLM itself only logs what is missing."""
    names: set[str] = set()
    load: Callable[[_Weights], set[str]] = model.load_weights

    def load_weights(weights: _Weights) -> set[str]:
        names.update(found := load(weights))
        return found

    model.load_weights = load_weights
    try:
        yield names
    finally:
        del model.load_weights


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)
