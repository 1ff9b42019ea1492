"""Small models, once a session: as transformers saves them, converted, and what transformers computes."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from support.converted import Silent
from support.huggingface_models import MODELS, VOCABULARY, Expected, add_tokenizer, expected_of, make_model
from torch import Tensor

from tepo_nemo.conversion.convert import convert
from tepo_nemo.rollout.protocol import GenerationRequest

PROMPTS = [[5, 14, 6, 130], [9], [4, 8, 15, 5, 77, 16]]
NEW_TOKENS = 10
TOKENS = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(3))
GREEDY = GenerationRequest(
    prompt_tokens=PROMPTS,
    prompt_keys=[1, 2, 3],
    sample_indices=[0, 0, 0],
    seed=1,
    temperature=0.0,
    max_response_lengths=[NEW_TOKENS] * 3,
)


class Model(NamedTuple):
    """One model in both forms."""

    huggingface: Path
    nemo: Path
    expected: Expected


QWEN3 = Path(__file__).with_name("qwen3")


def _make_qwen3(folder: Path) -> Expected:
    """The kept one, with a tokenizer (see make_qwen3_fixture.py)."""
    shutil.copytree(QWEN3 / "huggingface", folder)
    add_tokenizer(folder)
    kept = load_file(QWEN3 / "expected.safetensors")
    greedy = json.loads((QWEN3 / "greedy.json").read_text())
    assert torch.equal(kept["tokens"], TOKENS) and greedy["prompts"] == PROMPTS
    return Expected(kept["logits"], greedy["greedy"])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Every model; NeMo's form is a folder for most and a file for one."""
    made = {}
    for name in (*MODELS, "qwen3"):
        root = tmp_path_factory.mktemp(name)
        folder, nemo = root / "huggingface", root / ("nemo.nemo" if name == "mistral" else "nemo")
        if name == "qwen3":
            expected = _make_qwen3(folder)
        else:
            expected = expected_of(make_model(name, folder), TOKENS, PROMPTS, NEW_TOKENS)
        convert(folder, nemo, watcher=Silent())
        made[name] = Model(folder, nemo, expected)
    return made


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    return TOKENS


@pytest.fixture(scope="session")
def greedy() -> GenerationRequest:
    return GREEDY


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt set, since a configuration needs one."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text('{"id": "1", "prompt": "1+1=", "gold": "2"}\n')
    return path
