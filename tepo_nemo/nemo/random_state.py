"""The random generators of this rank, as tensors.

Nothing of a run draws from them: its randomness is keyed by seed, step, prompt and position. They are kept
for what a rank's libraries, or an objective of one's own, may draw.
"""

import json
import random

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """Of Python, NumPy, torch, the device, and Megatron's tracker."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    rest = json.dumps({"python": gauss, "numpy": [position, has_gauss, cached]})
    return {
        "random.python": torch.tensor(words, dtype=torch.int64),
        "random.numpy": torch.from_numpy(keys.astype(np.int64)),
        "random.rest": torch.tensor(list(rest.encode()), dtype=torch.uint8),
        "random.torch": torch.get_rng_state(),
        "random.device": torch.cuda.get_rng_state(),
        **{
            f"random.tracker.{name}": state.cpu()
            for name, state in get_cuda_rng_tracker().get_states().items()
        },
    }


def restore_random_state(tensors: dict[str, Tensor]) -> None:
    """The inverse."""
    rest = json.loads(bytes(tensors["random.rest"].tolist()))
    random.setstate((3, tuple(tensors["random.python"].tolist()), rest["python"]))
    np.random.set_state(("MT19937", tensors["random.numpy"].numpy().astype(np.uint32), *rest["numpy"]))
    torch.set_rng_state(tensors["random.torch"])
    torch.cuda.set_rng_state(tensors["random.device"])
    prefix = "random.tracker."
    get_cuda_rng_tracker().set_states(
        {name.removeprefix(prefix): state for name, state in tensors.items() if name.startswith(prefix)}
    )


def without_generators(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What else stands in the same file."""
    return {name: value for name, value in tensors.items() if not name.startswith("random.")}
