"""The values that options of the shipped methods take, by name: one name, one meaning, one kind of value.

The methods themselves declare their options, but need torch, and a login node has none. What two options must
agree on is left to them.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from tepo_nemo.config.base import Count, NonNegative
from tepo_nemo.config.messages import shown, wish
from tepo_nemo.errors import UserError

_ClipWidth = Annotated[float, Field(ge=0)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_AboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False)]

OPTIONS: dict[str, Any] = {
    "advantage_divisor": _AboveOne,
    "aggregation": Literal[
        "token-mean", "group-token-mean", "seq-mean-token-mean", "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    ],
    "buckets": Count,
    "clip_high": _ClipWidth,
    "clip_low": _ClipWidth,
    "covariance_high": _Finite,
    "covariance_low": _Finite,
    "dual_clip": _AboveOne | None,
    "entropy_bonus": NonNegative,
    "entropy_coefficient": NonNegative,
    "entropy_drop": Literal["entropy", "surprisal", "covariance"],
    "entropy_drop_tolerance": NonNegative,
    "gate_sharpness": NonNegative,
    "kl_coefficient": NonNegative,
    "kl_estimator": Literal["k1", "k2", "k3", "abs"],
    "kl_mask": Literal["tepo", "all", "none"],
    "next_weight": NonNegative,
    "process_scale": NonNegative,
    "process_std": NonNegative,
    "process_weight": NonNegative,
    "ratio": Literal["token", "sequence-geometric", "sequence-product", "none"],
    "ratio_gradient": Literal["full", "stop_gradient"],
    "selected_fraction": Annotated[float, Field(gt=0, le=1)],
    "surrogate": Literal["ppo", "printed"],
    "weight_decay": NonNegative,
    "window": Count,
}  # fmt: skip


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse a value that no method takes for an option of this name. Raises UserError on the first."""
    for key, value in options.items():
        if key in OPTIONS:
            try:
                _adapter(key).validate_python(value, strict=True)
            except ValidationError as error:
                mistake = error.errors(include_url=False)[0]
                raise UserError(f"algorithm.{key}={shown(value)}: {wish(mistake)}") from None


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    return TypeAdapter(OPTIONS[key])
