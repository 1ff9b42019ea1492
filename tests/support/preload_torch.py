"""What the launcher of stack "torch" imports once, before it forks ranks."""

import torch
import torch._dynamo  # noqa: F401  # which the first TorchDispatchMode imports, in every rank if not here
import torch.distributed  # noqa: F401

torch.set_num_threads(1)
