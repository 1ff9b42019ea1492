"""Requests, generations and their numbering."""

import pytest
import torch
from support.rollouts import make_prompt

from tepo_nemo.rollout.generate import generate
from tepo_nemo.rollout.protocol import Generation, GenerationRequest, concatenate_generations
from tepo_nemo.rollout.sampling import prompt_key

REQUEST = GenerationRequest(
    prompt_tokens=[[1], [2, 2], [3, 3, 3], [4]],
    prompt_keys=[10, 20, 30, 40],
    sample_indices=[0, 1, 0, 1],
    seed=7,
    temperature=0.6,
    max_response_lengths=[9, 8, 7, 6],
)


def test_rows_of_a_request():
    part = REQUEST.rows(1, 3)
    assert len(part) == 2
    assert part == GenerationRequest([[2, 2], [3, 3, 3]], [20, 30], [1, 0], 7, 0.6, [8, 7])
    assert REQUEST.rows(0, 4) == REQUEST
    assert len(REQUEST.rows(2, 2)) == 0
    assert REQUEST.rows(3, 10).prompt_keys == [40]


def test_rows_of_a_request_in_any_order():
    part = REQUEST.select([3, 1])
    assert part == GenerationRequest([[4], [2, 2]], [40, 20], [1, 1], 7, 0.6, [6, 8])
    assert len(REQUEST.select([])) == 0


def test_rows_of_a_generation_in_any_order():
    whole = Generation(
        torch.tensor([[1, 2], [3, 0], [4, 5]]),
        torch.tensor([2, 1, 2]),
        torch.tensor([False, True, True]),
        torch.tensor([[-1.0, -2.0], [-3.0, 0.0], [-4.0, -5.0]]),
    )
    part = whole.select(torch.tensor([2, 0]))
    assert part.tokens.tolist() == [[4, 5], [1, 2]]
    assert part.lengths.tolist() == [2, 2]
    assert part.finished.tolist() == [True, False]
    assert part.logprobs.tolist() == [[-4, -5], [-1, -2]]


def test_concatenate_pads_to_the_longest():
    short = Generation(torch.tensor([[5]]), torch.tensor([1]), torch.tensor([True]), torch.tensor([[-0.5]]))
    none = Generation(
        torch.zeros(0, 0).long(), torch.zeros(0).long(), torch.zeros(0).bool(), torch.zeros(0, 0)
    )
    long = Generation(
        torch.tensor([[1, 2, 3], [4, 0, 0]]),
        torch.tensor([3, 1]),
        torch.tensor([False, True]),
        torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]),
    )
    whole = concatenate_generations([short, none, long])
    assert whole.tokens.tolist() == [[5, 0, 0], [1, 2, 3], [4, 0, 0]]
    assert whole.lengths.tolist() == [1, 3, 1]
    assert whole.finished.tolist() == [True, False, True]
    assert whole.logprobs.tolist() == [[-0.5, 0, 0], [-1, -2, -3], [-4, 0, 0]]
    assert whole.tokens.dtype == torch.int64 and whole.logprobs.dtype == torch.float32


def ask(prompts, samples, prompts_at_once=None):
    """What `generate` makes, and the requests that it asks with."""
    requests = []

    def infer(request: GenerationRequest) -> Generation:
        requests.append(request)
        rows = len(request)
        return Generation(
            torch.arange(rows)[:, None],
            torch.ones(rows).long(),
            torch.ones(rows).bool(),
            torch.zeros(rows, 1),
        )

    rollouts = list(
        generate(
            infer,
            prompts,
            samples=samples,
            seed=3,
            temperature=0.6,
            max_response_length=12,
            prompts_at_once=prompts_at_once,
        )
    )
    return rollouts, requests


def test_a_prompt_is_asked_for_its_samples_in_a_row():
    prompts = [make_prompt(4, length=1), make_prompt(2, length=3)]
    (rollouts,), (request,) = ask(prompts, samples=3)
    assert request.prompt_tokens == [[4000]] * 3 + [[2000, 2001, 2002]] * 3
    assert request.prompt_keys == [prompt_key("p4")] * 3 + [prompt_key("p2")] * 3
    assert request.sample_indices == [0, 1, 2, 0, 1, 2]
    assert (request.seed, request.temperature) == (3, 0.6)
    assert request.max_response_lengths == [12] * 6
    assert rollouts.prompts == prompts
    assert rollouts.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert rollouts.samples.tolist() == [0, 1, 2, 0, 1, 2]
    assert rollouts.generation.tokens[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert len(rollouts) == 6


def test_a_prompt_that_comes_twice_is_two_groups_with_noise_of_their_own():
    """As happens at the edge of an epoch, and with fewer prompts than a step takes."""
    (rollouts,), (request,) = ask([make_prompt(1), make_prompt(0), make_prompt(1), make_prompt(1)], samples=2)
    assert rollouts.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rollouts.samples.tolist() == [0, 1] * 4
    noise = list(zip(request.prompt_keys, request.sample_indices, strict=True))
    assert len(set(noise)) == 8
    # The first time a prompt comes it is answered as if it came once.
    assert noise[:4] == list(
        zip(ask([make_prompt(1), make_prompt(0)], 2)[1][0].prompt_keys, [0, 1, 0, 1], strict=True)
    )


def test_one_sample():
    (rollouts,), (request,) = ask([make_prompt(0), make_prompt(1)], samples=1)
    assert rollouts.groups.tolist() == [0, 1] and rollouts.samples.tolist() == [0, 0]
    assert request.sample_indices == [0, 0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_of_whole_prompts_ask_for_the_same(size):
    """A prompt that comes again in a later batch still has noise of its own."""
    prompts = [make_prompt(1), make_prompt(0), make_prompt(1)]
    (_, (whole,)), (rollouts, requests) = ask(prompts, 2), ask(prompts, 2, size)
    assert [len(batch.prompts) for batch in rollouts] == {1: [1, 1, 1], 2: [2, 1], 4: [3]}[size]
    assert [prompt for batch in rollouts for prompt in batch.prompts] == prompts
    for name in ("prompt_tokens", "prompt_keys", "sample_indices", "max_response_lengths"):
        parts = [value for request in requests for value in getattr(request, name)]
        assert parts == list(getattr(whole, name))
    assert all(batch.groups.tolist() == [n // 2 for n in range(len(batch))] for batch in rollouts)


def test_a_batch_is_generated_when_it_is_asked_for():
    """So that the one before can be graded meanwhile."""
    asked = []

    def infer(request):
        asked.append(len(request))
        return Generation(*(torch.zeros(len(request), *shape) for shape in ((1,), (), (), (1,))))

    batches = generate(
        infer, [make_prompt(n) for n in range(3)], samples=2, seed=1, temperature=1.0, max_response_length=3,
        prompts_at_once=1,
    )  # fmt: skip
    assert asked == []
    next(batches)
    assert asked == [2]
