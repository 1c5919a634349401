"""A user's own map-style dataset, from ``model.factory``: items with any names, shapes and meaning.

What a user's loss would ignore is not known. So a micro-batch without enough items is shorter. One without any item
repeats item 0, because every rank takes part in the collectives of every pass; it has the key PADDING, and its loss
counts as zero (``model/factory.py``).

What an item draws from Python's, NumPy's or torch's generator, such as an augmentation, follows from (side, seed, step,
slot) alone: it is the same after a resume, on another number of ranks, and with another micro-batch size.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence, Sized
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils import data as torch_data

from shardwise.core.errors import DataError
from shardwise.data.cache_header import json_hash
from shardwise.data.dataset import Dataset, Sample, Splits
from shardwise.model.blueprint import PADDING, Batch
from shardwise.runtime.generators import generators_kept


class OwnDataset(Dataset):
    """Items first .. first+count-1 of a map-style dataset, each a dict of tensors or numbers.

    The plan uses the shapes of item 0, so no item may be larger.
    """

    def __init__(self, dataset: torch_data.Dataset[Any], first: int, count: int) -> None:
        self._dataset = dataset
        self._first = first
        self._count = count
        self._largest = {name: tensor.shape for name, tensor in _item(dataset, 0).items()}

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int) -> Sample:
        """An item, checked not to be larger than item 0: a larger one could cause OOM late in the run."""
        item = _item(self._dataset, self._index(index))
        for name, tensor in item.items():
            planned = self._largest.get(name, tensor.shape)
            fits = len(tensor.shape) == len(planned)
            if fits:
                fits = all(size <= most for size, most in zip(tensor.shape, planned, strict=True))
            if not fits:
                raise DataError(
                    f"'{name}' is larger than planned",
                    where=f"dataset item {self._index(index)}",
                    why=f"its shape is {list(tensor.shape)}, that of item 0 is {list(planned)}",
                    fix="truncate it, or make item 0 one of the largest",
                )
        return item

    def padding(self) -> Sample:
        return {**_item(self._dataset, 0), PADDING: torch.ones((), dtype=torch.bool)}

    def rows(self, indices: Sequence[int | None], keys: Sequence[object] = ()) -> list[Sample]:
        rows: list[Sample] = []
        # The model draws from the same generators, so a dataset must leave them as they were.
        with generators_kept():
            for index, key in zip_longest(indices, keys):
                _seed(key)
                rows.append(self.padding() if index is None else self.sample(index))
        return rows

    def where(self, indices: Sequence[int]) -> str:
        return f"dataset items {', '.join(str(self._index(index)) for index in indices)}"

    def text(self, index: int) -> str:
        tensors = _item(self._dataset, self._index(index)).items()
        parts = [f"{k}={v.item() if v.numel() == 1 else list(v.shape)}" for k, v in tensors]
        return f"dataset[{self._index(index)}]: " + " ".join(parts)

    def _index(self, sample: int) -> int:
        if not 0 <= sample < self._count:
            raise IndexError(f"sample {sample} of {self._count}")
        return self._first + sample


def open_dataset(dataset: torch_data.Dataset[Any], fraction: float) -> Splits[OwnDataset]:
    """Hold out the last `fraction` of a user's dataset: at least one item if there are two."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            "dataset has no length",
            where=type(dataset).__name__,
            why="a resumable order needs items by number",
            fix="return a map-style dataset, with __len__ and __getitem__, from the factory",
        )
    if not (count := len(dataset)):
        raise DataError("empty dataset", where=type(dataset).__name__, fix="check the factory")
    held_out = min(max(1, round(fraction * count)), count - 1) if fraction else 0
    with generators_kept():
        _seed("content")
        content = _content_hash(dataset, count)
        train = OwnDataset(dataset, 0, count - held_out)
        held = OwnDataset(dataset, count - held_out, held_out)
    return Splits(train, held, json_hash([content, held_out]))


def _item(dataset: torch_data.Dataset[Any], index: int) -> Batch:
    """Item `index` of a user's dataset, checked: a mapping from names to tensors."""
    where = f"dataset item {index}"
    try:
        item = dataset[index]
    except Exception as error:  # the user's code may raise anything
        raise DataError(
            "dataset raised an error", where=where, why=f"{type(error).__name__}: {error}", fix="correct it"
        ) from error
    if not isinstance(item, dict) or not item:
        raise DataError(
            "dataset item is not a dict of tensors",
            where=where,
            why=f"it is of type {type(item).__name__}",
            fix="return {name: tensor, ...} from __getitem__",
        )
    tensors = {}
    for name, value in item.items():
        try:
            tensors[str(name)] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"'{name}' is not a tensor",
                where=where,
                why=f"it is of type {type(value).__name__}",
                fix="return tensors or numbers from __getitem__",
            ) from None
    return tensors


def _content_hash(dataset: torch_data.Dataset[Any], count: int) -> str:
    """Hash of a user's dataset without reading all of it: class, length, first and last item."""
    digest = xxhash.xxh3_128(f"{type(dataset).__module__}.{type(dataset).__qualname__} {count}".encode())
    for index in (0, count - 1):
        for name, tensor in sorted(_item(dataset, index).items()):
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _seed(key: object) -> None:
    """Seed the generators that a dataset may draw from."""
    value = int.from_bytes(
        hashlib.blake2b(f"shardwise item {key}".encode(), digest_size=8).digest(), "little"
    )
    random.seed(value)
    np.random.seed(value % 2**32)  # NumPy takes 32 bits
    # ``torch.manual_seed`` would seed the accelerators, too, from which the model draws.
    torch.default_generator.manual_seed(value)
