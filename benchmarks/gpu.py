"""Measures one CUDA device, in commands of at most ten minutes: ``make benchmark-gpu PART=machine``.

Parts, in the order in which half an hour is best spent:

    machine      2 min  what ``shardwise doctor`` says; products, copies, attention by kernel with its error, the loss
    ladder       9 min  1.5B, 7B and LoRA of 8B: one more optimization on each rung, next to PyTorch, HF Trainer
    profile      4 min  the fastest rung and compiled PyTorch under torch.profiler
    techniques   6 min  offload, 8-bit AdamW, checkpoints, long rows, experts, DPO; what the planner chooses
    clock        5 min  ``doctor --calibrate``, then predicted against measured steps, the worst ones first
    parity       rest   techniques against one plain process, those never checked first; a run killed and resumed
    memory       rest   predicted against allocated and reserved memory of 20 configurations

Every row is appended to results/gpu-rows.jsonl once it is measured, with machine and day. A row that was measured on
this machine today is left out, unless ``--again``; a command that was cut off is repeated and goes on. A row that fails
is a row with its error, and is tried again after the others. A row that would take longer than the rest of
``--minutes`` is left out. ``--predict`` plans the rows that were measured without a plan; it needs no device.

``--tiny`` shrinks everything, and with ``--device cpu`` the same code runs without an accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from gpu_bench import Bench, Task, attempt, usable
from gpu_checks import memory, parity
from gpu_clock import clock
from gpu_ladder import ladder
from gpu_machine import machine
from gpu_profile import profile
from gpu_store import Row, Store, completed, is_measured
from gpu_techniques import techniques
from machine import described

from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS

RESULTS = Path(__file__).parent / "results"
TINY_RESULTS = Path("runs") / "gpu-tiny"
SECTIONS: dict[str, Callable[[Bench], Iterator[Task]]] = {
    "machine": machine,
    "ladder": ladder,
    "profile": profile,
    "techniques": techniques,
    "clock": clock,
    "parity": parity,
    "memory": memory,
}


def run(
    bench: Bench, store: Store, names: Sequence[str], most: int | None = None, again: bool = False
) -> None:
    """Measure at most ``most`` rows of each section while time is left.

    Args:
        again: also rows that were measured today.
    """
    bench.last = store.last
    for section in names:
        measured = _section(bench, store, section, most, again)
        print(f"{section}: {measured} rows measured, {bench.left:.0f} s left", flush=True)


def _section(bench: Bench, store: Store, section: str, most: int | None, again: bool) -> int:
    def failed(names: Sequence[str]) -> bool:
        """Whether one of them failed when it was last tried: those come after the others."""
        last = [store.last(section, name) for name in names]
        return any("error" in row and not is_measured(row) for row in last if row is not None)

    measured = 0
    for task in sorted(SECTIONS[section](bench), key=lambda task: failed(task.names)):
        wanted = [
            name for name in task.names if again or task.always or not store.measured_today(section, name)
        ]
        wanted = sorted(wanted, key=lambda name: failed([name]))[: None if most is None else most - measured]
        rows = iter(task.measure(wanted))
        for number, name in enumerate(wanted):
            if bench.left < _expected(store, section, name, task):
                print(f"{section}: left out for lack of time: {'; '.join(wanted[number:])}", flush=True)
                break
            store.begin(section, name)
            row = store.append(section, *next(rows))
            measured += 1
            print(f"{section}: {row['row']}: {_said(row)}", flush=True)
            if not usable(bench.device):
                print(
                    f"error: the device does not answer after {row['row']!r}; repeat the command", flush=True
                )
                os._exit(1)  # whatever is cleaned up would wait for the device
    return measured


def _expected(store: Store, section: str, name: str, task: Task) -> float:
    """Seconds: as long as it took when it was last measured, else what the task says."""
    row = store.last(section, name)
    return float(row["took_seconds"]) if row is not None and is_measured(row) else task.seconds


def _said(row: Row) -> str:
    left_out = ("section", "row", "machine", "recipe", "tiny", "day")
    return json.dumps({key: value for key, value in row.items() if key not in left_out}, ensure_ascii=False)


def predict(folder: Path) -> None:
    """Plan every row that Shardwise trained and that has no prediction: seconds of a step, and allocated bytes."""

    def lacks(row: Row) -> bool:
        return (
            is_measured(row) and row.get("own") is True and not {"predicted_seconds", "prediction"} & set(row)
        )

    for row in completed(folder, lacks, predicted):
        print(f"{row['row']}: {row.get('predicted_seconds', row.get('prediction'))}", flush=True)


def predicted(row: Row) -> Row:
    """What a plan says of a row that was trained, and the version of torch that planned; or why there is no plan."""

    def planned() -> Row:
        recipe = recipe_of(row["recipe"], SETTINGS)
        plan = make_plan(recipe, cluster_of(recipe.cluster))
        return {"predicted_seconds": plan.step.seconds, "predicted_bytes": plan.predicted_allocated(0)}

    found = attempt(planned)
    found.pop("took_seconds")
    return (found if is_measured(found) else {"prediction": found.get("error")}) | {
        "planned_with": torch.__version__
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="small models, few repetitions")
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), metavar="PART")
    parser.add_argument("--rows", type=int, help="at most so many rows of each part")
    parser.add_argument("--again", action="store_true", help="also rows that were measured today")
    parser.add_argument("--predict", action="store_true", help="only plan the rows that have no prediction")
    parser.add_argument("--out", type=Path, help=f"folder of gpu-rows.jsonl; default: {RESULTS}")
    given = parser.parse_args()
    out = given.out or (TINY_RESULTS if given.tiny else RESULTS)
    if given.predict:
        predict(out)
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device was found; --device cpu --tiny runs the same code without one")
    bench = Bench(torch.device(given.device), given.tiny, time.monotonic() + 60 * given.minutes)
    run(bench, Store(out, described(), given.tiny), given.only, given.rows, given.again)


if __name__ == "__main__":
    main()
