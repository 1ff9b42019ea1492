"""From a published file to a prompt set, and a report of what became of every row."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from tepo_nemo.data.prompts import Prompt, fingerprint
from tepo_nemo.data.rows import read_rows
from tepo_nemo.data.selection import Selection, select
from tepo_nemo.data.sources import SOURCES, Source
from tepo_nemo.data.templates import TEMPLATES, ChatTemplate
from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import to_json, write_atomic


@dataclass(frozen=True)
class LengthLimit:
    """The longest prompt that is kept, the template included."""

    longest: int
    tokenizer: Path | str | None = None  # None counts characters

    @property
    def unit(self) -> str:
        return "characters" if self.tokenizer is None else "tokens"

    def measure(self) -> Callable[[str], int]:
        """Length of a prompt. Raises UserError where the tokenizer cannot be loaded."""
        if self.tokenizer is None:
            return len
        try:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(self.tokenizer))
        except (ImportError, OSError, ValueError) as error:
            raise UserError(f"--tokenizer={self.tokenizer}: cannot be loaded ({error})") from error
        return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def prepare(
    source_name: str,
    path: Path,
    output: Path,
    *,
    template_name: str,
    limit: LengthLimit | None = None,
    skip_malformed: bool = False,
) -> list[str]:
    """Write the prompt set `output` and, beside it, `output` with the ending `.report.json`.

    Args:
        source_name, template_name: of `SOURCES` and `TEMPLATES`.
        path: the published file.
        limit: drops longer prompts, and counts them.
        skip_malformed: leave rows that are no problems out and list them, instead of raising.

    Returns:
        What a person should know of the set, line by line.

    Raises:
        UserError: the input or an argument is wrong, or one of the files is there already; nothing is
            written then.
    """
    source, template = SOURCES[source_name], TEMPLATES[template_name]
    report_path = output.with_suffix(".report.json")
    for written in (output, report_path):
        if written.exists():
            raise UserError(f"{written}: is there already; choose another --output, or remove it")
    if not output.parent.is_dir():
        raise UserError(f"{output}: there is no folder {output.parent}; make it, or choose another --output")
    measure = limit.measure() if limit is not None else None
    selection = select(read_rows(path), source, path, skip_malformed=skip_malformed)
    prompts = _with_template(selection, template, path)
    too_long = [
        prompt.id for prompt in prompts if measure is not None and measure(prompt.prompt) > limit.longest
    ]
    left_out = set(too_long)
    prompts = [prompt for prompt in prompts if prompt.id not in left_out]
    if not prompts:
        raise UserError(f"--max-prompt-length={limit.longest}: leaves no prompt of {path}; set a larger one")
    report = _report(source, path, selection, prompts, template_name) | {
        "max_prompt_length": None if limit is None else f"{limit.longest} {limit.unit}",
        "too_long": too_long,
    }
    write_atomic(output, "".join(to_json(asdict(prompt)) + "\n" for prompt in prompts))
    write_atomic(report_path, to_json(report) + "\n")
    return _told(report, selection, output, report_path)


def _with_template(selection: Selection, template: ChatTemplate, path: Path) -> list[Prompt]:
    prompts = []
    for problem in selection.problems:
        try:
            text = template.render(problem.text)
        except ValueError as error:
            raise UserError(f"{path}: problem {problem.id!r} {error}; repair or remove it") from error
        prompts.append(Prompt(problem.id, text, problem.gold, problem.metadata))
    return prompts


def _report(
    source: Source, path: Path, selection: Selection, prompts: Sequence[Prompt], template_name: str
) -> dict:
    return {
        "source": source.name,
        "licence": source.licence,
        "input": str(path),
        "input_sha256": _file_digest(path),
        "template": template_name,
        "rows": selection.rows,
        "malformed": selection.malformed,
        "distinct": selection.distinct,
        "repeats": selection.repeats,
        "contradictory": selection.contradictory,
        "repeated": selection.repeated,
        "prompts": len(prompts),
        "published": source.published,
        "unbalanced_golds": [prompt.id for prompt in prompts if not _balanced(prompt.gold)],
        "fingerprint": fingerprint(prompts),
    }


def _told(report: dict, selection: Selection, output: Path, report_path: Path) -> list[str]:
    lines = [f"{report['rows']} rows, {report['distinct']} distinct problems ({report['repeats']} repeats)"]
    lines += [f"malformed, row {entry['row']}: {entry['reason']}" for entry in selection.malformed]
    for entry in selection.contradictory:
        golds = " and ".join(f"{each['gold']} (row {each['row']})" for each in entry["golds"])
        lines.append(f"dropped, contradictory golds: {entry['id']}: {golds}")
    lines += [f"dropped, occurs {entry['rows']} times: {entry['id']}" for entry in selection.repeated]
    if report["max_prompt_length"] is not None:
        lines.append(f"dropped, longer than {report['max_prompt_length']}: {len(report['too_long'])}")
    lines += [f"kept, its gold has unbalanced braces: {id}" for id in report["unbalanced_golds"]]
    if report["published"] not in (None, report["prompts"]):
        lines.append(f"the published set has {report['published']} problems, this one {report['prompts']}")
    return [
        *lines,
        f"{output}: {report['prompts']} prompts, fingerprint {report['fingerprint']}",
        f"{report_path}: what became of every row",
    ]


def _balanced(gold: str) -> bool:
    depth = 0
    for brace in re.findall(r"[{}]", re.sub(r"\\.", "", gold)):  # without \{ and \}
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        digest = sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
