"""One rank of an evaluation: answers the benchmarks with a checkpoint, and reports what came out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TextIO

from tepo_nemo.config.schema import Config
from tepo_nemo.data.overlap import find_overlap
from tepo_nemo.data.prompts import load_prompts
from tepo_nemo.evaluation.accuracy import EvaluationSet, evaluate
from tepo_nemo.evaluation.records import ProblemRecord, RecordFile, records_of
from tepo_nemo.evaluation.report import Report, make_report, render
from tepo_nemo.evaluation.scores import average
from tepo_nemo.nemo.assembly import make_grader, prompts_at_once
from tepo_nemo.nemo.build import build_host
from tepo_nemo.nemo.policy import MegatronPolicy
from tepo_nemo.nemo.run import connect_policy, load_evaluation_sets
from tepo_nemo.objectives import registry
from tepo_nemo.rollout.scoring import Grader
from tepo_nemo.runs.evaluation import EvaluationDirectory
from tepo_nemo.runs.files import to_json, write_atomic

RESPONSES_AT_ONCE = 512  # where the configuration sets no limit: what an interruption may lose


def evaluate_checkpoint(config: Config, console: TextIO) -> None:
    """Evaluate as configured, problems that are done already left out; called by every rank.

    Args:
        config: checked; its evaluation directory is made already.
        console: where a person reads what the main rank says.

    Raises:
        UserError: a mistake that only the tokenizer, the data or the checkpoint can show.
    """
    host = build_host(config)
    sets = load_evaluation_sets(config, host)
    policy = connect_policy(host, config, registry.build("next_token", {}))  # nothing is trained
    grader = make_grader(config, policy, host.actor.tokenizer.ids_to_text)
    directory = EvaluationDirectory(config.output)
    file = RecordFile(directory.problems) if policy.is_main else None
    done = {(record.benchmark, record.id) for record in file.read()} if file is not None else None
    done = policy.broadcast_from_main(done)
    policy.prepare_for_inference()
    try:
        for entry in sets:
            left = [prompt for prompt in entry.prompts if (entry.name, prompt.prompt.id) not in done]
            if left:
                _answer(
                    config, policy, grader, replace(entry, prompts=left), len(entry.prompts), file, console
                )
    finally:
        grader.close()
    policy.finish_inference()
    if file is not None:
        _report(config, directory, list(file.read()), console)


def _answer(
    config: Config,
    policy: MegatronPolicy,
    grader: Grader,
    entry: EvaluationSet,
    problems: int,
    file: RecordFile | None,
    console: TextIO,
) -> None:
    """Answer the problems of a set that are left, and write each batch down as soon as it is graded."""
    answered = problems - len(entry.prompts)
    batches = evaluate(
        policy.infer,
        grader,
        entry,
        seed=config.seed,
        max_response_length=config.rollout.max_response_length,
        prompts_at_once=prompts_at_once(config, entry.samples) or max(1, RESPONSES_AT_ONCE // entry.samples),
    )
    for scored in batches:
        if file is not None:
            records = records_of(entry.name, scored)
            file.append(records)
            answered += len(records)
            console.write(f"{entry.name}  {answered}/{problems} problems  avg {average(records):.3f}\n")
            console.flush()


def _report(
    config: Config, directory: EvaluationDirectory, records: Sequence[ProblemRecord], console: TextIO
) -> None:
    report = report_of(config, records)
    write_atomic(directory.report, to_json(report.to_json()) + "\n")
    table = render(report, config.model.name)
    write_atomic(directory.table, table)
    console.write(f"\n{table}\n{directory.path}\n")
    console.flush()


def report_of(config: Config, records: Sequence[ProblemRecord]) -> Report:
    """The report of all problems, with the overlap of each benchmark and the training set."""
    train = load_prompts(config.data.train)
    names = [entry.name for entry in config.data.evaluation]
    return make_report(
        {name: [record for record in records if record.benchmark == name] for name in names},
        {entry.name: entry.k for entry in config.data.evaluation},
        {
            entry.name: {overlap.id for overlap in find_overlap(load_prompts(entry.path), train)}
            for entry in config.data.evaluation
        },
    )
