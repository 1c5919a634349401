"""All that must survive a restart beside tensors.

Weights and optimizer state are in the checkpoint's shards. The learning rate follows from the step, the order
of the data from seed and step; neither is stored, for what is derived cannot disagree with its source.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class TrainState:
    """Progress of a run.

    Attributes:
        step: optimizer steps done.
        tokens: valid targets trained on.
    """

    step: int = 0
    tokens: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Raises ValueError for all but an object with exactly these fields, whole numbers not negative."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ValueError(f"a training state has the fields {', '.join(sorted(names))}")
        if not all(type(value) is int and value >= 0 for value in values.values()):
            raise ValueError("a training state holds whole numbers")
        return cls(**values)
