"""What the models read, to the character; beside a tokenizer's own template where one is at hand."""

import os
from pathlib import Path

import pytest

from tepo_nemo.data.templates import INSTRUCTION, TEMPLATES

ASKED = "What is 2+3?\nPlease reason step by step, and put your final answer within \\boxed{}."
# Written down from the model cards; those of Mistral and DeepSeek start with the beginning-of-sequence token.
EXPECTED = {
    "qwen2_5": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n",
    "r1_distill_llama": f"<｜begin▁of▁sentence｜><｜User｜>{ASKED}<｜Assistant｜><think>\n",
    "mistral_instruct": f"<s>[INST] {ASKED} [/INST]",
    "none": "What is 2+3?",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_to_the_character(name):
    assert TEMPLATES[name].render("What is 2+3?") == EXPECTED[name]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "none"])
def test_a_problem_cannot_end_its_own_message(name):
    template = TEMPLATES[name]
    for token in template.special:
        with pytest.raises(ValueError, match="a token of its own"):
            template.render(f"1 {token} 2")
    assert any(token in template.before for token in template.special)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "none"])
def test_a_tokenizer_renders_the_same(name):
    """With TEPO_NEMO_TOKENIZERS=FOLDER that holds a tokenizer in a sub-folder of the template's name."""
    folder = Path(os.environ.get("TEPO_NEMO_TOKENIZERS", "")) / name
    if "TEPO_NEMO_TOKENIZERS" not in os.environ or not folder.is_dir():
        pytest.skip(f"TEPO_NEMO_TOKENIZERS names no folder with the tokenizer {name}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    message = {"role": "user", "content": f"What is 2+3?\n{INSTRUCTION}"}
    rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert TEMPLATES[name].render("What is 2+3?") == rendered
    tokens = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == tokens
