"""Objectives whose batches the trained model samples itself.

The trainer and the dry run know them by this interface. A *unit* is the number of optimizer steps that train on one
rollout: a run can be saved, resumed and rewound only between units, where the weights alone repeat what follows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shardwise.engine.run import Run
from shardwise.model.blueprint import Batch, TrainingObjective


class Prompts(Protocol):
    """What completions are sampled for."""

    tokenizer: Any

    def records(self, step: int) -> Sequence[Mapping[str, Any]]:
        """The prompts of a position: ``prompt`` (tokens) and ``fields`` (the record)."""


class PositionedBatches(Protocol):
    """This rank's micro-batches, by position in the order of the data.

    Attributes:
        unit: optimizer steps after which the weights and the position alone say what follows.
    """

    unit: int

    def at(self, position: int) -> list[Batch]: ...

    @property
    def validation_sets(self) -> list[str]: ...

    def validation(self, name: str = "") -> list[Batch]: ...

    def forget(self) -> None:
        """The run was rewound."""


Repeated = Callable[[float], AbstractContextManager[None]]
"""The costs of the block count so many times in a step."""


class SamplingObjective(TrainingObjective):
    """An objective with batches of its own."""

    @abstractmethod
    def batches(self, run: Run, prompts: Prompts) -> PositionedBatches:
        """In the place of the batches of the data."""

    @abstractmethod
    def rehearse(self, run: Run, batch: Batch, repeated: Repeated) -> None:
        """Allocate and compute on fake tensors what making the batches of a step takes.

        Args:
            batch: a micro-batch of this rank.
        """

    @abstractmethod
    def warm_up(self, run: Run) -> None:
        """Sample a few tokens of a tiny model, so that the kernels are loaded before memory is measured."""
