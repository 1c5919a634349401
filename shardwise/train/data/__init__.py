"""Data: from what the recipe names to the micro-batches of a rank.

    source ─readers─▶ pieces ──tokenizer──▶ token cache ──split──▶ sequences ──order, slots──▶ micro-batches
               └────▶ records ──encoding──▶ token cache ─packing─▶    ┘

The upper line is plain text; the lower one is records that say what is to be completed, such as chats (`formats`).

`open_data` walks that line once, before the first step, and finds everything that is wrong with the data on
the way; `Data` then answers for any step at once. `check_data` walks the part that needs no torch. Importing
this package imports neither torch nor `datasets` nor `transformers` nor `pyarrow`: each is loaded by what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.train.data.text import check_data
from shardwise.train.data.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from shardwise.train.data.batches import Data
    from shardwise.train.data.opening import open_data
    from shardwise.train.data.samples import Batch

__all__ = ["Batch", "Data", "Tokenizer", "check_data", "open_data", "open_tokenizer"]

_WITH_TORCH = {"Batch": "samples", "Data": "batches", "open_data": "opening"}


def __getattr__(name: str) -> object:
    if name in _WITH_TORCH:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
