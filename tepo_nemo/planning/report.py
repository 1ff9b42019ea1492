"""A plan in words: tables, what was assumed, and the line that starts the run."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tepo_nemo.planning import cost, memory
from tepo_nemo.planning.cost import Cost
from tepo_nemo.planning.memory import GIB, micro_batch_tokens
from tepo_nemo.planning.plan import Plan

_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations of an update",
    "output_layer": "output layer of an update",
    "engine": "weights of the rollout engine",
    "key_values": "keys and values of a rollout",
    "sampling": "drawing tokens in a rollout",
}

_ROLLOUTS = {
    "megatron": "the weights of training",
    "trtllm": "an engine in bf16 with all layers on each rank",
    "server": "servers, of which neither memory nor time is counted",
}


class Section(NamedTuple):
    """Rows of text under columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def sections(plan: Plan) -> Iterator[Section]:
    """The tables of a plan; memory and time are those of GPUs."""
    yield Section("Layout", ("", plan.config.model.name), list(_layout(plan)))
    yield Section("Parameters", ("", plan.config.model.name), list(_parameters(plan)))
    if plan.config.hardware.accelerator == "gpu":
        yield _memory(plan)
        if plan.cost is not None:
            yield _time(plan, plan.cost)


def assumptions(plan: Plan) -> Iterator[str]:
    """What the figures rest on, a line each."""
    if plan.config.hardware.accelerator == "cpu":
        return
    yield (
        f"memory: all sequences have {plan.shape.sequence} tokens; attention holds no scores (Transformer "
        f"Engine); {memory.RESERVED / GIB:g} GiB are reserved for CUDA, NCCL and fragmentation; rollouts use "
        + _ROLLOUTS[plan.config.rollout.backend]
    )
    if plan.room is None:
        yield "memory: hardware.device_memory_gib=null, so that nothing is compared with a GPU's"
    all_at_once = plan.config.rollout.batch_size is None and memory.generates_here(plan.config)
    if all_at_once and plan.config.data.evaluation:
        yield "memory: nothing is counted for benchmarks, which rollout.batch_size=null answers as a whole"
    if plan.cost is not None:
        yield (
            f"time: passes reach {cost.MODEL_FLOPS_UTILIZATION:.0%} of the arithmetic, decoding "
            f"{cost.BANDWIDTH_UTILIZATION:.0%} of the bandwidth and {cost.LAYER_LAUNCH_S * 1e3:g} ms a layer "
            "and position; a batch has one response of the longest length, and a step one generation batch; "
            "evaluation and checkpoints are not counted"
        )
    yield "nothing of this has been measured on a GPU"


def launch_lines(plan: Plan, arguments: Sequence[str], config_file: Path | None) -> Iterator[str]:
    """The commands that start the run, with the arguments that the plan was made of.

    A saved configuration starts with `tepo-nemo train` alone: the others take overrides.
    """
    words = " ".join(map(shlex.quote, arguments))
    saved = "" if config_file is None else f"--config {shlex.quote(str(config_file))} "
    hardware = plan.config.hardware
    if hardware.nodes == 1:
        yield f"tepo-nemo train {saved}{words}".rstrip()
    if hardware.accelerator == "gpu" and config_file is None:
        yield f"tepo-nemo submit {words}".rstrip()
        yield (
            f"srun --nodes={hardware.nodes} --ntasks-per-node={hardware.devices_per_node} "
            f"--gpus-per-node={hardware.devices_per_node} python examples/train_tepo.py {words}"
        ).rstrip()


def _layout(plan: Plan) -> Iterator[tuple[str, str]]:
    config, layout = plan.config, plan.config.layout
    yield (
        "ranks",
        (
            f"{layout.world} = {layout.tensor} tensor x {layout.pipeline} pipeline x {layout.data} data, on "
            f"{config.hardware.nodes} x {config.hardware.devices_per_node}"
        ),
    )
    yield (
        "step",
        (
            f"{layout.responses_per_step} responses = {config.rollout.prompts_per_step} prompts x "
            f"{config.rollout.responses_per_prompt}, at most "
            f"{layout.responses_per_step * config.rollout.max_response_length:,} tokens"
        ),
    )
    yield (
        "update",
        (
            f"{layout.responses_per_update} responses, {config.trainer.updates_per_rollout} a step; at most "
            f"{micro_batch_tokens(config, plan.shape):,} tokens a micro-batch"
        ),
    )
    yield "generation", _generation(plan)
    trainer = config.trainer
    yield (
        "checkpoints",
        (
            f"{_size(plan.checkpoint_bytes)} each, {trainer.keep_last + trainer.keep_best} kept, and "
            f"{_size(plan.shape.parameters * memory.weight_bytes(config))} of weights at the end"
        ),
    )
    yield "prompts", f"at most {plan.shape.sequence - config.rollout.max_response_length:,} tokens"


def _generation(plan: Plan) -> str:
    if not memory.generates_here(plan.config):
        return f"by {len(plan.config.rollout.server.urls)} servers"
    fitting = "" if plan.rows_that_fit is None else f" ({plan.rows_that_fit} would fit)"
    return f"{plan.rows} sequences at once a copy of the model{fitting}"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count > 0.1 * GIB else f"{count / 2**20:.1f} MiB"


def _parameters(plan: Plan) -> Iterator[tuple[str, str]]:
    shape = plan.shape
    yield "model", f"{shape.parameters:,}"
    for name, stage in _shown_stages(plan).items():
        yield f"a GPU{name}", f"{shape.parameters_of_rank(stage):,}"
    if shape.padded_vocabulary != shape.vocabulary:
        yield "vocabulary", f"{shape.vocabulary:,}, padded to {shape.padded_vocabulary:,}"


def _shown_stages(plan: Plan) -> dict[str, int]:
    """The stages that differ: the first, one in the middle, the last."""
    last = len(plan.stages) - 1
    if last == 0:
        return {"": 0}
    middle = {" of stage 2": 1} if last > 1 else {}
    return {" of stage 1": 0} | middle | {f" of stage {last + 1}": last}


def _memory(plan: Plan) -> Section:
    shown = _shown_stages(plan)
    stages = [plan.stages[stage] for stage in shown.values()]

    def row(name: str, values: Sequence[int]) -> list[str]:
        return [name, *(f"{value / GIB:.2f}" for value in values)]

    parts = [part for part in _PARTS if part != "engine" or memory.has_engine(plan.config)]
    rows = [row(_PARTS[part], [getattr(stage, part) for stage in stages]) for part in parts]
    rows.append(row("while updating", [stage.update for stage in stages]))
    rows.append(row("while generating", [stage.rollout for stage in stages]))
    if plan.room is not None:
        rows.append(row("there beside what is reserved", [plan.room] * len(stages)))
    if plan.reference_bytes:
        rows.append(row("reference policy, in host memory of a node", [plan.reference_bytes] * len(stages)))
    return Section("Memory of a GPU, GiB", ("", *(f"GPU{name}" for name in shown)), rows)


def _time(plan: Plan, of_step: tuple[Cost, Cost]) -> Section:
    steps, world = plan.config.trainer.max_steps, plan.config.layout.world

    def row(name: str, form: str, of: Sequence[float]) -> list[str]:
        return [name, *(form.format(value) for value in of)]

    rows = [
        row("prompt + response, tokens", "{}", [f"{c.prompt_tokens} + {c.response_tokens}" for c in of_step]),
        row("rollout, s", "{:.0f}", [each.rollout_s for each in of_step]),
        row("old statistics and other passes, s", "{:.0f}", [each.statistics_s for each in of_step]),
        row("updates, s", "{:.0f}", [each.update_s for each in of_step]),
        row("step, s", "{:.0f}", [each.step_s for each in of_step]),
        row(f"{steps} steps, h", "{:.1f}", [steps * each.step_s / 3600 for each in of_step]),
        row(f"{steps} steps, GPU-hours", "{:.0f}", [steps * each.step_s * world / 3600 for each in of_step]),
    ]
    return Section("Time", ("", "typical lengths", "longest lengths"), rows)
