"""Rollouts from servers: answers that are of the current weights, or none at all."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.completions_server import BROKEN, SPOILT
from support.plain_llama import PlainLlama
from support.servers import RESTART, ROWS, STOP, TESTS, RunningServer, free_port, make_weights, running

from tepo_nemo.config.server import ServerConfig
from tepo_nemo.errors import UserError
from tepo_nemo.rollout.protocol import RolloutError
from tepo_nemo.rollout.server.completions import Answer, Question, Vocabulary
from tepo_nemo.rollout.server.engines import check_vllm
from tepo_nemo.rollout.server.fleet import Fleet
from tepo_nemo.rollout.server.handover import Handover, Weights
from tepo_nemo.rollout.server.vllm_extension import _tensors

VOCABULARY = Vocabulary(ROWS, STOP)
QUESTIONS = [
    Question([4 + number % 9, 7, 4 + number % 5], 1 + number % 8, temperature, 1000 + number)
    for number in range(24)
    for temperature in ((0.0,) if number % 6 == 5 else (1.0, 0.6))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What servers start with, and what they are to be given."""
    root = tmp_path_factory.mktemp("weights")
    return {name: make_weights(root / name, seed) for seed, name in enumerate(("first", "current", "next"))}


@pytest.fixture(scope="module")
def start(folders: dict[str, Path]) -> Iterator[Callable[..., RunningServer]]:
    """`start()`: a server with the first weights."""
    with ExitStack() as stack:
        yield lambda kind="vllm", port=0: stack.enter_context(running(kind, folders["first"], port))


@pytest.fixture(scope="module")
def pair(start: Callable[[], RunningServer]) -> list[RunningServer]:
    """Two servers that live on."""
    return [start(), start()]


def fleet_of(*servers: RunningServer | str, **changes: object) -> Fleet:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    values = {"urls": urls, "backoff": 0.02, "attempts": 3, "request_time_limit": 10.0} | changes
    return Fleet(ServerConfig(**values), VOCABULARY)


def current(folders: dict[str, Path], name: str = "current") -> Weights:
    return Weights(f"{name}-1", folders[name])


@pytest.fixture(scope="module")
def undisturbed(pair: list[RunningServer], folders: dict[str, Path]) -> list[Answer]:
    """Answers of current weights without any fault."""
    fleet = fleet_of(pair[0])
    fleet.push(current(folders))
    return fleet.answer(QUESTIONS)


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    """A server that was given another prompt first may differ in the last bits."""
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    for answer, other in zip(answers, expected, strict=True):
        assert answer.finished == other.finished
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-6)


def largest_gap(answers: list[Answer], folder: Path) -> float:
    """Of log-probs to those of the weights of a folder."""
    model, gap = PlainLlama(folder), 0.0
    model.load_weights(_tensors(folder))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        for place, (token, told) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            logits = model.logits(torch.tensor([*question.prompt, *answer.tokens[:place]]))
            right = (logits / (question.temperature or 1.0)).log_softmax(dim=0)[token]
            gap = max(gap, abs(float(right) - told))
    return gap


# --------------------------------------------------------------------- what comes back


def test_answers_are_of_the_weights_that_were_pushed(
    undisturbed: list[Answer], folders: dict[str, Path]
) -> None:
    """In the order of the questions, each at its temperature and limit, the stop token counted once."""
    assert (
        largest_gap(undisturbed, folders["current"]) < 1e-5 < 0.1 < largest_gap(undisturbed, folders["first"])
    )
    for question, answer in zip(QUESTIONS, undisturbed, strict=True):
        assert answer.finished == (answer.tokens[-1] == STOP) and STOP not in answer.tokens[:-1]
        assert len(answer.tokens) == question.max_tokens or answer.finished
    assert 0 < sum(answer.finished for answer in undisturbed) < len(undisturbed), "both are to occur"


def test_seeds_part_the_samples_of_a_prompt(pair: list[RunningServer], folders: dict[str, Path]) -> None:
    """1000 first tokens have the frequencies of the distribution; the same seed gives the same response."""
    fleet = fleet_of(pair[0])
    fleet.push(current(folders))
    questions = [Question([5, 6], 1, 0.7, seed) for seed in range(1000)]
    drawn = torch.tensor([answer.tokens[0] for answer in fleet.answer(questions)])
    model = PlainLlama(folders["current"])
    model.load_weights(_tensors(folders["current"]))
    expected = 1000 * (model.logits(torch.tensor([5, 6])) / 0.7).softmax(dim=0)
    found = torch.bincount(drawn, minlength=ROWS)
    assert float(((found - expected) ** 2 / expected).sum()) < 50  # chi-square, 16 degrees: p < 1e-4
    again = fleet.answer([replace(questions[3], max_tokens=8)] * 2)
    assert again[0] == again[1]


def test_each_push_empties_the_prefix_cache(pair: list[RunningServer], folders: dict[str, Path]) -> None:
    """The server keeps what it computed for a prompt until it is told to forget."""
    fleet = fleet_of(pair[1])
    for name in ("current", "next", "current"):
        fleet.push(Weights(f"cache-{name}", folders[name]))
        assert largest_gap(fleet.answer(QUESTIONS), folders[name]) < 1e-5
    pair[1].plan(busy_cache=1)
    fleet.push(Weights("cache-busy", folders["next"]))
    assert largest_gap(fleet.answer(QUESTIONS), folders["next"]) < 1e-5


def test_requests_are_shared_out_and_bounded(
    pair: list[RunningServer], folders: dict[str, Path], undisturbed: list[Answer]
) -> None:
    before = [server.seen()["counts"]["completions"] for server in pair]
    fleet = fleet_of(*pair, requests_at_once=5)
    fleet.push(current(folders))
    assert_same(fleet.answer(QUESTIONS), undisturbed)
    asked = [
        server.seen()["counts"]["completions"] - count for server, count in zip(pair, before, strict=True)
    ]
    assert sum(asked) == len(QUESTIONS) and min(asked) > len(QUESTIONS) / 4


def test_no_more_in_flight_than_configured(
    start: Callable[[], RunningServer], folders: dict[str, Path]
) -> None:
    server = start()
    fleet = fleet_of(server, requests_at_once=4)
    fleet.push(current(folders))
    server.plan(slow=8)
    fleet.answer(QUESTIONS)
    assert server.seen()["counts"]["at once"] == 4


# --------------------------------------------------------------------- what must not come back


@pytest.mark.parametrize("kind", [*SPOILT, *(kind for kind in BROKEN if kind != "hangs"), "goes on"])
def test_garbage_is_asked_for_again(
    pair: list[RunningServer], folders: dict[str, Path], undisturbed: list[Answer], kind: str
) -> None:
    """Two broken answers: what comes in their place is what would have come."""
    fleet = fleet_of(pair[0])
    fleet.push(current(folders))
    pair[0].plan(**{kind.replace(" ", "_"): 2})
    assert_same(fleet.answer(QUESTIONS), undisturbed)


@pytest.mark.parametrize("kind", ["no json", "unknown id", "no logprobs", "other prompt"])
def test_garbage_without_end_ends_the_run(
    pair: list[RunningServer], folders: dict[str, Path], kind: str
) -> None:
    """After the tries that are allowed, no more and no less, with the reason."""
    fleet = fleet_of(pair[0])
    fleet.push(current(folders))
    before = pair[0].seen()["counts"]["completions"]
    pair[0].plan(**{kind.replace(" ", "_"): 3 * len(QUESTIONS)})
    with pytest.raises(RolloutError, match=f"{len(QUESTIONS)} responses have not come: {pair[0].url}: .*"):
        fleet.answer(QUESTIONS)
    assert pair[0].seen()["counts"]["completions"] - before == 3 * len(QUESTIONS)


def test_a_slow_answer_is_asked_for_again(
    pair: list[RunningServer], folders: dict[str, Path], undisturbed: list[Answer]
) -> None:
    fleet = fleet_of(pair[0], request_time_limit=2.0, requests_at_once=4)
    fleet.push(current(folders))
    pair[0].plan(hangs=1)
    assert_same(fleet.answer(QUESTIONS), undisturbed)


def test_the_whole_has_a_time_limit(pair: list[RunningServer], folders: dict[str, Path]) -> None:
    fleet = fleet_of(pair[0], time_limit=2.0)
    fleet.push(current(folders))
    pair[0].plan(hangs=2)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"\d+ of .* responses have not come within .*time_limit=2 s"):
        fleet.answer(QUESTIONS)
    assert time.monotonic() - started < 12


def test_log_probs_that_are_all_zero_are_refused(
    pair: list[RunningServer], folders: dict[str, Path], tmp_path: Path
) -> None:
    """A model that is certain of every token: as an engine that tells none."""
    certain = make_weights(tmp_path / "certain", 0)
    from safetensors.torch import load_file, save_file

    weights = load_file(certain / "model.safetensors")
    weights["lm_head.weight"] *= 1e4
    save_file(weights, certain / "model.safetensors")
    fleet = fleet_of(pair[0])
    fleet.push(Weights("certain", certain))
    with pytest.raises(RolloutError, match="all 0"):
        fleet.answer([replace(question, temperature=1.0, max_tokens=8) for question in QUESTIONS])


# --------------------------------------------------------------------- whose weights


def test_a_server_that_keeps_its_weights_is_not_used(
    pair: list[RunningServer], folders: dict[str, Path], undisturbed: list[Answer]
) -> None:
    """It acknowledges what it does not do: once, and again and again."""
    fleet = fleet_of(pair[0])
    pair[0].plan(stale=1)
    fleet.push(Weights("kept-1", folders["current"]))
    assert_same(fleet.answer(QUESTIONS), undisturbed)
    pair[0].plan(stale=3)
    with pytest.raises(RolloutError, match="was given weights kept-2 and says that it has kept-1"):
        fleet.push(Weights("kept-2", folders["next"]))


def test_beside_a_stale_server_the_other_goes_on(
    pair: list[RunningServer], folders: dict[str, Path], undisturbed: list[Answer], caplog
) -> None:
    fleet = fleet_of(*pair)
    pair[1].plan(stale=3)
    fleet.push(Weights("beside", folders["current"]))
    assert f"a server is left out: {pair[1].url}" in caplog.text
    before = pair[1].seen()["counts"]["completions"]
    pair[1].plan(stale=3)
    assert_same(fleet.answer(QUESTIONS), undisturbed)
    assert pair[1].seen()["counts"]["completions"] == before
    assert_same(fleet.answer(QUESTIONS), undisturbed)  # by now it has taken them
    assert pair[1].seen()["counts"]["completions"] > before


def test_answers_of_a_server_that_lost_the_weights_are_not_used(
    pair: list[RunningServer], folders: dict[str, Path], undisturbed: list[Answer], caplog
) -> None:
    """In the middle of a rollout somebody starts it anew: it answers readily, with its first weights."""
    fleet = fleet_of(pair[0], requests_at_once=2)
    fleet.push(Weights("lost", folders["current"]))
    pair[0].plan(forgets=1)
    assert_same(fleet.answer(QUESTIONS), undisturbed)
    assert "was started anew or has other weights" in caplog.text


def test_weights_of_another_model_are_not_taken(
    pair: list[RunningServer], folders: dict[str, Path], tmp_path: Path, undisturbed: list[Answer]
) -> None:
    """A weight is missing: the server says so and has no version, until it is given whole ones."""
    from safetensors.torch import load_file, save_file

    broken = make_weights(tmp_path / "broken", 1)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors")
    fleet = fleet_of(pair[0])
    with pytest.raises(RolloutError, match=r"got no value: model\.layers\.0\.mlp\.up_proj\.weight"):
        fleet.push(Weights("broken", broken))
    fleet.push(Weights("whole", folders["current"]))
    assert_same(fleet.answer(QUESTIONS), undisturbed)


# --------------------------------------------------------------------- servers that go and come


def test_a_killed_server_ends_the_run(start: Callable[[], RunningServer], folders: dict[str, Path]) -> None:
    server = start()
    fleet = fleet_of(server)
    fleet.push(current(folders))
    server.plan(dies=1)
    with pytest.raises(RolloutError, match="no server has the current weights: .*nobody listens there"):
        fleet.answer(QUESTIONS)


def test_beside_a_killed_server_the_other_goes_on(
    start: Callable[[], RunningServer], pair: list[RunningServer], folders, undisturbed, caplog
) -> None:
    server = start()
    fleet = fleet_of(pair[0], server, requests_at_once=4)
    fleet.push(current(folders))
    server.plan(dies=1)
    assert_same(fleet.answer(QUESTIONS), undisturbed)
    fleet.push(Weights("without", folders["next"]))
    assert f"a server is left out: {server.url}: nobody listens there" in caplog.text
    assert largest_gap(fleet.answer(QUESTIONS), folders["next"]) < 1e-5


@pytest.fixture
def restart_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """`restart_command(kind, *folder)`; what it has started ends with the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    pid_file = tmp_path / "pid"
    yield lambda kind, *folder: " ".join(
        [sys.executable, str(RESTART), kind, str(pid_file), *map(str, folder)]
    )
    if pid_file.exists():
        os.kill(int(pid_file.read_text()), 9)


def test_a_killed_server_is_started_anew_where_there_is_a_command(
    start: Callable[[], RunningServer], folders, undisturbed, restart_command, caplog
) -> None:
    """It comes up with its first weights, gets the current ones, and answers as if nothing had been."""
    server = start()
    fleet = fleet_of(server, restart_command=restart_command("vllm", folders["first"]), load_time_limit=60.0)
    fleet.push(current(folders))
    server.plan(dies=1)
    assert_same(fleet.answer(QUESTIONS), undisturbed)
    assert "a server is started anew" in caplog.text


def test_a_command_that_fails_is_told(folders: dict[str, Path]) -> None:
    fleet = fleet_of(f"http://127.0.0.1:{free_port()}", restart_command="false")
    with pytest.raises(RolloutError, match="restart_command ended with exit code 1"):
        fleet.push(current(folders))
    fleet = fleet_of(f"http://127.0.0.1:{free_port()}", restart_command="no_such_program")
    with pytest.raises(RolloutError, match="restart_command failed .*no_such_program"):
        fleet.push(current(folders))


def test_trtllm_serve_gets_weights_by_restart(folders: dict[str, Path], undisturbed, restart_command) -> None:
    """It is started by the command alone; each answer names the folder that it is of."""
    fleet = fleet_of(
        f"http://127.0.0.1:{free_port()}",
        engine="trtllm_serve",
        restart_command=restart_command("trtllm"),
        load_time_limit=60.0,
    )
    at_one = [index for index, question in enumerate(QUESTIONS) if question.temperature == 1]
    for name in ("current", "next"):
        fleet.push(Weights(name, folders[name]))
        answers = fleet.answer([QUESTIONS[index] for index in at_one])
        if name == "current":
            assert_same(answers, [undisturbed[index] for index in at_one])
        else:
            assert [answer.tokens for answer in answers] != [undisturbed[index].tokens for index in at_one]


def test_sleep_and_wake(start: Callable[[], RunningServer], folders: dict[str, Path]) -> None:
    """Weights have their place before they come, keys and values theirs after; sleeping it has neither."""
    server = start()
    fleet = fleet_of(server, sleep=True)
    for name in ("current", "next"):
        fleet.push(Weights(f"sleep-{name}", folders[name]))
        assert largest_gap(fleet.answer(QUESTIONS), folders[name]) < 1e-5
        fleet.sleep()
    order = ["wake weights", "load", "wake kv_cache", "reset", "name", "sleep"]
    assert server.seen()["order"] == order * 2
    server.kill()
    fleet.sleep()  # a dead server has no memory to give


# --------------------------------------------------------------------- before the run


def test_a_server_without_the_extension_is_a_mistake(
    start: Callable[..., RunningServer], pair: list[RunningServer]
) -> None:
    fleet_of(*pair).wait(check_vllm(64, ROWS, temperature=0.6))
    plain = start("trtllm")
    with pytest.raises(
        UserError, match=rf"rollout.server.urls={plain.url}: no server that takes .*status 404"
    ):
        fleet_of(plain).wait(check_vllm(64, ROWS, temperature=1.0))
    with pytest.raises(UserError, match="nobody listens there, and so for 0 s"):
        fleet_of(f"http://127.0.0.1:{free_port()}", load_time_limit=0.1).wait(
            check_vllm(64, ROWS, temperature=1.0)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 16}, "has a model with a vocabulary of 16, ours has 17"),
        ({"max_model_len": 63}, "takes 63 tokens, model.encoder_seq_length=64"),
        ({"logprobs_mode": "raw_logprobs"}, "tells log-probs at temperature 1, and rollout.temperature=0.6"),
        ({"data_parallel_size": 2}, "has 2 copies of the model"),
    ],
)
def test_a_server_that_does_not_fit_is_a_mistake(changes: dict[str, object], message: str) -> None:
    from tepo_nemo.rollout.server.engines import Instance

    found = {"vocabulary": 17, "max_model_len": 64, "logprobs_mode": "processed_logprobs"}
    found |= {"data_parallel_size": 1}
    check = check_vllm(64, ROWS, temperature=0.6)
    check("http://s", Instance("m", None, ("1",), found))
    with pytest.raises(UserError, match=message) as error:
        check("http://s", Instance("m", None, ("1",), found | changes))
    assert str(error.value).startswith("rollout.server.urls=http://s: the server ")


def test_a_handover_is_whole_or_absent(tmp_path: Path) -> None:
    """And what a killed run has left is removed."""
    folder = tmp_path / "handover"
    for name in ("weights_old_000001", ".weights_old_000002.7.partial"):
        make_weights(folder / name, 0)
    (folder / "mine.txt").write_text("")
    handover = Handover(folder)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]

    def fill(path: Path) -> None:
        assert not list(folder.glob("weights_*"))
        make_weights(path, 0)

    first = handover.write(fill)
    second = handover.write(lambda path: make_weights(path, 1))
    assert first.folder.is_dir() and first.version == first.folder.name != second.version
    with pytest.raises(RuntimeError):
        handover.write(lambda path: (_ for _ in ()).throw(RuntimeError()))
    handover.keep_only(second)
    assert sorted(path.name for path in folder.iterdir()) == ["mine.txt", second.version]
