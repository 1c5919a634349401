"""Token-by-token decoding of a batch, for any model.

    native decoders          with our KV cache (kv_cache.py)
    models of transformers   with their own cache, if they take positions and a mask and cache only keys and values
    all others               without a cache: every token reads each text again, one text after the other

All three take texts of different lengths. The result for each text equals that of the text alone, except for rounding.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Blueprint
from shardwise.model.decoder import Decoder
from shardwise.plugins.serve.kv_cache import Cache
from shardwise.plugins.serve.multi_lora import BASE, Bank


class Reader(ABC):
    """Decodes one batch: call ``begin`` once, then ``follow`` for each further token."""

    def __init__(self, model: nn.Module, bank: Bank) -> None:
        self.model, self.bank = model, bank
        self.device = next(model.parameters()).device

    @abstractmethod
    def begin(self, texts: list[list[int]], adapters: list[str], more: int, length: int = 0) -> Tensor:
        """Logits [b, vocab] after the texts, which may grow by ``more`` tokens, padded to ``length`` at least."""

    @abstractmethod
    def follow(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Logits [b, vocab] after one more token of every text; a tensor [b] of tokens stays on the device."""

    @abstractmethod
    def keep(self, rows: list[int]) -> None:
        """Drop all texts except ``rows``."""

    @abstractmethod
    def skip(self, count: int) -> None:
        """Make every text longer by tokens without a value, for plans."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of cached keys and values."""
        return 0


class Again(Reader):
    """Reads every text again for every token: for models without a cache."""

    def __init__(self, blueprint: Blueprint, model: nn.Module, bank: Bank) -> None:
        super().__init__(model, bank)
        self._blueprint = blueprint
        self._texts: list[list[int]] = []
        self._adapters: list[str] = []
        self._length = 0

    def begin(self, texts: list[list[int]], adapters: list[str], more: int, length: int = 0) -> Tensor:
        self._texts = [list(text) for text in texts]
        self._adapters = list(adapters)
        self._length = length
        return torch.stack([self._last(row) for row in range(len(texts))])

    def follow(self, tokens: Sequence[int] | Tensor) -> Tensor:
        tokens = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        self._length += 1
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        return torch.stack([self._last(row) for row in range(len(tokens))])

    def keep(self, rows: list[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._adapters = [self._adapters[row] for row in rows]

    def skip(self, count: int) -> None:
        self._texts = [text + [0] * count for text in self._texts]
        self._length += count

    def _last(self, row: int) -> Tensor:
        text = self._texts[row]
        padding = [0] * (self._length - len(text))  # at the end, where no token of the text attends to it
        ids = torch.tensor([text + padding], device=self.device)
        with self.bank.lock:
            self.bank.select([self._adapters[row]])
            return self._blueprint.logits(self.model, ids)[0, len(text) - 1]


class Cached(Reader):
    """Base of readers with a cache: texts are aligned at their ends; rows keep their adapters."""

    def begin(self, texts: list[list[int]], adapters: list[str], more: int, length: int = 0) -> Tensor:
        self._adapters = list(adapters)
        longest = max(length, *map(len, texts))
        padding = [longest - len(text) for text in texts]
        self._cache = Cache(padding, longest + more, self._blocks())
        rows = [[0] * missing + text for missing, text in zip(padding, texts, strict=True)]
        ids = torch.tensor(rows, device=self.device)
        return self._read(ids)

    def follow(self, tokens: Sequence[int] | Tensor) -> Tensor:
        return self._read(torch.as_tensor(tokens, device=self.device).unsqueeze(1))

    def keep(self, rows: list[int]) -> None:
        self._adapters = [self._adapters[row] for row in rows]
        self._cache.keep(rows)

    def skip(self, count: int) -> None:
        self._cache.advance(count)

    def _read(self, ids: Tensor) -> Tensor:
        positions = self._cache.expect(ids.shape[1], self.device)
        with self.bank.lock:
            self.bank.select(self._adapters)
            logits = self._logits(ids, positions)
        self._cache.advance(ids.shape[1])
        return logits[:, -1]

    @abstractmethod
    def _blocks(self) -> int:
        """Number of blocks in the cache."""

    @abstractmethod
    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [b, s, vocab], or of the last position alone [b, 1, vocab]."""


class Native(Cached):
    """For the native decoder."""

    def _blocks(self) -> int:
        return len(self.model.get_submodule("layers")._modules)

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, positions, self._cache.blocks)
        return logits

    @property
    def cache_bytes(self) -> int:
        return sum(block.nbytes for block in self._cache.blocks)


class Transformers(Cached):
    """For models of transformers, with their own cache; ours tracks the padding."""

    def begin(self, texts: list[list[int]], adapters: list[str], more: int, length: int = 0) -> Tensor:
        self._theirs = own_cache(self.model)
        self._cache_argument = cache_argument(self.model)
        takes = inspect.signature(self.model.forward).parameters
        self._last_alone = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        return super().begin(texts, adapters, more, length)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self._theirs.batch_select_indices(torch.tensor(rows, device=self.device))

    def skip(self, count: int) -> None:
        super().skip(count)
        for layer in self._theirs.layers:
            more = layer.keys.new_empty(*layer.keys.shape[:2], count, layer.keys.shape[3])
            layer.keys, layer.values = torch.cat([layer.keys, more], 2), torch.cat([layer.values, more], 2)

    def _blocks(self) -> int:
        return 0

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._theirs.layers)

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        seen = self._cache.seen + ids.shape[1]
        output = self.model(
            input_ids=ids,
            attention_mask=self._padding_mask(seen),
            position_ids=positions.expand(ids.shape),
            use_cache=True,
            **{self._cache_argument: self._theirs},
            **self._last_alone,
        )
        logits: Tensor = output.logits
        return logits

    def _padding_mask(self, seen: int) -> Tensor | None:
        """1 for every token that is not padding, [b, seen]; None without padding, so that none is built."""
        if not any(self._cache.padding):
            return None
        padding = torch.tensor(self._cache.padding, device=self.device)
        return (torch.arange(seen, device=self.device) >= padding.unsqueeze(1)).long()


def reader_of(blueprint: Blueprint, model: nn.Module, bank: Bank, cached: bool = True) -> Reader:
    """The fastest reader that the model supports."""
    if cached and isinstance(model, Decoder):
        return Native(model, bank)
    if cached and _takes_a_cache(model):
        return Transformers(model, bank)
    return Again(blueprint, model, bank)


def own_cache(model: Any) -> Any:
    """An empty transformers cache for a model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def cache_argument(model: Any) -> str:
    """The argument of a model of transformers that takes its cache, or "". Since 5.24 it is ``cache``."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), "")


def _takes_a_cache(model: Any) -> bool:
    """Whether a model of transformers supports left padding and a cache of keys and values only."""
    # FSDP2 makes a class of torch's for every module that it shards.
    kind = next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
    if not kind.__module__.startswith("transformers."):
        return False
    taken = inspect.signature(model.forward).parameters.keys()
    if not cache_argument(model) or not {"attention_mask", "position_ids", "use_cache"} <= taken:
        return False
    from transformers import cache_utils

    plain = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    return all(type(layer) in plain for layer in own_cache(model).layers)


def rehearse_reading(
    reader: Reader,
    sizes: tuple[int, int, int],
    choose: Callable[[Tensor], Tensor],
    repeated: Callable[[float], AbstractContextManager[None]],
) -> None:
    """Read texts and tokens after them on fake tensors, for plans.

    A token costs what one half-way does; the last one needs most memory.

    Args:
        sizes: texts, their tokens, and most tokens that follow.
        choose: tokens [b] of logits [b, vocab].
        repeated: the costs of its block count so many times.
    """
    texts, length, more = sizes
    half = (more - 1) // 2
    with repeated(1):
        padded = [[0] * max(1, length - 1), *([[0] * length] * (texts - 1))]
        tokens = choose(reader.begin(padded, [BASE] * texts, more))
    for skipped, times in ((half, more - 1), (more - 3 - half, 0)):
        if skipped >= 0 and more > 1:
            reader.skip(skipped)
            with repeated(times):
                tokens = choose(reader.follow(tokens))
