"""Makes `qwen3/`: a small Qwen3 as transformers saves it, and what transformers computes with it.

The pinned transformers has no Qwen3. This was run once, with transformers 4.57.3 and the pinned torch:

    python tests/conversion/make_qwen3_fixture.py

Tests take the folder as it is; nothing imports this file.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

FOLDER = Path(__file__).with_name("qwen3")
PROMPTS = [[5, 14, 6, 130], [9], [4, 8, 15, 5, 77, 16]]
NEW_TOKENS = 10


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=131,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(FOLDER / "huggingface")
    tokens = torch.randint(131, (3, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        save_file({"tokens": tokens, "logits": model(tokens).logits}, FOLDER / "expected.safetensors")
        greedy = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
    (FOLDER / "greedy.json").write_text(json.dumps({"prompts": PROMPTS, "greedy": greedy}) + "\n")


if __name__ == "__main__":
    main()
