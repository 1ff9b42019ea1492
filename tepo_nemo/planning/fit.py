"""The smallest layout whose memory is enough."""

from collections.abc import Iterator

from tepo_nemo.config.checks import check_config
from tepo_nemo.config.messages import shown
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.planning.memory import GIB, RESERVED
from tepo_nemo.planning.plan import Plan, make_plan

MOST_NODES = 64
FEWEST_ROWS = 64
"""Sequences that a copy of the model should generate at once: fewer read the weights for little."""


def fit(config: Config) -> tuple[Plan, list[str]]:
    """The plan of the smallest layout that fits, and the overrides that make it of the given configuration.

    Fewest nodes first, then fewest GPUs a copy of the model, fewest stages, and nothing recomputed; the nodes
    keep their GPUs.

    Raises:
        UserError: nothing fits on `MOST_NODES` nodes, with what the best layout would take; or the hardware
            says nothing of its memory.
    """
    if config.hardware.device_memory_gib is None:
        raise UserError(
            "hardware.device_memory_gib=null: there is nothing to fit into (set it, or choose a preset of "
            "hardware= that has it, such as h100x8)"
        )
    best: Plan | None = None
    for candidate in _candidates(config):
        plan = make_plan(candidate)
        fitting = plan.rows if plan.rows_that_fit is None else plan.rows_that_fit
        if fitting < min(plan.rows, FEWEST_ROWS) or plan.stages[plan.worst].update > plan.room:
            best = min(filter(None, (best, plan)), key=_shortage)
            continue
        if fitting < plan.rows:
            group = config.rollout.responses_per_prompt
            rows = fitting // group * group or fitting
            plan = make_plan(_with(candidate, rollout={"batch_size": rows}))
        return plan, _differences(config, plan.config)
    raise UserError(_nothing_fits(config, best))


def _candidates(config: Config) -> Iterator[Config]:
    """Layouts that pass all checks, in the order in which they are tried."""
    devices = config.hardware.devices_per_node
    nodes = 1
    while nodes <= MOST_NODES:
        sizes = [
            (tensor * pipeline, pipeline, tensor)
            for tensor in range(1, devices + 1)
            for pipeline in range(1, nodes * devices // tensor + 1)
        ]
        for _, pipeline, tensor in sorted(sizes):
            for granularity in (None, "full"):
                candidate = _with(
                    config,
                    hardware={"nodes": nodes},
                    model={
                        "tensor_model_parallel_size": tensor,
                        "pipeline_model_parallel_size": pipeline,
                        "sequence_parallel": tensor > 1,
                        "activations_checkpoint_granularity": granularity,
                    },
                )
                try:
                    check_config(candidate)
                except UserError:
                    break
                yield candidate
        nodes *= 2


def _with(config: Config, **sections: dict[str, object]) -> Config:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()}
    )


def _shortage(plan: Plan) -> int:
    """What a layout lacks for an update and for a rollout of `FEWEST_ROWS` sequences."""
    memory = plan.stages[plan.worst]
    rows = min(plan.rows, FEWEST_ROWS)
    fixed = memory.resident + memory.engine
    return max(memory.update, fixed + (memory.key_values + memory.sampling) * rows // plan.rows)


def _differences(given: Config, proposed: Config) -> list[str]:
    keys = [
        ("hardware", "nodes"),
        ("model", "tensor_model_parallel_size"),
        ("model", "pipeline_model_parallel_size"),
        ("model", "sequence_parallel"),
        ("model", "activations_checkpoint_granularity"),
        ("rollout", "batch_size"),
    ]
    values = [
        (f"{section}.{key}", *(getattr(getattr(config, section), key) for config in (given, proposed)))
        for section, key in keys
    ]
    return [f"{key}={shown(after)}" for key, before, after in values if before != after]


def _nothing_fits(config: Config, best: Plan | None) -> str:
    devices = config.hardware.devices_per_node
    start = (
        f"hardware.device_memory_gib={config.hardware.device_memory_gib:g}: no layout on up to {MOST_NODES} "
    )
    start += f"nodes of {devices} fits"
    if best is None:
        return f"{start}, since no layout passes the checks of the configuration (see tepo-nemo validate)"
    model = best.config.model
    return (
        f"{start}; the nearest, model.tensor_model_parallel_size={model.tensor_model_parallel_size} x "
        f"model.pipeline_model_parallel_size={model.pipeline_model_parallel_size} on "
        f"{best.config.hardware.nodes} nodes, takes {_shortage(best) / GIB:.1f} GiB of a GPU, and "
        f"{best.room / GIB:.1f} GiB are there beside the {RESERVED / GIB:g} GiB that are reserved (shorten "
        "model.encoder_seq_length or lower trainer.micro_batch_tokens)"
    )
