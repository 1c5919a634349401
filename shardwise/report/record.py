"""A run's folder, read back as values: recipe, plan, a line per step, and the report that ends it.

A run may be read while it trains. Then `report.json` is not there yet, and the last line of `metrics.jsonl`
may be half a line; both are normal. What is there but cannot be read, or is not what it should be, is a
DataError naming file and line, so that nobody looks at a page made from half of a file.

Chosen: pydantic checks every file against the shapes below before anything uses it, since these files are
also written by other versions and edited by hand. Keys of metrics and report that are not known here are
ignored: a newer writer may add some. The price is that the shape of `plan.json` stands here a second time,
beside `core.plan`.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shardwise.core.errors import DataError
from shardwise.core.pipeline_schedule import Action, Kind, Played
from shardwise.core.plan import Plan, plan_from

Size = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rows = dict[str, Size]

SETTLING_STEPS = 3
"""First steps, which are slower while memory is measured: left out of typical figures."""


@dataclass(frozen=True)
class StepRecord:
    """One line of `metrics.jsonl`. ``loss`` is in nats per token, and NaN once the run has failed."""

    step: Size
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: Size
    seconds: float
    tokens_per_second: float
    skipped: bool = False
    held_out_loss: float | None = None
    rewinds: Size | None = None


@dataclass(frozen=True)
class RankMemory:
    """Peak bytes of one rank: what the plan said and what was seen. ``reserved`` is 0 where there is none."""

    rank: Size
    predicted_peak_bytes: Size
    measured_peak_bytes: Size
    measured_reserved_bytes: Size = 0


@dataclass(frozen=True)
class RankPasses:
    """The passes of one rank in one step: kind, stage, micro-batch, and seconds from the first pass of all ranks."""

    rank: Size
    spans: tuple[tuple[Kind, Size, Size, Seconds, Seconds], ...]


@dataclass(frozen=True)
class PassesRecord:
    """What the ranks of one pipeline computed when, in one step, in their order."""

    step: Size
    ranks: Annotated[tuple[RankPasses, ...], Field(min_length=1)]

    def played(self) -> Played:
        return Played(
            tuple(
                tuple(
                    (Action(kind, stage, number), begin, end)
                    for kind, stage, number, begin, end in each.spans
                )
                for each in self.ranks
            )
        )


@dataclass(frozen=True)
class Outcome:
    """`report.json`: written once, when the run ends. ``seconds`` is None where no step was made."""

    ranks: Annotated[tuple[RankMemory, ...], Field(min_length=1)]
    predicted_step_seconds: Seconds
    measured_step_seconds: Seconds | None
    ledger: Rows
    held_out_loss: float | None = None
    parameters: Size = 0
    tokens: Size = 0
    seconds: Seconds = 0.0
    sample: str | None = None
    device: str = ""
    world_size: Size = 0
    passes: PassesRecord | None = None

    @property
    def worst(self) -> RankMemory:
        """The rank that held most."""
        return max(self.ranks, key=lambda rank: rank.measured_peak_bytes)


@dataclass(frozen=True)
class RunRecord:
    """All that a run wrote. ``outcome`` is None while it trains, or when it did not reach its end.

    ``planned_only`` says that there is no run but a plan alone; ``folder`` then only names it.
    """

    folder: Path
    recipe: str
    plan: Plan
    steps: tuple[StepRecord, ...]
    outcome: Outcome | None
    planned_only: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def step_seconds(self) -> float | None:
        """Typical time of a step: the outcome's, or so far the median after the first few."""
        if self.outcome is not None and self.outcome.measured_step_seconds is not None:
            return self.outcome.measured_step_seconds
        return _typical([step.seconds for step in self.steps])

    @property
    def tokens_per_second(self) -> float | None:
        """Typical rate of the targets that were trained on; of padded sequences the plan counts more."""
        return _typical([step.tokens_per_second for step in self.steps])

    @property
    def held_out_loss(self) -> float | None:
        """The outcome's, or the newest so far."""
        if self.outcome is not None and self.outcome.held_out_loss is not None:
            return self.outcome.held_out_loss
        return next((s.held_out_loss for s in reversed(self.steps) if s.held_out_loss is not None), None)


def _typical(values: list[float]) -> float | None:
    """The median after the first few steps, or of all when there are no more."""
    return statistics.median(values[SETTLING_STEPS:] or values) if values else None


def read_run(folder: Path) -> RunRecord:
    """Everything that is in the folder of a run, finished or not.

    Raises:
        DataError: the folder is not a run's, or a file of it cannot be read or is not what it should be.
    """
    folder = Path(folder)
    recipe, plan, report = folder / "recipe.yaml", folder / "plan.json", folder / "report.json"
    missing = [path.name for path in (recipe, plan) if not path.exists()]
    if missing:
        why = f"it has no {missing[0]}" if folder.is_dir() else "there is no such folder"
        fix = "give the folder that train --out had"
        raise DataError("not the folder of a run", where=str(folder), why=why, fix=fix)
    return RunRecord(
        folder=folder,
        recipe=_decoded(_bytes(recipe), recipe),
        plan=_plan(plan),
        steps=_steps(folder / "metrics.jsonl"),
        outcome=_checked(TypeAdapter(Outcome), _document(report), str(report)) if report.exists() else None,
    )


# -- files --------------------------------------------------------------------------------------------


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path.name}", where=str(path), why=error.strerror or str(error)
        ) from error


def _decoded(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"{path.name} is not text", where=f"{path}:{line}", why="it is not UTF-8") from error


def _document(path: Path) -> Any:
    return _parsed(_decoded(_bytes(path), path), path, first_line=1)


def _parsed(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}:{first_line + error.lineno - 1}"
        raise DataError(f"{path.name} is not JSON", where=where, why=error.msg) from error
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of too many digits
        raise DataError(f"{path.name} is not JSON", where=f"{path}:{first_line}", why=str(error)) from error


def _steps(path: Path) -> tuple[StepRecord, ...]:
    """A record per step that was not undone; without a file, no step has been made.

    A line whose step is not above the one before follows a rewind, and undoes all from its step on. What follows
    the last newline is being written, and may end in half a character: it is cut off first.
    """
    if not path.exists():
        return ()
    adapter = TypeAdapter(StepRecord)
    raw = _bytes(path)
    lines = _decoded(raw[: raw.rfind(b"\n") + 1], path).split("\n")
    steps: list[StepRecord] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            record: StepRecord = _checked(adapter, _parsed(line, path, number), f"{path}:{number}")
            while steps and steps[-1].step >= record.step:
                steps.pop()
            steps.append(record)
    return tuple(steps)


# -- shapes -------------------------------------------------------------------------------------------


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _PeakShape(_Shape):
    bytes: Size
    rank: Size
    phase: str
    where: str


class _StepShape(_Shape):
    seconds: Annotated[float, Field(gt=0)]
    tokens: Size
    flops: int
    traffic_bytes: Rows
    mfu: float
    split: dict[str, Seconds]


class _CandidateShape(_Shape):
    strategy: dict[str, Any]
    line: str
    peak_bytes: Size
    step_seconds: Seconds
    verdict: str
    reason: str


class _HostShape(_Shape):
    """Host memory of a rank."""

    capacity_bytes: Size
    ledger: Rows


class _DiskShape(_Shape):
    bytes: Size


class _PipelineShape(_Shape):
    schedule: str
    ranks: Annotated[int, Field(ge=1)]
    stages_per_rank: Annotated[int, Field(ge=1)]
    micro_batches: Annotated[int, Field(ge=1)]
    forward: list[Seconds]
    backward: list[Seconds]
    place: Size
    pass_bytes: Size


class _PlanShape(_Shape):
    """What `Plan.as_dict` writes."""

    strategy: dict[str, Any]
    line: str
    world_size: Size
    layout: dict[str, Annotated[int, Field(ge=1)]]
    cluster: str
    devices_per_node: Annotated[int, Field(ge=1)]
    device: str
    capacity_bytes: Size
    reserve_bytes: Size
    parameters: Size
    peak: _PeakShape
    ledger: Rows
    host: _HostShape
    disk: _DiskShape
    allocated_bytes: Rows
    step: _StepShape
    micro_batches: Size
    candidates: list[_CandidateShape]
    reasons: list[str]
    assumptions: list[str]
    timeline: list[dict[str, Any]]
    pipeline: _PipelineShape | None


def _plan(path: Path) -> Plan:
    values = _document(path)
    _checked(TypeAdapter(_PlanShape), values, str(path))
    for index, point in enumerate(values["timeline"]):
        rows = {row: size for row, size in point.items() if row != "phase"}
        _checked(TypeAdapter(Rows), rows, f"{path}: timeline.{index}")
        _checked(TypeAdapter(str), point.get("phase"), f"{path}: timeline.{index}.phase")
    try:
        plan = plan_from(values)
        plan.predicted_allocated(plan.worst_rank)
        return plan
    except (KeyError, TypeError, ValueError) as error:
        what = f"{path.name} is not a plan of this version"
        raise DataError(what, where=str(path), why=str(error)) from error


def _checked(adapter: TypeAdapter[Any], values: Any, where: str) -> Any:
    """`values` as the adapter's type. Raises DataError for its first fault."""
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in fault["loc"])
        place = f"{where}: {key}" if key else where
        raise DataError("unexpected content", where=place, why=fault["msg"]) from error
