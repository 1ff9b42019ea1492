"""The SLURM job of a configuration: a script of slurm/ with what the configuration decides filled in."""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.config.presets import shipped_folder
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError

_DIRECTIVE = re.compile(r"#SBATCH --([\w-]+)(?:=(.*))?")
_BLOCK = re.compile(r"# \[submit\n.*?# submit\]\n", re.S)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True)
class Job:
    """Jobs that train one configuration, one after the other."""

    script: str  # for the standard input of sbatch; the same for all jobs of the chain
    log: Path  # with SLURM's patterns, such as %j
    lines: tuple[
        tuple[str, ...], ...
    ]  # sbatch and its options, a job each; {previous} is the id of the last one


def plan_job(
    config: Config, overrides: Sequence[str], *, time: str | None, jobs: int, seeds: str | None
) -> Job:
    """The jobs that train `config`.

    Args:
        config: made of `overrides`, which the ranks get.
        time: limit of one job, as SLURM writes it; None for that of the template or, with trainer.max_time,
            for what leaves room to save after it.
        jobs: length of the chain; one job puts itself back into the queue instead.
        seeds: an array, as SLURM writes it; each seed trains in its own folder of `output`.

    Raises:
        UserError: the time is none, or leaves no room for the signal that comes before it ends; or the array
            is none.
    """
    template = (_folder() / _template_of(config)).read_text(encoding="utf-8")
    if seeds is not None and not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", seeds):
        raise UserError(f"--array {seeds}: is no list of seeds (write them as 1,2,3 or 1-8%4)")
    lead_s = int(_directives(template)["signal"].rpartition("@")[2])
    if time is not None:
        _check_time(time, lead_s)
    elif config.trainer.max_seconds is not None:
        time = _to_slurm(config.trainer.max_seconds + 2 * lead_s)  # so that the signal comes after it
    log = config.output.with_name(f"{config.output.name}-{'%j' if seeds is None else '%A_%a'}.log")
    directives = _directives_of(config, log) | _given(time=time, array=seeds)
    return Job(_fill_in(template, directives, overrides), log, tuple(_lines(jobs, seeds is not None)))


def submit(job: Job) -> list[str]:
    """Hand the jobs to sbatch, in the environment of slurm/env.sh; returns their ids.

    Raises UserError where sbatch is not there or refuses one.
    """
    job.log.parent.mkdir(parents=True, exist_ok=True)  # SLURM makes no folder for a log, and ends the job
    ids: list[str] = []
    for line in job.lines:
        ids.append(_sbatch([part.format(previous=ids[-1] if ids else "") for part in line], job.script))
    return ids


def shown(job: Job) -> str:
    """The script, and what would be done with it, as a script still."""
    lines = [" ".join(line).format(previous="PREVIOUS_ID") for line in job.lines]
    setting = shlex.join(("source", str(_folder() / "env.sh")))
    return job.script + "".join(f"# {line}\n" for line in ("would be submitted by:", setting, *lines))


def _folder() -> Path:
    return shipped_folder("slurm")


def _template_of(config: Config) -> str:
    return "tepo.sbatch" if config.hardware.accelerator == "gpu" else "tepo_cpu.sbatch"


def _directives_of(config: Config, log: Path) -> dict[str, str]:
    hardware = config.hardware
    directives = {
        "job-name": "tepo-" + re.sub(r"[^\w.-]", "_", config.output.name),
        "nodes": str(hardware.nodes),
        "ntasks-per-node": str(hardware.devices_per_node),
        "output": f'"{str(log.parent).replace("%", "%%")}/{log.name}"',
    }
    if hardware.accelerator == "gpu":
        directives["gpus-per-node"] = str(hardware.devices_per_node)
    return directives


def _given(**options: str | None) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}


def _directives(script: str) -> dict[str, str]:
    """What the `#SBATCH` lines of a script say."""
    found = map(_DIRECTIVE.fullmatch, script.splitlines())
    return {match[1]: match[2] or "" for match in found if match}


def _fill_in(template: str, directives: Mapping[str, str], overrides: Sequence[str]) -> str:
    """The template with other directives, and with its settings and arguments in it."""
    head, marker, body = template.partition("\n#SBATCH")
    lines = (marker + body).splitlines()[1:]
    body = "\n".join(line for line in lines if not _DIRECTIVE.fullmatch(line)) + "\n"
    wanted = _directives(template) | directives
    written = "\n".join(
        f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in wanted.items()
    )
    settings = (
        f"TEPO_SLURM={shlex.quote(str(_folder()))}\n"
        "TEPO_ON_STOP=${TEPO_ON_STOP:-requeue}\n"
        f"set -- {shlex.join(overrides)}\n"
    )
    return _BLOCK.sub(lambda _: settings, f"{head}\n{written}\n{body}")


def _lines(jobs: int, array: bool) -> list[tuple[str, ...]]:
    if jobs == 1:
        return [("sbatch", "--parsable")]
    # Each task of an array waits for its own predecessor. What has failed would fail again.
    after = "aftercorr" if array else "afterok"
    wait = (f"--dependency={after}:{{previous}}", "--kill-on-invalid-dep=yes")
    return [
        (
            "sbatch",
            "--parsable",
            f"--export=ALL,TEPO_ON_STOP={'next' if number < jobs - 1 else 'end'}",
            *(wait if number else ()),
        )
        for number in range(jobs)
    ]


def _check_time(time: str, lead_s: int) -> None:
    match = _TIME.fullmatch(time)
    if match is None:
        raise UserError(f"--time {time}: is no time (write it as HH:MM:SS or D-HH:MM:SS)")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None:  # D-HH:MM:SS, from the left
        seconds = ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:  # HH:MM:SS
        seconds = (first * 60 + second) * 60 + third
    else:  # MM:SS, or MM alone
        seconds = first * 60 + (second or 0)
    if seconds <= 2 * lead_s:
        raise UserError(
            f"--time {time}: {seconds} s are too short, since the run is asked to save {lead_s} s before its "
            f"end (give more than {2 * lead_s} s)"
        )


def _to_slurm(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"


def _sbatch(line: Sequence[str], script: str) -> str:
    """The id of the job."""
    program = 'set -e; source "$TEPO_SLURM/env.sh"; exec "$@"'
    try:
        ended = subprocess.run(
            ["bash", "-c", f"TEPO_SLURM={shlex.quote(str(_folder()))}; {program}", "submit", *line],
            input=script,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as error:
        raise UserError("bash: not found (submit from a login node of the cluster)") from error
    if ended.returncode == 127:
        raise UserError("sbatch: not found (submit from a login node of the cluster, or look at --dry-run)")
    if ended.returncode:
        raise UserError(f"sbatch refuses the job: {ended.stderr.strip()}")
    return ended.stdout.strip().split(";")[0]  # with clusters, their name follows
