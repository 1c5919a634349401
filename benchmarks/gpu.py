"""Everything that only a CUDA device can show, in one command: ``python benchmarks/gpu.py``.

Sections, in this order; each writes benchmarks/results/gpu-SECTION.json after every row, so a command that is cut off
leaves what it has measured:

    parity         every value of every technique against one plain process (verify)
    memory         predicted against max_memory_allocated and max_memory_reserved, of 20 configurations
    ceilings       matrix products, attention and copies on random data
    training       0.5B, 1.5B and 7B, bf16 and fp8: tokens/s, share of the measured ceiling, predicted time
    lora           a LoRA adapter on a model of Llama-3-8B's dimensions
    clock          predicted against measured seconds of 31 steps, after ``shardwise doctor --calibrate``
    cross_entropy  the chunked loss against F.cross_entropy: time and memory
    offload        a step with activations in host memory against one without
    checkpoint     how long a step waits for a checkpoint, in the foreground and in the background

A section starts while time is left (``--minutes``); a row that fails is a row with its error. ``--tiny`` shrinks
everything, and with ``--device cpu`` the same code runs without an accelerator.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import gpu_checks as checks
import gpu_speed as speed
import torch
import torch.distributed as dist
from gpu_bench import Bench, Row
from gpu_clock import clock
from machine import described

RESULTS = Path(__file__).parent / "results"
SECTIONS: dict[str, Callable[[Bench], Iterator[Callable[[], Row]]]] = {
    "parity": checks.parity,
    "memory": checks.memory,
    "ceilings": speed.ceilings,
    "training": speed.training,
    "lora": speed.lora,
    "clock": clock,
    "cross_entropy": speed.cross_entropy,
    "offload": speed.offload,
    "checkpoint": speed.checkpoint,
}


def row_of(measure: Callable[[], Row], device: torch.device) -> Row:
    """A measured row, or the row's error: the others are still measured."""
    began = time.perf_counter()
    try:
        row = measure()
    except Exception as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        if dist.is_initialized():
            dist.destroy_process_group()  # of this row
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row | {"took_seconds": round(time.perf_counter() - began, 2)}


def run(bench: Bench, names: list[str], out: Path, minutes: float, most: int | None) -> None:
    """Measure at most ``most`` rows of each section until the time is over; write after each row."""
    end = time.monotonic() + 60 * minutes
    for name in names:
        rows: list[Row] = []
        written = {"machine": described(), "tiny": bench.tiny, "complete": False, "rows": rows}
        for measure in islice(SECTIONS[name](bench), most):
            if time.monotonic() > end:
                break
            rows.append(row_of(measure, bench.device))
            print(f"{name}: {json.dumps(rows[-1])}", flush=True)
            write(out / f"gpu-{name}.json", written)
        else:
            written["complete"] = most is None
            write(out / f"gpu-{name}.json", written)
        if time.monotonic() > end:
            print(f"stopped in {name}: {minutes:g} minutes are over", flush=True)
            return


def write(path: Path, written: dict[str, Any]) -> None:
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="small models, few repetitions")
    parser.add_argument(
        "--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), metavar="SECTION"
    )
    parser.add_argument("--rows", type=int, help="at most so many rows of each section")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device was found; --device cpu --tiny runs the same code without one")
    run(Bench(torch.device(given.device), given.tiny), given.only, given.out, given.minutes, given.rows)


if __name__ == "__main__":
    main()
