"""Does a step take the seconds that the plan says, after ``shardwise doctor --calibrate``: one GPU of at least 80 GB.

A case pins its strategy. Those that pin none leave it to the planner; the others of the same model and batch are its
rivals. Each case trains in this process: nothing but steps is timed. Cases whose prediction was off by more than 15 %
when they were last measured come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Task, one, spread
from gpu_checks import MODELS as SMALL
from gpu_store import Row

from shardwise.hardware.cluster import recognise
from shardwise.hardware.measured_gpu import with_measured
from shardwise.launch.process import join
from shardwise.plugins.calibration.store import calibrated
from shardwise.plugins.doctor.checks import examine

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": SMALL["gpt2 124M"],
    "150M": SMALL["150M"],
    "0.4B": {"layers": 24, "width": 1024, "heads": 16, "kv_heads": 8, "ffn": 2816, "vocab": 50304},
    "1.3B": {"layers": 24, "width": 2048, "heads": 16, "kv_heads": 8, "ffn": 5632, "vocab": 32000},
    "3B": {"layers": 28, "width": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "8B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
}
LORA: dict[str, Any] = {"name": "lora", "rank": 16}
FULL, SELECTIVE = ({"activation_checkpointing": each} for each in ("full", "selective"))
COMPILED = {"compile": "block"}
STEPS = 7
"""Timed steps of a case."""


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``length`` tokens a step, in bf16; ``settings`` is {} for the planner's choice."""

    model: str
    batch: int
    length: int
    settings: Mapping[str, Any]
    adapter: Mapping[str, Any] | None = None

    @property
    def work(self) -> str:
        """The model and the batch, without the strategy."""
        adapted = "" if self.adapter is None else ", QLoRA" if "quantize" in self.adapter else ", LoRA"
        return f"{self.model}{adapted}, batch {self.batch} × {self.length}"

    @property
    def name(self) -> str:
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        return f"{self.work}: {settings or 'free choice'}"


def _of(work: tuple[str, int, int], *settings: Mapping[str, Any]) -> list[Case]:
    return [Case(*work, each) for each in settings]


MB1, MB2, MB4, MB8, MB16 = ({"micro_batch_size": size} for size in (1, 2, 4, 8, 16))
FREE: dict[str, Any] = {}

CASES: tuple[Case, ...] = (
    *_of(("150M", 16, 1024), FREE, MB16, MB8, MB2, MB8 | FULL, MB8 | {"loss": "chunked"}),
    *_of(("150M", 16, 1024), *(MB8 | {"precision": name} for name in ("fp32", "fp16", "fp8"))),
    *_of(("150M", 16, 1024), *(MB8 | {"offload": name} for name in ("activations", "optimizer"))),
    *_of(
        ("1.3B", 8, 2048), FREE, MB1, MB2, MB4, MB8, MB4 | FULL, MB4 | SELECTIVE, MB4 | {"precision": "fp8"}
    ),
    *_of(("3B", 4, 4096), MB1 | FULL, MB2 | FULL, FREE),
    *_of(("gpt2", 16, 1024), MB8),
    *_of(("0.4B", 4, 8192), MB1),
    *_of(("0.4B", 1, 32768), MB1 | FULL),
    Case("8B", 4, 2048, MB2, LORA),
    Case("8B", 4, 2048, MB2, LORA | {"quantize": "nf4"}),
    *_of(("150M", 16, 1024), MB8 | COMPILED),
    *_of(("1.3B", 8, 2048), MB4 | COMPILED, MB8 | COMPILED),
    *_of(("3B", 4, 4096), MB1 | COMPILED),
    *_of(("gpt2", 16, 1024), MB8 | COMPILED),
)


FAR_OFF = 0.15
CALIBRATION = "doctor --calibrate"


def clock(bench: Bench) -> Iterator[Task]:
    """A calibration where there is none, then a row for each case; free choices come last: they are planned longest."""
    if bench.capacity and not bench.tiny and not _is_calibrated():
        yield replace(one(CALIBRATION, _calibrate, 90.0), always=True)
    tasks = [one(case.name, partial(_clocked, bench, case), 15.0) for case in CASES]
    free = {case.name for case in CASES if not case.settings}
    yield from sorted(tasks, key=lambda task: (task.names[0] in free, not _was_far_off(bench, task.names[0])))


def _was_far_off(bench: Bench, name: str) -> bool:
    row = bench.last("clock", name) or {}
    return abs(row.get("error_of_prediction", 0.0)) > FAR_OFF


def _is_calibrated() -> bool:
    profile = recognise(torch.cuda.get_device_name())
    return profile is not None and with_measured(profile).measured is not None


def _calibrate() -> Row:
    diagnosis = examine(Path.cwd(), measure=False)
    return {"stored": [path.name for path in calibrated(diagnosis, Path.cwd())]}


def _clocked(bench: Bench, case: Case) -> Row:
    model = MODELS[case.model] | {"context": case.length}
    more = {} if case.adapter is None else {"adapter": dict(case.adapter)}
    settings = {"precision": "bf16"} | dict(case.settings)
    if bench.tiny and "micro_batch_size" in settings:
        settings["micro_batch_size"] = 1
    recipe = bench.recipe(model, case.length, case.batch, settings, **more)
    plan = bench.plan(recipe)
    if not plan.fits:
        return {"reason": "does not fit"}
    with join(bench.device.type):
        run = bench.run(recipe, plan.strategy)
        taken = spread(bench.seconds(run, repeat=2 if bench.tiny else STEPS))
        phases = bench.phases(run)
    return taken | {
        "work": case.work,
        "settings": dict(case.settings),
        "plan": plan.line,
        "predicted_seconds": plan.step.seconds,
        "error_of_prediction": plan.step.seconds / taken["median_seconds"] - 1,
        "predicted_phases": dict(plan.step.phases),
        "measured_phases": phases,
    }
