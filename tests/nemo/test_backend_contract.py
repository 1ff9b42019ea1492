"""What the trainer may expect of any rollout backend (`tepo_nemo.rollout.protocol`), held against each.

TensorRT-LLM is NeMo's exporter with a stand-in for the binary packages (`support.fake_trtllm`); the server is
`support.completions_server`, started with weights that are not those of the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.backend_contract import (
    LIMITS,
    REQUESTS,
    SAMPLED,
    SAMPLES,
    SHUFFLED,
    VOCABULARY,
    Answers,
    answer,
)
from support.converted import Silent
from support.layouts import LAYOUTS
from support.once import once
from support.servers import randomized, running
from support.synthetic import synthetic_batch
from support.toy import STOP_TOKEN, ToyFolder
from support.trtllm_runs import make_even_toy
from support.updates import make_start
from support.worlds import Worlds

from tepo_nemo.config.schema import Config
from tepo_nemo.conversion.convert import convert
from tepo_nemo.rollout.protocol import Generation

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

BACKENDS = {
    "megatron": ["tp2"],
    "trtllm": ["tp1", "tp2", "pp2", "dp2", "tp2_pp2"],
    "server": ["tp2", "dp2"],
}
EACH = [(backend, layout) for backend, layouts in BACKENDS.items() for layout in layouts]
each = pytest.mark.parametrize(("backend", "layout"), EACH, ids=map("-".join, EACH))
Answered = Callable[[str, str], list[Answers]]


def with_backend(config: Config, backend: str, url: str) -> Config:
    """The backend in place of the configured one; a CPU is refused where the configuration is checked."""
    server = config.rollout.server.model_copy(update={"urls": [url], "request_time_limit": 20.0})
    rollout = config.rollout.model_copy(update={"backend": backend, "batch_size": 4, "server": server})
    return config.model_copy(update={"rollout": rollout})


@dataclass(frozen=True)
class Start:
    """What all backends start from: a toy whose tokenizer has `VOCABULARY` tokens, and its weights."""

    toy: ToyFolder
    checkpoint: Path


@pytest.fixture(scope="module")
def start(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("even")
    (toy,) = worlds(1, stack="nemo").run(make_even_toy, folder)
    config = toy.config(f"model.vocab_size={VOCABULARY}")
    path = folder / "toy.nemo"
    worlds(1, stack="nemo").run(make_start, config, path, synthetic_batch(), timeout=110)
    return Start(toy, path)


@pytest.fixture(scope="module")
def url(start: Start) -> Iterator[str]:
    """The address of a server with such a model and other weights."""
    folder = start.checkpoint.with_name("huggingface")
    convert(start.checkpoint, folder, watcher=Silent())
    with running("vllm", randomized(folder)) as server:
        yield server.url


@pytest.fixture(scope="module")
def answered(worlds: Worlds, start: Start, url: str, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """`answered(backend, layout)`: the answers of all ranks, in batches of four."""

    def work(backend: str, layout: str) -> list[Answers]:
        config = LAYOUTS[layout].config(
            start.toy,
            f"model.restore_from_path={start.checkpoint}",
            f"model.vocab_size={VOCABULARY}",
            f"output={tmp_path_factory.mktemp('run')}",
        )
        world = worlds(LAYOUTS[layout].ranks, stack="nemo")
        return world.run(answer, with_backend(config, backend, url), REQUESTS, timeout=110)

    return once(work)


def rows_of(generation: Generation) -> list[list[int]]:
    return [
        row[:length]
        for row, length in zip(generation.tokens.tolist(), generation.lengths.tolist(), strict=True)
    ]


@each
def test_every_rank_has_the_same(answered: Answered, backend: str, layout: str) -> None:
    first, *others = answered(backend, layout)
    for other in others:
        for name, generation in first.generations.items():
            for field in ("tokens", "lengths", "finished", "logprobs"):
                assert torch.equal(getattr(generation, field), getattr(other.generations[name], field)), name


@each
def test_shapes_and_types(answered: Answered, backend: str, layout: str) -> None:
    for name, generation in answered(backend, layout)[0].generations.items():
        rows, longest = len(REQUESTS[name]), max(generation.lengths.tolist(), default=0)
        assert generation.tokens.shape == generation.logprobs.shape == (rows, longest), name
        assert generation.lengths.shape == generation.finished.shape == (rows,), name
        kinds = [getattr(generation, field).dtype for field in ("tokens", "lengths", "finished", "logprobs")]
        assert kinds == [torch.int64, torch.int64, torch.bool, torch.float32], name
        assert {value.device.type for value in vars(generation).values()} == {"cpu"}, name


@each
def test_ids_are_of_the_vocabulary(answered: Answered, backend: str, layout: str) -> None:
    """Padding columns of the embedding are never drawn, and what stands behind a response is a token, too."""
    generations = answered(backend, layout)[0].generations.values()
    tokens = torch.cat([generation.tokens.flatten() for generation in generations])
    assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCABULARY


@each
def test_the_stop_token_ends_a_response_and_counts_once(
    answered: Answered, backend: str, layout: str
) -> None:
    answers = answered(backend, layout)[0].generations
    for name, generation in answers.items():
        limits = REQUESTS[name].max_response_lengths
        for row, response in enumerate(rows_of(generation)):
            assert 1 <= len(response) <= limits[row], (name, row)
            assert STOP_TOKEN not in response[:-1], (name, row)
            assert bool(generation.finished[row]) == (response[-1] == STOP_TOKEN), (name, row)
            assert generation.finished[row] or len(response) == limits[row], (name, row)
    finished = torch.cat([generation.finished for generation in answers.values()])
    assert 0 < int(finished.sum()) < len(finished), "both are to occur"


@each
def test_a_response_may_be_the_stop_token_alone(answered: Answered, backend: str, layout: str) -> None:
    """There is no least length that keeps it from being drawn first: of 54 sampled responses some are."""
    lengths = torch.cat([answered(backend, layout)[0].generations[name].lengths for name in REQUESTS])
    assert int(lengths.min()) == 1


@each
def test_each_row_has_its_own_limit(answered: Answered, backend: str, layout: str) -> None:
    """A lower limit cuts a response and changes nothing else."""
    answers = answered(backend, layout)[0].generations
    expected = [row[:limit] for row, limit in zip(rows_of(answers["sampled"]), LIMITS, strict=True)]
    assert rows_of(answers["limits"]) == expected


@each
def test_responses_are_a_function_of_the_row(answered: Answered, backend: str, layout: str) -> None:
    """Not of its place, its companions or the batch; and asked again, the same comes again."""
    answers = answered(backend, layout)[0].generations
    sampled = rows_of(answers["sampled"])
    assert rows_of(answers["again"]) == sampled
    assert rows_of(answers["one row"]) == sampled[4:5]
    assert rows_of(answers["shuffled"]) == [sampled[row] for row in SHUFFLED]


@each
def test_samples_and_steps_differ(answered: Answered, backend: str, layout: str) -> None:
    """Rows that data-parallel ranks share out among them, too. (Two short answers may be equal by chance.)"""
    answers = answered(backend, layout)[0].generations
    sampled, later = rows_of(answers["sampled"]), rows_of(answers["another step"])
    assert sum(first == second for first, second in zip(sampled, later, strict=True)) < len(SAMPLED) / 3
    groups = [sampled[start : start + SAMPLES] for start in range(0, len(sampled), SAMPLES)]
    assert all(len(set(map(tuple, group))) > 1 for group in groups)
    greedy = rows_of(answers["greedy"])
    assert all(greedy[row] == greedy[row - row % SAMPLES] for row in range(len(greedy)))


@each
@pytest.mark.parametrize("name", ["sampled", "cool", "greedy", "limits"])
def test_logprobs_are_the_trainers(answered: Answered, backend: str, layout: str, name: str) -> None:
    """At the temperature of the request, and at 1 for greedy responses; 0 behind a response's end."""
    measured = {}
    for one in answered(backend, layout):
        measured |= one.measured[name]
    generation = answered(backend, layout)[0].generations[name]
    for row, length in enumerate(generation.lengths.tolist()):
        torch.testing.assert_close(generation.logprobs[row, :length], measured[row][0], rtol=0, atol=2e-5)
