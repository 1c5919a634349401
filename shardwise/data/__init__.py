"""Data: from the source in the recipe to the micro-batches of a rank.

    source ─readers─▶ pieces ──tokenizer──▶ token cache ──split──▶ sequences ──order, slots──▶ micro-batches
               └────▶ records ──encoding──▶ token cache ─packing─▶    ┘

The upper line is plain text. The lower line is records with completions, such as chats (`formats`). Everything up to
the sequences is a `Dataset` of numbered samples (`dataset`), of one kind per file: `text`, `streaming`, `completions`,
`pairs`, `own_dataset`, `mixture`. `batches` deals the samples of a step to ranks and stacks them.

`open_data` runs the whole line once, before the first step, and reports every error in the data. After that, `Data`
returns the batches of any step. `check_data` runs the part that needs no torch. Importing this package imports neither
torch nor `datasets` nor `transformers` nor `pyarrow`; the modules that need them import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.data.opening import check_data
from shardwise.data.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from shardwise.data.batches import Data, open_data
    from shardwise.model.blueprint import Batch

__all__ = ["Batch", "Data", "Tokenizer", "check_data", "open_data", "open_tokenizer"]


def __getattr__(name: str) -> object:
    if name in ("Batch", "Data", "open_data"):  # these need torch
        from shardwise.data import batches

        return getattr(batches, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
