"""`Data`: the samples of an optimizer step, and their assignment to ranks and micro-batches.

The samples of a step are `batch_size` numbers that depend only on (seed, step); see `shuffle`. Each sample gets a
*slot*: with data-parallel degree d and micro-batch size m, row i of micro-batch j on rank r is slot (j*d + r)*m + i,
and slot k holds sample k of the step. So one micro-batch across the ranks is a contiguous range of the step. Another
world size or micro-batch size assigns the same samples differently, and the sum over a step stays the same. Slots after
the last sample are padding, which the loss ignores. All ranks have M = ceil(batch_size / (d*m)) micro-batches: with one
fewer, a rank would leave the others waiting in a collective.

There is no iterator and no state: callers ask for a step by its number. There is no prefetching loader with workers,
because slicing a memory-mapped file takes microseconds. User datasets with slow items pay for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.data.masking import Masking
from shardwise.data.mixing import MixedOrder, MixedSamples
from shardwise.data.samples import Batch, Samples, StreamedSamples
from shardwise.data.shuffle import samples_of_step
from shardwise.data.tokenizer import Tokenizer

_HELD_OUT_SEED = 0
OWN = ""
"""The validation set that is held out of the training data; others have names."""


class Data:
    """Training and held-out samples, addressed by optimizer step.

    Attributes:
        vocab: the number of token ids, or None for a factory's own dataset.
        fingerprint: equal for two data exactly if sample numbers mean the same samples (for a factory's dataset
            only its first and last item are compared); independent of paths, seed and world size.
        tokenizer: the tokenizer, or None for a factory's own dataset.
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
        masking: Masking | None = None,
        order: MixedOrder | None = None,
        sets: Mapping[str, Samples] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.vocab = tokenizer.vocab if tokenizer else None
        self._train = train
        self._batch_size, self._seed, self._masking = batch_size, seed, masking
        self._order = order
        sides = train.sources if isinstance(train, MixedSamples) else [train]
        self._streams = [side.windows if isinstance(side, StreamedSamples) else None for side in sides]
        self._sets: dict[str, Samples] = {OWN: held_out, **(sets or {})}
        self._evaluation = evaluation_sequences

    @property
    def train_sequences(self) -> int:
        """Training samples in an epoch."""
        return len(self._train)

    @property
    def held_out_sequences(self) -> int:
        """Validation (held-out) samples; 0 if the recipe holds none out or the data is a single sequence."""
        return len(self._sets[OWN])

    @property
    def validation_sets(self) -> list[str]:
        """The names of the sets that have samples: OWN, and those of the recipe."""
        return [name for name, samples in self._sets.items() if len(samples)]

    def samples(self, step: int) -> list[int]:
        """The `batch_size` sample numbers of optimizer step `step`, which counts from 0."""
        if self._order is not None:
            return self._order.samples(step, self._batch_size)
        if isinstance(self._train, StreamedSamples):
            size = self._train.windows.sequences
            return samples_of_step(step, self._batch_size, size, self._seed, streamed=True)
        return samples_of_step(step, self._batch_size, len(self._train), self._seed)

    def cursor(self, step: int) -> tuple[str, ...]:
        """Where the streams are before optimizer step `step`, for a checkpoint: one text per source, "" if unknown."""
        if not any(self._streams):
            return ()
        if self._order is not None:
            numbers = self._order.windows(step, self._batch_size)
        else:
            numbers = [step * self._batch_size // stream.sequences for stream in self._streams if stream]
        pairs = zip(self._streams, numbers, strict=True)
        return tuple(stream.cursor(number) if stream else "" for stream, number in pairs)

    def begin_at(self, cursor: Sequence[str]) -> None:
        """Go on at the `cursor` of a checkpoint of the same data."""
        for stream, text in zip(self._streams, cursor, strict=bool(cursor)):
            if stream is not None:
                stream.begin_at(text)

    def micro_batches(self, step: int, rank: int, degree: int, micro_batch_size: int) -> list[Batch]:
        """The micro-batches of data-parallel rank `rank` of `degree` in optimizer step `step`, in order.

        Each has `micro_batch_size` rows, padding included. For text these are `input_ids` and `labels`, both
        [micro_batch_size, sequence_length] int64 on the CPU. Labels are already shifted; -100 marks ignored targets.
        """
        slots = deal(self._batch_size, rank, degree, micro_batch_size)
        return self._batches(self._train, self.samples(step), ("train", self._seed, step), slots)

    def held_out(
        self, index: int, rank: int, degree: int, micro_batch_size: int, name: str = OWN
    ) -> list[Batch]:
        """The micro-batches of validation `index` of a set, assigned to ranks like those of a step.

        The held-out samples are shuffled once, so that a few samples represent many documents. Evaluation 0 uses the
        first `evaluation.sequences` of them (all, if there are fewer), evaluation 1 the next, and so on, cyclically.
        The recipe's seed and the step do not change the samples of an index. The list is empty if nothing is held out.
        """
        side, samples = self._sets[name], list[int]()
        if count := min(self._evaluation, len(side)):
            samples = samples_of_step(index, count, len(side), _HELD_OUT_SEED)
        slots = deal(len(samples), rank, degree, micro_batch_size)
        return self._batches(side, samples, ("held out", _HELD_OUT_SEED, index), slots)

    def _batches(
        self, side: Samples, samples: list[int], step: tuple[str, int, int], slots: list[list[int | None]]
    ) -> list[Batch]:
        """The micro-batches with these slots of a step."""
        rows = [[None if slot is None else samples[slot] for slot in each] for each in slots]
        batches = [side.batch(each) for each in rows]
        if self._masking is None:
            return batches
        pairs = zip(batches, slots, strict=True)
        return [self._masking.masked(batch, step, each) for batch, each in pairs]

    def filled(self, step: int) -> list[int | None]:
        """Number of tokens before the padding, of each sample of optimizer step `step`; None if it has no padding."""
        return [self._train.filled(sample) for sample in self.samples(step)]

    def text(self, sample: int) -> str:
        """Training sample `sample` as text, for logs."""
        return self._train.text(sample)


def deal(filled: int, rank: int, degree: int, micro_batch_size: int) -> list[list[int | None]]:
    """The slots of each micro-batch of `rank`, of which the first `filled` have a sample; None for padding.

    Raises:
        ValueError: the rank is not within 0..degree-1, or the micro-batch size is below 1.
    """
    if not 0 <= rank < degree or micro_batch_size < 1:
        raise ValueError(f"rank {rank} of {degree}, micro-batches of {micro_batch_size}")
    count = -(-filled // (degree * micro_batch_size))
    starts = [(j * degree + rank) * micro_batch_size for j in range(count)]
    return [
        [slot if slot < filled else None for slot in range(start, start + micro_batch_size)]
        for start in starts
    ]
