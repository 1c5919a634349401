"""Where the time of one step goes, from a Chrome trace of torch.profiler: for the profiles of peers.py.

The time of an operator is its own, without that of operators that it calls. A step runs in two threads, the one of the
forward pass and autograd's, which never work at the same time. What no operator takes is Python between them.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS: Mapping[str, tuple[str, ...]] = {
    "matrix products": (
        "aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::mkldnn_linear", "aten::matmul",
        "mkldnn::", "mkl::", "onednn::",
    ),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    "optimizer": ("aten::_fused_adam",),
    "collectives": ("c10d::", "gloo:", "_c10d_functional::"),
    "fused kernels": ("## Call CompiledFxGraph",),
}  # fmt: skip
"""Beginnings of operators' names, by the kind of work."""
OTHERS, BETWEEN = "other operators", "between operators"
SAME = ("matrix products", "attention")
"""What every contender runs in the same libraries."""


def read(path: Path) -> dict[str, float]:
    """Seconds of one recorded step by kind, and the whole step as ``step``."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [e for e in json.loads(text)["traceEvents"] if e.get("ph") == "X"]
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    found: Counter[str] = Counter()
    for thread in {e["tid"] for e in operators}:
        for event, own in own_times([e for e in operators if e["tid"] == thread]):
            found[kind_of(event["name"])] += own / 1e6
    first = min(e["ts"] for e in operators)
    step = (max(e["ts"] + e["dur"] for e in operators) - first) / 1e6
    found[BETWEEN] = max(0.0, step - sum(found.values()))
    return {**found, "step": step}


def own_times(events: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """Events of one thread, each with the time that none within it takes."""
    order = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
    own = [float(e["dur"]) for e in order]
    around: list[int] = []
    for number, event in enumerate(order):
        while around and order[around[-1]]["ts"] + order[around[-1]]["dur"] <= event["ts"]:
            around.pop()
        if around:
            own[around[-1]] -= event["dur"]
        around.append(number)
    return list(zip(order, own, strict=True))


def kind_of(name: str) -> str:
    return next((kind for kind, begins in KINDS.items() if name.startswith(begins)), OTHERS)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: milliseconds of one step by kind, for rows with ``task``, ``contender`` and ``seconds``.

    The last column is the whole step in units of the work that is the same for all contenders.
    """
    kinds = [*KINDS, OTHERS, BETWEEN]
    lines = [
        f"| task | contender | step | {' | '.join(kinds)} | without the rest |",
        "|---|---|---:|" + "---:|" * (len(kinds) + 1),
    ]
    for row in rows:
        seconds = row["seconds"]
        cells = [f"{1e3 * seconds.get(kind, 0.0):,.0f}" for kind in kinds]
        same = sum(seconds.get(kind, 0.0) for kind in SAME)
        cells.append(f"{seconds['step'] / same:.2f} times as fast")
        lines.append(
            f"| {row['task']} | {row['contender']} | {1e3 * seconds['step']:,.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)
