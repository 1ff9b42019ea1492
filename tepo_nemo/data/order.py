"""The order in which prompts are taken, as a function of the seed and not as a state."""

from functools import lru_cache

import numpy as np


class PromptOrder:
    """An endless sequence of prompt indices: epoch after epoch, each a permutation of its own.

    The prompt at every place is a function of (n, seed, place). A run that resumes needs to know only how
    many prompts it has consumed, and the batch size may change on the way.
    """

    def __init__(self, n: int, seed: int):
        if n < 1:
            raise ValueError(f"a prompt order needs at least one prompt, got {n}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"the seed must lie in [0, 2**64), got {seed}")
        self._n = n
        self._seed = seed

    def take(self, consumed: int, count: int) -> list[int]:
        """Indices at the places consumed, ..., consumed + count - 1 of the sequence.

        A batch may cross the edge of an epoch, and then the same prompt can occur in it twice.
        """
        if consumed < 0 or count < 0:
            raise ValueError(f"consumed and count must not be negative, got {consumed} and {count}")
        indices: list[int] = []
        while len(indices) < count:
            epoch, offset = divmod(consumed + len(indices), self._n)
            missing = count - len(indices)
            indices += _permutation(self._n, self._seed, epoch)[offset : offset + missing].tolist()
        return indices


@lru_cache(maxsize=2)  # the epochs on both sides of an edge
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    # Sorting the raw words of a counter-based generator: unlike `shuffle`, they are the same in every NumPy.
    words = np.random.Philox(key=seed + (epoch << 64)).random_raw(n)
    return np.argsort(words, kind="stable")
