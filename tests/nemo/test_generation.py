"""The embedded engine: the same tokens at every layout and batch size, with the log-probs of training."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.gather import whole
from support.generation import Generated, generate_all, generate_with_loud_padding, generate_with_nemo
from support.layouts import BF16, LAYOUTS, MODES, REFERENCE, Given, Outcome, assert_close
from support.once import once
from support.reference_model import logits_of
from support.toy import FIRST_CHARACTER, STOP_TOKEN, VOCABULARY, ToyFolder
from support.updates import Case
from support.worlds import Worlds

from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.rollout.sampling import prompt_key

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

SAMPLES, LONGEST = 2, 10
PROMPTS = [
    torch.randint(
        FIRST_CHARACTER, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    for length in (9, 1, 5, 2, 8, 3)
]
SAMPLED = GenerationRequest(
    prompt_tokens=[prompt for prompt in PROMPTS for _ in range(SAMPLES)],
    prompt_keys=[prompt_key(str(number)) for number in range(len(PROMPTS)) for _ in range(SAMPLES)],
    sample_indices=list(range(SAMPLES)) * len(PROMPTS),
    seed=7,
    temperature=1.0,
    max_response_length=LONGEST,
)
REQUESTS = {
    "sampled": SAMPLED,
    "cool": replace(SAMPLED, temperature=0.6),
    "greedy": replace(SAMPLED, temperature=0.0),
    "one row": SAMPLED.rows(3, 4),
}
BATCH_SIZES = [None, 1, 3]
GENERATING = [REFERENCE, "tp2", "pp2", "dp2", "tp2_pp2", "tp2_sp"]


@pytest.fixture(scope="module")
def generated(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given]
) -> Callable[[str], list[Generated]]:
    """`generated(layout)`: the answers of all ranks. A loss is taken afterwards, on the same model."""
    start = given(False)

    def work(layout: str) -> list[Generated]:
        config = LAYOUTS[layout].config(toy, *start.overrides, "trainer.optimizer.name=sgd")
        case = Case(start.batch, start.old, config.algorithm)
        world = worlds(LAYOUTS[layout].ranks, stack="nemo")
        return world.run(generate_all, config, REQUESTS, BATCH_SIZES, case, timeout=110)

    return once(work)


def rows_of(generation: Generation) -> list[list[int]]:
    """Tokens of each response."""
    return [
        row[:length]
        for row, length in zip(generation.tokens.tolist(), generation.lengths.tolist(), strict=True)
    ]


def logprobs_of(generation: Generation) -> torch.Tensor:
    """Log-probs of all tokens of all responses, one after the other."""
    return torch.cat(
        [row[:length] for row, length in zip(generation.logprobs, generation.lengths.tolist(), strict=True)]
    )


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("layout", GENERATING)
def test_tokens_do_not_depend_on_layout_and_batch_size(
    generated: Callable[[str], list[Generated]], layout: str, name: str
) -> None:
    """On every rank, which also is to say that ranks draw alike (fault 26)."""
    expected = generated(REFERENCE)[0].responses[name, None]
    for rank, answer in enumerate(generated(layout)):
        for size in BATCH_SIZES:
            if name == "one row" and size is not None:
                continue
            actual = answer.responses[name, size]
            where = f"rank {rank}, batch size {size}"
            assert rows_of(actual) == rows_of(expected), where
            assert actual.finished.tolist() == expected.finished.tolist(), where
            torch.testing.assert_close(logprobs_of(actual), logprobs_of(expected), rtol=0, atol=1e-5)


def test_a_row_does_not_depend_on_its_companions(generated: Callable[[str], list[Generated]]) -> None:
    responses = generated(REFERENCE)[0].responses
    assert rows_of(responses["one row", None]) == rows_of(responses["sampled", None])[3:4]


@pytest.mark.parametrize("name", ["sampled", "cool", "greedy"])
@pytest.mark.parametrize("layout", GENERATING)
def test_logprobs_are_those_of_training(
    generated: Callable[[str], list[Generated]], layout: str, name: str
) -> None:
    """At the temperature of the request (fault 17), and at 1 for greedy responses."""
    measured = {}
    for answer in generated(layout):
        measured |= answer.statistics[name]
    assert sorted(measured) == list(range(len(SAMPLED)))
    expected = torch.cat([measured[row][0] for row in range(len(SAMPLED))])
    actual = logprobs_of(generated(layout)[0].responses[name, None])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", BF16)
def test_logprobs_are_those_of_training_but_for_rounding(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given], mode: str
) -> None:
    """In bf16 the cached forward may round a logit of up to 8 to its other neighbour, 2^-5 away."""
    config = LAYOUTS["tp2"].config(toy, *given(False).overrides, *MODES[mode])
    answer = worlds(2, stack="nemo").run(generate_all, config, {"sampled": SAMPLED}, [None], timeout=110)[0]
    measured = torch.cat([answer.statistics["sampled"][row][0] for row in range(len(SAMPLED))])
    gap = (logprobs_of(answer.responses["sampled", None]) - measured).abs()
    assert gap.mean() < 2**-6
    assert gap.max() < 2**-3


@pytest.mark.parametrize("name", ["sampled", "cool", "greedy"])
def test_responses_end_with_the_stop_token_or_at_the_limit(
    generated: Callable[[str], list[Generated]], name: str
) -> None:
    generation = generated(REFERENCE)[0].responses[name, None]
    for response, finished in zip(rows_of(generation), generation.finished.tolist(), strict=True):
        assert 1 <= len(response) <= LONGEST
        assert STOP_TOKEN not in response[:-1]
        assert finished == (response[-1] == STOP_TOKEN)
        assert finished or len(response) == LONGEST
    if name == "sampled":
        assert 0 < generation.finished.sum() < len(SAMPLED), "both are to occur"
        assert len(set(map(tuple, rows_of(generation)))) == len(SAMPLED), "samples of a prompt are to differ"


def test_greedy_takes_the_most_likely_token_of_a_full_forward(
    generated: Callable[[str], list[Generated]], given: Callable[[bool], Given]
) -> None:
    """Step by step and without a cache, in float64."""
    actual = rows_of(generated(REFERENCE)[0].responses["greedy", None])
    weights = given(False).weights_in_float64
    for prompt, response in zip(PROMPTS, actual[::SAMPLES], strict=True):
        expected: list[int] = []
        while len(expected) < LONGEST and STOP_TOKEN not in expected:
            expected.append(int(logits_of(weights, prompt + expected)[-1].argmax()))
        assert response == expected


def test_greedy_is_what_nemo_generates(
    generated: Callable[[str], list[Generated]],
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
) -> None:
    config = LAYOUTS[REFERENCE].config(toy, *given(False).overrides)
    (expected,) = worlds(1, stack="nemo").run(generate_with_nemo, config, PROMPTS, LONGEST, timeout=110)
    assert rows_of(generated(REFERENCE)[0].responses["greedy", None])[::SAMPLES] == expected


@pytest.mark.parametrize("layout", [REFERENCE, "tp2"])
def test_padding_columns_do_not_exist(
    generated: Callable[[str], list[Generated]],
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
    layout: str,
) -> None:
    """Neither for the sampler nor for the statistics, however large their logits (fault 12)."""
    config = LAYOUTS[layout].config(toy, *given(False).overrides)
    requests = {name: REQUESTS[name] for name in ("sampled", "greedy")}
    answers = worlds(LAYOUTS[layout].ranks, stack="nemo").run(
        generate_with_loud_padding, config, requests, timeout=110
    )
    for name in requests:
        quiet = generated(layout)[0]
        assert rows_of(answers[0].responses[name, None]) == rows_of(quiet.responses[name, None])
        for row, values in answers[0].statistics[name].items():
            for actual, expected in zip(values, quiet.statistics[name][row], strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", GENERATING)
def test_generation_leaves_training_as_it_was(
    generated: Callable[[str], list[Generated]], run: Callable[[str, bool], dict[str, Outcome]], layout: str
) -> None:
    """Sequence parallelism, which generation switches off, is on again."""
    expected = run(layout, False)["sgd"]
    answers = generated(layout)
    name = "tepo, micro-batch 4"
    assert answers[0].after.layer_lengths == expected.layer_lengths[name]
    gradients = whole([answer.after.gradients for answer in answers], vocabulary=VOCABULARY, tied=False)
    assert_close(gradients, expected.gradients[name], 1e-6, name)
