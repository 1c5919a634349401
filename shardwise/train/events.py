"""``events.jsonl``: one line for everything the guard met, with the samples that were read and their text.

Lines are only added. A run that resumes from a checkpoint and meets the same batch again logs it again: the
file says what happened, in order, and ``metrics.jsonl`` says what the run is made of. The price of that honesty
is that a reader who counts events must mind ``rewinds`` and ``step``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.core.errors import one_line, shorten
from shardwise.train.data import Data

NAME = "events.jsonl"
TEXTS = 32
"""Samples of an event whose text is shown; of more, the first."""

EXCERPT = 160
"""Characters of a sample's text."""


class EventFile:
    """Appends events; ``fresh`` starts the file anew."""

    def __init__(self, folder: Path, data: Data, fresh: bool) -> None:
        self._data = data
        self._file = (folder / NAME).open("w" if fresh else "a", encoding="utf-8", buffering=1)

    def write(self, event: str, step: int, positions: Iterable[int], values: Mapping[str, Any]) -> None:
        """One event at a step (counted from 1) with everything that was read at ``positions``."""
        places = list(positions)
        samples = [sample for place in places for sample in self._data.samples(place)]
        line = {"event": event, "step": step, "positions": places, **values, "samples": samples}
        if self._data.tokenizer is not None:
            line["text"] = [self._excerpt(sample) for sample in samples[:TEXTS]]
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _excerpt(self, sample: int) -> str:
        return shorten(one_line(self._data.text(sample)), EXCERPT)

    def close(self) -> None:
        self._file.close()
