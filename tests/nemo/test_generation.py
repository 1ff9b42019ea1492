"""The embedded engine: the same tokens at every layout and batch size, with the log-probs of training."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from support.gather import whole
from support.generation import (
    CacheUse,
    Generated,
    compare_with_nemo,
    count_passes,
    follow_cache,
    generate_all,
    generate_with_loud_padding,
    generate_with_nemo,
    look_seldom,
)
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
    max_response_lengths=[LONGEST] * (SAMPLES * len(PROMPTS)),
)
# Those to the prompts of 1, 2 and 3 tokens end before the prompt of 5 does: the batch runs empty and goes on.
LIMITS = [4, 9, 3, 1, 10, 1, 2, 1, 7, 2, 1, 2]
# Everything that may tell rows apart by where they stand: samples of a prompt are torn apart, too.
SHUFFLED = [7, 0, 11, 4, 2, 9, 1, 10, 3, 8, 6, 5]
REQUESTS = {
    "sampled": SAMPLED,
    "cool": replace(SAMPLED, temperature=0.6),
    "greedy": replace(SAMPLED, temperature=0.0),
    "one row": SAMPLED.rows(3, 4),
    "limits": replace(SAMPLED, max_response_lengths=LIMITS),
    "greedy, limits": replace(SAMPLED, temperature=0.0, max_response_lengths=LIMITS),
    "shuffled": SAMPLED.select(SHUFFLED),
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
    """Nor on its place among them; each row alone is batch size 1 in the test above."""
    responses = generated(REFERENCE)[0].responses
    sampled = rows_of(responses["sampled", None])
    assert rows_of(responses["one row", None]) == sampled[3:4]
    assert rows_of(responses["shuffled", None]) == [sampled[row] for row in SHUFFLED]


@pytest.mark.parametrize("name, without", [("limits", "sampled"), ("greedy, limits", "greedy")])
def test_each_response_is_cut_at_its_own_limit(
    generated: Callable[[str], list[Generated]], name: str, without: str
) -> None:
    """A lower limit shortens a response and changes nothing else."""
    responses = generated(REFERENCE)[0].responses
    expected = [row[:limit] for row, limit in zip(rows_of(responses[without, None]), LIMITS, strict=True)]
    assert rows_of(responses[name, None]) == expected
    assert responses[name, None].finished.tolist() == [row[-1] == STOP_TOKEN for row in expected]
    assert sum(map(len, expected)) < sum(map(len, rows_of(responses[without, None])))


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


def test_the_speed_comparison_is_of_equal_answers(
    generated: Callable[[str], list[Generated]],
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
) -> None:
    """Tokens that NeMo generates past a row's limit are not counted."""
    config = LAYOUTS["tp2"].config(toy, *given(False).overrides)
    request = REQUESTS["greedy, limits"]
    speeds = worlds(2, stack="nemo").run(compare_with_nemo, config, request, timeout=110)
    expected = int(generated(REFERENCE)[0].responses["greedy, limits", None].lengths.sum())
    for speed in speeds:
        assert speed.equal and speed.tokens == expected
    assert speeds[0] == speeds[1]


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


# ----------------------------------------------------------------- what is fed to the model


@dataclass(frozen=True)
class Counted:
    """Rows and positions of each forward pass, by hand, for responses that end at their limits alone."""

    prompts: list[list[int]]  # one a response
    limits: list[int]
    passes: list[tuple[int, int]]


A, B, C = [4, 5], [6, 7], [4, 5, 6, 7]
COUNTED = {
    # Two rows end where the next are drawn: of n tokens the last is never fed.
    "a group": Counted([C, C, C, C], [1, 2, 4, 4], [(1, 4), (3, 1), (2, 1), (2, 1)]),
    "two prompts of a length": Counted([A, B, A, B], [3, 1, 2, 1], [(2, 2), (2, 1), (1, 1)]),
    # A and B are drawn at positions 2, 3 and 4, where C joins; it is drawn at 4 and 5.
    "a longer prompt joins": Counted([C, A, B, A], [2, 3, 3, 3], [(2, 2), (3, 1), (3, 1), (1, 4), (1, 1)]),
    "a longer prompt follows": Counted([C, A, C], [2, 1, 1], [(1, 2), (1, 4), (1, 1)]),
    "the last place moves up": Counted([A, A, A], [1, 4, 3], [(1, 2), (2, 1), (2, 1), (1, 1)]),
}


@pytest.mark.parametrize("layout", [REFERENCE, "tp2_pp2"])
def test_what_is_fed(worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given], layout: str) -> None:
    """Each distinct prompt once, then the last token of each response that goes on; on every rank."""
    requests = {
        name: replace(
            SAMPLED,
            prompt_tokens=case.prompts,
            prompt_keys=[1] * len(case.prompts),
            sample_indices=list(range(len(case.prompts))),
            max_response_lengths=case.limits,
        )
        for name, case in COUNTED.items()
    }
    config = LAYOUTS[layout].config(toy, *given(False).overrides)
    world = worlds(LAYOUTS[layout].ranks, stack="nemo")
    for answer in world.run(count_passes, config, requests, timeout=110):
        for name, case in COUNTED.items():
            assert answer[name].generation.lengths.tolist() == case.limits, name
            assert answer[name].passes == case.passes, name


def test_tokens_fed_with_stop_tokens(
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
    generated: Callable[[str], list[Generated]],
) -> None:
    """A response of n tokens feeds n - 1. Looking for its end at every third position, up to two more."""
    config = LAYOUTS[REFERENCE].config(toy, *given(False).overrides)
    (answer,) = worlds(1, stack="nemo").run(look_seldom, config, SAMPLED, (1, 3), timeout=110)
    expected = generated(REFERENCE)[0].responses["sampled", None]
    fed = {interval: sum(rows * length for rows, length in seen.passes) for interval, seen in answer.items()}
    for seen in answer.values():
        assert torch.equal(seen.generation.tokens, expected.tokens)
        assert torch.equal(seen.generation.lengths, expected.lengths)
        assert torch.equal(seen.generation.finished, expected.finished)
        torch.testing.assert_close(seen.generation.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    needed = sum(map(len, PROMPTS)) + int((expected.lengths - 1).sum())
    assert fed[1] == needed
    assert needed < fed[3] <= needed + 2 * int(expected.finished.sum())


def test_the_cache_is_allocated_once_and_given_back(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given]
) -> None:
    """Keys and values of two layers, whatever batches and requests come, until it is released."""
    config = LAYOUTS[REFERENCE].config(toy, *given(False).overrides, "rollout.batch_size=5")
    (use,) = worlds(1, stack="nemo").run(follow_cache, config, [SAMPLED, REQUESTS["limits"]], timeout=110)
    assert use == CacheUse(allocated=4, alive_before_release=4, alive_after_release=0)
