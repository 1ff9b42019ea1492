"""What is trained on: models, prompts, and how long each response is. The same for every trainer."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal

from tepo_nemo.config.load import load_config
from tepo_nemo.config.schema import Config
from tepo_nemo.data.char_tokenizer import SPECIAL_TOKENS, make_char_tokenizer

_PROMPT_LENGTHS = (12, 20)  # from, to
_TAIL = 10  # how many times as long as the median the longest of skewed responses are
_TAIL_SCORE = NormalDist().inv_cdf(1 - 0.5 / 64)  # of so long a response: the longest of 64
_SEED = 1
_FIRST_CHARACTER = 0x4E00  # of a block with thousands of them

Lengths = Literal["skewed", "equal"]


@dataclass(frozen=True)
class Model:
    """A model with random weights: what differs from configs/model/toy.yaml."""

    name: str
    vocab_size: int
    keys: tuple[str, ...] = ()


TOY = Model("toy", 17)
WIDE = Model(
    "wide",
    4000,
    (
        "model.num_layers=4",
        "model.hidden_size=384",
        "model.ffn_hidden_size=1024",
        "model.num_attention_heads=8",
        "model.num_query_groups=8",
        "model.init_method_std=0.02",
    ),
)
MODELS = {model.name: model for model in (TOY, WIDE)}


@dataclass(frozen=True)
class Workload:
    """A step: `prompts` groups of `responses_per_prompt` responses in `updates` optimizer updates."""

    model: str  # of MODELS
    lengths: Lengths
    prompts: int
    responses_per_prompt: int
    updates: int
    median_length: int  # of responses, in tokens
    tensor: int = 2  # ranks that share a layer
    data: int = 1  # copies of the model

    @property
    def responses(self) -> int:
        return self.prompts * self.responses_per_prompt

    @property
    def limits(self) -> list[list[int]]:
        """Tokens of each response, by prompt and sample.

        Skewed lengths are the quantiles of a log-normal distribution, in a fixed random order; the longest of
        64 is ten times the median, and none is longer. Equal ones all have the mean of these.
        """
        quantiles = [(index + 0.5) / self.responses for index in range(self.responses)]
        scores = [NormalDist().inv_cdf(quantile) / _TAIL_SCORE for quantile in quantiles]
        lengths = [max(1, round(self.median_length * _TAIL ** min(score, 1))) for score in scores]
        if self.lengths == "equal":
            lengths = [round(sum(lengths) / len(lengths))] * len(lengths)
        random.Random(_SEED).shuffle(lengths)
        step = self.responses_per_prompt
        return [lengths[start : start + step] for start in range(0, len(lengths), step)]

    @property
    def unused_token(self) -> int:
        """The id of a column that pads the vocabulary: no response is ended by being drawn."""
        return MODELS[self.model].vocab_size

    @property
    def longest(self) -> int:
        return max(max(row) for row in self.limits)

    @property
    def trained_tokens(self) -> int:
        """Response tokens of a step."""
        return sum(sum(row) for row in self.limits)

    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(text) for text in self._texts()]

    @property
    def positions(self) -> int:
        """Positions whose output a step needs: a response's prompt and itself, but for its last token."""
        return sum(
            prompt + length - 1
            for prompt, row in zip(self.prompt_lengths(), self.limits, strict=True)
            for length in row
        )

    def _texts(self) -> list[str]:
        choice = random.Random(_SEED)
        characters = _characters(MODELS[self.model])
        texts = (
            "".join(choice.choices(characters, k=choice.randint(*_PROMPT_LENGTHS))) for _ in iter(int, 1)
        )
        distinct: dict[str, None] = {}
        while len(distinct) < self.prompts:
            distinct[next(texts)] = None
        return list(distinct)

    def write(self, folder: Path) -> None:
        """Make the prompt set that `config` names, and the tokenizer of its model where it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (tokenizer := folder / f"{self.model}_tokenizer").exists():
            make_char_tokenizer(tokenizer, _characters(MODELS[self.model]))
        lines = [
            json.dumps({"id": str(number), "prompt": text, "gold": "-"})
            for number, text in enumerate(self._texts())
        ]
        self._prompts(folder).write_text("\n".join(lines) + "\n")

    def _prompts(self, folder: Path) -> Path:
        return folder / f"{self.model}_{self.prompts}.jsonl"

    def config(self, folder: Path, *overrides: str) -> Config:
        """The configuration of a run on this work, `overrides` last."""
        model = MODELS[self.model]
        return load_config(
            [
                "model=toy",
                "algorithm=tepo",
                *model.keys,
                f"model.vocab_size={model.vocab_size}",
                f"model.tokenizer.type={folder / f'{self.model}_tokenizer'}",
                f"model.encoder_seq_length={_PROMPT_LENGTHS[1] + self.longest}",
                f"model.tensor_model_parallel_size={self.tensor}",
                f"hardware.devices_per_node={self.tensor * self.data}",
                f"data.train={self._prompts(folder)}",
                "data.evaluation=[]",
                "algorithm.dynamic_sampling=false",  # the other trainer has none
                f"rollout.prompts_per_step={self.prompts}",
                f"rollout.responses_per_prompt={self.responses_per_prompt}",
                f"rollout.max_response_length={self.longest}",
                f"trainer.updates_per_rollout={self.updates}",
                "trainer.max_steps=1",
                "trainer.optimizer.learning_rate=1e-6",
                *overrides,
            ]
        )


def _characters(model: Model) -> str:
    return "".join(chr(_FIRST_CHARACTER + index) for index in range(model.vocab_size - len(SPECIAL_TOKENS)))
