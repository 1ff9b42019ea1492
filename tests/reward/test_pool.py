"""A grading pool beside rewards that hang, crash, eat memory, and workers that are killed from outside."""

import contextlib
import logging
import threading

import psutil
import pytest
from support import hostile_rewards

from tepo_nemo.errors import UserError
from tepo_nemo.reward.exact_answer import exact_answer
from tepo_nemo.reward.pool import PoolSettings, RewardPool, open_reward
from tepo_nemo.reward.result import RewardResult

OBEY = f"{hostile_rewards.__name__}.obey"


def settings(**changed):
    usual = {
        "workers": 3, "time_limit_s": 20.0, "memory_limit_gib": 2.0, "max_tasks": 1000,
        "response_tail": 100_000, "alarm_fraction": 1.0,
    }  # fmt: skip
    return PoolSettings(**(usual | changed))


@pytest.fixture
def make_pool():
    pools = []

    def make(reward=OBEY, **changed):
        pools.append(RewardPool(reward, settings(**changed)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def items(*responses, gold="1"):
    return [("", response, gold, {}) for response in responses]


def statuses(results):
    return [result.status for result in results]


def test_results_keep_the_order_of_the_items(make_pool):
    pool = make_pool()
    responses = [str(number) for number in range(40)]
    assert pool.grade(items(*responses, gold="7")) == [
        RewardResult(float(number == 7), "ok", str(number)) for number in range(40)
    ]
    assert pool.grade([]) == []


def test_what_hangs_or_crashes_fails_alone(make_pool, caplog):  # faults 30
    pool = make_pool(time_limit_s=1.5)
    hostile = ["sleep", "hang in C", "eat", "crash", "raise", "recurse"]
    responses = ["1", "2"] * 5
    for place, response in enumerate(hostile):
        responses.insert(2 * place, response)
    with caplog.at_level(logging.ERROR):
        results = pool.grade(items(*responses))
    expected = {
        "1": RewardResult(1.0, "ok", "1"), "2": RewardResult(0.0, "ok", "2"),
        "sleep": RewardResult(0.0, "timeout"), "hang in C": RewardResult(0.0, "timeout"),
        "eat": RewardResult(0.0, "error"), "crash": RewardResult(0.0, "error"),
        "raise": RewardResult(0.0, "error"), "recurse": RewardResult(0.0, "error"),
    }  # fmt: skip
    assert results == [expected[response] for response in responses]
    assert "the reward failed on 3 of 16 responses" in caplog.text and caplog.text.count("Traceback") == 1
    assert statuses(pool.grade(items("1", "2"))) == ["ok", "ok"], "the pool is as good as new"


def workers_of_this_process():
    """The processes that grade: children of the server that this process has started."""
    return [
        worker for child in psutil.Process().children() if is_server(child) for worker in child.children()
    ]


def is_server(process):
    """Whether it hands out processes; other tests have children of their own, some of them dead."""
    try:
        return "forkserver" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_a_worker_killed_at_any_moment_loses_no_verdict(make_pool):
    """Workers are shot while they start, wait, are handed a response, grade, and answer."""
    pool = make_pool(time_limit_s=5.0)
    done = threading.Event()
    shots = []

    def shoot():
        while not done.wait(0.02 + 0.0137 * (len(shots) % 7)):
            workers = workers_of_this_process()
            if workers and len(shots) < 15:
                shots.append(workers[len(shots) % len(workers)])
                with contextlib.suppress(psutil.NoSuchProcess):
                    shots[-1].kill()

    shooter = threading.Thread(target=shoot)
    shooter.start()
    try:
        results = pool.grade(items(*["1", "slow", "2"] * 20))
    finally:
        done.set()
        shooter.join()
    assert len(shots) >= 5
    assert [result.value for result in results] == [1.0, 0.0, 0.0] * 20
    assert set(statuses(results)) == {"ok"}


def test_dead_workers_are_replaced(make_pool):
    pool = make_pool(time_limit_s=5.0)
    pool.grade(items("1"))
    for worker in workers_of_this_process():
        worker.kill()
    assert [result.value for result in pool.grade(items("1", "2"))] == [1.0, 0.0]
    pool.close()
    assert [result.value for result in pool.grade(items("1", "2"))] == [1.0, 0.0]


def test_a_worker_is_replaced_after_its_tasks(make_pool):
    pool = make_pool(workers=1, max_tasks=5)
    pids = [result.extracted for result in pool.grade(items(*["pid"] * 16))]
    assert len(set(pids)) >= 16 / 5
    assert max(pids.count(pid) for pid in pids) <= 5


def test_a_worker_has_nothing_of_the_training_process(make_pool):
    """Neither torch nor the program that this process runs; and no worker before the first batch."""
    import torch  # noqa: F401

    pool = make_pool()
    assert not workers_of_this_process()
    loaded = pool.grade(items("modules"))[0].extracted.split()
    assert not {"torch", "numpy", "transformers", "nemo", "megatron", "pytest", "pydantic"} & set(loaded)
    assert "tepo_nemo" in loaded


def test_only_the_tail_of_a_response_is_graded(make_pool):
    pool = make_pool(f"{hostile_rewards.__name__}.length", response_tail=1000)
    responses = ["x" * 10**6, "y" * 999, "\ud800" * 1001]
    assert [result.value for result in pool.grade(items(*responses))] == [1000, 999, 1000]


def test_wrong_data_ends_the_run(make_pool):
    pool = make_pool()
    with pytest.raises(UserError, match="gold '5' is no gold"):
        pool.grade(items("1", "user", "2", gold="5"))
    with pytest.raises(UserError, match="the reward function returned 1.0; return a"):
        pool.grade(items("number"))
    assert statuses(pool.grade(items("1"))) == ["ok"]


@pytest.mark.parametrize(("alarm", "alarmed"), [(0.2, True), (0.25, False)])
def test_an_alarm_where_too_many_gradings_fail(make_pool, caplog, alarm, alarmed):
    pool = make_pool(alarm_fraction=alarm)
    with caplog.at_level(logging.ERROR):
        pool.grade(items("1", "2", "raise", "3"))
    message = f"failed on 1 of 4 responses (0 of them by time), more than data.grading.alarm_fraction={alarm}"
    assert (message in caplog.text) == alarmed


def test_a_reward_that_cannot_hang_gets_no_pool():
    assert open_reward("exact_answer", settings()) is exact_answer
    short_and_exact = [("exact_answer", 1.0, {}), ("short", 0.1, {"characters": 10})]
    assert not isinstance(open_reward(short_and_exact, settings()), RewardPool)
    assert isinstance(open_reward("math_answer", settings()), RewardPool)
    assert isinstance(open_reward(OBEY, settings()), RewardPool)
    assert isinstance(
        open_reward([("exact_answer", 1.0, {}), ("math_answer", 1.0, {})], settings()), RewardPool
    )


def test_mathematics_in_the_pool(make_pool):
    """The usual verdicts beside responses that nobody can grade."""  # faults 30
    pool = make_pool("math_answer", time_limit_s=15.0)
    ordinary = [
        (r"\boxed{\frac{2}{4}}", 1.0),
        (r"\boxed{0.5}", 1.0),
        (r"\boxed{\frac{1}{3}}", 0.0),
        ("0.5", 0.0),
    ]
    hostile = [
        r"\boxed{5^(5^(5^(5^5)))}", r"\boxed{" + "(" * 10**5, "\\boxed{" * 10**5, "\x00\ud800" * 500_000,
        r"\boxed{" + "1+" * 500_000 + "1}", "😀" * 10**6, r"\boxed{9**9**9**9}",
    ]  # fmt: skip
    responses = [response for response, _ in ordinary for _ in range(10)] + hostile
    results = pool.grade([("", response, r"\frac{1}{2}", {}) for response in responses])
    assert [result.value for result in results[:40]] == [value for _, value in ordinary for _ in range(10)]
    assert [result.value for result in results[40:]] == [0.0] * len(hostile)
