"""A model that reads a batch of texts and says what may come next, token by token, whatever model it is.

    native decoders          with our cache (cache.py)
    models of transformers   with their own, where they take positions and a mask and keep nothing but keys and values
    all others               by reading the whole of every text again for every token, one after the other

All three are given texts of different lengths and answer for each as if it were alone, but for rounding.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Blueprint
from shardwise.model.decoder import Decoder
from shardwise.serve.bank import Bank
from shardwise.serve.cache import Cache


class Reader(ABC):
    """Reads for one batch: ``begin``, and then ``follow`` for each further token."""

    def __init__(self, model: nn.Module, bank: Bank) -> None:
        self.model, self.bank = model, bank
        self.device = next(model.parameters()).device

    @abstractmethod
    def begin(self, texts: list[list[int]], adapters: list[str], more: int) -> Tensor:
        """Logits [b, vocab] after texts that may grow by so many tokens."""

    @abstractmethod
    def follow(self, tokens: list[int]) -> Tensor:
        """Logits [b, vocab] after one more token of every text."""

    @abstractmethod
    def keep(self, rows: list[int]) -> None:
        """Forget all texts but these."""


class Again(Reader):
    """Reads everything again: for models without a cache."""

    def __init__(self, blueprint: Blueprint, model: nn.Module, bank: Bank) -> None:
        super().__init__(model, bank)
        self._blueprint = blueprint
        self._texts: list[list[int]] = []
        self._adapters: list[str] = []

    def begin(self, texts: list[list[int]], adapters: list[str], more: int) -> Tensor:
        self._texts, self._adapters = [list(text) for text in texts], list(adapters)
        return torch.stack([self._last(row) for row in range(len(texts))])

    def follow(self, tokens: list[int]) -> Tensor:
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        return torch.stack([self._last(row) for row in range(len(tokens))])

    def keep(self, rows: list[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._adapters = [self._adapters[row] for row in rows]

    def _last(self, row: int) -> Tensor:
        self.bank.select([self._adapters[row]])
        ids = torch.tensor([self._texts[row]], device=self.device)
        return self._blueprint.logits(self.model, ids)[0, -1]


class Cached(Reader):
    """What readers with a cache share: texts aligned at their ends, and the adapters of the rows that are left."""

    def begin(self, texts: list[list[int]], adapters: list[str], more: int) -> Tensor:
        self._adapters = list(adapters)
        lengths = [len(text) for text in texts]
        longest = max(lengths)
        self._cache = Cache(lengths, longest + more, self._blocks())
        ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=self.device)
        return self._read(ids)

    def follow(self, tokens: list[int]) -> Tensor:
        return self._read(torch.tensor(tokens, device=self.device).unsqueeze(1))

    def keep(self, rows: list[int]) -> None:
        self._adapters = [self._adapters[row] for row in rows]
        self._cache.keep(rows)

    def _read(self, ids: Tensor) -> Tensor:
        self.bank.select(self._adapters)
        positions = self._cache.expect(ids.shape[1], self.device)
        logits = self._logits(ids, positions)
        self._cache.advance(ids.shape[1])
        return logits[:, -1]

    @abstractmethod
    def _blocks(self) -> int:
        """How many blocks have a place in the cache."""

    @abstractmethod
    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[b, s, vocab], or of the last position alone [b, 1, vocab]."""


class Native(Cached):
    """For the native decoder."""

    def _blocks(self) -> int:
        return len(self.model.get_submodule("layers")._modules)

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, positions, self._cache.blocks)
        return logits


class Transformers(Cached):
    """For models of transformers, with their own cache; ours keeps count of the padding."""

    def begin(self, texts: list[list[int]], adapters: list[str], more: int) -> Tensor:
        self._theirs = own_cache(self.model)
        takes = inspect.signature(self.model.forward).parameters
        self._last_alone = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        return super().begin(texts, adapters, more)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self._theirs.batch_select_indices(torch.tensor(rows, device=self.device))

    def _blocks(self) -> int:
        return 0

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        seen = self._cache.seen + ids.shape[1]
        padding = torch.tensor(self._cache.padding, device=self.device)
        found = self.model(
            input_ids=ids,
            attention_mask=(torch.arange(seen, device=self.device) >= padding.unsqueeze(1)).long(),
            position_ids=positions.expand(ids.shape),
            past_key_values=self._theirs,
            use_cache=True,
            **self._last_alone,
        )
        logits: Tensor = found.logits
        return logits


def reader_of(blueprint: Blueprint, model: nn.Module, bank: Bank, cached: bool = True) -> Reader:
    """The fastest reader that there is for a model."""
    if cached and isinstance(model, Decoder):
        return Native(model, bank)
    if cached and _takes_a_cache(model):
        return Transformers(model, bank)
    return Again(blueprint, model, bank)


def own_cache(model: Any) -> Any:
    """An empty cache of transformers for a model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _takes_a_cache(model: Any) -> bool:
    """Whether a model of transformers can read a batch with padding in front and keep keys and values."""
    if not type(model).__module__.startswith("transformers."):
        return False
    taken = inspect.signature(model.forward).parameters.keys()
    if not {"attention_mask", "position_ids", "past_key_values", "use_cache"} <= taken:
        return False
    from transformers import cache_utils

    plain = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    return all(type(layer) in plain for layer in own_cache(model).layers)
