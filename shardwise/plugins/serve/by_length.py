"""Decoding where the rotary angles of all positions depend on the length of the text (LongRoPE: Phi-3).

transformers takes other frequencies as soon as the longest text of a pass has more tokens than the model was first
trained with. So texts on the two sides of that length are decoded in batches of their own, and a text that passes it
is read again: the keys in the cache were turned by the other frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plugins.serve.decoding import Reader
from shardwise.plugins.serve.multi_lora import Bank


class ByLength(Reader):
    """A reader for the texts of at most ``limit`` tokens, and one for those that are longer.

    Args:
        reader: makes an empty reader.
    """

    def __init__(self, model: nn.Module, bank: Bank, limit: int, reader: Callable[[], Reader]) -> None:
        super().__init__(model, bank)
        self._limit, self._reader = limit, reader
        self._texts: list[list[int]] = []
        self._adapters: list[str] = []
        self._sides: list[tuple[list[int], Reader]] = []
        self._more = 0

    def begin(self, texts: list[list[int]], adapters: list[str], more: int, length: int = 0) -> Tensor:
        self._texts = [list(text) for text in texts]
        self._adapters = list(adapters)
        self._more = more
        rows_by_side = [self._rows(long) for long in (False, True)]
        self._sides = [(rows, self._reader()) for rows in rows_by_side if rows]
        return self._gathered([self._read(rows, reader) for rows, reader in self._sides])

    def follow(self, tokens: Sequence[int] | Tensor) -> Tensor:
        tokens = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        self._more -= 1
        if any(len(text) == self._limit + 1 for text in self._texts):
            return self.begin(self._texts, self._adapters, self._more)
        return self._gathered([side.follow([tokens[row] for row in rows]) for rows, side in self._sides])

    def keep(self, rows: list[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._adapters = [self._adapters[row] for row in rows]
        new_row = {row: number for number, row in enumerate(rows)}
        sides = []
        for old_rows, reader in self._sides:
            if kept := [index for index, row in enumerate(old_rows) if row in new_row]:
                reader.keep(kept)
                sides.append(([new_row[old_rows[index]] for index in kept], reader))
        self._sides = sides

    def skip(self, count: int) -> None:
        for _, reader in self._sides:
            reader.skip(count)

    @property
    def cache_bytes(self) -> int:
        return sum(reader.cache_bytes for _, reader in self._sides)

    def _rows(self, long: bool) -> list[int]:
        return [row for row, text in enumerate(self._texts) if (len(text) > self._limit) == long]

    def _read(self, rows: list[int], reader: Reader) -> Tensor:
        return reader.begin(
            [self._texts[row] for row in rows], [self._adapters[row] for row in rows], self._more
        )

    def _gathered(self, logits: list[Tensor]) -> Tensor:
        """The logits of both sides in the order of the rows."""
        order = torch.tensor([row for rows, _ in self._sides for row in rows], device=self.device)
        return torch.cat(logits)[order.argsort()]


def batches_by_length(lengths: Sequence[int], size: int, model: nn.Module) -> Iterator[list[int]]:
    """The indices of texts in batches, longest first; all texts of a batch have the angles that each has alone."""
    limit = limit_of_angles(model)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    longer = sum(limit is not None and length > limit for length in lengths)
    for side in (order[:longer], order[longer:]):
        yield from (side[first : first + size] for first in range(0, len(side), size))


def limit_of_angles(model: nn.Module) -> int | None:
    """The most tokens of a text before all rotary angles are others; None if they do not depend on its length."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one for each type of layer
    limits = [
        kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)
