"""From what the engine returns to responses, with nothing believed that can be looked at."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tepo_nemo.rollout.protocol import Generation, GenerationRequest, RolloutError

LOG = logging.getLogger(__name__)
_ROUNDING = 1e-4  # by which a log-prob may be above 0
# So many tokens are never all certain to the last bit of a float.
_ENOUGH_TOKENS = 32


def to_generation(
    output: Mapping[str, Tensor] | None, request: GenerationRequest, *, stop_token: int, vocab_size: int
) -> Generation:
    """The responses of one batch, on the host.

    A response with a token that the model does not have becomes one of length 0, which is neither graded nor
    trained on.

    Args:
        output: of `ModelRunner.generate`: `output_ids` and `log_probs` [N, 1, L], where the response stands
            right after its prompt, and `sequence_lengths` [N, 1] of both together.

    Raises:
        RolloutError: what came back is not an answer to the request.
    """
    ids, lengths, logprobs = _parts(output, request)
    prompts = torch.tensor([len(prompt) for prompt in request.prompt_tokens])
    limits = torch.tensor(request.max_response_lengths)
    own = lengths - prompts
    most = (ids.shape[1] - prompts).clamp(max=int(limits.max()))
    wrong = (own < 1) | (own > most)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise RolloutError(
            f"TensorRT-LLM tells a length of {int(own[row])} for response {row} of {len(request)}, which "
            f"must be 1 to {int(most[row])}"
        )
    columns = torch.arange(int(limits.max()))
    places = (prompts[:, None] + columns).clamp(max=ids.shape[1] - 1)
    tokens, logprobs = ids.gather(1, places), logprobs.gather(1, places)
    own = torch.minimum(own, limits)
    within = columns < own[:, None]
    _check_prompts(ids, request)
    _check_logprobs(logprobs[within], request)
    own = _without_unknown(tokens, within, own, vocab_size)
    within = columns < own[:, None]
    finished = (tokens == stop_token) & (columns == own[:, None] - 1)
    _check_stops(tokens, finished, within, own, limits, stop_token)
    return Generation(
        tokens=torch.where(within, tokens, stop_token),
        lengths=own,
        finished=finished.any(dim=1),
        logprobs=torch.where(within, logprobs, 0.0),
    )


def _parts(output: Mapping[str, Tensor] | None, request: GenerationRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [N, L] int64, lengths [N] int64 and log-probs [N, L] fp32, without the axis of beams."""
    names = ("output_ids", "sequence_lengths", "log_probs")
    found = {name: tuple(output[name].shape) for name in names if output is not None and name in output}
    width = found.get("output_ids", (0,))[-1]
    rows, longest = len(request), max(map(len, request.prompt_tokens))
    wanted = dict(zip(names, ((rows, 1, width), (rows, 1), (rows, 1, width)), strict=True))
    if found != wanted or width <= longest:
        raise RolloutError(
            f"TensorRT-LLM returned tensors of shapes {found}, expected {wanted} with more than {longest} "
            "columns"
        )
    ids, lengths, logprobs = (output[name].squeeze(1).cpu() for name in names)
    return ids.long(), lengths.long(), logprobs.float()


def _check_prompts(ids: Tensor, request: GenerationRequest) -> None:
    prompts = pad_sequence(
        [torch.as_tensor(prompt, dtype=torch.int64) for prompt in request.prompt_tokens],
        batch_first=True,
        padding_value=-1,
    )
    different = ((ids[:, : prompts.shape[1]] != prompts) & (prompts >= 0)).any(dim=1)
    if bool(different.any()):
        raise RolloutError(
            f"TensorRT-LLM answered another prompt than that of response {int(different.int().argmax())}"
        )


def _check_logprobs(logprobs: Tensor, request: GenerationRequest) -> None:
    """Of all counted tokens, in one dimension."""
    if not bool(logprobs.isfinite().all()) or bool((logprobs > _ROUNDING).any()):
        raise RolloutError(
            "TensorRT-LLM returned log-probs that are not finite or above 0: the weights are broken, or it "
            "tells something else"
        )
    if request.temperature > 0 and len(logprobs) >= _ENOUGH_TOKENS and not bool(logprobs.any()):
        raise RolloutError(
            "TensorRT-LLM returned log-probs that are all 0, as an engine with pipeline stages does: nothing "
            "could be compared with the trainer's"
        )


def _without_unknown(tokens: Tensor, within: Tensor, lengths: Tensor, vocab_size: int) -> Tensor:
    """The lengths, 0 where a counted token is not of the vocabulary."""
    if bool((within & (tokens < 0)).any()):
        row = int((within & (tokens < 0)).any(dim=1).int().argmax())
        raise RolloutError(
            f"TensorRT-LLM tells a length of {int(lengths[row])} for response {row}, which is more than it "
            "has drawn"
        )
    unknown = within & (tokens >= vocab_size)
    rows = unknown.any(dim=1)
    if bool(rows.all()):
        raise RolloutError(
            f"TensorRT-LLM drew token {int(tokens[unknown][0])}, which is not of the vocabulary of "
            f"{vocab_size}, and such in all {len(rows)} responses of a batch: its vocabulary is another"
        )
    if bool(rows.any()):
        LOG.warning(
            "%d of %d responses are left out: TensorRT-LLM drew token %d, and the vocabulary has %d",
            int(rows.sum()),
            len(rows),
            int(tokens[unknown][0]),
            vocab_size,
        )
    return torch.where(rows, 0, lengths)


def _check_stops(
    tokens: Tensor, finished: Tensor, within: Tensor, lengths: Tensor, limits: Tensor, stop_token: int
) -> None:
    """A response goes to its first stop token, or to its limit."""
    early = within & (tokens == stop_token) & ~finished
    short = (lengths > 0) & ~finished.any(dim=1) & (lengths < limits)
    for rows, what in (
        (early.any(dim=1), "goes on after the stop token"),
        (short, "ends without the stop token before its limit"),
    ):
        if bool(rows.any()):
            row = int(rows.int().argmax())
            raise RolloutError(
                f"response {row} of TensorRT-LLM, told to have {int(lengths[row])} of at most "
                f"{int(limits[row])} tokens, {what}"
            )
