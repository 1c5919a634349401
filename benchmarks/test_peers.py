"""The profiles of benchmarks/peers.py: own times of operators in a Chrome trace, by the kind of work."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import peer_profiles as profiles
import pytest


def event(name: str, thread: int, start: float, end: float, kind: str = "cpu_op") -> dict[str, object]:
    return {"ph": "X", "cat": kind, "name": name, "tid": thread, "ts": start, "dur": end - start}


def test_the_time_of_an_operator_is_its_own(tmp_path: Path) -> None:
    """A linear layer of two products, a fused graph within which one runs, and the backward pass in another thread."""
    events = [
        event("aten::linear", 1, 0, 100),
        event("aten::mm", 1, 10, 90),
        event("## Call CompiledFxGraph f00 ##", 1, 100, 160),
        event("aten::mm", 1, 110, 150),
        event("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 2, 200, 250),
        event("aten::silu_backward", 2, 250, 300),
        event("a function of Python", 2, 0, 1000, kind="python_function"),
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = {kind: round(1e6 * seconds) for kind, seconds in profiles.read(path).items()}
    assert found == {
        "matrix products": 140,
        "fused kernels": 20,
        "attention": 50,
        profiles.OTHERS: 50,
        profiles.BETWEEN: 40,
        "step": 300,
    }
    assert "1.58 times" in profiles.table([{"task": "t", "contender": "c", "seconds": profiles.read(path)}])


def test_a_trace_without_operators_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}', encoding="utf-8")
    with pytest.raises(ValueError, match="empty"):
        profiles.read(path)
