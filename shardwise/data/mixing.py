"""A mixture of sources: the order in which their samples come, and batches out of several sources.

Positions are counted over the whole run and divided into blocks of 1,024. Every block has the same number of samples of
each source, by its weight (largest remainder), in a pseudo-random order that depends on (seed, block) alone. So the
n-th sample of a source is known for any position in O(1): no state is saved, and a resumed run, or one on another
number of ranks, reads the same samples. Each source has its own permutation per epoch of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from shardwise.core.errors import RecipeError
from shardwise.data.samples import FAR, Batch, Samples, joined
from shardwise.data.shuffle import Permutation

BLOCK = 1024


class MixedOrder:
    """Which sample comes at which position.

    Args:
        sizes: number of samples of each source; of a stream, those of a window.
        weights: of each source; only their ratios matter.
        streamed: the sources that are streams (`windows`).

    Raises:
        RecipeError: a weight is below half a sample in a block.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, streamed: Collection[int] = ()
    ) -> None:
        self._sizes, self._seed, self._streamed = sizes, seed, streamed
        self.counts = counts_of(weights)
        self._ends = np.cumsum(self.counts)
        lengths = [FAR if source in streamed else size for source, size in enumerate(sizes)]
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])

    def windows(self, step: int, batch_size: int) -> list[int]:
        """The first window that each source may be asked for from ``step`` on."""
        block = step * batch_size // BLOCK
        return [block * count // size for count, size in zip(self.counts, self._sizes, strict=True)]

    def samples(self, step: int, batch_size: int) -> list[int]:
        """The sample numbers of optimizer step ``step``: those of source s begin at the sum of the sizes before it."""
        found: list[int] = []
        position, end = step * batch_size, (step + 1) * batch_size
        while position < end:
            block, offset = divmod(position, BLOCK)
            taken = min(BLOCK - offset, end - position)
            places = np.arange(offset, offset + taken, dtype=np.uint64)
            slots = Permutation(BLOCK, self._seed, block)(places).astype(np.int64)
            sources = np.searchsorted(self._ends, slots, side="right")
            found += [self._sample(int(s), block, int(slot)) for s, slot in zip(sources, slots, strict=True)]
            position += taken
        return found

    def _sample(self, source: int, block: int, slot: int) -> int:
        count = self.counts[source]
        draw = (
            block * count + slot - int(self._ends[source]) + count
        )  # the slots of a source number its draws
        epoch, place = divmod(draw, self._sizes[source])
        # Seeds of sources are above those of recipes, so that no source has the order of another run.
        permuted = Permutation(self._sizes[source], self._seed + ((source + 1) << 64), epoch)
        first = int(self._offsets[source]) + (epoch * self._sizes[source] if source in self._streamed else 0)
        return first + int(permuted(np.array([place], dtype=np.uint64))[0])


def counts_of(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a block: BLOCK shared out by the largest remainders. Raises RecipeError."""
    shares = [BLOCK * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda s: (counts[s] - shares[s], s))
    for source in by_remainder[: BLOCK - sum(counts)]:
        counts[source] += 1
    if 0 in counts:
        why = f"it is less than a {BLOCK}th of all"
        where = f"data.mixture[{counts.index(0)}].weight"
        raise RecipeError(
            "the weight is too small", where=where, why=why, fix="raise it, or leave the source out"
        )
    return counts


class MixedSamples(Samples):
    """The samples of several ``sources``, numbered one source after the other."""

    def __init__(self, sources: Sequence[Samples]) -> None:
        self.sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, sample: int) -> tuple[Samples, int]:
        source = int(np.searchsorted(self._ends, sample, side="right"))
        return self.sources[source], sample - int(self._ends[source]) + len(self.sources[source])

    def batch(self, samples: Sequence[int | None]) -> Batch:
        rows = []
        for sample in samples:
            side, own = (self.sources[0], None) if sample is None else self._find(sample)
            rows.append(side.batch([own]))
        return joined(rows)

    def filled(self, sample: int) -> int | None:
        side, own = self._find(sample)
        return side.filled(own)

    def text(self, sample: int) -> str:
        side, own = self._find(sample)
        return side.text(own)
