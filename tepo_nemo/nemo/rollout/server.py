"""The rollout backend on servers: weights go to them after each step, responses come from them."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel

from tepo_nemo.config.server import ServerConfig
from tepo_nemo.conversion.families import Architecture
from tepo_nemo.conversion.huggingface import CONFIG
from tepo_nemo.conversion.output import check_room
from tepo_nemo.conversion.to_huggingface import huggingface_weights, save_weights
from tepo_nemo.conversion.weights import total_bytes
from tepo_nemo.errors import UserError
from tepo_nemo.nemo.live_weights import LiveWeights
from tepo_nemo.nemo.rollout.main_rank import by_main_rank
from tepo_nemo.rollout.protocol import Generation, GenerationRequest, no_responses
from tepo_nemo.rollout.sampling import row_keys
from tepo_nemo.rollout.server.completions import Question, Vocabulary
from tepo_nemo.rollout.server.engines import check_vllm
from tepo_nemo.rollout.server.fleet import Fleet
from tepo_nemo.rollout.server.generation import to_generation
from tepo_nemo.rollout.server.handover import Handover, Weights

_POSITIVE = (1 << 63) - 1


class ServerRollout:
    """Implements `RolloutBackend`. The main rank talks to the servers, for all copies of the model.

    Args:
        handover_folder: of this run alone, under one path for this machine and the servers'.
        stop_token: id that ends a response.
        vocab_size: of the true vocabulary.
        temperature: of training rollouts.

    Raises:
        UserError: the model has no form that servers know, or a server is not what it must be.
    """

    takes_all_rows = True

    def __init__(
        self,
        model: MegatronGPTModel,
        config: ServerConfig,
        *,
        handover_folder: Path,
        stop_token: int,
        vocab_size: int,
        temperature: float,
    ) -> None:
        self._model = model
        self._files = model.huggingface_files
        if CONFIG not in self._files:
            raise UserError(
                "rollout.backend=server: the model is of no family of tepo-nemo convert, and servers could "
                "not load it (set rollout=megatron)"
            )
        self._architecture = Architecture.of(self._files[CONFIG], CONFIG)
        rows = self._architecture.sizes.vocabulary
        if vocab_size > rows:
            raise UserError(
                f"model.vocab_size={vocab_size}: servers have the {rows} tokens of the model's config.json "
                f"(set model.vocab_size={rows} or less)"
            )
        self._stop_token = stop_token
        self._vocab_size = vocab_size
        self._main = _Main(config, handover_folder, self._architecture, stop_token) if _is_main() else None
        by_main_rank(lambda: self._main.wait(model.cfg.encoder_seq_length, temperature))

    def prepare(self) -> None:
        """Hand the current weights over, and have the servers take them. Weights come from all ranks."""
        weights = LiveWeights(self._model)
        if self._main is None:
            for _ in huggingface_weights(weights, self._architecture):
                pass  # read, and so sent to the main rank
            handed_over = None
        else:
            handed_over = self._main.hand_over(weights, self._files)
        by_main_rank(lambda: self._main.push(handed_over))

    def generate(self, request: GenerationRequest) -> Generation:
        """Ask for each row; see `RolloutBackend`."""
        if not len(request):
            return no_responses()
        keys = row_keys(request.seed, request.prompt_keys, request.sample_indices, torch.device("cpu"))
        questions = [
            Question(prompt, limit, request.temperature, seed & _POSITIVE)
            for prompt, limit, seed in zip(
                request.prompt_tokens, request.max_response_lengths, keys.tolist(), strict=True
            )
        ]
        return by_main_rank(
            lambda: to_generation(
                self._main.fleet.answer(questions),
                vocab_size=self._vocab_size,
                stop_token=self._stop_token,
            )
        )

    def release(self) -> None:
        """Have the servers sleep, where that is configured."""
        by_main_rank(lambda: self._main.fleet.sleep())


class _Main:
    """The main rank's part."""

    def __init__(
        self, config: ServerConfig, folder: Path, architecture: Architecture, stop_token: int
    ) -> None:
        self._config = config
        self._folder = folder
        self._architecture = architecture
        self._handover = Handover(folder)
        self.fleet = Fleet(config, Vocabulary(architecture.sizes.vocabulary, stop_token))

    def wait(self, sequence_length: int, temperature: float) -> None:
        """Look at servers that must be there before they have weights of ours."""
        if self._config.engine == "vllm":
            self.fleet.wait(
                check_vllm(sequence_length, self._architecture.sizes.vocabulary, temperature=temperature)
            )

    def hand_over(self, weights: LiveWeights, files: Mapping[str, bytes]) -> Weights:
        """Write the next version, while all ranks read."""
        check_room(self._folder, total_bytes(self._architecture))

        def fill(folder: Path) -> None:
            for name, content in files.items():
                (folder / name).write_bytes(content)
            values = huggingface_weights(weights, self._architecture)
            save_weights(folder, self._architecture, values, wrote=lambda count: None)

        return self._handover.write(fill)

    def push(self, weights: Weights) -> None:
        self.fleet.push(weights)
        self._handover.keep_only(weights)


def _is_main() -> bool:
    return dist.get_rank() == 0
