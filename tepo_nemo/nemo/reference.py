"""The frozen reference policy: weights on the host that change places with the model's for a pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel


class FrozenReference:
    """The weights of this rank at the moment it is made.

    Takes as much memory on the host as they take on the device, in their dtype (pinned where they are on a
    GPU), and on the device one parameter at a time while they change places.
    """

    @torch.no_grad()
    def __init__(self, model: MegatronGPTModel) -> None:
        self._parameters = [
            parameter for chunk in model.get_model_module_list() for parameter in chunk.parameters()
        ]
        self._absent = [
            torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda).copy_(parameter)
            for parameter in self._parameters
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model is the reference inside, and to the bit what it was before afterwards."""
        self._change_places()
        try:
            yield
        finally:
            self._change_places()

    @torch.no_grad()
    def _change_places(self) -> None:
        """By copy: parameters may be views into the buffers of Megatron's optimizer."""
        for parameter, absent in zip(self._parameters, self._absent, strict=True):
            leaving = parameter.detach().clone()
            parameter.copy_(absent, non_blocking=True)
            absent.copy_(leaving, non_blocking=True)
