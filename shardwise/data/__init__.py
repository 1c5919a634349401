"""Data: from the source in the recipe to the micro-batches of a rank.

    source ─readers─▶ pieces ──tokenizer──▶ token cache ──split──▶ sequences ──order, slots──▶ micro-batches
               └────▶ records ──encoding──▶ token cache ─packing─▶    ┘

The upper line is plain text. The lower line is records with completions, such as chats (`formats`).

`open_data` runs the whole line once, before the first step, and reports every error in the data. After that, `Data`
returns the batches of any step. `check_data` runs the part that needs no torch. Importing this package imports neither
torch nor `datasets` nor `transformers` nor `pyarrow`; the modules that need them import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.data.text import check_data
from shardwise.data.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from shardwise.data.batches import Data
    from shardwise.data.opening import open_data
    from shardwise.data.samples import Batch

__all__ = ["Batch", "Data", "Tokenizer", "check_data", "open_data", "open_tokenizer"]

_WITH_TORCH = {"Batch": "samples", "Data": "batches", "open_data": "opening"}


def __getattr__(name: str) -> object:
    if name in _WITH_TORCH:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
