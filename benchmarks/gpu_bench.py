"""What the sections of the GPU benchmark share: the device, the time that is left, recipes, runs and timed steps."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from gpu_store import Row
from machine import synchronise

from shardwise.core.plan import Plan
from shardwise.core.strategy import Strategy
from shardwise.dryrun.model_flops import model_flops
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.step import step
from shardwise.engine.step_clock import PhaseClock
from shardwise.hardware.cluster import cluster_of, recognise
from shardwise.jobs.planning import make_plan
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.plugins.doctor.speed import matrix_product
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    SETTINGS,
    broken_rules,
    micro_batches,
    strategy_from,
)

Named = tuple[str, Row]
TINY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256, "context": 64}
_TINY_LENGTH, _TINY_BATCH = 16, 4
_DOCUMENT, _TINY_DOCUMENT = 512, 8
"""Tokens of a packed document."""
_SHAPES = (
    "layers",
    "width",
    "heads",
    "head_dim",
    "kv_heads",
    "ffn",
    "vocab",
    "context",
    "preset",
    "expert_ffn",
)


class Refused(Exception):
    """A row that cannot be measured here, with the reason."""


@dataclass(frozen=True)
class Task:
    """Measures some rows.

    Attributes:
        names: of the rows.
        measure: of the names that are wanted; yields each row with its name.
        seconds: what a row is expected to take where it was never measured.
        always: whether it is measured again although it was today.
    """

    names: tuple[str, ...]
    measure: Callable[[Sequence[str]], Iterable[Named]]
    seconds: float = 20.0
    always: bool = False


def one(name: str, measure: Callable[[], Row], seconds: float = 20.0) -> Task:
    """A task of one row. What it raises becomes the row."""

    def measured(names: Sequence[str]) -> Iterator[Named]:
        row = attempt(measure)
        if dist.is_initialized():
            dist.destroy_process_group()  # of a row that failed
        free()
        yield name, row

    return Task((name,), measured, seconds)


def attempt(measure: Callable[[], Row]) -> Row:
    """A measured row, or the row's reason or error: the others are still measured."""
    began = time.perf_counter()
    try:
        row = measure()
    except Refused as refusal:
        row = {"reason": str(refusal)}
    except Exception as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    return row | {"took_seconds": round(time.perf_counter() - began, 2)}


def free() -> None:
    """Give freed memory back to the device."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def usable(device: torch.device) -> bool:
    """Whether the device still answers. An illegal access ends all further work of a process on a CUDA device."""
    try:
        synchronise(device)
    except RuntimeError:
        return False
    return True


@dataclass
class Bench:
    """The device, whether models and repetitions are small, and when the time is over (``time.monotonic``)."""

    device: torch.device
    tiny: bool
    end: float = float("inf")
    last: Callable[[str, str], Row | None] = field(default=lambda section, name: None)
    """The newest measurement of a section's row, on any day."""

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    @property
    def untimed(self) -> int:
        """First steps, in which kernels are compiled and chosen and the allocator grows."""
        return 1 if self.tiny else 5

    @property
    def timed(self) -> int:
        return 2 if self.tiny else 15

    @property
    def capacity(self) -> int:
        """Bytes of the device's memory; 0 on the CPU."""
        return torch.cuda.mem_get_info(self.device)[1] if self.device.type == "cuda" else 0

    def product_flops(self) -> float:
        """FLOP/s of a large bf16 product at this moment: the device's clock follows its temperature."""
        size = 64 if self.tiny else 8192
        return matrix_product(self.device, torch.bfloat16, size=size, budget=0.05 if self.tiny else 0.3).flops

    def values(
        self, model: Mapping[str, Any], length: int, batch: int, strategy: Mapping[str, Any], **more: Any
    ) -> dict[str, Any]:
        """A recipe on this device, as it stands in YAML. Tiny: a small model and sequences of 16 tokens."""
        shape = {key: value for key, value in model.items() if key not in _SHAPES}
        data = {"sequence_length": _TINY_LENGTH if self.tiny else length} | dict(more.pop("data", {}))
        return {
            "model": TINY | shape if self.tiny else dict(model),
            "data": data,
            "steps": self.untimed + self.timed,
            "batch_size": min(batch, _TINY_BATCH) if self.tiny else batch,
            "optimizer": {"learning_rate": 1e-4} | dict(more.pop("optimizer", {})),
            "cluster": {"device": self._profile()},
            "strategy": dict(strategy),
            **more,
        }

    def recipe(
        self, model: Mapping[str, Any], length: int, batch: int, strategy: Mapping[str, Any], **more: Any
    ) -> Recipe:
        return recipe_of(self.values(model, length, batch, strategy, **more), SETTINGS)

    def plan(self, recipe: Recipe) -> Plan:
        """The plan of a recipe; no process group may be initialised."""
        return make_plan(recipe, cluster_of(recipe.cluster))

    def pinned(self, recipe: Recipe) -> Strategy:
        """The strategy of a recipe that pins it, without a plan. Raises Refused for one that breaks a rule."""
        strategy = strategy_from(recipe.strategy)
        for violation in broken_rules(strategy, 1, recipe):
            raise Refused(f"refused: {violation.rule.key}: {violation.rule.reason}")
        return strategy

    def run(self, recipe: Recipe, strategy: Strategy) -> Run:
        return build(recipe, blueprint_of(recipe), strategy, self.device)

    def model_flops(self, recipe: Recipe) -> int:
        """FLOPs of a step, forward and backward, without recomputation."""
        kind, dtype = self.device.type, "bf16"
        return model_flops(blueprint_of(recipe), recipe.data, recipe.batch_size, dtype, kind)

    def seconds(self, run: Run, repeat: int | None = None) -> list[float]:
        """Seconds of each timed step, on random tokens. The device is idle before and after a step."""
        batches = self.batches(run)
        taken = [
            timed(lambda: step(run, next(batches), 1e-4), self.device)
            for _ in range(self.untimed + (repeat or self.timed))
        ]
        return taken[self.untimed :]

    def phases(self, run: Run) -> dict[str, float]:
        """Median seconds of each phase of a step."""
        batches, readings = self.batches(run), list[dict[str, float]]()
        for _ in range(3):
            clock = PhaseClock(self.device)
            with clock.over():
                step(run, next(batches), 1e-4)
            readings.append(clock.read())
        return {name: statistics.median(reading[name] for reading in readings) for name in readings[0]}

    def batches(self, run: Run) -> Iterator[list[Batch]]:
        """Random tokens; in packed rows, documents of 512 tokens."""
        recipe, vocabulary = run.recipe, TINY["vocab"] if self.tiny else 32_000
        shape = (run.strategy[MICRO_BATCH_SIZE], recipe.data.sequence_length)
        count = micro_batches(run.strategy, run.layout, recipe.batch_size)
        more = self._documents(*shape) if recipe.data.packing else {}
        while True:
            tokens = [torch.randint(vocabulary, shape, device=self.device) for _ in range(count)]
            yield [{"input_ids": ids, "labels": ids, **more} for ids in tokens]

    def _documents(self, rows: int, length: int) -> Batch:
        size = _TINY_DOCUMENT if self.tiny else _DOCUMENT
        positions = torch.arange(length, device=self.device).remainder(size).repeat(rows, 1)
        starts = torch.arange(0, length, size, dtype=torch.int32, device=self.device).repeat(rows, 1)
        return {"positions": positions, "starts": starts}

    def _profile(self) -> str:
        """The name of the device's profile."""
        if self.device.type == "cpu":
            return "cpu"
        reported = torch.cuda.get_device_name(self.device)
        profile = recognise(reported)
        if profile is None:
            raise SystemExit(
                f"error: no profile describes {reported}; shardwise/hardware/profiles is to get one"
            )
        return profile.name


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from an idle device to an idle device."""
    synchronise(device)
    began = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - began


def spread(seconds: Sequence[float]) -> Row:
    """Median, fastest and slowest."""
    return {
        "median_seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "slowest_seconds": max(seconds),
    }
