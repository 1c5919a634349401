"""Objectives whose batches the trained model samples itself.

The trainer and the dry run know them by this interface. A *unit* is the number of optimizer steps that train on one
rollout: a run can be saved, resumed and rewound only between units, where the weights alone repeat what follows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.core.strategy import Strategy
from shardwise.engine.run import Run
from shardwise.model.blueprint import Batch, Blueprint, ForwardOnly, TrainingObjective


class Sampler(Protocol):
    """What samples completions and computes on them: a rank of a run, or one plain process.

    Attributes:
        data_rank, data_degree: the share of the batch, and the number of shares.
        leads: whether this is the first of the ranks that read the same share.
    """

    @property
    def objective(self) -> TrainingObjective: ...

    @property
    def blueprint(self) -> Blueprint: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def passes(self) -> ForwardOnly: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def strategy(self) -> Strategy: ...

    @property
    def data_rank(self) -> int: ...

    @property
    def data_degree(self) -> int: ...

    @property
    def leads(self) -> bool: ...

    def local_batch(self, batch: Batch) -> Batch:
        """The part of a micro-batch of this share that the model runs on."""

    def exceeded(self) -> bool:
        """Whether passes left out tokens of experts for lack of room, and must be run again; there is more room now."""

    def sampling(self) -> AbstractContextManager[None]:
        """Within it the model continues texts token by token, whole ones on every rank."""


class Prompts(Protocol):
    """What completions are sampled for."""

    tokenizer: Any

    def records(self, step: int) -> Sequence[Mapping[str, Any]]:
        """The prompts of a position: ``prompt`` and ``closing`` (tokens), and ``fields`` (the record)."""

    @property
    def validation_sets(self) -> list[str]:
        """The names of the sets of prompts that are not trained on."""

    def held_out_records(self, name: str) -> Sequence[Mapping[str, Any]]:
        """The prompts of such a set."""


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
    def batches(self, sampler: Sampler, prompts: Prompts, folder: Path | None = None) -> PositionedBatches:
        """In the place of the batches of the data.

        Args:
            folder: of rollouts that several runs train on: those in it are read, and others are written to it.
        """

    def has_signal(self, batch: Batch) -> bool:
        """Whether rewards train anything in a batch; False where every advantage is zero."""
        return True

    @abstractmethod
    def rehearse(self, run: Run, batch: Batch, repeated: Repeated) -> None:
        """Allocate and compute on fake tensors what making the batches of a step takes.

        Args:
            batch: a micro-batch of this rank.
        """

    @abstractmethod
    def warm_up(self, run: Run) -> None:
        """Sample a few tokens of a tiny model, so that the kernels are loaded before memory is measured."""
