"""What every section of a recipe is made of: the base class and the kinds of values that several keys share.

Apart from recipe.py so that the list of keys there stays one page.
"""

import math
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Scalar: TypeAlias = str | int | float | bool | None
Count: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000_000)]
Dimension: TypeAlias = Annotated[int, Field(ge=1, le=10_000_000)]
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=4096)]


def pair(value: object) -> object:
    """A list of YAML as the tuple it stands for. Raises ValueError unless it has two items."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("a list of two numbers, such as [0.9, 0.95]")
    return tuple(value)


def share(value: object) -> object:
    """Raises ValueError unless `value` is a number of steps (int) or a fraction of them (float below 1)."""
    steps = type(value) is int and 0 <= value <= 1_000_000_000
    if not steps and not (type(value) is float and 0 <= value < 1):
        raise ValueError("a whole number of steps or a fraction from 0 to below 1")
    return value


def steps_of(share: float, steps: int) -> int:
    """A whole number is steps; a fraction, of ``steps``, rounded up (0.07 of 100 is 7, though not in binary)."""
    return math.ceil(round(share * steps, 6)) if share < 1 else int(share)


class Section(BaseModel):
    """What all sections share: immutable, no unknown keys, no coercion, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
