"""`tepo-nemo submit` with a stand-in for sbatch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.toy_files import make_toy_files

from tepo_nemo import cli

REPOSITORY = Path(__file__).parents[2]
TOY = ["experiment=toy_cpu", "output=runs/toy"]
GPU = ["hardware.accelerator=gpu", "hardware.nodes=4", "hardware.devices_per_node=8", "output=runs/gpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, stand_ins):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{stand_ins.folder}:{os.environ['PATH']}")
    make_toy_files(tmp_path)
    return tmp_path


def script(capsys, *arguments: str) -> str:
    """What a dry run prints."""
    assert cli.main(["submit", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def directives(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.M))


def test_the_configuration_decides_nodes_and_tasks(capsys, folder):
    said = directives(script(capsys, *GPU, "--time", "2-00:00:00"))
    assert said == {
        "job-name": "tepo-gpu",
        "nodes": "4",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "exclusive": "",
        "mem": "0",
        "time": "2-00:00:00",
        "signal": "USR1@900",
        "requeue": "",
        "open-mode": "append",
        "output": f'"{folder}/runs/gpu-%j.log"',
    }


def test_cpus_need_no_gpus(capsys):
    said = directives(script(capsys, *TOY))
    assert (said["nodes"], said["ntasks-per-node"], said["time"]) == ("1", "2", "01:00:00")
    assert not {"gpus-per-node", "exclusive"} & said.keys()


def test_directives_stand_before_the_first_command(capsys):
    """sbatch reads no further."""
    lines = script(capsys, *GPU).splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(number < first_command for number, line in enumerate(lines) if line.startswith("#SBATCH"))


def test_a_dry_run_leaves_nothing_and_calls_nothing(capsys, folder, stand_ins):
    script(capsys, *TOY)
    assert not (folder / "runs").exists()
    assert stand_ins.calls("sbatch") == []


def test_the_script_starts_what_the_template_starts(capsys, stand_ins):
    """One template: the same ranks as by hand, with the arguments in the script."""
    overrides = ["experiment=toy_cpu", "output='runs/a $HOME b'"]
    written = script(capsys, *overrides)
    assert stand_ins.run(written).returncode == 0
    [(rendered, environ)] = stand_ins.calls("srun")
    assert stand_ins.run(REPOSITORY / "slurm" / "tepo_cpu.sbatch", *overrides).returncode == 0
    [(by_hand, its_environ)] = stand_ins.calls("srun")
    assert rendered == by_hand
    assert rendered[-2:] == overrides
    assert {name for name in environ if environ[name] != its_environ.get(name)} <= {"_"}


def test_a_job_is_submitted_with_the_settings_of_the_site(capsys, folder, stand_ins, monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    assert cli.main(["submit", *TOY]) == 0
    assert capsys.readouterr().out == f"submitted 4711, log {folder}/runs/toy-%j.log\n"
    [(arguments, environ)] = stand_ins.calls("sbatch")
    assert arguments == ["--parsable"]
    assert environ["SBATCH_ACCOUNT"] == "mine"
    assert environ["TEPO_MAX_REQUEUES"] == "20"  # of env.sh
    assert (folder / "runs").is_dir()  # SLURM makes no folder for the log


def test_the_script_goes_to_sbatch(capsys, folder, stand_ins):
    (stand_ins.folder / "sbatch").write_text(f"#!/bin/sh\ncat > {folder}/received; echo '8;cluster'\n")
    assert cli.main(["submit", *TOY]) == 0
    assert capsys.readouterr().out.startswith("submitted 8,")
    assert (folder / "received").read_text() == script(capsys, *TOY).partition("# would be")[0]


def test_a_chain(stand_ins):
    assert cli.main(["submit", *TOY, "--jobs", "3"]) == 0
    wait = ["--dependency=afterok:4711", "--kill-on-invalid-dep=yes"]
    assert [arguments for arguments, _ in stand_ins.calls("sbatch")] == [
        ["--parsable", "--export=ALL,TEPO_ON_STOP=next"],
        ["--parsable", "--export=ALL,TEPO_ON_STOP=next", *wait],
        ["--parsable", "--export=ALL,TEPO_ON_STOP=end", *wait],
    ]


def test_an_array_over_seeds(capsys, folder, stand_ins):
    said = directives(script(capsys, *TOY, "--array", "1,2,5"))
    assert said["array"] == "1,2,5"
    assert said["output"] == f'"{folder}/runs/toy-%A_%a.log"'
    assert cli.main(["submit", *TOY, "--array", "1-4%2", "--jobs", "2"]) == 0
    assert "--dependency=aftercorr:4711" in stand_ins.calls("sbatch")[1][0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--time", "soon"], "--time soon: is no time (write it as HH:MM:SS or D-HH:MM:SS)"),
        (["--time", "2"], "--time 2: 120 s are too short"),
        (["--time", "1:30"], "--time 1:30: 90 s are too short"),
        (["--time", "0:02:00"], "--time 0:02:00: 120 s are too short"),
        (["--array", "a,b"], "--array a,b: is no list of seeds"),
        (["--jobs", "0"], "argument --jobs: '0' is no whole number from 1 on"),
        (["seeed=1"], "seeed: unknown key (did you mean seed?)"),
        (["data.reward=exact_answr"], "data.reward=exact_answr is unknown"),
        (["data.train=none.jsonl"], "data.train="),
    ],
)
def test_mistakes_are_found_before_the_queue(capsys, stand_ins, arguments, line):
    assert cli.main(["submit", *TOY, *arguments]) == 2
    answer = capsys.readouterr()
    assert answer.out == "" and answer.err.count("\n") == 1
    assert answer.err.startswith(f"tepo-nemo: error: {line}")
    assert stand_ins.calls("sbatch") == []


@pytest.mark.parametrize(
    ("changed", "mounts", "key"),
    [
        ([], "", ""),  # the folder of the call
        ([], "{folder}:/elsewhere", "output={folder}/runs/gpu"),
        ([], "{folder}/runs:{folder}/runs", "data.train={folder}/toy/train.jsonl"),
        ([], "/data:/data,{folder}:{folder}:rw", ""),
        ([], "/data,{folder}", ""),
        (["output=/scratch/run"], "", "output=/scratch/run"),
        (["output=/scratch/run"], "{folder}:{folder},/scratch:/scratch", ""),
        (["output=/scratch/run"], "{folder}:{folder},/scratch:/scr", "output=/scratch/run"),
        (["output=/scratch2/run"], "{folder}:{folder},/scratch:/scratch", "output=/scratch2/run"),
    ],
)
def test_what_the_container_does_not_see_is_refused(capsys, folder, monkeypatch, changed, mounts, key):
    monkeypatch.setenv("TEPO_MOUNTS", mounts.format(folder=folder))
    code = cli.main(["submit", "--dry-run", *GPU, *changed])
    said = capsys.readouterr().err
    assert code == (2 if key else 0)
    assert said.startswith(f"tepo-nemo: error: {key.format(folder=folder)}: is in no folder" if key else "")
    monkeypatch.setenv("TEPO_IMAGE", "")
    assert cli.main(["submit", "--dry-run", *GPU, *changed]) == 0


@pytest.mark.parametrize("time", ["3", "2:01", "0:02:01", "1-0", "0-00:03"])
def test_times_as_slurm_writes_them(capsys, time):
    assert directives(script(capsys, *TOY, "--time", time))["time"] == time


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (TOY, "00:12:00"),  # 10 minutes, and twice the minute before the end in which SLURM asks
        (GPU, "00:40:00"),  # twice 15 minutes
    ],
)
def test_a_run_with_a_time_limit_of_its_own_gets_room_to_save(capsys, config, said):
    assert directives(script(capsys, *config, "trainer.max_time='0:10:00'"))["time"] == said


def test_sbatch_refuses(capsys, stand_ins):
    (stand_ins.folder / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n"
    )
    assert cli.main(["submit", *TOY]) == 2
    assert capsys.readouterr().err == (
        "tepo-nemo: error: sbatch refuses the job: sbatch: error: invalid partition\n"
    )


def test_no_sbatch(capsys, stand_ins, monkeypatch, tmp_path):
    (tmp_path / "bash_alone").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bash_alone" / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path / "bash_alone"))
    assert cli.main(["submit", *TOY]) == 2
    assert capsys.readouterr().err == (
        "tepo-nemo: error: sbatch: not found (submit from a login node of the cluster, or look at "
        "--dry-run)\n"
    )


def test_a_login_node_needs_no_torch(folder):
    heavy = ["torch", "nemo", "nemo_aligner", "megatron", "lightning", "transformers"]
    code = (
        f"import sys\nfor name in {heavy!r}: sys.modules[name] = None\n"
        f"from tepo_nemo.cli import main\nsys.exit(main(['submit', '--dry-run', *{TOY!r}]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
