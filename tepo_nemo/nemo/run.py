"""One rank of a run: builds the host, hands it to the trainer, and writes down what came out."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from tepo_nemo.config.schema import Config
from tepo_nemo.evaluation.accuracy import EvaluationSet, evaluate
from tepo_nemo.evaluation.records import ProblemRecord, records_of
from tepo_nemo.evaluation.scores import average
from tepo_nemo.nemo.assembly import make_grader, make_recorder, make_trainer, prompts_at_once
from tepo_nemo.nemo.build import Host, build_host
from tepo_nemo.nemo.hangs import StackWatch, naming_hung_ranks
from tepo_nemo.nemo.history import RunHistory, make_saver
from tepo_nemo.nemo.policy import MegatronPolicy
from tepo_nemo.nemo.prompts import load_tokenized
from tepo_nemo.nemo.replay import open_replay
from tepo_nemo.nemo.rollout.choice import build_rollout
from tepo_nemo.objectives import registry
from tepo_nemo.objectives.contract import Objective
from tepo_nemo.rollout.batch import TokenizedPrompt
from tepo_nemo.rollout.correction import RolloutCorrection
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.rollout.scoring import Grader
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.stop import StopFlag, Stopped
from tepo_nemo.runs.summary import write_summary
from tepo_nemo.training.guard import BadUpdatesError
from tepo_nemo.training.recorder import RecordError, SilentRecorder
from tepo_nemo.training.stopping import StopCheck


def connect_policy(host: Host, config: Config, objective: Objective) -> MegatronPolicy:
    """The trainer's policy on a built host, with the rollout engine of the configuration.

    Where the objective needs a reference policy, it is the weights of this moment: those that the run starts
    from. Weights of a later step are to be loaded after this.
    """
    # An embedding may have rows that are no token of the tokenizer (Qwen2.5: 399 of them): no text is made of
    # such an id, so none may be drawn, and none counts.
    tokens = host.actor.tokenizer.vocab_size
    vocab_size = min(config.model.vocab_size or tokens, tokens)
    host.actor.connect(
        objective,
        build_rollout(host.actor, config, vocab_size),
        temperature=config.rollout.temperature,
        vocab_size=vocab_size,
        fused_output_layer=config.trainer.fused_output_layer,
        sequence_packing=config.trainer.sequence_packing,
        correction=make_correction(config),
    )
    policy = MegatronPolicy(host.actor, host.optimizer, gradient_clip=config.trainer.optimizer.gradient_clip)
    if objective.needs_reference:
        policy.keep_reference()
    return policy


def make_correction(config: Config) -> RolloutCorrection | None:
    """The correction of a configuration; None where it is off."""
    correction = RolloutCorrection(**config.rollout.correction.model_dump())
    return correction if correction.is_on else None


def load_training_set(config: Config, host: Host) -> list[TokenizedPrompt]:
    """Read, tokenize and check the prompts to train on."""
    return _load(config, host, config.data.train, "data.train")


def load_evaluation_sets(config: Config, host: Host) -> list[EvaluationSet]:
    """Read, tokenize and check every benchmark of the configuration."""
    sets = []
    for entry in config.data.evaluation:
        prompts = _load(config, host, entry.path, "data.evaluation")
        if entry.answer_form is not None:
            prompts = [_with_answer_form(prompt, entry.answer_form) for prompt in prompts]
        sets.append(EvaluationSet(entry.name, prompts, entry.samples, entry.temperature))
    return sets


def _load(config: Config, host: Host, path: Path, key: str) -> list[TokenizedPrompt]:
    return load_tokenized(
        path,
        host.actor.tokenizer,
        key=key,
        max_response_length=config.rollout.max_response_length,
        sequence_length=host.actor.cfg.encoder_seq_length,
    )


def _with_answer_form(prompt: TokenizedPrompt, answer_form: str) -> TokenizedPrompt:
    metadata = prompt.prompt.metadata | {"answer_form": answer_form}
    return prompt._replace(prompt=replace(prompt.prompt, metadata=metadata))


def evaluator(
    config: Config,
    policy: MegatronPolicy,
    grader: Grader,
    sets: list[EvaluationSet],
    check_stop: Callable[[], None],
) -> Callable[[], dict[str, float]]:
    """A function that gives avg@k of every evaluation set under the current weights.

    Between batches it raises Stopped where the run is to stop.
    """

    def infer(request: GenerationRequest) -> Generation:
        check_stop()
        return policy.infer(request)

    def run() -> dict[str, float]:
        policy.prepare_for_inference()
        scores = {entry.name: average(answered(entry)) for entry in sets}
        policy.finish_inference()
        return scores

    def answered(entry: EvaluationSet) -> list[ProblemRecord]:
        batches = evaluate(
            infer,
            grader,
            entry,
            seed=config.seed,
            max_response_length=config.rollout.max_response_length,
            prompts_at_once=prompts_at_once(config, entry.samples),
        )
        return [record for scored in batches for record in records_of(entry.name, scored)]

    return run


def train(config: Config, console: TextIO, stop: StopFlag) -> None:
    """Train as configured; called by every rank, after the CPU stand-ins where there is no GPU.

    Where the run directory has checkpoints, the run goes on from the newest one that can be trusted.

    Args:
        config: checked; its run directory is made already.
        console: where a person reads what the main rank says.
        stop: asks this process to stop.

    Raises:
        UserError: a mistake that only the tokenizer, the data or the checkpoint can show.
        Stopped: a rank was asked to stop; the state is saved.
        SaveError: the last checkpoint could not be written.
        BadUpdatesError: see `Trainer.fit`.
        RecordError: steps could not be written to the metrics file.
        HungRankError: another rank hangs or is gone.
        FloatingPointError: the weights give logits that are not finite.
    """
    started = time.monotonic()
    objective = registry.build(config.algorithm.name, config.algorithm.options)
    host = build_host(config)
    with naming_hung_ranks():
        _train(config, console, stop, objective, host, started)


def _train(
    config: Config, console: TextIO, stop: StopFlag, objective: Objective, host: Host, started: float
) -> None:
    prompts, sets = load_training_set(config, host), load_evaluation_sets(config, host)
    policy = connect_policy(host, config, objective)
    config, replay = open_replay(
        config, vocab_size=host.actor.true_vocab_size, sequence_length=host.actor.cfg.encoder_seq_length
    )
    watch = StackWatch(config.trainer.collective_timeout * 60)
    check_stop = StopCheck(stop, policy.max_over_ranks, watch.moved)
    grader = make_grader(config, policy, host.actor.tokenizer.ids_to_text)
    evaluate_all = evaluator(config, policy, grader, sets, check_stop)
    directory = RunDirectory(config.output)
    history = RunHistory(config, prompts, started)
    restored = history.go_on(host, directory)
    after = replay.first - 1 if replay is not None else 0
    if restored is not None:
        after = restored.state["step"]
    vocab_size = host.actor.true_vocab_size
    recorder = (
        make_recorder(config, directory, console, after, vocab_size) if policy.is_main else SilentRecorder()
    )
    saver = make_saver(config, host, directory, history, recorder.message)

    def go_back() -> dict[str, Any] | None:
        saver.settle()
        return history.go_back(host, directory)

    trainer = make_trainer(
        config, policy, objective, grader, prompts, evaluate_all, recorder, saver, check_stop, go_back, replay
    )
    if replay is not None and replay.note is not None:
        recorder.message(replay.note)
    if restored is not None:
        for line in restored.notes:
            recorder.message(line)
        trainer.load_state_dict(restored.state, restored.progress)
        saver.newest, saver.failed = restored.position, restored.state["failed_saves"]
    status = "failed"
    try:
        with naming_hung_ranks():  # before anything below waits for something else
            if restored is None and config.data.evaluate_before and sets:
                history.eval_before = evaluate_all()
                recorder.evaluation("before", history.eval_before)
            trainer.fit()
            saver.close()
            saver.export(trainer.step, directory.exported(trainer.step))
            if config.data.evaluate_after and sets:
                history.eval_after = evaluate_all()
                recorder.evaluation("after", history.eval_after)
        status = "done"
    except Stopped as stopped:
        saver.close()
        status = "stopped"
        recorder.message(
            f"stopped by {stopped} after step {trainer.step}, with the state saved; the same command goes on"
        )
        raise
    except BadUpdatesError:
        saver.close()  # a checkpoint of an earlier step may be on its way
        raise
    finally:
        watch.stop()
        grader.close()
        try:
            recorder.close()
        except RecordError:
            status = "failed"
            raise
        finally:
            if policy.is_main:
                write_summary(
                    directory.summary,
                    steps=trainer.step,
                    reward_first=recorder.rewards[0] if recorder.rewards else None,
                    reward_last=recorder.rewards[-1] if recorder.rewards else None,
                    eval_before=history.eval_before,
                    eval_after=history.eval_after,
                    wall_s=history.wall_s,
                    status=status,
                )
