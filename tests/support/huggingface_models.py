"""Small models of the real architectures, made by transformers, and what transformers makes of them.

Sizes are odd: grouped queries, a vocabulary that is not even, heads whose width is not hidden / heads.
Every weight is random, norms and biases too, so that each has a say in the logits.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.toy import CHARACTERS
from torch import Tensor

VOCABULARY = 131
SEQUENCE = 64
_SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=SEQUENCE,
    rms_norm_eps=1e-6,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# Lengths at which Llama's scaling leaves some wavelengths alone, stretches some, and some half-way.
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5": ("Qwen2", dict(tie_word_embeddings=False, rope_theta=1e6)),
    "qwen2_5_tied": ("Qwen2", dict(tie_word_embeddings=True, rope_theta=1e6)),
    "llama": ("Llama", dict(rope_theta=100.0, rope_scaling=_LLAMA3, head_dim=16)),
    "mistral": ("Mistral", dict(head_dim=16, rope_theta=1e6, sliding_window=None)),
}


@dataclass(frozen=True)
class Expected:
    """What transformers makes of a model."""

    logits: Tensor  # [rows, length, V], fp32
    greedy: list[list[int]]  # continuation of each prompt, up to the stop token


def make_model(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a model of `MODELS` with a tokenizer as transformers does; in more than one file."""
    import transformers

    architecture, values = MODELS[name]
    config = getattr(transformers, f"{architecture}Config")(**(_SIZES | values | changes))
    torch.manual_seed(7)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB")
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path, tokens: int = VOCABULARY) -> None:
    """Put the tokenizer of a model of characters beside its weights."""
    from tepo_nemo.data.char_tokenizer import SPECIAL_TOKENS, make_char_tokenizer

    missing = tokens - len(SPECIAL_TOKENS) - len(CHARACTERS)
    characters = CHARACTERS + "".join(chr(ord("\u4e00") + number) for number in range(missing))
    made = make_char_tokenizer(folder / "tokenizer", characters)
    for file in made.iterdir():
        shutil.move(file, folder / file.name)
    made.rmdir()


def expected_of(folder: Path, tokens: Tensor, prompts: list[list[int]], new_tokens: int) -> Expected:
    """Logits of `tokens` [rows, length], and greedy continuations."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        greedy = []
        for prompt in prompts:
            row = torch.tensor([prompt])
            mask = torch.ones_like(row)
            answer = model.generate(row, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
            greedy.append(answer[0, len(prompt) :].tolist())
    return Expected(logits_of(folder, tokens), greedy)


def logits_of(folder: Path, tokens: Tensor) -> Tensor:
    """Of `tokens` [rows, length], [rows, length, V]."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        return model(tokens).logits


def all_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the safetensors of a folder."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
