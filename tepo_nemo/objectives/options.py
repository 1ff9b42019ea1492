"""Types of options that several methods share. NaN is refused by each."""

from typing import Annotated

from pydantic import Field

ClipWidth = Annotated[float, Field(ge=0)]
"""How far a ratio may leave 1 on one side before the clip; `inf` switches that side off."""

DualClip = Annotated[float, Field(gt=1, allow_inf_nan=False)] | None
"""Largest ratio that counts for a negative advantage; null switches it off."""

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Weight of a term in the loss, or a tolerance; 0 switches it off."""

SelectedFraction = Annotated[float, Field(gt=0, le=1)]
"""Share of the mini-batch's tokens that a method selects; at least one is."""


def selected_tokens(fraction: float, tokens: int) -> int:
    """How many of a mini-batch's tokens a share is, max(1, int(fraction * tokens))."""
    return max(1, int(fraction * tokens))
