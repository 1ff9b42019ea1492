"""What every rollout backend is asked, and what it answered. Run in all ranks of a layout."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from support.fake_trtllm.faults import Faults
from support.synthetic import Found
from support.toy import FIRST_CHARACTER, build_objective
from support.toy import VOCABULARY as TOY_VOCABULARY

from tepo_nemo.config.schema import Config
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.rollout.sampling import prompt_key, stream_seed

# One more than the toy's, whose 17 two ranks cannot share.
VOCABULARY = TOY_VOCABULARY + 1
SAMPLES, LONGEST = 3, 10
PROMPTS = [
    torch.randint(
        FIRST_CHARACTER, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    for length in (9, 1, 5, 2, 8, 3)
]


def request_of(step: int) -> GenerationRequest:
    """The rollout of a step: groups of samples of each prompt."""
    rows = len(PROMPTS) * SAMPLES
    return GenerationRequest(
        prompt_tokens=[prompt for prompt in PROMPTS for _ in range(SAMPLES)],
        prompt_keys=[prompt_key(str(number)) for number in range(len(PROMPTS)) for _ in range(SAMPLES)],
        sample_indices=list(range(SAMPLES)) * len(PROMPTS),
        seed=stream_seed(1, "rollout/0", step),
        temperature=1.0,
        max_response_lengths=[LONGEST] * rows,
    )


SAMPLED = request_of(0)
LIMITS = [4, 9, 3, 1, 10, 1, 2, 1, 7, 2, 1, 2, 5, 10, 1, 3, 8, 6]
SHUFFLED = [7, 0, 11, 4, 2, 9, 17, 1, 10, 3, 14, 8, 6, 12, 5, 16, 13, 15]
REQUESTS = {
    "sampled": SAMPLED,
    "again": SAMPLED,
    "another step": request_of(1),
    "cool": replace(SAMPLED, temperature=0.6),
    "greedy": replace(SAMPLED, temperature=0.0),
    "one row": SAMPLED.rows(4, 5),
    "limits": replace(SAMPLED, max_response_lengths=LIMITS),
    "shuffled": SAMPLED.select(SHUFFLED),
    "none": SAMPLED.rows(0, 0),
}


@dataclass(frozen=True)
class Answers:
    """One rank's."""

    generations: dict[str, Generation]
    measured: dict[str, Found]  # the trainer's own statistics of its share of the rows, by request


def answer(
    rank: int,
    world_size: int,
    config: Config,
    requests: Mapping[str, GenerationRequest],
    faults: Faults | None = None,
) -> Answers:
    """Answer every request, then measure the answers."""
    host, policy = build_with_backend(config, faults)
    policy.prepare_for_inference()
    generations = {name: policy.infer(request) for name, request in requests.items()}
    policy.finish_inference()
    policy.prepare_for_training()
    measured = {
        name: measure(host, policy, request, generations[name])
        for name, request in requests.items()
        if len(request) and len(request) % policy.data_parallel_size == 0
    }
    return Answers(generations, measured)


def build_with_backend(config: Config, faults: Faults | None = None):
    """`build_policy` in a rank, with TensorRT-LLM faked where it is the backend.

    The fake comes after the host, which would take its mpi4py for the launcher of the ranks.
    """
    gc.freeze()
    from tepo_nemo.nemo.build import build_host
    from tepo_nemo.nemo.run import connect_policy

    host = build_host(config)
    if config.rollout.backend == "trtllm":
        from support.fake_trtllm import seat

        seat(faults)
    return host, connect_policy(host, config, build_objective(config.algorithm))


def measure(host, policy, request: GenerationRequest, generation: Generation) -> Found:
    """The trainer's log-probs and entropies of the answers, at the temperature of the request."""
    from support.generation import as_batch
    from support.updates import statistics_of

    own = host.actor.temperature
    host.actor.temperature = request.temperature or 1.0
    batch = as_batch(request, generation)
    found = statistics_of(policy, batch, micro_batch_size=len(request))
    host.actor.temperature = own
    return found
