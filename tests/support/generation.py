"""What the ranks of a layout generate. Asked for in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from support.synthetic import Found
from support.toy import STOP_TOKEN, VOCABULARY, build_objective, build_policy
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
    from nemo.collections.nlp.modules.common.text_generation_strategy import GPTModelTextGenerationStrategy

    host, policy = build_policy(config)
    policy.prepare_for_inference()
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()) + max_response_length, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    output = host.actor.generate(
        inputs=(tokens, lengths),
        length_params={"max_length": max_response_length, "min_length": 0},
        sampling_params={
            "use_greedy": True,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            "add_BOS": False,
            "all_probs": False,
            "compute_logprob": False,
            "end_strings": ["<eos>"],
        },
        strategy=GPTModelTextGenerationStrategy(host.actor),
    )
    policy.finish_inference()
    responses = []
    for prompt, ids in zip(prompts, output["token_ids"], strict=True):
        response = list(ids[len(prompt) : len(prompt) + max_response_length])
        end = response.index(STOP_TOKEN) + 1 if STOP_TOKEN in response else len(response)
        responses.append(response[:end])
    return responses


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
