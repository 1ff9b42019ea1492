"""Llama in a page of plain PyTorch, under the names of Hugging Face: what servers of tests generate with."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


class PlainLlama(nn.Module):
    """A Llama without scaling of its positions, as `config.json` describes it; its weights come later."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"] and not config["tie_word_embeddings"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.width, self.eps, self.base = config["head_dim"], config["rms_norm_eps"], config["rope_theta"]
        self.layers, self.vocabulary = config["num_hidden_layers"], config["vocab_size"]
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        queries, keys = self.heads * self.width, self.groups * self.width
        shapes = {"model.embed_tokens": (self.vocabulary, hidden), "model.norm": (hidden,)}
        for number in range(self.layers):
            layer = f"model.layers.{number}."
            shapes |= {layer + "input_layernorm": (hidden,), layer + "post_attention_layernorm": (hidden,)}
            shapes |= {layer + f"self_attn.{name}_proj": (keys, hidden) for name in "kv"}
            shapes |= {
                layer + "self_attn.q_proj": (queries, hidden),
                layer + "self_attn.o_proj": (hidden, queries),
            }
            shapes |= {layer + f"mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
            shapes |= {layer + "mlp.down_proj": (hidden, ffn)}
        shapes["lm_head"] = (self.vocabulary, hidden)
        self.shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
        for name, shape in self.shapes.items():  # a name with dots is no attribute
            self.register_parameter(
                name.replace(".", "/"), nn.Parameter(torch.zeros(shape), requires_grad=False)
            )

        self._by_name = dict(self.named_parameters())

    def named_parameters(self, *args, **kwargs):
        return ((name.replace("/", "."), value) for name, value in super().named_parameters(*args, **kwargs))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As vLLM's models do: take what comes, refuse what is unknown, and tell the names."""
        own = dict(self.named_parameters())
        names = set()
        for name, value in weights:
            own[name].copy_(value)
            names.add(name)
        return names

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the next token, [V], after `tokens` [L]."""
        w = self._by_name
        length = len(tokens)
        angles = torch.arange(length)[:, None] * self.base ** (-torch.arange(0, self.width, 2) / self.width)
        turn = torch.cat([angles, angles], dim=1)

        def rotated(x: Tensor) -> Tensor:  # [heads, L, width]
            first, second = x.chunk(2, dim=-1)
            return x * turn.cos() + torch.cat([-second, first], dim=-1) * turn.sin()

        x = w["model.embed_tokens.weight"][tokens]
        for number in range(self.layers):
            layer = f"model.layers.{number}."
            y = rms_norm(x, x.shape[-1:], w[layer + "input_layernorm.weight"], self.eps)
            q, k, v = (
                (y @ w[layer + f"self_attn.{name}_proj.weight"].T)
                .view(length, -1, self.width)
                .transpose(0, 1)
                for name in "qkv"
            )
            k, v = (part.repeat_interleave(self.heads // self.groups, dim=0) for part in (rotated(k), v))
            y = scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
            x = x + y.transpose(0, 1).reshape(length, -1) @ w[layer + "self_attn.o_proj.weight"].T
            y = rms_norm(x, x.shape[-1:], w[layer + "post_attention_layernorm.weight"], self.eps)
            gate, up = (y @ w[layer + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (silu(gate) * up) @ w[layer + "mlp.down_proj.weight"].T
        return rms_norm(x[-1], x.shape[-1:], w["model.norm.weight"], self.eps) @ w["lm_head.weight"].T
