"""The embedded rollout engine: Megatron's own forward with its KV cache.

Runs wherever the model runs, at every tensor- and pipeline-parallel layout, with the training weights
themselves, so that nothing has to be refitted.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.inference_params import InferenceParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from torch import Tensor

from tepo_nemo.parallel.pipeline import broadcast_from_last_stage
from tepo_nemo.rollout.protocol import Generation, GenerationRequest, concatenate_generations
from tepo_nemo.rollout.sampling import row_keys, sample_tokens


class MegatronRollout:
    """Generates with the model under training; implements `RolloutBackend`.

    Args:
        model: in evaluation mode and without sequence parallelism while generating.
        stop_token: id that ends a response.
        vocab_size: of the true vocabulary.
        batch_size: responses generated at once; None for all of a request.
    """

    def __init__(
        self, model: MegatronGPTModel, *, stop_token: int, vocab_size: int, batch_size: int | None
    ) -> None:
        self._model = model
        self._stop_token = stop_token
        self._vocab_size = vocab_size
        self._batch_size = batch_size

    def prepare(self) -> None:
        """Nothing to refit: the weights are the training weights."""

    def release(self) -> None:
        """Nothing to give back: caches live as long as a batch."""

    @torch.no_grad()
    def generate(self, request: GenerationRequest) -> Generation:
        """Generate batch by batch; see `RolloutBackend`."""
        size = self._batch_size or len(request)
        with last_position_logits(self._model):
            return concatenate_generations(
                [
                    self._generate_batch(request.rows(start, start + size))
                    for start in range(0, len(request), size)
                ]
            )

    def _generate_batch(self, request: GenerationRequest) -> Generation:
        device = torch.cuda.current_device()
        prompt_lengths = torch.tensor([len(prompt) for prompt in request.prompt_tokens], device=device)
        rows, longest = len(request), int(prompt_lengths.max())
        tokens = torch.full((rows, longest + request.max_response_length), self._stop_token, device=device)
        for row, prompt in enumerate(request.prompt_tokens):
            tokens[row, : len(prompt)] = torch.as_tensor(prompt, device=device)
        logprobs = torch.zeros(tokens.shape, device=device)
        response_lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        finished = torch.zeros(rows, dtype=torch.bool, device=device)
        keys = row_keys(request.seed, request.prompt_keys, request.sample_indices, device)
        cache = InferenceParams(max_batch_size=rows, max_sequence_length=tokens.shape[1])

        # Prompts start together and end apart: the first pass takes as many positions as the shortest has,
        # and a row whose prompt goes on is fed its own token where others are fed what was drawn.
        fed = 0
        position = int(prompt_lengths.min())
        while position < tokens.shape[1]:
            logits = self._forward(tokens[:, fed:position], fed, cache)
            drawn, drawn_logprobs = self._draw(logits, keys, position - prompt_lengths, request.temperature)
            active = (
                (position >= prompt_lengths) & ~finished & (response_lengths < request.max_response_length)
            )
            tokens[:, position] = torch.where(active, drawn, tokens[:, position])
            logprobs[:, position] = torch.where(active, drawn_logprobs, 0.0)
            response_lengths += active
            finished |= active & (drawn == self._stop_token)
            if bool((finished | (response_lengths == request.max_response_length)).all()):
                break
            fed, position = position, position + 1

        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError("the model's logits are not finite: its weights are broken")
        width = int(response_lengths.max())
        columns = prompt_lengths[:, None] + torch.arange(width, device=device)
        return Generation(
            tokens=tokens.gather(1, columns).cpu(),
            lengths=response_lengths.cpu(),
            finished=finished.cpu(),
            logprobs=logprobs.gather(1, columns).cpu(),
        )

    def _forward(self, tokens: Tensor, offset: int, cache: InferenceParams) -> Tensor | None:
        """Logits [rows, V_local] after the last of `tokens`; None on stages without them."""
        rows, length = tokens.shape
        cache.sequence_len_offset = offset
        position_ids = torch.arange(offset, offset + length, device=tokens.device).expand(rows, -1)

        def forward_step(data_iterator, model):
            output = model(
                input_ids=tokens, position_ids=position_ids, attention_mask=None, inference_params=cache
            )
            return output, lambda output, non_loss_data: output[:, -1]

        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([None]),
            model=self._model.model,
            num_microbatches=1,
            forward_only=True,
            seq_length=length,
            micro_batch_size=rows,
            collect_non_loss_data=True,
        )
        return outputs[0] if outputs else None

    def _draw(
        self, logits: Tensor | None, keys: Tensor, positions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Next tokens and their log-probs, [rows] each, on every stage."""
        drawn = None
        if logits is not None:
            # float64 carries token ids and log-probs in one message.
            drawn = torch.stack(
                [
                    column.double()
                    for column in sample_tokens(
                        logits,
                        keys,
                        positions,
                        temperature=temperature,
                        vocab_size=self._vocab_size,
                        group=parallel_state.get_tensor_model_parallel_group(),
                    )
                ]
            )
        drawn = broadcast_from_last_stage(
            drawn,
            shape=(2, len(keys)),
            dtype=torch.float64,
            device=keys.device,
            group=parallel_state.get_pipeline_model_parallel_group(),
            last_rank=parallel_state.get_pipeline_model_parallel_last_rank(),
        )
        return drawn[0].long(), drawn[1].float()


@contextmanager
def last_position_logits(model: MegatronGPTModel) -> Iterator[None]:
    """Let only the last position enter the output layer; a prompt's other logits are never looked at."""

    def keep_last(module, args):
        hidden, *rest = args
        return (hidden[-1:], *rest)

    hooks = [
        chunk.output_layer.register_forward_pre_hook(keep_last)
        for chunk in model.get_model_module_list()
        if hasattr(chunk, "output_layer")
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
