"""``events.jsonl``: one line per event (spike, skipped update, rewind, OOM), with its samples and their text.

Lines are only appended. A resumed run that reads the same batch again logs the event again. So a reader who counts
events must look at ``rewinds`` and ``step``. ``metrics.jsonl`` has the steps that count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.core.errors import one_line, shorten
from shardwise.core.run_files import EVENTS
from shardwise.data import Data

TEXTS = 32
"""Largest number of samples whose text an event shows."""

EXCERPT = 160
"""Characters shown of a sample's text."""


class EventFile:
    """Appends events; ``fresh`` empties the file first."""

    def __init__(self, folder: Path, fresh: bool) -> None:
        self._file = (folder / EVENTS).open("w" if fresh else "a", encoding="utf-8", buffering=1)

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()


def event_line(
    data: Data, event: str, step: int, positions: Iterable[int], values: Mapping[str, Any]
) -> dict[str, Any]:
    """An event of a step, counted from 1, with the samples at ``positions`` in the order of the data."""
    positions = list(positions)
    samples = [sample for position in positions for sample in data.samples(position)]
    line = {"event": event, "step": step, "positions": positions, **values, "samples": samples}
    if data.tokenizer is not None:
        line["text"] = [shorten(one_line(data.text(sample)), EXCERPT) for sample in samples[:TEXTS]]
    return line
