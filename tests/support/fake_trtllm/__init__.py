"""TensorRT-LLM, TensorRT and MPI as far as NeMo's exporter and our backend call them, on the CPU.

Only the binary packages are made up. NeMo's `TensorRTLLM`, Megatron-core's exporter, its weight conversion
and its engine builder are the real ones, so that names, layouts and shapes of weights are production's.
The "engine" keeps copies of the weights that it was built and refitted with and runs them through a Llama
forward of its own (`engine.py`): weights that are stale, missing or laid out wrongly have consequences.

Strict where the real one is strict, and silent where it is silent: names that do not fit are logged.
"""

from support.fake_trtllm.faults import Faults
from support.fake_trtllm.seating import seat

__all__ = ["Faults", "seat"]
