"""The toy model and the losses once more: float64, one response at a time, from the papers' formulas."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from support.synthetic import Rows
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


TokenTerms = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(log-probs, entropies, old log-probs, old entropies, advantage) of a response -> loss terms, [|o|]."""


def token_mean_loss(
    weights: Mapping[str, Tensor], batch: TrainBatch, old: Rows, terms: TokenTerms, temperature: float = 1.0
) -> Tensor:
    """The mean of the terms over all trained tokens of the batch."""
    collected = []
    for row, length in enumerate(batch.response_lengths.tolist()):
        if length > 0:
            logp, entropy = response_statistics(weights, batch, row, temperature)
            of_old = old.logprobs[row, :length].double(), old.entropy[row, :length].double()
            collected.append(terms(logp, entropy, *of_old, float(batch.advantages[row])))
    return torch.cat(collected).mean()


def tepo_terms(*, clip: float = 0.2, kl_coefficient: float = 0.01, entropy_bonus: float = 0.0) -> TokenTerms:
    """Equation 4 in the PPO form, with k3 and an entropy bonus."""

    def terms(
        logp: Tensor, entropy: Tensor, old_logp: Tensor, old_entropy: Tensor, advantage: float
    ) -> Tensor:
        d = logp - old_logp
        ratio = d.mean().exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        masked = (entropy.detach() < old_entropy) & (advantage > 0)
        return -surrogate + kl_coefficient * ((-d).exp() + d - 1) * masked - entropy_bonus * entropy

    return terms


def grpo_terms(*, clip: float = 0.2) -> TokenTerms:
    """The PPO loss on token ratios; its dual clip of 10 is never reached here."""

    def terms(
        logp: Tensor, entropy: Tensor, old_logp: Tensor, old_entropy: Tensor, advantage: float
    ) -> Tensor:
        ratio = (logp - old_logp).exp()
        return torch.maximum(-ratio * advantage, -ratio.clamp(1 - clip, 1 + clip) * advantage)

    return terms
