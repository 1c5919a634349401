"""KV cache of a batch.

Rows are aligned at their ends, so short rows have left padding. Only a padding position attends to itself (attention
over no key would be NaN). So all rows write to the same position, and a mask is needed only if there is padding.
Without padding, the prefill is the same attention as in training.

Memory is allocated once per batch, for the longest length that its texts may reach.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class Cache:
    """Keys and values of a batch, with one ``BlockCache`` per decoder block in ``blocks``.

    Args:
        padding: tokens before each text.
        capacity: tokens of a row, at most.
    """

    def __init__(self, padding: list[int], capacity: int, blocks: int) -> None:
        self.padding, self.capacity = padding, capacity
        self.seen = 0
        self.mask: Tensor | None = None
        self.blocks = [BlockCache(self) for _ in range(blocks)]

    def expect(self, count: int, device: torch.device) -> Tensor:
        """Prepare for ``count`` more tokens in every row; return their positions, [s] or [b, s]."""
        first = self.seen
        last = self.seen + count
        slots = torch.arange(first, last, device=device)
        if not any(self.padding):
            self.mask = None
            return slots
        padding = torch.tensor(self.padding, device=device).view(-1, 1, 1)
        keys = torch.arange(last, device=device)
        # [b, s, keys]: keys that are neither padding nor later; a position always sees itself.
        seen = (keys >= padding) & (keys <= slots.view(-1, 1)) | (keys == slots.view(-1, 1))
        self.mask = seen.unsqueeze(1)
        return (slots - padding.squeeze(2)).clamp(min=0)

    def advance(self, count: int) -> None:
        """Record that the expected tokens are in the cache."""
        self.seen += count

    def keep(self, rows: list[int]) -> None:
        """Drop all rows except ``rows``."""
        self.padding = [self.padding[row] for row in rows]
        for block in self.blocks:
            block.keep(rows)


class BlockCache:
    """The keys and values of one block, each [b, k, capacity, d]."""

    def __init__(self, cache: Cache) -> None:
        # In a cycle, memory would be free only after a garbage collection.
        self._cache: Cache = weakref.proxy(cache)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """See ``model.decoder.KeyValues``."""
        cache = self._cache
        count = k.shape[2]
        if self._keys is None or self._values is None:
            shape = (k.shape[0], k.shape[1], cache.capacity, k.shape[3])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        first = cache.seen
        last = cache.seen + count
        self._keys[:, :, first:last] = k
        self._values[:, :, first:last] = v
        if first == 0 and cache.mask is None:
            return k, v, None, True
        assert count == 1 or cache.mask is not None, "only single tokens follow the first pass"
        return self._keys[:, :, :last], self._values[:, :, :last], cache.mask, False

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated keys and values."""
        return sum(tensor.nbytes for tensor in (self._keys, self._values) if tensor is not None)

    def keep(self, rows: list[int]) -> None:
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]
