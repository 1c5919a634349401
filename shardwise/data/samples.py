"""Batches of numbered samples: token sequences, packed records, or items of a user's own dataset.

The three kinds share one interface, so the order, the slots and the trainer do not depend on the kind. A row of tokens
may be *padding*: separators, whose labels are all -100, which the loss ignores. Padding gives every rank the same
number of equally shaped micro-batches for any batch size.

What a user's loss would ignore is not known. So a micro-batch of a dataset without enough items is shorter. One without
any item repeats item 0, because every rank takes part in the collectives of every pass; it has the key PADDING, and
its loss counts as zero (``model/factory.py``).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from shardwise.core.errors import DataError
from shardwise.data.cache import TokenCache
from shardwise.data.examples import Sequences
from shardwise.data.pairs import Pairs
from shardwise.data.split import Stream
from shardwise.data.text import starts_in
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.windows import Windows
from shardwise.model.blueprint import PADDING

Batch = dict[str, Tensor]

NOT_COUNTED = -100
"""The label that the loss ignores: the `ignore_index` of PyTorch's cross entropy."""


class Samples(ABC):
    """Numbered samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, samples: Sequence[int | None]) -> Batch:
        """The samples stacked along a new first dimension; None is a padding row."""

    def filled(self, sample: int) -> int | None:
        """Number of tokens of a sample before its padding; None if it has no padding."""
        return None

    @abstractmethod
    def text(self, sample: int) -> str:
        """The sample as readable text."""


class TokenSamples(Samples):
    """The sequences of a stream: `input_ids` and `labels`, both [b, s] int64, labels shifted.

    Args:
        starts: start of each document in the cache, [documents], to keep documents apart; None runs them together. Then
            a batch has `starts` (see `_documents`) and `positions`, [b, s], which are 0 where a document or a sequence
            begins. The first token of a document is no target: only the document before it would predict it (Llama 3,
            arXiv:2407.21783, sec. 3.2).
    """

    def __init__(
        self,
        stream: Stream,
        cache: TokenCache,
        tokenizer: Tokenizer,
        starts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._stream, self._cache, self._tokenizer, self._starts = stream, cache, tokenizer, starts

    def __len__(self) -> int:
        return self._stream.sequences

    def batch(self, samples: Sequence[int | None]) -> Batch:
        shape = (len(samples), self._stream.length)
        inputs = np.full(shape, self._tokenizer.separator, dtype=np.int64)
        labels = np.full(shape, NOT_COUNTED, dtype=np.int64)
        positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
        for row, sample in enumerate(samples):
            if sample is not None:
                sequence = self._stream.sequence(sample)
                inputs[row], labels[row] = sequence[:-1], sequence[1:]
                if self._starts is not None:
                    places = self._stream.positions(sample, self._starts)
                    positions[row] = places[:-1]
                    labels[row, places[1:] == 0] = NOT_COUNTED
        self._cache.release()
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        return batch if self._starts is None else {**batch, **_documents(positions)}

    def text(self, sample: int) -> str:
        return self._tokenizer.decode(self._stream.sequence(sample)[:-1].tolist())


FAR = 1 << 44
"""The number of samples of a stream, which has no end."""


class StreamedSamples(Samples):
    """Sequences of a stream: sample n is sequence n mod W of window n // W (`windows`). Batches are `TokenSamples`'."""

    def __init__(self, windows: Windows, tokenizer: Tokenizer, packed: bool) -> None:
        self.windows = windows
        self._tokenizer, self._packed = tokenizer, packed

    def __len__(self) -> int:
        return FAR

    def _side(self, number: int) -> TokenSamples:
        cache = self.windows.window(number)
        starts = starts_in(cache) if self._packed else None
        return TokenSamples(self.windows.train(number), cache, self._tokenizer, starts)

    def batch(self, samples: Sequence[int | None]) -> Batch:
        size = self.windows.sequences
        numbers = sorted({sample // size for sample in samples if sample is not None})
        sides = {number: self._side(number) for number in numbers}
        if len(sides) == 1:
            [side] = sides.values()
            return side.batch([None if sample is None else sample % size for sample in samples])
        rows = []
        for sample in samples:
            number, own = (0, None) if sample is None else divmod(sample, size)
            rows.append((sides.get(number) or self._side(number)).batch([own]))
        return joined(rows)

    def text(self, sample: int) -> str:
        number, own = divmod(sample, self.windows.sequences)
        return self._side(number).text(own)


def joined(rows: Sequence[Batch]) -> Batch:
    """One batch of several. Only ``starts`` of packed documents differ in length: the row's length fills them up."""
    length = rows[0]["input_ids"].shape[1]
    return {name: torch.cat(_even([row[name] for row in rows], length)) for name in rows[0]}


def _even(rows: list[Tensor], length: int) -> list[Tensor]:
    most = max(row.shape[1] for row in rows)
    return [torch.cat([row, row.new_full((row.shape[0], most - row.shape[1]), length)], 1) for row in rows]


class ExampleSamples(Samples):
    """Sequences of records: `input_ids` and `labels`, both [b, s] int64, labels shifted; packed, see `_documents`."""

    def __init__(self, examples: Sequences, tokenizer: Tokenizer, packed: bool) -> None:
        self._examples, self._tokenizer, self._packed = examples, tokenizer, packed

    def __len__(self) -> int:
        return self._examples.sequences

    def batch(self, samples: Sequence[int | None]) -> Batch:
        shape = (len(samples), self._examples.length)
        inputs = np.full(shape, self._tokenizer.separator, dtype=np.int64)
        labels = np.full(shape, NOT_COUNTED, dtype=np.int64)
        positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
        for row, sample in enumerate(samples):
            if sample is not None:
                found = self._examples.sequence(sample)
                inputs[row], labels[row], positions[row] = found.inputs, found.labels, found.positions
        self._examples.cache.release()
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        return {**batch, **_documents(positions)} if self._packed else batch

    def filled(self, sample: int) -> int | None:
        return self._examples.filled_tokens(sample)

    def text(self, sample: int) -> str:
        found = self._examples.sequence(sample)
        return self._tokenizer.decode(found.inputs[: found.filled].tolist())


def _documents(positions: npt.NDArray[np.int64]) -> Batch:
    """``positions`` [b, s] of packed documents, and ``starts``: where the documents of each row begin, int32 [b, n].

    n is the largest number in a row; for those that a row lacks, ``starts`` has the row's length.
    """
    begins = positions == 0
    most = int(begins.sum(1).max())
    first = np.argsort(~begins, axis=1, kind="stable")[:, :most]
    starts = np.where(np.take_along_axis(begins, first, axis=1), first, positions.shape[1])
    return {
        "positions": torch.from_numpy(positions),
        "starts": torch.from_numpy(starts.astype(np.int32)),
    }


class PairSamples(Samples):
    """Records for encoder-decoders: `input_ids` and `attention_mask` [b, s], `labels` [b, t] not shifted; int64."""

    def __init__(self, pairs: Pairs, tokenizer: Tokenizer) -> None:
        self._pairs, self._tokenizer = pairs, tokenizer

    def __len__(self) -> int:
        return self._pairs.sequences

    def batch(self, samples: Sequence[int | None]) -> Batch:
        arrays = self._pairs.padded(samples, self._tokenizer.separator)
        names = ("input_ids", "attention_mask", "labels")
        return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}

    def text(self, sample: int) -> str:
        sides = self._pairs.prompt(sample), self._pairs.completion(sample)
        return "".join(self._tokenizer.decode(side.tolist()) for side in sides)


class DatasetSamples(Samples):
    """Items first .. first+count-1 of a map-style dataset, each a dict of tensors or numbers.

    The plan uses the shapes of item 0, so no item may be larger.
    """

    def __init__(self, dataset: Dataset[Any], first: int, count: int) -> None:
        self._dataset, self._first, self._count = dataset, first, count
        self._largest = {name: tensor.shape for name, tensor in item(dataset, 0).items()}

    def __len__(self) -> int:
        return self._count

    def batch(self, samples: Sequence[int | None]) -> Batch:
        indices = [self._index(sample) for sample in samples if sample is not None]
        items = [self._item(index) for index in indices] or [item(self._dataset, 0)] * len(samples)
        try:
            collated: Batch = default_collate(items)
        except (RuntimeError, KeyError, TypeError) as error:
            raise DataError(
                "samples do not stack into a batch",
                where=f"dataset items {', '.join(map(str, indices))}",
                why=str(error),
                fix="give every item the same names, shapes and dtypes",
            ) from None
        return collated if indices else {**collated, PADDING: torch.ones((), dtype=torch.bool)}

    def _item(self, index: int) -> Batch:
        """An item, checked not to be larger than item 0: a larger one could cause OOM late in the run."""
        found = item(self._dataset, index)
        for name, tensor in found.items():
            planned = self._largest.get(name, tensor.shape)
            if len(tensor.shape) != len(planned) or any(
                a > b for a, b in zip(tensor.shape, planned, strict=True)
            ):
                raise DataError(
                    f"'{name}' is larger than planned",
                    where=f"dataset item {index}",
                    why=f"its shape is {list(tensor.shape)}, that of item 0 is {list(planned)}",
                    fix="truncate it, or make item 0 one of the largest",
                )
        return found

    def text(self, sample: int) -> str:
        tensors = item(self._dataset, self._index(sample)).items()
        parts = [f"{k}={v.item() if v.numel() == 1 else list(v.shape)}" for k, v in tensors]
        return f"dataset[{self._index(sample)}]: " + " ".join(parts)

    def _index(self, sample: int) -> int:
        if not 0 <= sample < self._count:
            raise IndexError(f"sample {sample} of {self._count}")
        return self._first + sample


def item(dataset: Dataset[Any], index: int) -> Batch:
    """Item `index` of a user's dataset, checked: a mapping from names to tensors."""
    place = f"dataset item {index}"
    try:
        found = dataset[index]
    except Exception as error:  # the user's code may raise anything
        raise DataError(
            "dataset raised an error", where=place, why=f"{type(error).__name__}: {error}", fix="correct it"
        ) from error
    if not isinstance(found, dict) or not found:
        raise DataError(
            "dataset item is not a dict of tensors",
            where=place,
            why=f"it is of type {type(found).__name__}",
            fix="return {name: tensor, ...} from __getitem__",
        )
    tensors = {}
    for name, value in found.items():
        try:
            tensors[str(name)] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"'{name}' is not a tensor",
                where=place,
                why=f"it is of type {type(value).__name__}",
                fix="return tensors or numbers from __getitem__",
            ) from None
    return tensors


def fingerprint_of(dataset: Dataset[Any], count: int) -> str:
    """Hash of a user's dataset without reading all of it: class, length, first and last item."""
    digest = xxhash.xxh3_128(f"{type(dataset).__module__}.{type(dataset).__qualname__} {count}".encode())
    for index in (0, count - 1):
        for name, tensor in sorted(item(dataset, index).items()):
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
