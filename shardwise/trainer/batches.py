"""This rank's batches, on its device."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from shardwise.core.errors import DataError, RecipeError
from shardwise.data import Data
from shardwise.engine.sampling import PositionedBatches, Sampler, SamplingObjective
from shardwise.model.blueprint import Batch, Blueprint
from shardwise.runtime.offload.host import to_device
from shardwise.technique import MICRO_BATCH_SIZE


class RankBatches:
    """Reads the share of one rank from the data of a run."""

    unit = 1

    def __init__(self, data: Data, run: Sampler) -> None:
        self._data = data
        self._run = run
        # Ranks of one share, as those of a tensor or pipeline axis, read the same samples.
        self._share = (run.data_rank, run.data_degree, run.strategy[MICRO_BATCH_SIZE])

    def at(self, position: int) -> list[Batch]:
        """The micro-batches at a position in the order of the data."""
        return self._on_device(self._data.micro_batches(position, *self._share))

    @property
    def validation_sets(self) -> list[str]:
        """The names of all validation sets with samples; "" is that of the run's own data."""
        return self._data.validation_sets

    def validation(self, name: str = "") -> list[Batch]:
        """All micro-batches of this rank of a validation set; empty when it has no samples."""
        if name not in self.validation_sets:
            return []
        return self._on_device(self._data.held_out(0, *self._share, name))

    def forget(self) -> None:
        """Nothing: the batches depend on nothing but the position."""

    def _on_device(self, batches: list[Batch]) -> list[Batch]:
        device = self._run.device
        return [{key: to_device(value, device) for key, value in batch.items()} for batch in batches]


def batches_of(data: Data, run: Sampler, folder: Path | None = None) -> PositionedBatches:
    """The batches of the data, or those that the model samples itself; ``folder`` is of rollouts that runs share."""
    if isinstance(run.objective, SamplingObjective):
        return run.objective.batches(run, data, folder)
    return RankBatches(data, run)


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of each step (engine/run.py, ``BatchSource``).

    Attributes:
        position: where a step reads in the order of the data.
        steps: of the whole run.
    """

    batches: PositionedBatches
    position: Callable[[int], int]
    steps: int

    def micro_batches(self, step: int) -> list[Batch]:
        return self.batches.at(self.position(step)) if step < self.steps else []


def require_one_data(data: Data) -> None:
    """Raise DataError if ranks read other data: each node has files and a cache of its own. Collective.

    Each rank computes the order of samples from its own data, so samples would repeat or be left out. Of a factory's
    dataset the lengths are compared, because its items may be random.
    """
    # (samples, fingerprint, host) by rank. All ranks compare the same list, so all raise or none does.
    by_rank: list[tuple[int, str, str]] = [(0, "", "")] * dist.get_world_size()
    fingerprint = data.fingerprint if data.tokenizer else ""
    dist.all_gather_object(by_rank, (data.train_sequences, fingerprint, socket.gethostname()))
    other = next((rank for rank, identity in enumerate(by_rank) if identity[:2] != by_rank[0][:2]), None)
    if other is None:
        return
    expected = by_rank[0][0]
    count, _, host = by_rank[other]
    if count == expected:
        why = "their tokens differ"
    else:
        why = f"rank 0 has {expected:,} training samples, this one {count:,}"
    fix = "give every node the same files and tokenizer, or a folder that all share"
    raise DataError("the ranks read different data", where=f"rank {other} on {host}", why=why, fix=fix)


def require_vocabulary(blueprint: Blueprint, data: Data, fix: str = "") -> None:
    """Raise RecipeError if the data has token ids beyond the model's vocabulary.

    Args:
        fix: what to do about it, where the model is given; "" for a recipe's.
    """
    if blueprint.vocab is None or data.vocab is None or data.vocab <= blueprint.vocab:
        return
    if blueprint.origin is None:
        raise RecipeError(
            f"the model's vocabulary of {blueprint.vocab:,} is too small",
            where="model.vocab",
            why=f"the tokenizer has {data.vocab:,} tokens",
            fix=fix or f"set model.vocab to at least {data.vocab}",
        )
    raise RecipeError(
        f"the model has {blueprint.vocab:,} embeddings, and the tokenizer {data.vocab:,} tokens",
        where=f"model.hf: {blueprint.origin}",
        fix=fix
        or f"resize it in transformers first, model.resize_token_embeddings({data.vocab}) and save_pretrained,"
        " or give its own tokenizer",
    )
