"""What the ranks of a layout generate. Asked for in one call."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from support.synthetic import Found
from support.toy import VOCABULARY, build_objective, build_policy
from support.updates import Case, Taken, statistics_of, take_case

from tepo_nemo.config.schema import Config
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.training.batch import TrainBatch


@dataclass(frozen=True)
class Generated:
    """One rank's answer."""

    responses: dict[tuple[str, int | None], Generation]  # by name of the request and batch size
    statistics: dict[
        str, Found
    ]  # of the responses to each request, forward only; log-probs at its temperature
    after: Taken | None = None  # a loss that was taken after generating


def generate_all(
    rank: int,
    world_size: int,
    config: Config,
    requests: Mapping[str, GenerationRequest],
    batch_sizes: Sequence[int | None],
    case: Case | None = None,
) -> Generated:
    """Answer every request at every batch size, then measure what came out, then take a loss."""
    from tepo_nemo.nemo.run import connect_policy

    host, policy = build_policy(config)
    objective = build_objective(config.algorithm)
    responses, statistics = {}, {}
    for size in batch_sizes:
        rollout = config.rollout.model_copy(update={"batch_size": size})
        policy = connect_policy(host, config.model_copy(update={"rollout": rollout}), objective)
        policy.prepare_for_inference()
        for name, request in requests.items():
            responses[name, size] = policy.infer(request)
        policy.finish_inference()
    policy.prepare_for_training()
    for name, request in requests.items():
        size, rest = divmod(len(request), policy.data_parallel_size)
        if rest == 0:
            host.actor.temperature = request.temperature or 1.0
            batch = as_batch(request, responses[name, batch_sizes[0]])
            statistics[name] = statistics_of(policy, batch, micro_batch_size=size)
    host.actor.temperature = config.rollout.temperature
    return Generated(responses, statistics, None if case is None else take_case(host, policy, case))


def as_batch(request: GenerationRequest, generation: Generation) -> TrainBatch:
    """A rollout to measure."""
    return TrainBatch(
        prompt_tokens=request.prompt_tokens,
        response_tokens=generation.tokens,
        response_lengths=generation.lengths,
        groups=torch.arange(len(request)),
        advantages=torch.zeros(len(request)),
    )


def generate_with_nemo(
    rank: int, world_size: int, config: Config, prompts: Sequence[Sequence[int]], max_response_length: int
) -> list[list[int]]:
    """NeMo's own greedy generation: the responses, up to the first stop token."""
    from tepo_nemo.bench.generation import generate_with_nemo as generate

    host, policy = build_policy(config)
    policy.prepare_for_inference()
    request = GenerationRequest(
        prompt_tokens=prompts,
        prompt_keys=[0] * len(prompts),
        sample_indices=[0] * len(prompts),
        seed=0,
        temperature=0.0,
        max_response_lengths=[max_response_length] * len(prompts),
    )
    responses = generate(host.actor, request)
    policy.finish_inference()
    return responses


def compare_with_nemo(rank: int, world_size: int, config: Config, request: GenerationRequest):
    """One timed pair of greedy answers: a `GenerationSpeed`."""
    from tepo_nemo.bench.generation import compare_generation

    host, _ = build_policy(config)
    return compare_generation(host.actor, request.prompt_tokens, request.max_response_lengths, pairs=1)


@dataclass(frozen=True)
class Fed:
    """A generation, and rows and positions of each forward pass that it took."""

    generation: Generation
    passes: list[tuple[int, int]]


def count_passes(
    rank: int, world_size: int, config: Config, requests: Mapping[str, GenerationRequest]
) -> dict[str, Fed]:
    """Answer the requests with a stop token that cannot be drawn."""
    from tepo_nemo.nemo.rollout.megatron import MegatronRollout

    host, policy = build_policy(config)
    host.actor.rollout = MegatronRollout(
        host.actor, stop_token=VOCABULARY, vocab_size=VOCABULARY, batch_size=None
    )
    policy.prepare_for_inference()
    answers = {name: _fed(host, policy, request) for name, request in requests.items()}
    policy.finish_inference()
    return answers


def look_seldom(
    rank: int, world_size: int, config: Config, request: GenerationRequest, intervals: Sequence[int]
) -> dict[int, Fed]:
    """Answer a request looking for stop tokens at various intervals."""
    host, policy = build_policy(config)
    policy.prepare_for_inference()
    answers = {}
    for interval in intervals:
        host.actor.rollout.stop_check_interval = interval
        answers[interval] = _fed(host, policy, request)
    policy.finish_inference()
    return answers


def _fed(host, policy, request: GenerationRequest) -> Fed:
    passes = []

    def note(module, args, kwargs):
        passes.append(tuple(kwargs["input_ids"].shape))

    hook = host.actor.model.register_forward_pre_hook(note, with_kwargs=True)
    generation = policy.infer(request)
    hook.remove()
    return Fed(generation, passes)


@dataclass(frozen=True)
class CacheUse:
    """Buffers that Megatron allocated for keys and values."""

    allocated: int
    alive_before_release: int
    alive_after_release: int


def follow_cache(
    rank: int, world_size: int, config: Config, requests: Sequence[GenerationRequest]
) -> CacheUse:
    """Answer the requests one after the other."""
    from megatron.core.transformer.attention import Attention

    host, policy = build_policy(config)
    buffers = []
    allocate = Attention._allocate_memory

    def watch(*args, **kwargs):
        buffer = allocate(*args, **kwargs)
        buffers.append(weakref.ref(buffer))
        return buffer

    def alive() -> int:
        return sum(buffer() is not None for buffer in buffers)

    with patch.object(Attention, "_allocate_memory", watch):
        policy.prepare_for_inference()
        for request in requests:
            policy.infer(request)
        before = alive()
        policy.finish_inference()
    return CacheUse(len(buffers), before, alive())


def generate_with_loud_padding(
    rank: int, world_size: int, config: Config, requests: Mapping[str, GenerationRequest]
) -> Generated:
    """The same from a model whose padding columns have by far the largest logits."""
    host, policy = build_policy(config)
    with torch.no_grad():
        for chunk in host.actor.get_model_module_list():
            if hasattr(chunk, "output_layer"):
                _shout(chunk.output_layer.weight)
    policy.prepare_for_inference()
    responses = {(name, None): policy.infer(request) for name, request in requests.items()}
    policy.finish_inference()
    policy.prepare_for_training()
    statistics = {
        name: statistics_of(policy, as_batch(request, responses[name, None]), micro_batch_size=len(request))
        for name, request in requests.items()
    }
    return Generated(responses, statistics)


def _shout(output_weight: torch.nn.Parameter) -> None:
    """Give the padding rows of an output layer [V_local, h] large weights of either sign."""
    from megatron.core import parallel_state

    first = parallel_state.get_tensor_model_parallel_rank() * len(output_weight)
    rows = torch.arange(first, first + len(output_weight))
    loud = 100.0 * (1 - 2 * (torch.arange(output_weight.shape[1]) % 2))
    output_weight[(rows >= VOCABULARY) & (rows % 2 == 0)] = loud
    output_weight[(rows >= VOCABULARY) & (rows % 2 == 1)] = -loud
