"""`Data`: the samples of an optimizer step, and their assignment to ranks and micro-batches.

The samples of a step are `batch_size` numbers that depend only on (seed, step); see `shuffle`. Each sample gets a
*slot*: with data-parallel degree d and micro-batch size m, row i of micro-batch j on rank r is slot (j*d + r)*m + i,
and slot k holds sample k of the step. So one micro-batch across the ranks is a contiguous range of the step. Another
world size or micro-batch size assigns the same samples differently, and the sum over a step stays the same. Slots after
the last sample are padding, which the loss ignores. All ranks have M = ceil(batch_size / (d*m)) micro-batches: with one
fewer, a rank would leave the others waiting in a collective.

There is no iterator: callers ask for a step by its number. There is no prefetching loader with workers,
because slicing a memory-mapped file takes microseconds. User datasets with slow items pay for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import data as torch_data

from shardwise.core.cache_folder import default_root
from shardwise.core.errors import DataError
from shardwise.data.cache_header import json_hash
from shardwise.data.dataset import Dataset, Sample, Splits
from shardwise.data.masking import Masking
from shardwise.data.mixture import Mixture
from shardwise.data.opening import open_sources
from shardwise.data.own_dataset import open_dataset
from shardwise.data.shuffle import samples_of_step
from shardwise.data.tokenizer import Tokenizer, mask_token
from shardwise.model.blueprint import PADDING, Batch
from shardwise.recipe.sections import Recipe

_HELD_OUT_SEED = 0
OWN_SET = ""
"""The validation set that is held out of the training data; others have names."""
TRAIN = "train "
"""The training data, which no set has the name of."""


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
        recipe: Recipe,
        splits: Splits[Dataset],
        tokenizer: Tokenizer | None = None,
        sets: Mapping[str, Dataset] | None = None,
        masking: Masking | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        self.fingerprint = splits.fingerprint
        self.tokenizer = tokenizer
        self.vocab = tokenizer.vocab if tokenizer else None
        self._train = splits.train
        self._masking = masking
        self._batch_size = recipe.batch_size
        self._seed = recipe.seed
        self._unit = recipe.unit
        self._unit_samples = recipe.unit_samples
        self._sets = {OWN_SET: splits.held_out, **(sets or {})}
        self._fingerprints = {TRAIN: splits.fingerprint, OWN_SET: splits.fingerprint, **(fingerprints or {})}
        self._evaluation_sequences = recipe.evaluation.sequences

    @property
    def train_sequences(self) -> int:
        """Training samples in an epoch."""
        return len(self._train)

    @property
    def held_out_sequences(self) -> int:
        """Validation (held-out) samples; 0 if the recipe holds none out or the data is a single sequence."""
        return len(self._sets[OWN_SET])

    @property
    def validation_sets(self) -> list[str]:
        """The names of the sets that have samples: OWN_SET, and those of the recipe."""
        return [name for name, dataset in self._sets.items() if len(dataset)]

    def samples(self, step: int) -> list[int]:
        """The sample numbers of optimizer step `step`, which counts from 0; steps of one unit have the same."""
        return self._train.samples(step // self._unit, self._unit_samples, self._seed)

    def records(self, step: int) -> list[Sample]:
        """The samples of optimizer step `step`, which do not stack into a batch."""
        return [self._train.sample(index) for index in self.samples(step)]

    def held_out_records(self, name: str = OWN_SET) -> list[Sample]:
        """The samples of an evaluation of a set, which do not stack into a batch."""
        return [self._sets[name].sample(index) for index in self._evaluated(0, name)]

    def cursor(self, step: int) -> tuple[str, ...]:
        """The state before optimizer step `step`, for a checkpoint; empty if seed and step say everything."""
        return self._train.cursor(step * self._batch_size)

    def begin_at(self, cursor: Sequence[str]) -> None:
        """Go on at the `cursor` of a checkpoint of the same data."""
        self._train.begin_at(cursor)

    def micro_batches(self, step: int, rank: int, degree: int, micro_batch_size: int) -> list[Batch]:
        """The micro-batches of data-parallel rank `rank` of `degree` in optimizer step `step`, in order.

        Each has `micro_batch_size` rows, padding included. For text these are `input_ids` and `labels`, both
        [micro_batch_size, sequence_length] int64 on the CPU. Labels are already shifted; -100 marks ignored targets.
        """
        slots = deal(self._batch_size, rank, degree, micro_batch_size)
        return self._batches(self._train, self.samples(step), ("train", self._seed, step), slots)

    def held_out(
        self, index: int, rank: int, degree: int, micro_batch_size: int, name: str = OWN_SET
    ) -> list[Batch]:
        """The micro-batches of validation `index` of a set, assigned to ranks like those of a step.

        The held-out samples are shuffled once, so that a few samples represent many documents. Evaluation 0 uses the
        first `evaluation.sequences` of them (all, if there are fewer), evaluation 1 the next, and so on, cyclically.
        The recipe's seed and the step do not change the samples of an index. The list is empty if nothing is held out.
        """
        dataset = self._sets[name]
        samples = self._evaluated(index, name)
        slots = deal(len(samples), rank, degree, micro_batch_size)
        return self._batches(dataset, samples, ("held out", _HELD_OUT_SEED, index), slots)

    def _evaluated(self, index: int, name: str) -> list[int]:
        """The samples of validation ``index`` of a set."""
        size = len(self._sets[name])
        count = min(self._evaluation_sequences, size)
        return samples_of_step(index, count, size, _HELD_OUT_SEED) if count else []

    def asked(self, recipe: Recipe) -> dict[str, tuple[Dataset, list[int], str]]:
        """The samples that a run reads: the dataset, their numbers and its fingerprint, of TRAIN and of every set.

        After a rewind a run reads some steps further.
        """
        steps = recipe.steps + recipe.guard.rewinds * recipe.guard.skips
        if steps * self._batch_size >= len(self._train):  # a whole epoch has every sample
            numbers = list(range(len(self._train)))
        else:
            numbers = sorted({number for step in range(steps) for number in self.samples(step)})
        samples = {TRAIN: (self._train, numbers, self._fingerprints[TRAIN])}
        for name in self.validation_sets:
            samples[name] = (self._sets[name], sorted(self._evaluated(0, name)), self._fingerprints[name])
        return samples

    def replace(self, name: str, dataset: Dataset) -> None:
        """Read TRAIN, or a set, from a dataset with the same samples."""
        if name == TRAIN:
            self._train = dataset
        else:
            self._sets[name] = dataset

    def _batches(
        self, dataset: Dataset, samples: list[int], step: tuple[str, int, int], slots: list[list[int | None]]
    ) -> list[Batch]:
        """The micro-batches with these slots of a step."""
        batches = []
        for micro_batch in slots:
            indices = [None if slot is None else samples[slot] for slot in micro_batch]
            rows = dataset.rows(indices, [(*step, slot) for slot in micro_batch])
            if self._masking is not None:
                pairs = zip(rows, micro_batch, strict=True)
                rows = [self._masking.masked(row, step, slot) for row, slot in pairs]
            batches.append(collate(dataset, indices, rows))
        return batches

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


def batch_of(dataset: Dataset, indices: Sequence[int | None]) -> Batch:
    """The samples of a dataset stacked along a new first dimension; None is a padding row."""
    return collate(dataset, indices, dataset.rows(indices))


def collate(dataset: Dataset, indices: Sequence[int | None], rows: Sequence[Sample]) -> Batch:
    """Stack rows by name. Rows with the key PADDING stay only where there are no others.

    Raises:
        DataError: rows differ in names, shapes or dtypes.
    """
    # A row with the key PADDING is a real item whose loss counts as zero; it must not join real ones.
    rows = [row for row in rows if PADDING not in row] or rows
    fill = dataset.fill
    packed = "starts" in rows[0]
    try:
        batch = {
            name: _stacked([torch.as_tensor(row[name]) for row in rows], fill.get(name), packed)
            for name in rows[0]
        }
    except (RuntimeError, KeyError, TypeError) as error:
        raise DataError(
            "samples do not stack into a batch",
            where=dataset.where([index for index in indices if index is not None]),
            why=str(error),
            fix="give every item the same names, shapes and dtypes",
        ) from None
    dataset.release()  # the batch is a copy, so the mapped pages may go
    return batch


def _stacked(tensors: list[torch.Tensor], fill: int | None, packed: bool) -> torch.Tensor:
    """The tensors along a new first dimension, shorter ones with a `fill` up to the longest one's length.

    In packed rows up to a power of two: blocks compile for each number of documents, so there should be few numbers.
    """
    if fill is not None:
        length = max(len(tensor) for tensor in tensors)
        if packed:
            length = 1 << (length - 1).bit_length()
        tensors = [torch.cat([t, t.new_full((length - len(t), *t.shape[1:]), fill)]) for t in tensors]
    return torch.stack(tensors)


def open_data(
    recipe: Recipe, dataset: torch_data.Dataset[Any] | None = None, cache: Path | None = None
) -> Data:
    """The data of a recipe. The first process tokenizes it; other processes wait and share the result.

    Args:
        recipe: `data`, `batch_size`, `seed` and `evaluation` are read.
        dataset: a factory's own map-style dataset, which replaces `data.source`.
        cache: the folder of token caches; by default $SHARDWISE_CACHE, else ~/.cache/shardwise.

    Raises:
        DataError: the source or the tokenizer is missing or malformed, or the data is shorter than one sequence.
        ResourceError: the cache cannot be written.
    """
    if dataset is not None:
        return Data(recipe, open_dataset(dataset, recipe.data.held_out))
    opened = open_sources(recipe, cache or default_root())
    tokenizer = opened.tokenizer
    splits: Splits[Dataset] = opened.parts[0]
    if recipe.data.mixture is not None:
        weights = [part.weight for part in recipe.data.mixture]
        train = Mixture([part.train for part in opened.parts], weights)
        held_out = Mixture([part.held_out for part in opened.parts], weights)
        fingerprint = json_hash([[part.fingerprint for part in opened.parts], train.counts])
        splits = Splits(train, held_out, fingerprint)
    masking = None
    if recipe.model.objective == "masked":
        never = (tokenizer.separator, tokenizer.begin)
        masking = Masking(mask_token(tokenizer), never, tokenizer.vocab)
    sets = {name: named.train for name, named in opened.sets.items()}
    fingerprints = {name: named.fingerprint for name, named in opened.sets.items()}
    return Data(recipe, splits, tokenizer, sets, masking, fingerprints)
