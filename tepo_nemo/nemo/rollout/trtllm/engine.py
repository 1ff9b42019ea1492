"""One engine a process: built, refitted with the current weights, and put away."""

import atexit
import gc
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from torch import Tensor

from tepo_nemo.errors import UserError
from tepo_nemo.nemo.rollout.trtllm.architecture import (
    MODEL_TYPE,
    VocabularySize,
    engine_class_of,
    exported_config,
)
from tepo_nemo.nemo.rollout.trtllm.weights import check_weights
from tepo_nemo.rollout.protocol import RolloutError


class Engine:
    """NeMo's exporter on a model. All methods are called by all ranks.

    Args:
        exporter: `nemo.export.tensorrt_llm`.
        folder: where the engine file is kept, which a refit after `unload` reads again; None is the machine's
            folder for temporary files. Each job has a folder of its own in it, which goes with the job.
        devices_per_node: ranks that share a machine.
        columns: of the logits.
        max_prompt_length, max_response_length: tokens.
        batch_size: sequences at once.

    Raises:
        UserError: MPI has another order of ranks than torch.distributed.
    """

    def __init__(
        self,
        exporter: ModuleType,
        model: MegatronGPTModel,
        *,
        folder: Path | None,
        devices_per_node: int,
        columns: int,
        max_prompt_length: int,
        max_response_length: int,
        batch_size: int,
    ) -> None:
        _check_mpi_ranks()
        self._exporter, self._model = exporter, model
        self._devices_per_node = devices_per_node
        self._vocabulary = VocabularySize(columns)
        self._max_prompt_length, self._max_response_length = max_prompt_length, max_response_length
        self._batch_size = batch_size
        self._export = exporter.TensorRTLLM(str(_folder_of_job(folder)), load_model=False)
        self._built = False

    @property
    def decoder(self) -> Any:
        """The `ModelRunner` of this process; None while it is put away."""
        from nemo.export.trt_llm import tensorrt_llm_run

        return tensorrt_llm_run.tensorrt_llm_worker_context.decoder

    def take_weights(self) -> None:
        """Build the engine, the first time, or refit it; afterwards it has the weights of now.

        Raises:
            RolloutError: names of weights differ, see `weights`, or TensorRT refuses them.
        """
        # Neither DDP's nor the mixed-precision wrapper, whose prefixes the exporter does not know.
        (model,) = self._model.get_model_module_list()
        config = exported_config(self._model)
        if self._built:
            with self._weights_checked_before_refit():
                self._export.refit(model, config)
            return
        with engine_class_of(self._model):
            self._export.build(
                model=model,
                model_config=config,
                model_type=MODEL_TYPE,
                gpus_per_node=self._devices_per_node,
                tokenizer=self._vocabulary,
                max_input_len=self._max_prompt_length,
                max_output_len=self._max_response_length,
                max_batch_size=self._batch_size,
                use_refit=True,
                # Log-probs of an engine with pipeline stages are all 0.
                reshard_model=parallel_state.get_pipeline_model_parallel_world_size() > 1,
            )
        self._built = True
        check_weights(self.decoder, self._export.trtllm_helper.weights_converter.trtllm_model_weights)

    def unload(self) -> None:
        """Give the device memory back; the next `take_weights` loads the engine again."""
        if self.decoder is None:
            return
        self._export.unload_engine()
        gc.collect()
        torch.cuda.empty_cache()

    @contextmanager
    def _weights_checked_before_refit(self) -> Iterator[None]:
        refit = self._exporter.refit

        def check_and_refit(weights: Mapping[str, Tensor]) -> None:
            # The exporter copies to the host without waiting for the copies.
            torch.cuda.synchronize()
            check_weights(self.decoder, weights)
            try:
                refit(weights)
            except ValueError as error:
                raise RolloutError(f"TensorRT has not taken the weights into the engine: {error}") from error

        self._exporter.refit = check_and_refit
        try:
            yield
        finally:
            self._exporter.refit = refit


def _check_mpi_ranks() -> None:
    import tensorrt_llm

    mpi, torch_rank = tensorrt_llm.mpi_rank(), dist.get_rank()
    if mpi != torch_rank:
        raise UserError(
            f"rollout.backend=trtllm: rank {torch_rank} of torch is rank {mpi} of MPI, and TensorRT-LLM "
            "takes them to be one (start the ranks with `srun --mpi=pmix`, or with mpirun in the same order)"
        )


def _folder_of_job(folder: Path | None) -> Path:
    """A folder that no other job of this machine has; the same on all ranks."""
    box = [uuid.uuid4().hex]
    dist.broadcast_object_list(box, src=0)
    own = (folder or Path(tempfile.gettempdir())) / f"tepo_nemo_engine_{box[0]}"
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own
