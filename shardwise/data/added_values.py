"""Samples with values of a model that were computed once, such as log-probabilities of a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardwise.data.dataset import Dataset, Sample

UnitValues = Mapping[int, npt.NDArray[np.float64]]
"""By sample number: the values [units, ...] of its units."""


class AddedValues(Dataset):
    """A dataset whose samples have further arrays.

    Args:
        values: of each array, by its name. Samples that are asked for must have them.
    """

    def __init__(self, dataset: Dataset, values: Mapping[str, UnitValues]) -> None:
        self._dataset = dataset
        self._values = values
        self.endless = dataset.endless

    def __len__(self) -> int:
        return len(self._dataset)

    def sample(self, index: int) -> Sample:
        added = {name: by_sample[index] for name, by_sample in self._values.items()}
        return {**self._dataset.sample(index), **added}

    def padding(self) -> Sample:
        # One unit, with the shape that the units of any sample have.
        nothing = {
            name: np.zeros((1, *next(iter(by_sample.values())).shape[1:]))
            for name, by_sample in self._values.items()
            if by_sample
        }
        return {**self._dataset.padding(), **nothing}

    def text(self, index: int) -> str:
        return self._dataset.text(index)

    @property
    def fill(self) -> Mapping[str, int]:
        return {**self._dataset.fill, **dict.fromkeys(self._values, 0)}

    def release(self) -> None:
        self._dataset.release()

    def filled(self, index: int) -> int | None:
        return self._dataset.filled(index)

    def where(self, indices: Sequence[int]) -> str:
        return self._dataset.where(indices)

    @property
    def epoch(self) -> int:
        return self._dataset.epoch

    def samples(self, step: int, batch_size: int, seed: int) -> list[int]:
        return self._dataset.samples(step, batch_size, seed)

    def cursor(self, consumed: int) -> tuple[str, ...]:
        return self._dataset.cursor(consumed)

    def begin_at(self, cursor: Sequence[str]) -> None:
        self._dataset.begin_at(cursor)
