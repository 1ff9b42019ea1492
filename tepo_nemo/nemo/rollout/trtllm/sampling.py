"""What one batch asks of the engine's sampler."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo_nemo.rollout.protocol import GenerationRequest, RolloutError
from tepo_nemo.rollout.sampling import row_keys

# Neither end nor padding: no token has this id. With the stop token as `end_id` it would not be counted in
# the lengths, as a stop word it is.
NO_TOKEN = -42


def stop_words(stop_token: int, rows: int) -> np.ndarray:
    """TensorRT-LLM's table of stop words, int32 [rows, 2, 1]: the ids, and where each word ends among them.

    NeMo-Aligner's builder takes id 0 for padding, and glues the words around it together.
    """
    return np.tile(np.array([[[stop_token], [1]]], dtype=np.int32), (rows, 1, 1))


def row_seeds(request: GenerationRequest) -> Tensor:
    """int64 [N], not negative: of the run, its step, the prompt and the sample, so the same on the ranks that
    share a row and different wherever two rows are. Those ranks draw by themselves."""
    keys = row_keys(request.seed, request.prompt_keys, request.sample_indices, torch.device("cpu"))
    return keys & torch.iinfo(torch.int64).max


def sampling_config(request: GenerationRequest, stop_token: int) -> Any:
    """`tensorrt_llm.runtime.SamplingConfig` for a request: from the whole distribution, or greedy.

    The limit is that of the longest response; rows with a lower one are cut afterwards.
    """
    from tensorrt_llm.runtime import SamplingConfig

    greedy = request.temperature == 0
    config = SamplingConfig(
        end_id=NO_TOKEN,
        pad_id=NO_TOKEN,
        max_new_tokens=max(request.max_response_lengths),
        temperature=request.temperature or 1.0,
        top_k=1 if greedy else 0,
        top_p=1.0,
        output_sequence_lengths=True,
        return_dict=True,
        stop_words_list=stop_words(stop_token, len(request)),
    )
    ignored = config.update(
        random_seed=row_seeds(request),
        output_log_probs=True,
        min_length=0,  # or logits[end_id] is written to, in front of the logits
    )
    if ignored:
        raise RolloutError(f"TensorRT-LLM's sampler has no setting {', '.join(ignored)}")
    return config
