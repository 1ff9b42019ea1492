"""The toy model and TEPO once more: float64, one response at a time, from the papers' formulas and global weights."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from support.synthetic import RESPONSES_PER_UPDATE, Rows
from torch import Tensor

from tepo_nemo.training.batch import TrainBatch

HEADS, GROUPS, NORM_EPSILON, ROTARY_BASE = 4, 2, 1e-5, 10_000


def logits_of(weights: Mapping[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """[L, V] of a Llama-shaped model; differentiable in the weights (float64)."""
    embedding = weights["embedding.word_embeddings.weight"]
    hidden = embedding[torch.tensor(tokens)]
    for layer in range(2):
        own = {name.removeprefix(f"decoder.layers.{layer}."): value for name, value in weights.items()}
        attended = _attention(
            _rms_norm(hidden, own["input_layernorm.weight"]), own["self_attention.linear_qkv.weight"]
        )
        hidden = hidden + attended @ own["self_attention.linear_proj.weight"].T
        gate, up = (
            _rms_norm(hidden, own["pre_mlp_layernorm.weight"]) @ own["mlp.linear_fc1.weight"].T
        ).chunk(2, -1)
        hidden = hidden + (F.silu(gate) * up) @ own["mlp.linear_fc2.weight"].T
    output = weights.get("output_layer.weight", embedding)
    return _rms_norm(hidden, weights["decoder.final_layernorm.weight"]) @ output.T


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + NORM_EPSILON).sqrt() * weight


def _attention(x: Tensor, qkv_weight: Tensor) -> Tensor:
    """Causal attention with grouped queries; Megatron stores q, q, ..., k, v group by group."""
    length, width = len(x), x.shape[1] // HEADS
    qkv = (x @ qkv_weight.T).view(length, GROUPS, HEADS // GROUPS + 2, width)
    outputs = []
    for head in range(HEADS):
        group, member = divmod(head, HEADS // GROUPS)
        query, key, value = _rotate(qkv[:, group, member]), _rotate(qkv[:, group, -2]), qkv[:, group, -1]
        scores = query @ key.T / math.sqrt(width)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
    return torch.cat(outputs, dim=-1)


def _rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer) in its half-split layout: pairs (j, j + width / 2)."""
    length, width = x.shape
    frequency = ROTARY_BASE ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angle = torch.arange(length, dtype=x.dtype)[:, None] * frequency
    first, second = x.chunk(2, -1)
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )


def response_statistics(
    weights: Mapping[str, Tensor], batch: TrainBatch, row: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy, [|o|] each, of the trained tokens of a response."""
    length, prompt = int(batch.response_lengths[row]), list(batch.prompt_tokens[row])
    response = batch.response_tokens[row, :length]
    logits = logits_of(weights, prompt + response.tolist())[len(prompt) - 1 : len(prompt) - 1 + length]
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, response[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def tepo_loss(
    weights: Mapping[str, Tensor],
    batch: TrainBatch,
    old: Rows,
    *,
    clip: float = 0.2,
    kl_coefficient: float = 0.01,
    entropy_bonus: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """Equation 4 with k3, in the PPO form, over the first mini-batch; minimised."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(min(len(batch), RESPONSES_PER_UPDATE)):
        length = int(batch.response_lengths[row])
        if length == 0:
            continue
        logp, entropy = response_statistics(weights, batch, row, temperature)
        log_ratio = logp - old.logprobs[row, :length]
        advantage = float(batch.advantages[row])
        ratio = log_ratio.mean().exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        reinforced = (entropy.detach() < old.entropy[row, :length]) & (advantage > 0)
        kl = (-log_ratio).exp() + log_ratio - 1
        total = (
            total + length * surrogate - kl_coefficient * kl[reinforced].sum() + entropy_bonus * entropy.sum()
        )
        count += length
    return -total / count
