"""Jobs on a real SLURM of one node: signals, requeues, chains and failures.

Most have a trainer without a model, and three train the toy. All jobs are submitted at once, since they wait
for most of their time; each test looks at its own.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster import Cluster, missing

from tepo_nemo import cli
from tepo_nemo.config.load import load_config
from tepo_nemo.launch.slurm import Job, plan_job, submit
from tepo_nemo.runs.metrics import read_metrics

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "SLURM is here"),
    pytest.mark.timeout(400),  # the first test waits until the toy has started on a busy machine
]

REPOSITORY = Path(__file__).parents[2]
STEPS = 40  # of the stand-in
TOY = [
    "experiment=toy_cpu", "model.restore_from_path=null", "model.num_layers=1", "model.hidden_size=32",
    "model.ffn_hidden_size=64", "rollout.prompts_per_step=8", "rollout.responses_per_prompt=4",
    "trainer.updates_per_rollout=2", "trainer.max_steps=10", "data.evaluation=[]",
    "data.reward=[{name:short,options:{characters:8}}]",  # random weights get no sum right
]  # fmt: skip


class Site:
    """A cluster, a folder to work in, and the jobs that were submitted from there."""

    def __init__(self, cluster: Cluster, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.cluster, self.folder, self._patch = cluster, folder, patch

    def job(self, name: str, *more: str, jobs: int = 1, seeds: str | None = None) -> Job:
        overrides = [*TOY, f"output=runs/{name}", "seed=7", *more]
        return plan_job(load_config(overrides), overrides, time=None, jobs=jobs, seeds=seeds)

    def submit(self, job: Job, behaviour: str = "trains", **environment: str) -> list[str]:
        """The ids of jobs that train runs/NAME, handed in as `tepo-nemo submit` does."""
        with self._patch.context() as patch:
            for key, value in {"STAND_IN": behaviour, **environment}.items():
                patch.setenv(key, value)
            return submit(job)

    def states(self, name: str) -> list[dict]:
        """What the two ranks have saved."""
        return [self.state(name, rank) for rank in (0, 1)]

    def state(self, name: str, rank: int) -> dict:
        return json.loads((self.folder / f"runs/{name}/rank_{rank}.json").read_text())

    def log(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "runs").glob(f"{name}-*.log")))

    def when_training(self, name: str, step: int = 5) -> None:
        """Wait until both ranks have made some steps."""
        files = [self.folder / f"runs/{name}/rank_{rank}.progress" for rank in (0, 1)]
        self._until(name, lambda: all(file.exists() and int(file.read_text() or 0) >= step for file in files))

    def when_training_the_toy(self, name: str, steps: int = 2) -> None:
        """Wait until it has made some steps."""
        metrics = self.folder / f"runs/{name}/metrics.jsonl"
        self._until(name, lambda: metrics.exists() and metrics.read_text().count("\n") >= steps)

    def _until(self, name: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 180
        while not reached():
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.05)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    assert cli.main(["prepare-data", "toy", "--output", str(folder / "toy")]) == 0
    # The code as the jobs see it, but with another trainer.
    code = folder / "code"
    (code / "examples").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("stand_in_trainer.py"), code / "examples" / "train_tepo.py")
    (code / "slurm").symlink_to(REPOSITORY / "slurm")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        patch.setenv("TEPO_CODE", str(code))
        patch.setenv("TEPO_PYTHON", sys.executable)
        try:
            cluster.start()
            yield Site(cluster, folder, patch)
        finally:
            cluster.stop()


@pytest.fixture(scope="module")
def jobs(site) -> dict[str, list[str]]:
    """The ids of the jobs of this module, by the name of their run; what happens to them has been done."""
    real = {"TEPO_CODE": str(REPOSITORY)}
    started = {name: site.submit(site.job(name), **real) for name in ("toy_whole", "toy_signalled")}
    started["toy_dead"] = site.submit(site.job("toy_dead", "trainer.max_steps=1000"), **real)
    limited, mistaken = site.job("limited"), site.job("mistaken")
    # A minute, and the signal 55 s before its end; SLURM looks twice a minute.
    limited = replace(limited, lines=((*limited.lines[0], "--time=1", "--signal=USR1@55"),))
    mistaken = replace(mistaken, script=mistaken.script.replace("seed=7", "seeed=7"))
    started |= {
        "limited": site.submit(limited, "waits"),
        "mistaken": site.submit(mistaken, **real),
        "whole": site.submit(site.job("whole")),
        "dead": site.submit(site.job("dead"), "dies"),
        "bounded": site.submit(site.job("bounded"), "endless", TEPO_MAX_REQUEUES="1"),
        "chained": site.submit(site.job("chained", jobs=3), "waits"),
        "broken_chain": site.submit(site.job("broken_chain", jobs=2), "dies"),
        "seeds": site.submit(site.job("seeds", seeds="3,5")),
    }
    for name in ("signalled", "terminated", "preempted", "cancelled"):
        started[name] = site.submit(site.job(name), "waits")
    for name, command in {
        "signalled": ("scancel", "--signal=USR1"),
        "terminated": ("scancel", "--signal=TERM"),  # what preemption with a time of grace sends
        "preempted": ("scontrol", "requeue"),
        "cancelled": ("scancel",),
        "chained": ("scancel", "--signal=USR1"),
    }.items():
        site.when_training(name)
        site.cluster.run(*command, started[name][0])
    site.when_training_the_toy("toy_signalled")
    site.cluster.run("scancel", "--signal=USR1", *started["toy_signalled"])
    site.when_training_the_toy("toy_dead")
    os.kill(pid_of(started["toy_dead"][0], rank=1), signal.SIGKILL)
    return started


def pid_of(job: str, rank: int) -> int:
    """The Python of a rank that runs on this machine."""
    wanted = {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().split("\0")
            variables = set((process / "environ").read_text(errors="replace").split("\0"))
        except OSError:
            continue  # it has ended
        if command[0] == sys.executable and command[1].endswith("train_tepo.py") and wanted <= variables:
            return int(process.name)
    raise AssertionError(f"job {job} has no rank {rank}")


def value_after(steps: int, seed: int = 7) -> int:
    """Of the stand-in, in closed form."""
    return seed * pow(31, steps, 1_000_003) % 1_000_003


def trained(site, name: str, starts: int) -> bool:
    """Both ranks have made every step once, over so many starts."""
    return site.states(name) == [{"step": STEPS, "value": value_after(STEPS), "starts": starts}] * 2


def test_a_job_trains(site, jobs):
    ended = site.cluster.wait(jobs["whole"][0])
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), site.log(
        "whole"
    )
    assert trained(site, "whole", starts=1)


@pytest.mark.parametrize("name", ["signalled", "terminated", "preempted", "limited"])
def test_a_job_that_is_stopped_goes_back_into_the_queue_and_on(site, jobs, name):
    ended = site.cluster.wait(jobs[name][0])
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), site.log(
        name
    )
    assert trained(site, name, starts=2)


def test_a_job_that_its_user_has_cancelled_does_not_come_back(site, jobs):
    ended = site.cluster.wait(jobs["cancelled"][0])
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    assert [state["starts"] for state in site.states("cancelled")] == [1, 1]  # and its state is saved


def test_a_mistake_is_told_once_and_not_tried_again(site, jobs):
    """The real trainer: both ranks find it."""
    ended = site.cluster.wait(jobs["mistaken"][0])
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    told = site.log("mistaken")
    # Once, unless a rank is seconds later than another on a busy machine.
    said = [line for line in told.splitlines() if "tepo-nemo: error" in line]
    assert said and len(said) <= 2
    assert all(line.endswith("seeed: unknown key (did you mean seed?)") for line in said)
    assert "Traceback" not in told


def test_a_dead_rank_ends_the_job_at_once(site, jobs):
    ended = site.cluster.wait(jobs["dead"][0])
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "137:0", "0"), site.log(
        "dead"
    )
    # Half a second of steps, and the end of the other rank; all of its steps take four seconds.
    assert site.state("dead", 0)["step"] < STEPS


def test_requeues_are_bounded(site, jobs):
    ended = site.cluster.wait(jobs["bounded"][0])
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "3:0", "1"), site.log(
        "bounded"
    )
    assert [state["starts"] for state in site.states("bounded")] == [2, 2]


def test_a_chain_goes_on_in_its_next_job(site, jobs):
    ended = [site.cluster.wait(number) for number in jobs["chained"]]
    assert [(job["JobState"], job["Restarts"]) for job in ended] == [("COMPLETED", "0")] * 3, site.log(
        "chained"
    )
    assert trained(site, "chained", starts=3)  # the third finds nothing left to do


def test_a_chain_that_fails_ends(site, jobs):
    first, second = (site.cluster.wait(number) for number in jobs["broken_chain"])
    assert (first["JobState"], second["JobState"]) == ("FAILED", "CANCELLED")


def test_an_array_trains_a_run_a_seed(site, jobs):
    [number] = jobs["seeds"]
    for seed in (3, 5):
        site.cluster.wait(f"{number}_{seed}")
        assert site.states(f"seeds/seed_{seed}")[0]["value"] == value_after(STEPS, seed)


def test_the_toy_is_stopped_requeued_and_ends_as_if_nothing_had_been(site, jobs):
    for name, restarts in (("toy_whole", "0"), ("toy_signalled", "1")):
        ended = site.cluster.wait(jobs[name][0])
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", restarts), site.log(name)
    whole, signalled = (
        read_metrics(site.folder / f"runs/{name}/metrics.jsonl") for name in ("toy_whole", "toy_signalled")
    )
    assert len(whole) == 10 and all(row["update/skipped"] == 0 for row in whole)
    assert [untimed(row) for row in whole] == [untimed(row) for row in signalled]


def untimed(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("time/")}


def test_a_dead_rank_of_the_toy_ends_its_job(site, jobs):
    """The other rank waits for it in a collective."""
    ended = site.cluster.wait(jobs["toy_dead"][0])
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), site.log("toy_dead")
    assert ended["ExitCode"] == "137:0"
    assert len(read_metrics(site.folder / "runs/toy_dead/metrics.jsonl")) < 1000


def test_mpi_and_torch_number_the_ranks_alike(site):
    """`srun --mpi=pmix`, which is what TensorRT-LLM needs; `tepo-nemo doctor` sees it too."""
    if "pmix" not in site.cluster.run("srun", "--mpi=list").split():
        pytest.skip("no libpmix (apt-get install libpmix-dev)")
    doctor = [sys.executable, "-m", "tepo_nemo.cli", "doctor", "--output", str(site.folder)]
    step = ["srun", "--mpi=pmix", "--ntasks=2", "--label", "bash", str(REPOSITORY / "slurm/rank.sh"), *doctor]
    environ = site.cluster.environment | {"PYTHONPATH": str(REPOSITORY)}
    answer = site.cluster.run(*step, env=environ, check=False)
    said = sorted(" ".join(line.split()) for line in answer.splitlines() if " ranks " in line)
    assert said == [f"{rank}: ranks ok torch rank {rank}, PMIX_RANK={rank}" for rank in (0, 1)]
