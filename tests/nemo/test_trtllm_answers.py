"""What is made of the tensors that TensorRT-LLM returns, and what is asked of its sampler, by hand."""

from dataclasses import replace

import pytest
import torch

from tepo_nemo.nemo.rollout.trtllm.answers import to_generation
from tepo_nemo.nemo.rollout.trtllm.sampling import row_seeds, stop_words
from tepo_nemo.rollout.protocol import GenerationRequest, RolloutError
from tepo_nemo.rollout.sampling import stream_seed

STOP, VOCABULARY, NONE = 0, 10, -42
REQUEST = GenerationRequest(
    prompt_tokens=[[5, 0], [7, 8, 9, 1], [6]],  # token 0, the stop token, may stand in a prompt
    prompt_keys=[11, 12, 13],
    sample_indices=[0, 0, 0],
    seed=1,
    temperature=1.0,
    max_response_lengths=[3, 3, 2],
)
# Rows are prompt, response, filling: ended by the stop token, cut at its limit, and past its own limit of 2.
IDS = torch.tensor(
    [[5, 0, 3, 0, NONE, NONE, NONE], [7, 8, 9, 1, 2, 2, 4], [6, 4, 4, 3, NONE, NONE, NONE]], dtype=torch.int32
)
LENGTHS = torch.tensor([4, 7, 4], dtype=torch.int32)
LOGPROBS = torch.tensor(
    [[0, 0, -1, -2, 0, 0, 0], [0, 0, 0, 0, -3, -4, -5], [0, -6, -7, -8, 0, 0, 0]], dtype=torch.float32
)


def output(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    values = {"output_ids": IDS, "sequence_lengths": LENGTHS, "log_probs": LOGPROBS} | changes
    beams = {name: value[:, None] for name, value in values.items() if value is not None}
    return beams | {"cum_log_probs": torch.zeros(3, 1)}


def answers(request: GenerationRequest = REQUEST, **changes: torch.Tensor | None):
    return to_generation(output(**changes), request, stop_token=STOP, vocab_size=VOCABULARY)


def changed(tensor: torch.Tensor, row: int, column: int, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row, column] = value
    return tensor


def test_responses_stand_behind_their_prompts() -> None:
    found = answers()
    assert found.lengths.tolist() == [2, 3, 2]
    assert found.finished.tolist() == [True, False, False]
    assert found.tokens.tolist() == [[3, 0, STOP], [2, 2, 4], [4, 4, STOP]]
    assert found.logprobs.tolist() == [[-1, -2, 0], [-3, -4, -5], [-6, -7, 0]]


def test_the_stop_token_at_the_limit_is_an_end() -> None:
    assert answers(output_ids=changed(IDS, 1, 6, STOP)).finished.tolist() == [True, True, False]


def test_a_token_that_the_model_does_not_have_makes_a_response_none() -> None:
    found = answers(output_ids=changed(IDS, 1, 5, 10))
    assert found.lengths.tolist() == [2, 0, 2] and found.finished.tolist() == [True, False, False]
    assert int(found.tokens.max()) < VOCABULARY
    # Behind a response's own limit nobody minds.
    assert answers(output_ids=changed(IDS, 2, 3, 10)).lengths.tolist() == [2, 3, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": None}, "returned tensors of shapes"),
        ({"log_probs": LOGPROBS[:, :5]}, "returned tensors of shapes"),
        ({"output_ids": IDS[:2], "log_probs": LOGPROBS[:2]}, "returned tensors of shapes"),
        ({"sequence_lengths": LENGTHS + 1}, "a length of 4 for response 1 of 3, which must be 1 to 3"),
        ({"sequence_lengths": LENGTHS - 3}, "a length of -1 for response 0 of 3"),
        ({"sequence_lengths": changed(LENGTHS[:, None], 0, 0, 5)[:, 0]}, "more than it has drawn"),
        ({"sequence_lengths": LENGTHS - 1}, "ends without the stop token before its limit"),
        ({"output_ids": changed(IDS, 1, 4, STOP)}, "response 1 .* goes on after the stop token"),
        ({"output_ids": changed(IDS, 1, 3, 2)}, "another prompt than that of response 1"),
        ({"log_probs": changed(LOGPROBS, 1, 4, torch.nan)}, "not finite or above 0"),
        ({"log_probs": changed(LOGPROBS, 1, 4, -torch.inf)}, "not finite or above 0"),
        ({"log_probs": changed(LOGPROBS, 1, 4, 0.1)}, "not finite or above 0"),
    ],
)
def test_what_is_no_answer(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        answers(**changes)


def test_no_output_at_all() -> None:
    """What a rank gets that is not the first of its pipeline: an engine of ours has no pipeline."""
    with pytest.raises(RolloutError, match="returned tensors of shapes {}"):
        to_generation(None, REQUEST, stop_token=STOP, vocab_size=VOCABULARY)


def test_a_vocabulary_that_is_another() -> None:
    ids = IDS.clone()
    ids[0, 2], ids[1, 4], ids[2, 1] = 10, 11, 12
    with pytest.raises(RolloutError, match="drew token 10, which is not of the vocabulary of 10"):
        answers(output_ids=ids)


@pytest.mark.parametrize(("temperature", "refused"), [(1.0, True), (0.0, False)])
def test_log_probs_of_zero(temperature: float, refused: bool) -> None:
    """40 sampled tokens are never certain; greedy ones of a policy that is sure may be."""
    rows = 20
    request = replace(
        REQUEST,
        prompt_tokens=[[5]] * rows,
        prompt_keys=[1] * rows,
        sample_indices=list(range(rows)),
        temperature=temperature,
        max_response_lengths=[2] * rows,
    )
    ids = torch.tensor([[[5, 3, 4]]]).repeat(rows, 1, 1)
    given = {
        "output_ids": ids,
        "sequence_lengths": torch.full((rows, 1), 3),
        "log_probs": torch.zeros(rows, 1, 3),
    }
    if refused:
        with pytest.raises(RolloutError, match="all 0, as an engine with pipeline stages does"):
            to_generation(given, request, stop_token=STOP, vocab_size=VOCABULARY)
    else:
        found = to_generation(given, request, stop_token=STOP, vocab_size=VOCABULARY)
        assert found.lengths.tolist() == [2] * rows


def test_the_stop_token_is_a_stop_word_also_where_its_id_is_0() -> None:
    """NeMo-Aligner's table loses it; the layout is ids, then where each word ends, int32."""
    for token in (0, 9):
        table = stop_words(token, rows=3)
        assert table.tolist() == [[[token], [1]]] * 3 and table.dtype == "int32"


def test_seeds_are_those_of_the_row() -> None:
    """Not negative, equal for equal rows, and different over prompts, samples and steps."""
    rows = [(prompt, sample) for prompt in range(64) for sample in range(8)]
    seeds = set()
    for step in range(3):
        request = GenerationRequest(
            prompt_tokens=[[1]] * len(rows),
            prompt_keys=[prompt for prompt, _ in rows],
            sample_indices=[sample for _, sample in rows],
            seed=stream_seed(1, "rollout/0", step),
            temperature=1.0,
            max_response_lengths=[1] * len(rows),
        )
        found = row_seeds(request)
        assert found.dtype == torch.int64 and int(found.min()) >= 0
        assert torch.equal(row_seeds(request.rows(7, 9)), found[7:9])
        seeds |= set(found.tolist())
    assert len(seeds) == 3 * len(rows)
