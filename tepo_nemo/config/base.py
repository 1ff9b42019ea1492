"""What all sections of the configuration share."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Immutable, and strict: no unknown key, no text where a number is asked for."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )


Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LocalPath = Annotated[Path, Field(strict=False), AfterValidator(lambda path: path.expanduser().absolute())]
"""Made absolute when it is read, so that a saved configuration means the same from every folder."""
