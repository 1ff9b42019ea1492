"""The step of NeMo-Aligner 0.7.0: its REINFORCE trainer and actor, live and unmodified.

TensorRT-LLM is off, so its actor generates with Megatron's own `generate`. What is changed around it: where a
response ends (its end-of-generation condition is told each length, and `min_length` holds the stop token back
before), so that both trainers work on responses of the same lengths; and what `_scalars_are_taken` needs to
run on gloo and without a KL penalty. The tokens of its loss are counted.

Its reward client answers at once, it writes no logs, and it saves nothing.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from nemo.collections.nlp.data.language_modeling.megatron.data_samplers import (
    MegatronPretrainingRandomSampler,
)
from nemo.collections.nlp.parts.megatron_trainer_builder import MegatronTrainerBuilder
from nemo_aligner.algorithms import reinforce
from nemo_aligner.models.nlp.gpt import megatron_gpt_reinforce_actor
from nemo_aligner.models.nlp.gpt.megatron_gpt_reinforce_actor import MegatronGPTReinforceActorModel
from nemo_aligner.utils.text_generation_utils import TrackLengthGPTModelTextGenerationStrategy
from nemo_aligner.utils.train_script_utils import (
    CustomLoggerWrapper,
    FakeCheckpointCallback,
    extract_optimizer_scheduler_from_ptl_model,
    init_distributed,
    init_using_ptl,
)
from nemo_aligner.utils.utils import collate_with_batch_max_sequence_length
from omegaconf import OmegaConf

from tepo_nemo.bench.step.taken import Taken
from tepo_nemo.bench.step.workload import Workload
from tepo_nemo.nemo.host_config import host_config
from tepo_nemo.nemo.prompts import load_tokenized

_MOST_STEPS = 10_000
_STATISTICS_MICRO_BATCH = 8  # of its forward-only pass, which takes more than one response


class AlignerStep:
    """Takes steps of NeMo-Aligner's REINFORCE trainer on a workload; micro-batches of one response.

    Its loss multiplies [B, S - 1] by [B], which breaks for more than one.
    """

    def __init__(self, workload: Workload, folder: Path) -> None:
        config = workload.config(folder)
        cfg = host_config(config)
        cfg.model.micro_batch_size = 1
        cfg.model.global_batch_size = workload.responses // workload.updates
        cfg.model.reinforce = _reinforce_section(workload)
        cfg.trainer.max_steps = _MOST_STEPS * workload.updates
        lightning = MegatronTrainerBuilder(cfg).create_trainer()
        torch.manual_seed(config.seed)
        self.actor = MegatronGPTReinforceActorModel(cfg.model, lightning)
        init_distributed(lightning, self.actor, False)
        prompts = [
            {"text": torch.tensor(prompt.tokens), "length": len(prompt.tokens), "loss_multiplier": 1.0}
            for prompt in load_tokenized(
                config.data.train,
                self.actor.tokenizer,
                key="data.train",
                max_response_length=workload.longest,
                sequence_length=config.model.encoder_seq_length,
            )
        ]
        init_using_ptl(lightning, self.actor, torch.utils.data.DataLoader(prompts), prompts)
        self.optimizer, scheduler = extract_optimizer_scheduler_from_ptl_model(self.actor)
        collate = partial(
            collate_with_batch_max_sequence_length,
            response_token_length=workload.longest,
            eos_id=self.actor.tokenizer.eos_id,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            generate_masks_and_position_ids=False,
        )

        def load_prompts(consumed_samples: int) -> torch.utils.data.DataLoader:
            sampler = MegatronPretrainingRandomSampler(
                total_samples=len(prompts),
                consumed_samples=consumed_samples,
                micro_batch_size=workload.prompts // workload.data,
                global_batch_size=workload.prompts,
                data_parallel_rank=parallel_state.get_data_parallel_rank(),
                data_parallel_size=workload.data,
                drop_last=True,
                seed=config.seed,
            )
            return torch.utils.data.DataLoader(prompts, batch_sampler=sampler, collate_fn=collate)

        self._log = _Log()
        self._limits = _Limits([prompt["text"].tolist() for prompt in prompts], workload.limits)
        self._trainer = reinforce.ReinforceTrainer(
            cfg=OmegaConf.create(
                {
                    "max_epochs": _MOST_STEPS,
                    "max_steps": -1,
                    "initial_policy_kl_penalty": 0.0,
                    "use_absolute_kl": True,
                    "rollout_batch_seq_length": None,
                    "num_rollouts_per_prompt": workload.responses_per_prompt,
                    "model_gbs": cfg.model.global_batch_size,
                    "gradient_clip_val": config.trainer.optimizer.gradient_clip,
                    "val_check_interval": 0,
                    "save_interval": 0,
                }
            ),
            model=self.actor,
            optimizer=self.optimizer,
            scheduler=scheduler,
            train_dataloader_builder=load_prompts,
            val_dataloader_builder=None,
            collate_fn=collate,
            rm=SimpleNamespace(infer_rm=_infer_reward),
            batch_iterator_cls=_batches,
            logger=CustomLoggerWrapper([self._log]),
            ckpt_callback=FakeCheckpointCallback(),
            run_timer=SimpleNamespace(start_time=lambda: None, is_finished=lambda: False),
        )

    def __call__(self) -> Taken:
        self._trainer.max_steps = self._trainer.step + 1
        trained, take_loss = [], self.actor.get_loss_and_metrics

        def take_counted_loss(batch: dict[str, torch.Tensor], forward_only: bool) -> Any:
            trained.append(int(batch["mask"].sum()))
            return take_loss(batch, forward_only)

        with (
            self._limits.imposed(),
            _scalars_are_taken(),
            mock.patch.object(self.actor, "get_loss_and_metrics", take_counted_loss),
        ):
            self._trainer.fit()
        total = torch.tensor(sum(trained))
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return Taken(
            generation=self._log.timers["timers/generate"],
            statistics=self._log.timers["timers/logprobs"],
            training=self._log.timers["timers/train_time"],
            trained_tokens=int(total),
        )


def _reinforce_section(workload: Workload) -> dict[str, Any]:
    return {
        "forward_micro_batch_size": min(_STATISTICS_MICRO_BATCH, workload.responses // workload.data),
        "rollout_micro_batch_size": workload.prompts // workload.data,
        "num_rollout_samples": workload.prompts,
        "offload_adam_states": False,
        "length_params": {"max_length": workload.longest, "min_length": workload.longest},
        "sampling_params": {
            "use_greedy": False,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            "add_BOS": False,
            "all_probs": False,
            "compute_logprob": False,
            "end_strings": ["<|endoftext|>"],  # NeMo's name of the stop token, whatever it is
        },
    }


def _batches(sampler: Iterator[list[int]], count: int, dataset: list, collate: Callable) -> Iterator[dict]:
    """What its `DefaultBatchIterator` gives; the module of that imports a web server."""
    return (collate([dataset[index] for index in indices]) for indices in itertools.islice(sampler, count))


class _Log:
    """A Lightning logger that remembers the timers of the last step."""

    def __init__(self) -> None:
        self.timers: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None) -> None:
        self.timers |= {name: value for name, value in metrics.items() if name.startswith("timers/")}


class _Limits:
    """Ends the responses to each prompt at the given lengths, in turn and from the first again."""

    def __init__(self, prompts: Sequence[Sequence[int]], limits: Sequence[Sequence[int]]) -> None:
        self._next = {
            tuple(prompt): itertools.cycle(of_prompt)
            for prompt, of_prompt in zip(prompts, limits, strict=True)
        }

    @contextmanager
    def imposed(self) -> Iterator[None]:
        limits = self._next

        class Strategy(TrackLengthGPTModelTextGenerationStrategy):
            def init_batch(self, context_tokens, context_length, compute_attention_mask):
                lengths = self._context_lengths.tolist()
                rows = zip(context_tokens.tolist(), lengths, strict=True)
                self._ends = self._context_lengths + torch.tensor(
                    [next(limits[tuple(tokens[:length])]) for tokens, length in rows],
                    device=self._context_lengths.device,
                )
                super().init_batch(context_tokens, context_length, compute_attention_mask)

            def end_of_generation_condition(self, tokens, prev, eod_id, end_strings):
                prev = torch.where(tokens.size(1) >= self._ends, eod_id, prev)
                return super().end_of_generation_condition(tokens, prev, eod_id, end_strings)

        name = TrackLengthGPTModelTextGenerationStrategy.__name__
        with mock.patch.object(megatron_gpt_reinforce_actor, name, Strategy):
            yield


@contextmanager
def _scalars_are_taken() -> Iterator[None]:
    """Let gloo gather a tensor without dimensions, as NCCL does, and a mean be taken of one.

    Without the KL penalty, which would cost it one more pass and ours has none of, its trainer takes the mean
    over a mask of one number, which PyTorch refuses.
    """
    gather, mean = dist.all_gather_into_tensor, reinforce.masked_mean

    def gather_elements(output: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> None:
        gather(output, value.reshape(-1) if value.ndim == 0 else value, group=group)

    def mean_of_row(values: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
        return mean(values.expand_as(mask), mask, dim=dim)

    with (
        mock.patch.object(dist, "all_gather_into_tensor", gather_elements),
        mock.patch.object(reinforce, "masked_mean", mean_of_row),
    ):
        yield


def _infer_reward(rollout: dict[str, torch.Tensor]) -> SimpleNamespace:
    """1 where the last token is odd; ready at once."""
    last = rollout["response_tokens"].gather(1, rollout["response_lengths"][:, None] - 1)
    return SimpleNamespace(result=lambda: (last % 2).float())
