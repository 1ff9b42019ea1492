"""How ranks form copies of the model, and how the responses of a step make updates."""

from dataclasses import dataclass

from tepo_nemo.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Ranks and responses of one training step; every division is exact.

    Which copy of the model trains on which responses of an update is a matter of their lengths.
    """

    world: int  # ranks = nodes x devices a node
    tensor: int  # ranks that share each layer
    pipeline: int  # stages that share the layers
    data: int  # copies of the model
    responses_per_step: int  # sampled by one rollout: prompts x responses a prompt
    responses_per_update: int  # one mini-batch, over all copies of the model

    def __str__(self) -> str:
        return "\n".join(
            (
                f"ranks      {self.world} = {self.tensor} tensor x {self.pipeline} pipeline x {self.data} "
                "data",
                f"step       {self.responses_per_step} responses, "
                f"{self.responses_per_step // self.responses_per_update} updates of "
                f"{self.responses_per_update}",
            )
        )


def plan_layout(
    *,
    nodes: int,
    devices_per_node: int,
    tensor: int,
    pipeline: int,
    prompts_per_step: int,
    responses_per_prompt: int,
    updates_per_rollout: int,
) -> Layout:
    """Divide ranks and responses; all arguments are at least 1.

    Raises UserError, with the numbers and the nearest values that would do, where a division leaves a rest.
    """
    world = nodes * devices_per_node
    if world % (tensor * pipeline):
        raise UserError(
            f"hardware.nodes={nodes} x hardware.devices_per_node={devices_per_node}: the number of ranks, "
            f"{world}, is no "
            f"multiple of the {tensor * pipeline} that hold a copy of the model "
            f"(model.tensor_model_parallel_size={tensor} x model.pipeline_model_parallel_size={pipeline}); "
            f"make the ranks a multiple of {tensor * pipeline}"
        )
    data = world // (tensor * pipeline)
    if prompts_per_step % updates_per_rollout:
        raise UserError(
            f"trainer.updates_per_rollout={updates_per_rollout}: must divide rollout.prompts_per_step="
            f"{prompts_per_step}, so that an update trains on whole groups; "
            f"{_nearest_divisors(prompts_per_step, updates_per_rollout)}"
        )
    step = prompts_per_step * responses_per_prompt
    update = step // updates_per_rollout
    if update < data:
        raise UserError(
            f"trainer.updates_per_rollout={updates_per_rollout}: leaves {update} responses an update "
            f"({step} / {updates_per_rollout}) for {data} copies of the model ({world} ranks / "
            f"{tensor * pipeline}); make rollout.prompts_per_step={prompts_per_step} x "
            f"rollout.responses_per_prompt={responses_per_prompt} at least {updates_per_rollout * data}"
        )
    return Layout(
        world=world,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        responses_per_step=step,
        responses_per_update=update,
    )


def _nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` on either side of one that is none."""
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    near = [number for number in divisors if number < wanted][-1:] + [
        number for number in divisors if number > wanted
    ][:1]
    return "set it to " + " or ".join(str(number) for number in near)
