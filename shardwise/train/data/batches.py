"""`Data`: which samples an optimizer step takes, and which of them this rank puts into which micro-batch.

The samples of a step are `batch_size` numbers that depend on (seed, step) alone (see `order`). They are dealt
to *slots*: with data-parallel degree d and micro-batches of m, row i of micro-batch j on rank r is slot
(j*d + r)*m + i, and slot k takes sample k of the step. So one micro-batch across the ranks is a contiguous
stretch of the step, another world or micro-batch size deals the same samples differently, and what any of
them sums over a step is the same. Slots past the last sample are padding that no loss counts; all ranks have
M = ceil(batch_size / (d*m)) micro-batches, because a rank with one fewer would leave its peers waiting.

There is no iterator and no state: a step is asked for by its number. A prefetching loader with workers was
refused, because slicing a mapped file takes microseconds next to a step; the price falls on user datasets
whose items are slow to make.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.train.data.order import samples_of_step
from shardwise.train.data.samples import Batch, Samples
from shardwise.train.data.tokenizer import Tokenizer

_HELD_OUT_SEED = 0


class Data:
    """Training and held-out samples, addressed by optimizer step.

    Attributes:
        vocab: the number of token ids, or None for a factory's own dataset.
        fingerprint: equal for two data exactly when sample numbers mean the same samples (of a factory's
            dataset: as far as its first and last item tell); independent of paths, seed and world size.
        tokenizer: what made the tokens, or None for a factory's own dataset.
    """

    def __init__(
        self,
        train: Samples,
        held_out: Samples,
        *,
        tokenizer: Tokenizer | None,
        fingerprint: str,
        batch_size: int,
        seed: int,
        evaluation_sequences: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.vocab = tokenizer.vocab if tokenizer else None
        self._train, self._held_out = train, held_out
        self._batch_size, self._seed = batch_size, seed
        self._evaluation = min(evaluation_sequences, len(held_out))

    @property
    def train_sequences(self) -> int:
        """Training samples in an epoch."""
        return len(self._train)

    @property
    def held_out_sequences(self) -> int:
        """Held-out samples; 0 when the recipe holds none out or the data is a single sequence."""
        return len(self._held_out)

    def samples(self, step: int) -> list[int]:
        """The `batch_size` sample numbers of optimizer step `step`, which counts from 0."""
        return samples_of_step(step, self._batch_size, len(self._train), self._seed)

    def micro_batches(self, step: int, rank: int, degree: int, micro_batch_size: int) -> list[Batch]:
        """The micro-batches of data-parallel rank `rank` of `degree` in optimizer step `step`, in order.

        Each has `micro_batch_size` rows, padding included: for text `input_ids` and `labels`, both
        [micro_batch_size, sequence_length] int64 on the CPU, labels already shifted, -100 where not counted.
        """
        slots = deal(self.samples(step), rank, degree, micro_batch_size)
        return [self._train.batch(rows) for rows in slots]

    def held_out(self, index: int, rank: int, degree: int, micro_batch_size: int) -> list[Batch]:
        """The micro-batches of held-out evaluation `index`, dealt like those of a step.

        Evaluation 0 takes the first `evaluation.sequences` held-out samples (all, where there are fewer) of
        an order that is shuffled once for all, so that a few of them speak for many documents; evaluation 1
        takes the next, and so on around. Neither the recipe's seed nor the step changes what an index means.
        The list is empty when nothing is held out.
        """
        samples: list[int] = []
        if self._evaluation:
            samples = samples_of_step(index, self._evaluation, len(self._held_out), _HELD_OUT_SEED)
        return [self._held_out.batch(rows) for rows in deal(samples, rank, degree, micro_batch_size)]

    def text(self, sample: int) -> str:
        """Training sample `sample` as a person would read it, for logs."""
        return self._train.text(sample)


def deal(samples: Sequence[int], rank: int, degree: int, micro_batch_size: int) -> list[list[int | None]]:
    """The rows of each micro-batch of `rank`: sample numbers, or None for padding.

    Raises:
        ValueError: the rank is not within 0..degree-1, or there is no row to deal to.
    """
    if not 0 <= rank < degree or micro_batch_size < 1:
        raise ValueError(f"rank {rank} of {degree}, micro-batches of {micro_batch_size}")
    count = -(-len(samples) // (degree * micro_batch_size))
    starts = [(j * degree + rank) * micro_batch_size for j in range(count)]
    return [
        [samples[k] if k < len(samples) else None for k in range(start, start + micro_batch_size)]
        for start in starts
    ]
