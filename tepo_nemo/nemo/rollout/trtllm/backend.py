"""The rollout backend on an engine of TensorRT-LLM."""

from pathlib import Path

import torch
import torch.distributed as dist
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel

from tepo_nemo.nemo.rollout.trtllm.answers import to_generation
from tepo_nemo.nemo.rollout.trtllm.engine import Engine
from tepo_nemo.nemo.rollout.trtllm.replicas import check_agreement, gather_rows, own_rows
from tepo_nemo.nemo.rollout.trtllm.sampling import sampling_config
from tepo_nemo.nemo.rollout.trtllm.signatures import check_signatures, import_exporter
from tepo_nemo.nemo.rollout.trtllm.time_limit import time_limit
from tepo_nemo.rollout.protocol import (
    Generation,
    GenerationRequest,
    concatenate_generations,
    no_responses,
)


class TensorRTLLMRollout:
    """Implements `RolloutBackend`.

    Args:
        stop_token: id that ends a response.
        vocab_size: of the true vocabulary; a response with any other id is none.
        columns: of the engine's logits, which are the rows of the embedding without what Megatron pads.
        max_prompt_length, max_response_length, batch_size: what the engine is built for; a request is cut
            into batches, its prompts and responses must fit.
        unload: give the engine's memory back to training, and load it again for the next rollout.
        time_limit_s: seconds that one batch may take.
        engine_folder, devices_per_node: see `Engine`.

    Raises:
        UserError: the installed packages, or the ranks of MPI, are not what the backend needs.
    """

    takes_all_rows = False

    def __init__(
        self,
        model: MegatronGPTModel,
        *,
        stop_token: int,
        vocab_size: int,
        columns: int,
        max_prompt_length: int,
        max_response_length: int,
        batch_size: int,
        unload: bool,
        time_limit_s: float,
        engine_folder: Path | None,
        devices_per_node: int,
    ) -> None:
        exporter = import_exporter()
        check_signatures(exporter)
        self._engine = Engine(
            exporter,
            model,
            folder=engine_folder,
            devices_per_node=devices_per_node,
            columns=columns,
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
            batch_size=batch_size,
        )
        self._stop_token = stop_token
        self._vocab_size = vocab_size
        self._batch_size = batch_size
        self._unload = unload
        self._time_limit_s = time_limit_s

    def prepare(self) -> None:
        """Build the engine, or refit it with the current weights."""
        self._engine.take_weights()

    def release(self) -> None:
        """Give the engine's memory back, where that is configured."""
        if self._unload:
            self._engine.unload()

    @torch.no_grad()
    def generate(self, request: GenerationRequest) -> Generation:
        """Generate batch by batch; see `RolloutBackend`."""
        if not len(request):
            return no_responses()
        own = own_rows(request)
        # Prompts of similar length together: a batch is as wide as its longest.
        order = sorted(range(len(own)), key=lambda row: len(own.prompt_tokens[row]))
        ordered = own.select(order)
        generation = no_responses()
        if order:
            generation = concatenate_generations(
                [
                    self._answer(ordered.rows(start, start + self._batch_size))
                    for start in range(0, len(order), self._batch_size)
                ]
            ).select(torch.tensor(order).argsort())
        return gather_rows(generation, max(request.max_response_lengths))

    def _answer(self, request: GenerationRequest) -> Generation:
        prompts = [torch.tensor(prompt, dtype=torch.int32) for prompt in request.prompt_tokens]
        what = f"TensorRT-LLM on rank {dist.get_rank()}, a batch of {len(request)} prompts"
        try:
            with time_limit(self._time_limit_s, what):
                output = self._engine.decoder.generate(
                    batch_input_ids=prompts,
                    sampling_config=sampling_config(request, self._stop_token),
                    streaming=False,
                )
        except RuntimeError as error:
            longest, limit = max(map(len, request.prompt_tokens)), max(request.max_response_lengths)
            error.add_note(f"{what} of up to {longest} tokens, {limit} to generate")
            raise
        generation = to_generation(output, request, stop_token=self._stop_token, vocab_size=self._vocab_size)
        check_agreement(generation)
        return generation
