"""A mixture of datasets: the order in which their samples come.

Positions are counted over the whole run and divided into blocks of 1,024. Every block has the same number of samples of
each dataset, by its weight (largest remainder), in a pseudo-random order that depends on (seed, block) alone. So the
n-th sample of a dataset is known for any position in O(1): no state is saved, and a resumed run, or one on another
number of ranks, reads the same samples. Each dataset has its own permutation per epoch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwise.core.errors import RecipeError
from shardwise.data.dataset import Dataset, Sample
from shardwise.data.shuffle import Permutation

BLOCK_SIZE = 1024


class Mixture(Dataset):
    """The samples of several datasets, numbered one dataset after the other.

    Args:
        weights: of each dataset; only their ratios matter.

    Attributes:
        counts: samples of each dataset in a block.

    Raises:
        RecipeError: a weight is below half a sample in a block.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]) -> None:
        self._datasets = datasets
        self._offsets = np.concatenate([[0], np.cumsum([len(dataset) for dataset in datasets])])
        self.counts = counts_of(weights)
        self._ends = np.cumsum(self.counts)

    @property
    def fill(self) -> Mapping[str, int]:
        return {name: value for dataset in self._datasets for name, value in dataset.fill.items()}

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def _source_of(self, index: int) -> tuple[Dataset, int]:
        """The dataset of a sample, and the sample's number there."""
        source = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return self._datasets[source], index - int(self._offsets[source])

    def sample(self, index: int) -> Sample:
        dataset, number = self._source_of(index)
        return dataset.sample(number)

    def padding(self) -> Sample:
        return self._datasets[0].padding()

    def release(self) -> None:
        for dataset in self._datasets:
            dataset.release()

    def filled(self, index: int) -> int | None:
        dataset, number = self._source_of(index)
        return dataset.filled(number)

    def text(self, index: int) -> str:
        dataset, number = self._source_of(index)
        return dataset.text(number)

    # -- order

    def samples(self, step: int, batch_size: int, seed: int) -> list[int]:
        samples: list[int] = []
        position = step * batch_size
        end = (step + 1) * batch_size
        while position < end:
            block, offset = divmod(position, BLOCK_SIZE)
            taken = min(BLOCK_SIZE - offset, end - position)
            offsets = np.arange(offset, offset + taken, dtype=np.uint64)
            slots = Permutation(BLOCK_SIZE, seed, block)(offsets).astype(np.int64)
            # Before the permutation, a block has the slots of dataset 0, then those of dataset 1, and so on.
            sources = np.searchsorted(self._ends, slots, side="right")
            samples += [
                self._sample_at(int(source), block, int(slot), seed)
                for source, slot in zip(sources, slots, strict=True)
            ]
            position += taken
        return samples

    def _sample_at(self, source: int, block: int, slot: int, seed: int) -> int:
        """The sample in a slot of a block, which is one of the slots of a dataset."""
        count = self.counts[source]
        size = self._datasets[source].epoch
        # The slots of a dataset number its draws: those of block b are b * count .. (b + 1) * count - 1.
        draw = block * count + slot - int(self._ends[source]) + count
        epoch, position = divmod(draw, size)
        # Seeds of datasets are above those of recipes, so that no dataset has the order of another run.
        order = Permutation(size, seed + ((source + 1) << 64), epoch)
        first = int(self._offsets[source]) + (epoch * size if self._datasets[source].endless else 0)
        return first + int(order(np.array([position], dtype=np.uint64))[0])

    def cursor(self, consumed: int) -> tuple[str, ...]:
        """One text per dataset, "" for one without a state: where its draws of the block begin."""
        block = consumed // BLOCK_SIZE
        pairs = zip(self._datasets, self.counts, strict=True)
        cursors = [dataset.cursor(block * count) for dataset, count in pairs]
        return tuple("".join(cursor) for cursor in cursors) if any(cursors) else ()

    def begin_at(self, cursor: Sequence[str]) -> None:
        for dataset, text in zip(self._datasets, cursor, strict=bool(cursor)):
            dataset.begin_at((text,))


def counts_of(weights: Sequence[float]) -> list[int]:
    """Samples of each dataset in a block: BLOCK_SIZE shared out by the largest remainders. Raises RecipeError."""
    shares = [BLOCK_SIZE * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    # The largest remainder first; of equal ones, the first dataset.
    by_remainder = sorted(range(len(shares)), key=lambda source: (counts[source] - shares[source], source))
    for source in by_remainder[: BLOCK_SIZE - sum(counts)]:
        counts[source] += 1
    if 0 in counts:
        why = f"it is less than a {BLOCK_SIZE}th of all"
        where = f"data.mixture[{counts.index(0)}].weight"
        raise RecipeError(
            "the weight is too small", where=where, why=why, fix="raise it, or leave the source out"
        )
    return counts
