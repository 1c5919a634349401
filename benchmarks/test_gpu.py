"""The GPU benchmark runs on the CPU with tiny models, so that it works where there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SECTIONS = (
    "parity", "memory", "ceilings", "training", "lora", "clock", "cross_entropy", "offload", "checkpoint"
)  # fmt: skip


def measured(out: Path, *more: str) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--tiny", "--out", str(out), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    files = {name: json.loads((out / f"gpu-{name}.json").read_text(encoding="utf-8")) for name in SECTIONS}
    assert all(file["complete"] is ("--rows" not in more) for file in files.values())
    return {name: file["rows"] for name, file in files.items()}


def checked(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert not [
        row
        for section in rows.values()
        for row in section
        if "error" in row and isinstance(row["error"], str)
    ]
    assert all(row["passed"] for row in rows["parity"])
    assert all(row["correct"] for row in rows["ceilings"] if "product" in row)
    assert all(row["fits"] and row["tokens_per_second"] > 0 for row in rows["training"] + rows["lora"])


@pytest.mark.long
def test_a_row_of_each_section(tmp_path: Path) -> None:
    checked(measured(tmp_path, "--rows", "1"))


@pytest.mark.long
def test_every_row(tmp_path: Path) -> None:
    rows = measured(tmp_path)
    checked(rows)
    assert len(rows["training"]) == 6 and len(rows["parity"]) > 20


@pytest.mark.long
def test_without_a_cuda_device_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: no CUDA device was found")
