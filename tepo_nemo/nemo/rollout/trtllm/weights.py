"""The weights that an engine holds, against those that it is given.

NeMo's exporter writes one line into the log where a name is on one side alone, and goes on: a bias that the
engine does not have is dropped, a weight that it folded away stays what it was. Both end the run here.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tepo_nemo.rollout.protocol import RolloutError

# Tables of the positions: constants of the network that TensorRT lists among its weights.
_TABLES = ("rotary_inv_freq", "embed_positions", "embed_positions_for_gpt_attention")


def check_weights(decoder: Any, given: Mapping[str, Tensor]) -> None:
    """Every weight of the engine is given, nothing else is, and the numbers of elements agree.

    Args:
        decoder: the `ModelRunner` of this process.
        given: what the exporter converted, by TensorRT's names.

    Raises:
        RolloutError: with the names.
    """
    import tensorrt

    refitter = tensorrt.Refitter(
        engine=decoder.session.runtime.engine, logger=tensorrt.Logger(tensorrt.Logger.ERROR)
    )
    held = {name for name in refitter.get_all_weights() if name.rpartition(".")[2] not in _TABLES}
    problems = [
        f"{what}: {_shown(names)}"
        for what, names in (
            ("the engine has and the model does not give", held - given.keys()),
            ("the model gives and the engine does not have", given.keys() - held),
            (
                "differ in size",
                {
                    name
                    for name in held & given.keys()
                    if refitter.get_weights_prototype(name).size != given[name].numel()
                },
            ),
        )
        if names
    ]
    if problems:
        raise RolloutError(
            "TensorRT-LLM's engine cannot take the weights of the model; "
            + "; ".join(problems)
            + " (its class does not fit the model, or its compiler has made constants of them)"
        )


def _shown(names: set[str], most: int = 6) -> str:
    listed = sorted(names)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
