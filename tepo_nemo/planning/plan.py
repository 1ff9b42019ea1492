"""What a configuration takes of its hardware."""

from dataclasses import dataclass

from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.planning.architecture import Architecture
from tepo_nemo.planning.cost import Cost, costs, passes_of
from tepo_nemo.planning.memory import (
    GIB,
    RESERVED,
    Memory,
    generates_here,
    generation_rows,
    key_value_bytes,
    memory_of,
    optimizer_bytes,
    sampling_bytes,
    weight_bytes,
)


@dataclass(frozen=True)
class Plan:
    """Layout, memory and time of a run."""

    config: Config
    shape: Architecture
    stages: tuple[Memory, ...]  # of a GPU of each pipeline stage
    cost: tuple[Cost, Cost] | None  # typical and longest; None where the hardware says nothing of its speed

    @property
    def worst(self) -> int:
        """The stage whose GPUs are fullest."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].peak)

    @property
    def room(self) -> int | None:
        """Bytes of a GPU that a run may take; None where the hardware does not say."""
        memory = self.config.hardware.device_memory_gib
        return None if memory is None else int(memory * GIB) - RESERVED

    @property
    def fits(self) -> bool:
        return self.room is None or self.stages[self.worst].peak <= self.room

    @property
    def rows_that_fit(self) -> int | None:
        """Sequences that a copy of the model could generate at once; None where a GPU's memory is not known,
        or is none of the rollout's."""
        if self.room is None or not generates_here(self.config):
            return None
        token = key_value_bytes(self.config, self.shape)
        return min(
            max(0, self.room - memory.resident - memory.engine)
            // (token * self.shape.sequence + sampling_bytes(self.config, self.shape, stage))
            for stage, memory in enumerate(self.stages)
        )

    @property
    def rows(self) -> int:
        """Sequences that a copy of the model does generate at once."""
        return generation_rows(self.config)

    @property
    def checkpoint_bytes(self) -> int:
        """Of a checkpoint that training goes on from: weights and optimizer state, each once."""
        return self.shape.parameters * (weight_bytes(self.config) + optimizer_bytes(self.config))

    @property
    def reference_bytes(self) -> int:
        """Of a frozen reference policy in the host memory of a node; 0 where the method needs none."""
        needed = passes_of(self.config.algorithm, self.config.trainer.updates_per_rollout).reference
        largest = max(self.shape.parameters_of_rank(stage) for stage in range(self.shape.pipeline))
        return needed * largest * weight_bytes(self.config) * self.config.hardware.devices_per_node


def make_plan(config: Config) -> Plan:
    """Raises UserError where the configuration leaves the architecture to a checkpoint."""
    shape = Architecture.of(config.model)
    hardware = config.hardware
    known = hardware.device_tflops is not None and hardware.device_bandwidth_gb_s is not None
    return Plan(
        config=config,
        shape=shape,
        stages=tuple(memory_of(config, shape, stage) for stage in range(shape.pipeline)),
        cost=costs(config, shape) if known else None,
    )


def check_fits(plan: Plan) -> None:
    """Raises UserError, with the numbers, where the memory of a GPU is too small."""
    if plan.fits:
        return
    memory, room = plan.stages[plan.worst], plan.room
    busy = "an update" if memory.update > room else "a rollout"
    needed = memory.update if memory.update > room else memory.rollout
    raise UserError(
        f"hardware.device_memory_gib={plan.config.hardware.device_memory_gib:g}: {busy} takes "
        f"{needed / GIB:.1f} GiB of a GPU, and {room / GIB:.1f} GiB are there beside the {RESERVED / GIB:g} "
        f"GiB that are reserved (weights, gradients and optimizer {memory.resident / GIB:.1f} GiB; "
        "tepo-nemo plan --fit looks for a layout that fits)"
    )
