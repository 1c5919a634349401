"""What all sections of a recipe have in common."""

import ast
import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from shardwise.core.plugins import TRACKERS
from shardwise.core.user_objects import PATTERN

MOST_STEPS = 1_000_000_000
Count: TypeAlias = Annotated[int, Field(ge=1, le=MOST_STEPS)]
RecipeText: TypeAlias = Annotated[str, Field(min_length=1, max_length=4096)]
DeviceName: TypeAlias = Annotated[RecipeText, BeforeValidator(lambda v: str(v) if type(v) is int else v)]
"""A device or a preset. YAML reads names such as 4090 as numbers."""
ObjectName: TypeAlias = Annotated[str, Field(pattern=PATTERN, max_length=4096)]
"""A user's object, as package.module:name."""

Scalar: TypeAlias = str | int | float | bool | None
if TYPE_CHECKING:
    TrackerName: TypeAlias = str
else:
    TrackerName = Literal[tuple(TRACKERS)]  # those of the table of plugins


class Arguments(dict[str, Any]):
    """Keyword arguments that can be a part of a cache's key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))


def words(value: object) -> object:
    """A list as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def steps_or_share(value: object) -> object:
    """Check for a number of steps (int) or a fraction of all steps (float below 1). Raises ValueError otherwise."""
    steps = type(value) is int and 0 <= value <= MOST_STEPS
    if not steps and not (type(value) is float and 0 <= value < 1):
        raise ValueError("a whole number of steps or a fraction from 0 to below 1")
    return value


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no coercion, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """The documentation of each key: the string below it, read from the source on request.

        pydantic's ``use_attribute_docstrings`` reads it when a class is created, which takes an eighth of the time to
        a first error.
        """
        (made,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(made, ast.ClassDef)
        return {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in pairwise(made.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(text.value.value, str)
        }
