"""The embedded rollout engine: Megatron's own forward with its KV cache.

Runs wherever the model runs, at every tensor- and pipeline-parallel layout, with the training weights
themselves, so that nothing has to be refitted.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from torch import Tensor

from tepo_nemo.nemo.rollout.decoding import Decoding
from tepo_nemo.nemo.rollout.forward import last_logits, last_position_logits
from tepo_nemo.nemo.rollout.kv_cache import KVCache
from tepo_nemo.nemo.rollout.rotary import cache_rotated_keys
from tepo_nemo.parallel.pipeline import broadcast_from_last_stage
from tepo_nemo.rollout.protocol import (
    Generation,
    GenerationRequest,
    concatenate_generations,
    no_responses,
)
from tepo_nemo.rollout.sampling import row_keys, sample_tokens


class MegatronRollout:
    """Generates with the model under training; implements `RolloutBackend`.

    Args:
        model: in evaluation mode and without sequence parallelism while generating.
        stop_token: id that ends a response.
        vocab_size: of the true vocabulary.
        batch_size: responses generated at once; None for all of a request.
    """

    takes_all_rows = False

    def __init__(
        self, model: MegatronGPTModel, *, stop_token: int, vocab_size: int, batch_size: int | None
    ) -> None:
        self._model = model
        self._stop_token = stop_token
        self._vocab_size = vocab_size
        self._batch_size = batch_size
        self._cache: KVCache | None = None
        # To look at a token stalls a GPU, which otherwise has its next steps queued already; a CPU has no
        # queue. At 8 an ended response is fed 3.5 tokens too many on average, of hundreds.
        self.stop_check_interval = 8 if torch.cuda.is_available() else 1

    def prepare(self) -> None:
        """Nothing to refit: the weights are the training weights."""

    def release(self) -> None:
        """Give the cache back, which the batches of all requests so far have shared."""
        self._cache = None

    @torch.no_grad()
    def generate(self, request: GenerationRequest) -> Generation:
        """Generate batch by batch; see `RolloutBackend`."""
        if not len(request):
            return no_responses()
        # Prompts of similar length together: they join a batch at about the same step.
        order = sorted(range(len(request)), key=lambda row: len(request.prompt_tokens[row]))
        ordered = request.select(order)
        size = min(self._batch_size or len(request), len(request))
        self._make_room(ordered, size)
        with last_position_logits(self._model), cache_rotated_keys(self._model):
            generation = concatenate_generations(
                [
                    self._generate_batch(ordered.rows(start, start + size))
                    for start in range(0, len(request), size)
                ]
            )
        return generation.select(torch.tensor(order).argsort())

    def _make_room(self, request: GenerationRequest, rows: int) -> None:
        """A cache for any batch of the request. The last token of a response is never fed."""
        length = max(
            len(prompt) + limit - 1
            for prompt, limit in zip(request.prompt_tokens, request.max_response_lengths, strict=True)
        )
        if self._cache is None or not self._cache.fits(rows, length):
            self._cache = KVCache(rows, length)

    def _generate_batch(self, request: GenerationRequest) -> Generation:
        device = torch.device(torch.cuda.current_device())
        keys = row_keys(request.seed, request.prompt_keys, request.sample_indices, device)
        cache = self._cache

        def forward(tokens: Tensor, row: int, position: int) -> Tensor | None:
            return last_logits(self._model, tokens, cache.at(row, position))

        def draw(logits: Tensor | None, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            return self._draw(logits, keys[rows], positions, request.temperature)

        return Decoding(
            request,
            cache,
            forward,
            draw,
            stop_token=self._stop_token,
            stop_check_interval=self.stop_check_interval,
            device=device,
        ).run()

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
                        group=_shared(parallel_state.get_tensor_model_parallel_group()),
                    )
                ]
            )
        drawn = broadcast_from_last_stage(
            drawn,
            shape=(2, len(keys)),
            dtype=torch.float64,
            device=keys.device,
            group=_shared(parallel_state.get_pipeline_model_parallel_group()),
            last_rank=parallel_state.get_pipeline_model_parallel_last_rank(),
        )
        return drawn[0].long(), drawn[1].float()


def _shared(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A group of more than this rank: a message to oneself is felt at every token."""
    return group if dist.get_world_size(group) > 1 else None
