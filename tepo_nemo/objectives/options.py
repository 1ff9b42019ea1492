"""Types of options that several methods share. NaN is refused by each."""

from typing import Annotated

from pydantic import Field

ClipWidth = Annotated[float, Field(ge=0)]
"""How far a ratio may leave 1 on one side before the clip; `inf` switches that side off."""

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Weight of a term in the loss, or a tolerance; 0 switches it off."""
