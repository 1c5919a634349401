"""What PyTorch's memory viewer requires of a snapshot, and the memory that it would draw.

Its page (torch/utils/viz/MemoryViz.js) is not in PyTorch's wheel. This follows its reader: the opcodes that it knows,
the fields that it reads without a check, and its replay of the events from the segments at the end.
"""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

OPCODES = set(
    """APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK MEMOIZE PROTO SETITEMS
    SHORT_BINUNICODE STOP TUPLE2 APPEND NEWFALSE BINPUT BINUNICODE EMPTY_TUPLE NEWTRUE NONE BINFLOAT TUPLE TUPLE1
    TUPLE3 LONG_BINPUT LIST DICT SETITEM""".split()  # noqa: SIM905
)
"""Those that the viewer's unpickler has."""


def viewed(content: bytes) -> tuple[dict[str, Any], list[int]]:
    """A snapshot, and the allocated bytes after each event. Fails where the viewer would.

    Bytes of blocks that were allocated before the first event count from the start.
    """
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= OPCODES
    snapshot = pickle.loads(content)  # noqa: S301 - this package wrote it
    [trace] = snapshot["device_traces"]
    spans = [(each["address"], each["address"] + each["total_size"]) for each in snapshot["segments"]]
    categories = {entry["category"] for entry in trace if "category" in entry}
    assert not categories or "unknown" in categories
    living = {}
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                living[at] = block["requested_size"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"] and segment["device"] == 0
    level = sum(living.values())
    levels = [level]
    for entry in reversed(trace):
        assert all({"name", "filename", "line"} <= frame.keys() for frame in entry["frames"])
        if entry["action"] == "alloc":
            level -= living.pop(entry["addr"])
        elif entry["action"] == "free_completed":
            assert any(
                first <= entry["addr"] and entry["addr"] + entry["size"] <= end for first, end in spans
            )
            assert entry["addr"] not in living
            living[entry["addr"]] = entry["size"]
            level += entry["size"]
        levels.append(level)
    return snapshot, levels[::-1]
