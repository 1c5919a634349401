"""Recipes, runs and timed steps for the sections of the GPU benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from machine import synchronise

from shardwise.core.plan import Plan
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.step import step
from shardwise.engine.step_clock import PhaseClock
from shardwise.hardware.cluster import cluster_of, recognise
from shardwise.jobs.planning import make_plan
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, SETTINGS, micro_batches

Row = dict[str, Any]
TINY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256, "context": 64}


@dataclass(frozen=True)
class Bench:
    """The device, and whether models and repetitions are small."""

    device: torch.device
    tiny: bool

    @property
    def untimed(self) -> int:
        """First steps, in which kernels are compiled and chosen and the allocator grows."""
        return 1 if self.tiny else 5

    @property
    def timed(self) -> int:
        return 2 if self.tiny else 15

    def recipe(
        self, model: dict[str, Any], length: int, batch: int, strategy: dict[str, Any], **more: Any
    ) -> Recipe:
        """A recipe on this device. Tiny: a small model and sequences of 16 tokens."""
        values = {
            "model": TINY if self.tiny else model,
            "data": {"sequence_length": 16 if self.tiny else length},
            "steps": self.untimed + self.timed,
            "batch_size": min(batch, 4) if self.tiny else batch,
            "optimizer": {"learning_rate": 1e-4},
            "cluster": {"device": self._profile()},
            "strategy": strategy,
            **more,
        }
        return recipe_of(values, SETTINGS)

    def plan(self, recipe: Recipe) -> Plan:
        """The plan of a recipe; no process group may be initialised."""
        return make_plan(recipe, cluster_of(recipe.cluster))

    def run(self, recipe: Recipe, plan: Plan) -> Run:
        return build(recipe, blueprint_of(recipe), plan.strategy, self.device)

    def seconds(self, run: Run, repeat: int | None = None) -> list[float]:
        """Seconds of each timed step, on random tokens. The device is idle before and after a step."""
        batches = self._batches(run)
        taken = []
        for number in range(self.untimed + (repeat or self.timed)):
            synchronise(self.device)
            began = time.perf_counter()
            step(run, next(batches), 1e-4)
            synchronise(self.device)
            if number >= self.untimed:
                taken.append(time.perf_counter() - began)
        return taken

    def phases(self, run: Run) -> dict[str, float]:
        """Median seconds of each phase of a step."""
        batches, readings = self._batches(run), list[dict[str, float]]()
        for _ in range(3):
            clock = PhaseClock(self.device)
            with clock.over():
                step(run, next(batches), 1e-4)
            readings.append(clock.read())
        return {name: statistics.median(each[name] for each in readings) for name in readings[0]}

    def _batches(self, run: Run) -> Iterator[list[Batch]]:
        recipe, vocabulary = run.recipe, TINY["vocab"] if self.tiny else 32_000
        shape = (run.strategy[MICRO_BATCH_SIZE], recipe.data.sequence_length)
        count = micro_batches(run.strategy, run.layout, recipe.batch_size)
        while True:
            tokens = [torch.randint(vocabulary, shape, device=self.device) for _ in range(count)]
            yield [{"input_ids": each, "labels": each} for each in tokens]

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


def spread(seconds: list[float]) -> Row:
    """Median, fastest and slowest."""
    return {
        "median_seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "slowest_seconds": max(seconds),
    }
