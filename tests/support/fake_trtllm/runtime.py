"""Engines, their runtime and its sampling, as TensorRT-LLM's Python `ModelRunner` behaves."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from support.fake_trtllm.engine import DTYPES, Network
from support.fake_trtllm.mpi import Session
from torch import Tensor


class Engine:
    """A built engine: its configuration and its weights."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config = SimpleNamespace(to_dict=lambda: config, **config)
        self.weights = weights

    def save(self, engine_dir: str) -> None:
        folder = Path(engine_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rank = self.config.to_dict()["pretrained_config"]["mapping"]["rank"]
        (folder / f"rank{rank}.engine").write_bytes(safetensors.torch.save(self.weights))

    @classmethod
    def from_buffer(cls, engine_buffer: bytearray, json_config_str: str, rank: int) -> "Engine":
        config = json.loads(json_config_str)
        assert config["pretrained_config"]["mapping"]["rank"] == rank, "another rank's engine"
        return cls(config, safetensors.torch.load(bytes(engine_buffer)))


class GptJsonConfig:
    """The reader of an engine's configuration."""

    @staticmethod
    def parse_file(path: Path) -> SimpleNamespace:
        config = json.loads(Path(path).read_text())
        build = config["build_config"]
        sizes = {name: build[name] for name in ("max_batch_size", "max_input_len")}
        return SimpleNamespace(
            model_config=SimpleNamespace(**sizes),
            tensor_parallelism=config["pretrained_config"]["mapping"]["tp_size"],
        )


@dataclass
class SamplingConfig:
    """Greedy, and with a minimum length, unless told otherwise."""

    end_id: int
    pad_id: int
    max_new_tokens: int = 20
    num_beams: int = 1
    output_sequence_lengths: bool = False
    return_dict: bool = False
    stop_words_list: np.ndarray | None = None
    bad_words_list: np.ndarray | None = None
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.0
    repetition_penalty: float = 1.0
    min_length: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    random_seed: Tensor | None = field(init=False, default=None)
    output_log_probs: bool = field(init=False, default=False)
    output_cum_log_probs: bool = field(init=False, default=False)

    def update(self, **values: Any) -> dict[str, Any]:
        """Sets what it knows, and returns the rest without a word."""
        known = {entry.name for entry in fields(self)}
        for name in values.keys() & known:
            setattr(self, name, values[name])
        return {name: value for name, value in values.items() if name not in known}


class ModelRunner:
    """One rank's runtime. Tensor-parallel ranks draw by themselves: only equal seeds make them agree."""

    session_of_ranks: Session

    def __init__(self, engine: Engine) -> None:
        config = engine.config.to_dict()
        self._build, self._model = config["build_config"], config["pretrained_config"]
        self._faults = self.session_of_ranks.faults
        self._network = Network(self._model, engine.weights, self.session_of_ranks.group, self._faults)
        cuda_engine = SimpleNamespace(refittable=self._build["use_refit"], weights=engine.weights)
        self.session = SimpleNamespace(
            dtype=DTYPES[self._model["dtype"]], runtime=SimpleNamespace(engine=cuda_engine)
        )

    @classmethod
    def from_engine(
        cls,
        engine: Engine,
        *,
        max_output_len: int | None = None,
        lora_dir: list[str] | None = None,
        rank: int = 0,
        debug_mode: bool = False,
        lora_ckpt_source: str = "hf",
        medusa_choices: list | None = None,
        stream: Any = None,
        gpu_weights_percent: float = 1,
        enable_context_fmha_fp32_acc: bool | None = None,
        multi_block_mode: bool | None = None,
    ) -> "ModelRunner":
        assert isinstance(engine, Engine) and isinstance(rank, int) and lora_dir is None
        return cls(engine)

    @torch.no_grad()
    def generate(
        self, batch_input_ids: Sequence[Tensor], sampling_config: SamplingConfig, streaming: bool = False
    ) -> dict[str, Tensor]:
        lengths = self._check(batch_input_ids, sampling_config, streaming)
        if self._faults.error:
            raise RuntimeError("[TensorRT-LLM][ERROR] CUDA runtime error in cudaMemcpyAsync")
        while self._faults.hang:
            time.sleep(0.05)
        output, log_probs, lengths = self._decode(batch_input_ids, lengths, sampling_config)
        self._spoil(output, log_probs, batch_input_ids)
        found = {"output_ids": output[:, None], "sequence_lengths": lengths[:, None].to(torch.int32)}
        found["sequence_lengths"] += self._faults.longer_by
        return found | ({"log_probs": log_probs[:, None]} if sampling_config.output_log_probs else {})

    def _check(self, prompts: Sequence[Tensor], sampling: SamplingConfig, streaming: bool) -> Tensor:
        """The limits of the engine raise RuntimeError; what would corrupt memory fails here."""
        assert not streaming and isinstance(sampling, SamplingConfig) and sampling.num_beams == 1
        assert sampling.return_dict and sampling.output_sequence_lengths
        assert all(prompt.dim() == 1 and prompt.device.type == "cpu" for prompt in prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        if len(prompts) > self._build["max_batch_size"]:
            raise RuntimeError(f"Input batch size ({len(prompts)}) exceeds the engine limit")
        if int(lengths.max()) > self._build["max_input_len"]:
            raise RuntimeError(f"Maximum input length ({int(lengths.max())}) exceeds the engine limit")
        if int(lengths.max()) + sampling.max_new_tokens > self._build["max_seq_len"]:
            raise RuntimeError("Maximum input length plus maximum new tokens exceeds the engine limit")
        assert int(lengths.min()) > 0
        assert sampling.end_id >= 0 or sampling.min_length == 0, "writes at logits[end_id]: out of bounds"
        stop = sampling.stop_words_list
        assert isinstance(stop, np.ndarray) and stop.dtype == np.int32 and stop.shape[1] == 2
        assert len(stop) >= len(prompts), "a row of stop words for each prompt"
        seeds = sampling.random_seed
        assert seeds is None or (seeds.dtype == torch.int64 and seeds.shape == (len(prompts),))
        assert sampling.repetition_penalty == 1.0 and sampling.temperature > 0
        assert (sampling.top_k, sampling.top_p) in ((0, 1.0), (1, 0.0), (1, 1.0)), "nothing else here"
        return lengths

    def _decode(
        self, prompts: Sequence[Tensor], lengths: Tensor, sampling: SamplingConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = int(lengths.max()) + sampling.max_new_tokens
        output = torch.full((len(prompts), width), sampling.pad_id, dtype=torch.int32)
        for row, prompt in enumerate(prompts):
            output[row, : len(prompt)] = prompt
        log_probs = torch.zeros(len(prompts), width)
        uniform = self._uniform(len(prompts), sampling)
        lengths, living = lengths.clone(), torch.ones(len(prompts), dtype=torch.bool)
        for step in range(sampling.max_new_tokens):
            if not living.any():
                break
            logits = self._network.logits(output[:, : int(lengths.max())].long().clamp(min=0), lengths)
            if sampling.temperature != 1.0 and not self._faults.ignores_temperature:
                logits = logits / (sampling.temperature + 1e-6)
            log_p = logits.log_softmax(-1)
            if sampling.top_k == 1:
                drawn = log_p.argmax(-1)
            else:
                reached = log_p.double().exp().cumsum(-1)
                drawn = (reached < uniform[:, step, None] * reached[:, -1:]).sum(-1)
            rows = living.nonzero().squeeze(1)
            output[rows, lengths[rows]] = drawn[rows].to(torch.int32)
            log_probs[rows, lengths[rows]] = log_p[rows, drawn[rows]]
            lengths[rows] += 1
            living &= ~self._stopped(output, lengths, sampling.stop_words_list)
        return output, log_probs, lengths

    def _uniform(self, rows: int, sampling: SamplingConfig) -> Tensor:
        """[rows, max_new_tokens] of each row's own generator; without seeds all rows have the same."""
        seeds = torch.zeros(rows, dtype=torch.int64) if sampling.random_seed is None else sampling.random_seed
        if self._faults.ignores_seeds:
            seeds = seeds[:1].expand(rows)
        if self._faults.seeds_by_rank:
            seeds = seeds ^ (self._model["mapping"]["rank"] + 1)
        draws = [
            torch.rand(
                sampling.max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            )
            for seed in seeds.tolist()
        ]
        return torch.stack(draws)

    @staticmethod
    def _stopped(output: Tensor, lengths: Tensor, stop_words: np.ndarray) -> Tensor:
        """Whether a stop word is the end of the whole sequence, prompt and all."""
        found = []
        for row, length in enumerate(lengths.tolist()):
            ids, ends = stop_words[row].tolist()
            words, start = [], 0
            for end in (end for end in ends if end >= 0):
                words.append(ids[start:end])
                start = end
            sequence = output[row, :length].tolist()
            found.append(any(sequence[-len(word) :] == word for word in words))
        return torch.tensor(found)

    def _spoil(self, output: Tensor, log_probs: Tensor, prompts: Sequence[Tensor]) -> None:
        if self._faults.bad_id is not None:
            output[0, len(prompts[0])] = self._faults.bad_id
        if self._faults.zero_logprobs:
            log_probs.zero_()


class ModelRunnerOf013(ModelRunner):
    """Without the argument that NeMo 2.2 passes."""

    @classmethod
    def from_engine(
        cls, engine: Engine, *, max_output_len: int | None = None, rank: int = 0
    ) -> "ModelRunner":
        return cls(engine)
