"""The actor: a Megatron GPT model that generates, measures and trains under a policy objective.

Built on NeMo's `MegatronGPTModel` with NeMo-Aligner's generative interface.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from lightning.pytorch.trainer.trainer import Trainer
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from nemo_aligner.models.alignable_interface import AlignableGenerativeInterface
from nemo_aligner.utils.train_utils import (
    grad_reductions,
    prepare_for_training_step,
    set_eval,
    set_sync_funcs,
    set_train,
)
from omegaconf import DictConfig
from torch import Tensor

from tepo_nemo.nemo.layers import add_up_qk_layernorm_gradients, qk_layernorm_where_asked
from tepo_nemo.nemo.model_inputs import packed_inputs, padded_inputs
from tepo_nemo.nemo.output_layer import hidden_states_as_output, response_logprobs_and_entropy
from tepo_nemo.nemo.sequence_parallelism import set_sequence_parallelism
from tepo_nemo.objectives.contract import Mean, MinibatchTotals, Objective
from tepo_nemo.parallel.pipeline import broadcast_from_last_stage
from tepo_nemo.rollout.correction import RolloutCorrection
from tepo_nemo.rollout.protocol import Generation, GenerationRequest, RolloutBackend
from tepo_nemo.training.batch import MicroBatch, MiniBatch, TokenStatistics, add_means
from tepo_nemo.training.metrics import logprob_gap, weight_metrics


@contextmanager
def _shapes_are_sent_along(config: TransformerConfig) -> Iterator[None]:
    """Let pipeline stages tell each other the shape of what they send. Generation has no need of it."""
    config.variable_seq_lengths = True
    try:
        yield
    finally:
        config.variable_seq_lengths = False


class MegatronGPTTEPOActorModel(MegatronGPTModel, AlignableGenerativeInterface):
    """Megatron GPT under TEPO or any other objective.

    NeMo builds it from a model configuration; `connect` then hands over what is not part of the model.
    """

    objective: Objective
    rollout: RolloutBackend
    huggingface_files: Mapping[str, bytes] = {}
    """What its checkpoints keep of the model's folder on Hugging Face: config.json, tokenizer."""

    def __init__(self, cfg: DictConfig, trainer: Trainer) -> None:
        super().__init__(cfg, trainer=trainer)
        self.automatic_optimization = False

    def model_provider_func(self, pre_process: bool, post_process: bool) -> torch.nn.Module:
        with qk_layernorm_where_asked():
            return super().model_provider_func(pre_process, post_process)

    def connect(
        self,
        objective: Objective,
        rollout: RolloutBackend,
        *,
        temperature: float,
        vocab_size: int,
        fused_output_layer: bool,
        sequence_packing: bool,
        correction: RolloutCorrection | None,
    ) -> None:
        """Set what the model is trained with.

        Args:
            temperature: of training rollouts; every log-prob and entropy is taken at it.
            vocab_size: of the true vocabulary; columns that pad it for tensor parallelism do not exist for
                the mathematics.
            fused_output_layer: never hold the logits of a micro-batch: make them block by block, and again in
                the backward pass.
            sequence_packing: let the sequences of a micro-batch stand in one row, without padding. Needs an
                attention that keeps them apart, as Transformer Engine's does.
            correction: weights of tokens by how far the rollout engine was from the policy; None is off.
        """
        self.objective = objective
        self.rollout = rollout
        self.temperature = temperature
        self.true_vocab_size = vocab_size
        self.fused_output_layer = fused_output_layer
        self.sequence_packing = sequence_packing
        self.correction = correction

    # ----------------------------------------------------------------- inference

    def prepare_for_inference(self) -> None:
        set_eval(self)
        set_sequence_parallelism(self, False)
        self.rollout.prepare()

    @torch.no_grad()
    def infer(self, request: GenerationRequest) -> Generation:
        """Generate the requested responses; the same on all ranks of a model-parallel group."""
        return self.rollout.generate(request)

    def finish_inference(self) -> None:
        self.rollout.release()
        set_sequence_parallelism(self, self.cfg.get("sequence_parallel", False))
        set_train(self)

    # ----------------------------------------------------------------- statistics

    @torch.no_grad()
    def get_token_statistics(self, micro_batches: Sequence[MicroBatch]) -> list[TokenStatistics]:
        """Log-prob and entropy of every target, forward only; on every rank of the model-parallel group.

        Runs in training mode, so that the values are those that the training forward of the same
        micro-batch gives under the same weights.
        """
        outputs = self._run_schedule(self._statistics_step, micro_batches, forward_only=True, collect=True)
        device = torch.device(torch.cuda.current_device())
        tokens = [len(micro_batch.positions) for micro_batch in micro_batches]
        of_all = broadcast_from_last_stage(
            torch.cat(outputs, dim=1) if outputs else None,
            shape=(2, sum(tokens)),
            dtype=torch.float32,
            device=device,
            group=parallel_state.get_pipeline_model_parallel_group(),
            last_rank=parallel_state.get_pipeline_model_parallel_last_rank(),
        )
        return [
            TokenStatistics(*map(micro_batch.spread, values))
            for micro_batch, values in zip(micro_batches, of_all.split(tokens, dim=1), strict=True)
        ]

    def _statistics_step(self, data_iterator, model):
        micro_batch, places, hidden = self._forward(data_iterator, model)

        def collect(hidden: Tensor, non_loss_data: bool) -> Tensor:
            return torch.stack(
                self._logprobs_and_entropy(hidden, micro_batch, places, entropy_requires_grad=False)
            )

        return hidden, collect

    # ----------------------------------------------------------------- training

    def prepare_for_training(self) -> None:
        set_train(self)

    def prepare_for_training_step(self) -> None:
        prepare_for_training_step(self, zero_grad=True)

    def get_loss_and_metrics(
        self, batch: MiniBatch, forward_only: bool
    ) -> tuple[Tensor | None, dict[str, Mean]]:
        """Forward and backward over this rank's micro-batches of one mini-batch.

        Returns:
            This rank's share of the loss (shares add over data-parallel ranks to the mini-batch loss) and of
            each metric; None and nothing on pipeline stages that do not have the loss.
        """
        num_micro_batches = len(batch.micro_batches)
        # Megatron's schedule divides a loss by the number of micro-batches, and data parallelism averages
        # gradients over its ranks. The objective's shares already add up, so both are undone here and
        # nowhere else.
        scale = num_micro_batches * parallel_state.get_data_parallel_world_size()
        step = partial(self._loss_step, totals=batch.totals, scale=scale)
        outputs = self._run_schedule(step, batch.micro_batches, forward_only=forward_only)
        if not outputs:
            return None, {}
        metrics: dict[str, Mean] = {}
        for _, micro_metrics in outputs:
            add_means(metrics, micro_metrics)
        return torch.stack([loss for loss, _ in outputs]).sum(), metrics

    def _loss_step(self, data_iterator, model, totals: MinibatchTotals, scale: int):
        micro_batch, places, hidden = self._forward(data_iterator, model)

        def loss_func(hidden: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Mean]]]:
            values = self._logprobs_and_entropy(
                hidden, micro_batch, places, entropy_requires_grad=self.objective.needs_entropy_gradient
            )
            current = TokenStatistics(*map(micro_batch.spread, values))
            tokens = micro_batch.token_batch(current, self.correction)
            output = self.objective(tokens, totals)
            metrics = output.metrics | logprob_gap(micro_batch, tokens.old_logprobs) | weight_metrics(tokens)
            return output.loss * scale, (output.loss.detach(), metrics)

        return hidden, loss_func

    def finish_training_step(self) -> None:
        if not self.use_mcore_dist_optim and not self.cfg.get("sequence_parallel", False):
            add_up_qk_layernorm_gradients(self.model)
        grad_reductions(self)

    def finish_training(self) -> None:
        """Nothing to give back: the optimizer's state stays where it is."""

    # ----------------------------------------------------------------- shared

    def _run_schedule(
        self, step, micro_batches: Sequence[MicroBatch], *, forward_only: bool, collect: bool = False
    ) -> list:
        """Run Megatron's pipeline schedule.

        Returns what the step's second function gave beside the loss (all it gave with `collect`), one entry a
        micro-batch, on the last stage; an empty list elsewhere.
        """
        set_sync_funcs(self, forward_only)
        # Megatron casts in its forward passes alone: what the backward pass recomputes must be cast as well.
        with (
            _shapes_are_sent_along(self.transformer_config),
            torch.autocast("cuda", dtype=self.autocast_dtype, enabled=self.enable_autocast),
        ):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=self._make_data_iterator_list(iter(micro_batches)),
                model=self.model,
                num_microbatches=len(micro_batches),
                forward_only=forward_only,
                seq_length=1,  # every micro-batch has a shape of its own
                micro_batch_size=1,
                collect_non_loss_data=collect,
            )

    def _forward(self, data_iterator, model) -> tuple[MicroBatch, Tensor, Tensor]:
        """The micro-batch, the places of its trained tokens, and the stage's hidden states."""
        on_host = next(data_iterator)
        device = torch.device(torch.cuda.current_device())
        micro_batch = on_host.to(device)
        if self.sequence_packing:
            inputs = packed_inputs(on_host, device, self.length_multiple)
        else:
            inputs = padded_inputs(micro_batch)
        with hidden_states_as_output(self):
            hidden = model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                attention_mask=None,
                packed_seq_params=inputs.packed_seq_params,
            )
        return micro_batch, inputs.places, hidden

    @property
    def length_multiple(self) -> int:
        """What the length of a row must be a multiple of: sequence parallelism shares it out."""
        return (
            parallel_state.get_tensor_model_parallel_world_size()
            if self.cfg.get("sequence_parallel", False)
            else 1
        )

    def _logprobs_and_entropy(
        self, hidden: Tensor, micro_batch: MicroBatch, places: Tensor, *, entropy_requires_grad: bool
    ) -> tuple[Tensor, Tensor]:
        return response_logprobs_and_entropy(
            self.get_model_module_list()[-1],
            hidden,
            places,
            micro_batch.targets.flatten().index_select(0, micro_batch.positions),
            temperature=self.temperature,
            vocab_size=self.true_vocab_size,
            fused=self.fused_output_layer,
            entropy_requires_grad=entropy_requires_grad,
            dtype=self.torch_dtype,
        )
