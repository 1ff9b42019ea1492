"""Next-token training on given answers: the warm start of a model that is to be right now and then.

The same policy, micro-batches and schedule as reinforcement learning, under the `next_token` objective.
"""

from collections.abc import Callable, Sequence

import torch

from tepo_nemo.data.order import PromptOrder
from tepo_nemo.objectives.contract import Mean
from tepo_nemo.rollout.batch import TokenizedPrompt
from tepo_nemo.training.balance import MicroBatchLimits
from tepo_nemo.training.batch import TrainBatch
from tepo_nemo.training.minibatch import build_mini_batches
from tepo_nemo.training.policy import Policy


def train_supervised(
    policy: Policy,
    prompts: Sequence[TokenizedPrompt],
    answers: Sequence[Sequence[int]],
    *,
    seed: int,
    steps: int,
    batch_size: int,
    micro_batch_size: int | None,
    micro_batch_tokens: int | None,
    sequence_packing: bool,
    learning_rate: float,
    report: Callable[[int, float], None],
) -> None:
    """Train on (prompt, answer) pairs for `steps` updates of `batch_size` pairs.

    Args:
        answers: token ids of each prompt's answer, the stop token included.
        report: called after each update with its number (from 1) and the mean loss in nats a token.
    """
    order = PromptOrder(len(prompts), seed)
    longest = max(len(answer) for answer in answers)
    for step in range(steps):
        rows = order.take(step * batch_size, batch_size)
        responses = torch.zeros(batch_size, longest, dtype=torch.int64)
        for row, index in enumerate(rows):
            responses[row, : len(answers[index])] = torch.tensor(answers[index])
        (mini_batch,) = build_mini_batches(
            TrainBatch(
                prompt_tokens=[prompts[index].tokens for index in rows],
                response_tokens=responses,
                response_lengths=torch.tensor([len(answers[index]) for index in rows]),
                groups=torch.arange(batch_size),
                advantages=torch.ones(batch_size),
            ),
            responses_per_update=batch_size,
            limits=MicroBatchLimits(
                micro_batch_size, micro_batch_tokens, policy.length_multiple, packed=sequence_packing
            ),
            attention_length=policy.attention_length,
            data_parallel_rank=policy.data_parallel_rank,
            data_parallel_size=policy.data_parallel_size,
            max_response_length=longest,
        )
        policy.prepare_for_training()
        policy.prepare_for_training_step()
        loss, metrics = policy.get_loss_and_metrics(mini_batch, forward_only=False)
        policy.finish_training_step()
        if not policy.clip_gradient(loss, metrics).not_finite:
            policy.optimizer_step(learning_rate)
        policy.finish_training()
        share = (
            {}
            if loss is None
            else {"loss": Mean(loss, torch.full_like(loss, 1.0 / policy.data_parallel_size))}
        )
        report(step + 1, policy.reduce_metrics(share)["loss"])
