"""Tokens per second of the embedded engine and of NeMo's own generation, on one model, prompts and limits."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from nemo.collections.nlp.modules.common.text_generation_strategy import GPTModelTextGenerationStrategy

from tepo_nemo.bench.timing import Ratio, ratio, time_pairs, time_run
from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel
from tepo_nemo.rollout.protocol import GenerationRequest

Responses = list[list[int]]


class GenerationSpeed(NamedTuple):
    """What a comparison found; the same on every rank."""

    tokens: int  # of all responses, those past a limit or a stop token not counted
    tokens_per_second: float
    nemo_tokens_per_second: float
    times_as_fast: Ratio  # as NeMo
    equal: bool  # the two gave the same tokens


def compare_generation(
    actor: MegatronGPTTEPOActorModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    pairs: int,
) -> GenerationSpeed:
    """Answer prompts greedily with either, in turns; called by every rank.

    NeMo knows one limit for all: it generates up to the longest, and what is past a row's own limit counts
    for nothing. It stops early where every response has stopped, as it does by itself.

    Args:
        prompts: token ids, one entry a response.
        limits: of each response, in tokens.
    """
    request = GenerationRequest(
        prompt_tokens=prompts,
        prompt_keys=[0] * len(prompts),  # greedy responses need no noise
        sample_indices=[0] * len(prompts),
        seed=0,
        temperature=0.0,
        max_response_lengths=limits,
    )
    ours = _Answer(lambda: generate(actor, request))
    nemo = _Answer(lambda: generate_with_nemo(actor, request))
    actor.prepare_for_inference()
    for answer in (ours, nemo):
        time_run(answer)  # a warm-up
    times = time_pairs(lambda: time_run(ours), lambda: time_run(nemo), pairs)
    actor.finish_inference()
    tokens = sum(len(response) for response in ours.responses)
    seconds, nemo_seconds = (median([pair[side].total for pair in times]) for side in (0, 1))
    return GenerationSpeed(
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        nemo_tokens_per_second=tokens / nemo_seconds,
        times_as_fast=ratio([(first.total, second.total) for first, second in times]),
        equal=ours.responses == nemo.responses,
    )


class _Answer:
    """A `Run` that can be run again and keeps what it made."""

    def __init__(self, generate: Callable[[], Responses]) -> None:
        self._generate = generate
        self.responses: Responses = []

    def __call__(self) -> "_Answer":
        return self

    def forward(self) -> None:
        self.responses = self._generate()

    def backward(self) -> None:
        """Generation has none."""


def generate(actor: MegatronGPTTEPOActorModel, request: GenerationRequest) -> Responses:
    """The responses of the embedded engine."""
    generation = actor.infer(request)
    return [
        row[:length]
        for row, length in zip(generation.tokens.tolist(), generation.lengths.tolist(), strict=True)
    ]


def generate_with_nemo(actor: MegatronGPTTEPOActorModel, request: GenerationRequest) -> Responses:
    """The greedy responses of `MegatronGPTModel.generate`, up to the first stop token or the limit."""
    stop_token, longest = actor.tokenizer.eos_id, max(request.max_response_lengths)
    lengths = torch.tensor([len(prompt) for prompt in request.prompt_tokens])
    tokens = torch.full((len(request), int(lengths.max()) + longest), stop_token)
    for row, prompt in enumerate(request.prompt_tokens):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    device = torch.cuda.current_device()
    output = actor.generate(
        inputs=(tokens.to(device), lengths.to(device)),
        length_params={"max_length": longest, "min_length": 0},
        sampling_params={
            "use_greedy": True,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            "add_BOS": False,
            "all_probs": False,
            "compute_logprob": False,
            "end_strings": ["<|endoftext|>"],  # NeMo's name for the tokenizer's stop token, whatever its text
        },
        strategy=GPTModelTextGenerationStrategy(actor),
    )
    responses = []
    for prompt, ids, limit in zip(
        request.prompt_tokens, output["token_ids"], request.max_response_lengths, strict=True
    ):
        response = list(ids[len(prompt) : len(prompt) + limit])
        end = response.index(stop_token) + 1 if stop_token in response else limit
        responses.append(response[:end])
    return responses
