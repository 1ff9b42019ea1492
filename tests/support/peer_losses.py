"""Losses of verl and TRL, live and unmodified, on the tensors of a `Case`.

Their functions are taken out of their files (see `tepo_nemo.bench.peers`); what stands in for the rest of
those packages is here. In float64, and with 0 where a token is masked: neither keeps what is there out.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Optional
from unittest import mock

import numpy as np
import torch
from objectives.cases import MAX_LENGTH, Case
from torch import Tensor

from tepo_nemo.bench import peers


class PeerResult(NamedTuple):
    """Loss, its gradient by the log-probabilities [S, T], and the metrics that the peer tells."""

    loss: float
    gradient: np.ndarray
    metrics: dict[str, float]


class ActorConfig:
    """verl's settings of a loss, and the totals of the mini-batch."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)
        self.clip_ratio = None
        self.policy_loss = SimpleNamespace(**values)

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@cache
def verl() -> ModuleType:
    """verl's losses, KL estimators and advantages; peers.Absent where it is not installed."""
    folder = peers.folder_of("verl")
    functional = peers.load_functions(
        folder / "utils/torch_functional.py", ["masked_sum", "masked_mean"], {"torch": torch}
    )
    unchanged = mock.Mock(return_value=lambda function: function)  # of a decorator that registers
    return peers.load_functions(
        folder / "trainer/ppo/core_algos.py",
        [
            "agg_loss",
            *(f"compute_policy_loss_{name}" for name in ("vanilla", "gspo", "gpg", "clip_cov", "kl_cov")),
            *(f"compute_{name}_outcome_advantage" for name in ("grpo", "rloo", "gpg")),
            "kl_penalty",
            "kl_penalty_forward",
        ],
        {
            "torch": torch,
            "np": np,
            "defaultdict": defaultdict,
            "Any": Any,
            "Optional": Optional,
            "verl_F": functional,
            "ActorConfig": ActorConfig,
            "AlgoConfig": type("AlgoConfig", (), {}),
            "AdvantageEstimator": mock.Mock(),
            "register_policy_loss": unchanged,
            "register_adv_est": unchanged,
        },
    )


@cache
def _verl_correction() -> ModuleType:
    folder = peers.folder_of("verl")
    functional = peers.load_functions(
        folder / "utils/torch_functional.py", ["masked_sum", "masked_mean"], {"torch": torch}
    )
    return peers.load_functions(
        folder / "trainer/ppo/rollout_corr_helper.py",
        ["_parse_rollout_is_threshold", "compute_rollout_correction_weights"],
        {
            "torch": torch,
            "Optional": Optional,
            "verl_F": functional,
            "SAFETY_BOUND": 20.0,
            "compute_is_metrics": lambda **_: {},
        },
    )


def verl_weights(gap: Tensor, mask: Tensor, threshold: float | str) -> Tensor:
    """verl's weights of tokens [S, T] by the log-ratio of policy to engine; "low_high" is IcePop."""
    compute = _verl_correction().compute_rollout_correction_weights
    return compute(gap, mask.to(gap.dtype), rollout_is="token", rollout_is_threshold=threshold)[0]


def verl_loss(
    name: str,
    case: Case,
    aggregation: str,
    whole: Case | None = None,
    weights: np.ndarray | None = None,
    **options: Any,
) -> PeerResult:
    """One of verl's losses on a micro-batch of the mini-batch `whole`, with that one's denominators."""
    whole = whole or case
    config = ActorConfig(
        global_batch_info={
            "dp_size": 1,
            "batch_num_tokens": max(1, len(whole.valid)),
            "global_batch_size": max(1, len({row for row, _ in whole.valid})),
            "loss_scale_factor": MAX_LENGTH,
        },
        **options,
    )
    loss_function = getattr(verl(), f"compute_policy_loss_{name}")
    told: dict[str, float] = {}

    def loss(logprobs: Tensor) -> Tensor:
        value, metrics = loss_function(
            old_log_prob=_tensor(case, case.old_logprobs),
            log_prob=logprobs,
            advantages=_tensor(case, case.advantages),
            response_mask=torch.tensor(case.mask).double(),
            loss_agg_mode=aggregation,
            config=config,
            rollout_is_weights=None if weights is None else _tensor(case, weights),
        )
        told.update(metrics)
        return value

    return PeerResult(*_with_gradient(loss, case), told)


@cache
def _trl() -> ModuleType:
    folder = peers.folder_of("trl") / "trainer"
    extremes = peers.load_functions(folder / "utils.py", ["nanmin", "nanmax"], {"torch": torch})
    return peers.load_functions(
        folder / "grpo_trainer.py",
        ["GRPOTrainer._compute_loss"],
        {"torch": torch, "nanmin": extremes.nanmin, "nanmax": extremes.nanmax},
    )


def trl_loss(
    loss_type: str,
    case: Case,
    *,
    clip_low: float,
    clip_high: float,
    level: str = "token",
    dual_clip: float | None = None,
    kl_coefficient: float = 0.0,
) -> PeerResult:
    """TRL's GRPO loss on a mini-batch of one micro-batch; advantages are one a response."""
    compute_loss = _trl()._compute_loss
    metrics = defaultdict(list)

    def loss(logprobs: Tensor) -> Tensor:
        entropy = _tensor(case, case.entropy)
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=level,
            beta=kl_coefficient,
            loss_type=loss_type,
            epsilon_low=clip_low,
            epsilon_high=clip_high,
            args=SimpleNamespace(delta=dual_clip, use_bias_correction_kl=False, steps_per_generation=1),
            use_vllm=False,
            current_gradient_accumulation_steps=1,
            max_completion_length=MAX_LENGTH,
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
            ),
            model=SimpleNamespace(training=True),
            _entropy_bonus_enabled=False,
            _metrics={"train": metrics},
        )
        rows, width = case.mask.shape
        nothing = torch.zeros(rows, 0)
        return compute_loss(
            trainer,
            None,
            {
                "prompt_ids": nothing,
                "prompt_mask": nothing,
                "completion_ids": torch.zeros(rows, width),
                "completion_mask": torch.tensor(case.mask).double(),
                "advantages": _tensor(case, case.advantages).sum(1) / case.mask.sum(1).clip(1),
                "old_per_token_logps": _tensor(case, case.old_logprobs),
                "ref_per_token_logps": _tensor(case, case.reference_logprobs),
                "num_items_in_batch": torch.tensor(len(case.valid)),
            },
        )

    return PeerResult(*_with_gradient(loss, case), {name: values[0] for name, values in metrics.items()})


def _tensor(case: Case, values: np.ndarray) -> Tensor:
    return torch.tensor(np.where(case.mask, values, 0))


def _with_gradient(loss: Callable[[Tensor], Tensor], case: Case) -> tuple[float, np.ndarray]:
    logprobs = _tensor(case, case.logprobs).requires_grad_()
    value = loss(logprobs)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return value.item(), gradient.numpy()
