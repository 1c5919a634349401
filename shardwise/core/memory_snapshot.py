"""Memory snapshots in the format of ``torch.cuda.memory._snapshot``, which docs.pytorch.org/memory_viz opens.

The viewer reads pickles, so this module writes them. Nothing in this package reads one.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

PROTOCOL = 4
"""The newest that the viewer reads."""


def snapshot_bytes(snapshot: Mapping[str, Any]) -> bytes:
    """The content of a snapshot's file. ``snapshot`` has plain dicts, lists, texts and numbers."""
    return pickle.dumps(dict(snapshot), protocol=PROTOCOL)
