"""Time of a step, from arithmetic and bandwidth. Estimates: nothing of it has been measured on a GPU."""

from dataclasses import dataclass

from tepo_nemo.config.schema import AlgorithmConfig, Config
from tepo_nemo.planning.architecture import Architecture
from tepo_nemo.planning.memory import (
    generates_here,
    generating_copies,
    generation_rows,
    has_engine,
    key_value_bytes,
    micro_batch_tokens,
    rollout_shape,
    weight_bytes,
)

MODEL_FLOPS_UTILIZATION = 0.4  # of the peak, in updates and in passes without a gradient
BANDWIDTH_UTILIZATION = 0.5  # of the peak, while decoding
LAYER_LAUNCH_S = 4e-4  # to start the kernels of a layer for one position, from Python
TYPICAL = 8  # a typical prompt or response is this part of the longest


@dataclass(frozen=True)
class Cost:
    """Of one step whose prompts and responses have these lengths, on average."""

    prompt_tokens: int
    response_tokens: int
    rollout_s: float
    statistics_s: float  # old, selection and reference passes
    update_s: float

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.statistics_s + self.update_s


@dataclass(frozen=True)
class Passes:
    """Passes over a step without a gradient, beside its updates, in units of the whole step."""

    old: float
    selection: int
    reference: int

    @property
    def total(self) -> float:
        return self.old + self.selection + self.reference


def passes_of(algorithm: AlgorithmConfig, updates: int) -> Passes:
    """What a shipped method declares; somebody else's is taken to need none but the old statistics."""
    options = algorithm.options
    shapes = algorithm.name in ("erpo", "ep_grpo")
    penalises = algorithm.name == "grpo" and options["kl_coefficient"] > 0
    selects = algorithm.name == "clip_cov" or (algorithm.name == "kl_cov" and options["kl_coefficient"] > 0)
    covariance = (
        algorithm.name == "tepo" and options["kl_mask"] == "tepo" and options["entropy_drop"] == "covariance"
    )
    return Passes(
        old=1 if shapes else (updates - 1) / updates,
        selection=int(selects or covariance),
        reference=int(shapes or penalises),
    )


def costs(config: Config, shape: Architecture) -> tuple[Cost, Cost]:
    """Of a step with typical lengths, and of one with the longest everywhere."""
    response = config.rollout.max_response_length
    prompt = shape.sequence - response
    return tuple(
        _cost(config, shape, max(1, prompt // part), max(1, response // part)) for part in (TYPICAL, 1)
    )


def _cost(config: Config, shape: Architecture, prompt: int, response: int) -> Cost:
    forward_s = _forward_s(config, shape, prompt, response)
    recomputed = config.model.activations_checkpoint_granularity == "full"
    passes = passes_of(config.algorithm, config.trainer.updates_per_rollout)
    return Cost(
        prompt_tokens=prompt,
        response_tokens=response,
        rollout_s=_rollout_s(config, shape, prompt, response),
        statistics_s=passes.total * forward_s,
        update_s=(4 if recomputed else 3) * forward_s,
    )


def _forward_s(config: Config, shape: Architecture, prompt: int, response: int) -> float:
    """One forward pass over a step, with what stages wait for each other."""
    length = prompt + response
    attention = 2 * shape.layers * shape.query_width * length**2  # causal: half of 4 h L^2
    output = 2 * shape.padded_vocabulary * shape.hidden * response
    operations = config.layout.responses_per_step * (
        2 * shape.matrix_parameters * length + attention + output
    )
    of_copy = config.layout.responses_per_update / config.layout.data
    micro_batches = max(1.0, of_copy * length / micro_batch_tokens(config, shape))
    waiting = 1 + (shape.pipeline - 1) / micro_batches
    peak = config.layout.world * config.hardware.device_tflops * 1e12
    return waiting * operations / (peak * MODEL_FLOPS_UTILIZATION)


def _rollout_s(config: Config, shape: Architecture, prompt: int, response: int) -> float:
    """Reads all weights for each position of a batch, up to the longest response, and all keys and values.

    Stages of a pipeline work one after the other. What servers take is not known.
    """
    if not generates_here(config):
        return 0.0
    bandwidth = config.hardware.device_bandwidth_gb_s * 1e9 * BANDWIDTH_UTILIZATION
    share = config.layout.responses_per_step / generating_copies(config)
    batches = -(-share // generation_rows(config))
    positions = batches * config.rollout.max_response_length
    weights = shape.parameters * (2 if has_engine(config) else weight_bytes(config)) / shape.tensor
    cached = rollout_shape(config, shape).pipeline * key_value_bytes(config, shape)
    reads = positions * weights + share * response * (prompt + response / 2) * cached
    return reads / bandwidth + positions * shape.layers * LAYER_LAUNCH_S
