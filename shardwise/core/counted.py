"""What the figures of a run count: the units of its rates and of its loss."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Unit: TypeAlias = Literal["tokens", "samples"]
"""What a run reads, for its rates."""


class Units(NamedTuple):
    """What a run reads, and what its loss is a mean over: tokens, of a model's own loss; pairs, for example, of an
    objective on preferences.
    """

    read: Unit = "tokens"
    trained: str = "tokens"


TOKENS = Units()
