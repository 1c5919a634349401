"""The state of one page: its controls, the points that are predicted so far, and those that the page asks for.

Points are written as compact JSON. Texts that many share, such as the sections of their recipes, are in one table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from shardwise.core.answer import SAMPLE_STEPS
from shardwise.core.plan import moment
from shardwise.core.progress import Progress, silent
from shardwise.core.units import KiB
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.planner.accuracy import spread_of
from shardwise.planner.read_ahead import ReadAhead
from shardwise.plugins.explorer.controls import (
    STRATEGY,
    Workload,
    Workloads,
    controls_of,
    workload_of,
)
from shardwise.plugins.explorer.grid import PointGrid, PointGroup
from shardwise.plugins.explorer.points import REFUSED, PlannedPoint, pinned_recipe, planned_points
from shardwise.recipe.load import dump_recipe
from shardwise.report.notation import COLOURS, row_label
from shardwise.report.record import RunRecord

_SECTION = re.compile(r"^(?=[a-z])", re.MULTILINE)
_ASK = re.compile(r"\d{1,3}(?:-\d{1,3}){1,60}", re.ASCII)
MOST_ASKED = 16
"""Points that wait to be predicted at a time."""


class _Texts(dict[str, int]):
    """The number of each text in a table."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


class Exploration:
    """A recipe and the points around its plan."""

    def __init__(
        self,
        file: Path,
        overrides: Sequence[str],
        name: str,
        run: RunRecord | None = None,
        progress: Progress = silent,
    ) -> None:
        """Plan the recipe, unless ``run`` trained it.

        Args:
            run: its measured figures are shown.

        Raises:
            RecipeError: for a fault in the recipe, or pins that break a rule.
        """
        self.name, self.run = name, run
        self.workloads = Workloads(file, overrides)
        recipe, cluster = self.workloads.recipe, self.workloads.cluster
        trained = None
        if run is not None:
            asked = run.settings()
            trained = workload_of(asked, cluster_of(asked.cluster)), run.plan.strategy
        own = run is not None and file.parent == run.folder and not overrides
        plan = run.plan if run is not None and own else make_plan(recipe, cluster, progress=progress)
        self.plan, self._trained = plan, trained
        self.controls = controls_of(self.workloads, plan.strategy, trained)
        self.grid = PointGrid(self.workloads, plan.strategy, self.controls)
        self.points: list[PlannedPoint] = []
        self.done = False
        self._written: list[dict[str, Any]] = []
        self._texts = _Texts()
        self._own = _sections(dump_recipe(pinned_recipe(self.workloads, self.workloads.own, plan.strategy)))
        self._asked: SimpleQueue[tuple[int, ...]] = SimpleQueue()
        self._choices: set[tuple[int, ...]] = set()

    @property
    def devices(self) -> Sequence[str]:
        return self.controls[0].values

    @property
    def predicted(self) -> int:
        """The number of points with figures."""
        return sum(point.figures is not None for point in self.points)

    @property
    def in_words(self) -> str:
        """How many points there are."""
        refused = sum(point.verdict == REFUSED for point in self.points)
        said = f"{self.predicted} points" + (f", {refused} refused" if refused else "")
        return said if self.done else f"{said}; --seconds for more"

    # -- predicting ---------------------------------------------------------------------------------

    def fill(self, seconds: float, changed: Callable[[], object]) -> None:
        """Predict the grid, on all cores; begin no group after so many seconds.

        Args:
            changed: called after each group.
        """
        until = time.monotonic() + seconds
        groups = self.groups()
        with ReadAhead(self.predict, groups) as ahead:
            for number in range(len(groups)):
                self.answer_asked(changed)
                if number and time.monotonic() > until:
                    break
                self.add(ahead.get(number))
                changed()
            else:
                self.done = True

    def groups(self) -> list[PointGroup]:
        """The plan's own, the run's, then those around the plan."""
        groups = list(self.grid.groups())
        if self._trained is not None and self._choice(*self._trained) is not None:
            groups.insert(1, PointGroup(*self._trained))
        return groups

    def predict(self, group: PointGroup) -> list[PlannedPoint]:
        """The points of a group, one for each device."""
        return planned_points(self.workloads, self.devices, group)

    def answer_asked(self, changed: Callable[[], object], wait: float | None = 0.0) -> None:
        """Predict what the page has asked for; ``wait`` so many seconds for the first, None for ever."""
        while True:
            try:
                choice = self._asked.get(wait != 0, wait)
            except Empty:
                return
            wait = 0.0
            if choice not in self._choices:
                self.add(self.predict(self._group(choice)))
                changed()

    def ask(self, choice: tuple[int, ...]) -> None:
        """Have a point predicted; one that is known, or no choice of this page, is left out."""
        valid = len(choice) == len(self.controls) and all(
            number < len(control.values) for number, control in zip(choice, self.controls, strict=True)
        )
        if valid and choice not in self._choices and self._asked.qsize() < MOST_ASKED:
            self._asked.put(choice)

    def _group(self, choice: tuple[int, ...]) -> PointGroup:
        values = {c.key: c.values[number] for c, number in zip(self.controls, choice, strict=True)}
        workload = Workload(
            **{key: value for key, value in values.items() if key in Workload.__annotations__}
        )
        settings = {key.removeprefix(STRATEGY): v for key, v in values.items() if key.startswith(STRATEGY)}
        return PointGroup(workload, self.plan.strategy.with_values(**settings))

    def _choice(self, workload: Workload, strategy: Any) -> tuple[int, ...] | None:
        """The values of all controls; None where a value is not on the page."""
        own = asdict(workload)
        values = [strategy.values[c.setting] if c.setting else own[c.key] for c in self.controls]
        shown = {c.setting for c in self.controls}
        differ = strategy.differences(self.plan.strategy).keys() - shown
        if differ or any(value not in c.values for c, value in zip(self.controls, values, strict=True)):
            return None
        return tuple(c.values.index(value) for c, value in zip(self.controls, values, strict=True))

    # -- writing ------------------------------------------------------------------------------------

    def add(self, points: Iterable[PlannedPoint]) -> None:
        """Add points that can be shown."""
        for point in points:
            choice = self._choice(point.workload, point.strategy)
            if choice is not None and choice not in self._choices:
                self._choices.add(choice)
                self._written.append(self._compact(point, choice))
                self.points.append(point)

    def _compact(self, point: PlannedPoint, choice: tuple[int, ...]) -> dict[str, Any]:
        written: dict[str, Any] = {"c": choice, "v": point.verdict}
        if point.why:
            written["w"] = self._texts[point.why]
        if point.recipe:
            sections = enumerate(_sections(point.recipe))
            written["x"] = [[at, self._texts[text]] for at, text in sections if text != self._own[at]]
            written["n"] = self._texts[point.line]
            written["m"] = [point.capacity_bytes, point.reserve_bytes]
        if point.figures is not None:
            peak, step = point.figures.peak, point.figures.step
            written |= {
                "p": peak.bytes,
                "r": peak.rank,
                "a": self._texts[moment(peak.phase, peak.where)],
                "b": [round(size / KiB) for size in point.figures.ledger.as_dict().values()],
                "s": step.seconds,
                "k": step.tokens,
                "u": round(step.mfu, 4),
            }
        return written

    def since(self, points: int, texts: int) -> dict[str, Any]:
        """Points and texts after so many; the texts of a point are in the table before the point is."""
        new = self._written[points:]
        return {"points": new, "texts": list(self._texts)[texts:], "done": self.done}

    def data(self) -> dict[str, Any]:
        """All that the page's script reads."""
        recipe = self.workloads.recipe
        plan = self.plan
        steps = recipe.steps or SAMPLE_STEPS
        return {
            "controls": [
                {"key": c.key, "title": c.title, "values": c.labels(), "workload": not c.setting}
                for c in self.controls
            ],
            "start": self._choice(self.workloads.own, plan.strategy),
            "ledger": [[row_label(row), COLOURS[row]] for row in plan.ledger.as_dict()],
            "unit": plan.step.unit,
            "goal": steps * plan.step.tokens,
            "price": recipe.cluster.price_per_device_hour,
            "own": self._own,
            "spread": dict(self._spreads()),
            "run": self._measured(),
            **self.since(0, 0),
        }

    def _spreads(self) -> Iterator[tuple[str, list[Any] | None]]:
        """P50 and P95 of measured over predicted, where runs of such a device were compared."""
        device = self.workloads.cluster.device
        known = not device.traits.is_host or device.measured is not None
        for quantity in ("seconds", "memory"):
            spread = spread_of(quantity, device.traits.spread) if known or quantity == "memory" else None
            yield quantity, [spread.p50, spread.p95, spread.runs, spread.source] if spread else None

    def _measured(self) -> dict[str, Any] | None:
        """What a run measured; None without one."""
        run = self.run
        if run is None or self._trained is None:
            return None
        worst = run.outcome.worst if run.outcome is not None else None
        return {
            "name": run.name,
            "choice": self._choice(*self._trained),
            "seconds": run.step_seconds,
            "planned": run.plan.step.seconds,
            "peak": worst and worst.measured_peak_bytes,
            "expected": worst and worst.predicted_peak_bytes,
            "rank": worst and worst.rank,
        }


def _sections(recipe: str) -> list[str]:
    """The text of each top-level key."""
    return _SECTION.split(recipe)[1:]


def asked_in(query: str) -> tuple[int, int, tuple[int, ...] | None]:
    """(points, texts) that the page has, and the choice that it asks for; 0 where a number cannot be read."""
    have, _, ask = query.partition("&")
    counts = re.fullmatch(r"(\d{1,7})\.(\d{1,7})", have, re.ASCII)
    choice = tuple(map(int, ask.split("-"))) if _ASK.fullmatch(ask) else None
    return int(counts[1]) if counts else 0, int(counts[2]) if counts else 0, choice
