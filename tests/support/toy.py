"""A toy model on the real host stack: its configuration, its tokenizer, and hosts built from them."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_nemo.config.load import load_config
from tepo_nemo.config.schema import AlgorithmConfig, Config

if TYPE_CHECKING:  # the ranks alone have the stack
    from tepo_nemo.nemo.build import Host
    from tepo_nemo.nemo.policy import MegatronPolicy
    from tepo_nemo.objectives.contract import Objective

CHARACTERS = "0123456789+-="
VOCABULARY = 4 + len(CHARACTERS)  # the special tokens come first
STOP_TOKEN = 2
FIRST_CHARACTER = 4

# That of configs/model/toy.yaml, but narrower and with grouped queries. The vocabulary of 17 is padded to 24
# columns at TP1 and to 32 at TP2, where the second rank has one true column. Initial weights are large enough
# for distributions that differ from position to position.
_SHAPE = (
    "model.restore_from_path=null",
    f"model.vocab_size={VOCABULARY}",
    "model.make_vocab_size_divisible_by=8",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.init_method_std=0.15",
    "rollout.max_response_length=12",
)


@dataclass(frozen=True)
class ToyFolder:
    """A folder with a tokenizer and a prompt set, which `make_toy_folder` makes."""

    path: Path

    def config(self, *overrides: str, tensor: int = 1, pipeline: int = 1, data: int = 1) -> Config:
        """48 responses a step in 3 updates of 16; fp32 and micro-batches of 4 unless told otherwise."""
        return load_config(
            [
                *_SHAPE,
                f"model.tokenizer.type={self.path / 'tokenizer'}",
                f"data.train={self.path / 'train.jsonl'}",
                "data.evaluation=[]",
                "rollout.prompts_per_step=12",
                "rollout.responses_per_prompt=4",
                "trainer.updates_per_rollout=3",
                "trainer.micro_batch_size=4",
                f"model.tensor_model_parallel_size={tensor}",
                f"model.pipeline_model_parallel_size={pipeline}",
                f"hardware.devices_per_node={tensor * pipeline * data}",
                *overrides,
            ]
        )


def make_toy_folder(rank: int, world_size: int, path: Path) -> ToyFolder:
    """Run in one rank, which has the tokenizer's libraries loaded."""
    from tepo_nemo.data.char_tokenizer import make_char_tokenizer

    make_char_tokenizer(path / "tokenizer", CHARACTERS)
    (path / "train.jsonl").write_text('{"id": "1", "prompt": "1+1=", "gold": "2"}\n')
    return ToyFolder(path)


def build_objective(algorithm: AlgorithmConfig) -> "Objective":
    """The objective of a configuration."""
    from tepo_nemo.objectives import registry

    return registry.build(algorithm.name, algorithm.options)


def build_policy(config: Config) -> "tuple[Host, MegatronPolicy]":
    """Build what a run builds, in every rank. A rank may do so more than once, at one layout."""
    # A rank starts with the launcher's million objects: walking them would copy every page of them.
    gc.freeze()
    from tepo_nemo.nemo.build import build_host
    from tepo_nemo.nemo.run import connect_policy

    host = build_host(config)
    return host, connect_policy(host, config, build_objective(config.algorithm))
