"""The plan, which is also the file ``plan.json``: a strategy, its predicted cost, and why others were not chosen.

``peak.bytes`` is the memory that one device must have: what the dry run counted plus the overhead from the device's
profile. ``allocated_bytes`` leaves out what the measurement cannot see (a driver's context, communicators). A run's
measured peak is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from shardwise.core.block_times import BlockTimes
from shardwise.core.counted import Unit, Units
from shardwise.core.errors import DataError, one_line
from shardwise.core.figures import of_capacity, percent_text, tokens_rate
from shardwise.core.json_file import (
    Finite,
    PositiveInt,
    Seconds,
    Size,
    Total,
    plain,
    read_json,
    text_of,
    written_as,
)
from shardwise.core.ledger import Ledger
from shardwise.core.notebook_html import notebook_card
from shardwise.core.strategy import Axis, Layout, Setting, Strategy
from shardwise.core.timetable import Timetable
from shardwise.core.units import format_bytes, format_count, format_seconds

StrategyValues = Annotated[
    Strategy, written_as(dict[str, Any], Strategy, lambda strategy: dict(strategy.values))
]

PLAN_ONLY = "plan only"
"""Begins the assumption of a plan for devices on which Shardwise cannot train."""


def _axes_by_name(degrees: Mapping[str, int]) -> Layout:
    """Axes without properties; ``read_plan`` replaces them by those of the techniques."""
    return Layout(tuple((Axis(name), degree) for name, degree in degrees.items()))


Degrees = Annotated[Layout, written_as(dict[str, PositiveInt], _axes_by_name, lambda layout: layout.degrees)]


@dataclass(frozen=True)
class StepEstimate:
    """One optimizer step: predicted time, and counts.

    Attributes:
        seconds: of one step, the slowest rank.
        tokens: targets of the global batch.
        flops: executed by one rank, recomputation included.
        traffic_bytes: sent by one rank, by mesh axis, ring convention.
        mfu: model FLOPs per second over the peak of all devices in the compute dtype.
        split: seconds by purpose, without overlapped communication.
        model_flops: of the whole batch, the same for every strategy: forward and backward without recomputation; 0
            in files of the first version, which did not have it.
        phases: seconds of forward, backward, optimizer and communication, of the rank that was dry-run; communication
            is the part that is not overlapped.
        unit: what ``tokens`` counts; a user's own dataset has samples, whose targets only the loss counts.
        counted: what the loss is a mean over, where the unit is tokens (``TrainingObjective.counted``).
    """

    seconds: Annotated[Finite, Field(gt=0)]
    tokens: Size
    flops: Total
    traffic_bytes: Mapping[str, Size]
    mfu: Finite
    split: Mapping[str, Seconds]
    model_flops: Total = 0
    phases: Mapping[str, Seconds] = field(default_factory=dict)
    unit: Unit = "tokens"
    counted: str = "tokens"

    @property
    def units(self) -> Units:
        return Units(self.unit, self.counted if self.unit == "tokens" else "targets")

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @model_serializer(mode="wrap")
    def _written(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {**fields(self), "tokens_per_second": self.tokens_per_second}


def moment(phase: str, where: str) -> str:
    """A peak's phase and module in words. Outside of modules the loss is named, and no operator.

    The dry run writes ``the loss (aten::sub.Tensor)`` for every tensor outside of modules. Only in the passes is that
    the loss.
    """
    module = where.partition(" (")[0] if phase in ("forward", "backward") or " (" not in where else ""
    return f"in the {phase} phase" + (f", at {module}" if module else "")


PeakIs: TypeAlias = Literal["counted", "estimated", "at least"]


@dataclass(frozen=True)
class Candidate:
    """One strategy that was considered.

    Attributes:
        verdict: chosen | fits | tight (only by emptying the allocator's cache in every step) | does not fit | invalid |
            could not be predicted (its dry run raised the error in ``reason``; peak and seconds are 0).
        reason: one sentence.
        peak_is: counted: the peak that the strategy's own plan has; estimated: with fragmentation in proportion to the
            chosen strategy's, or of a rank that need not be the worst; at least: without fragmentation, or of weights
            and optimizer state alone.
        split: seconds by purpose, as of a StepEstimate; empty where no time was predicted.
    """

    strategy: StrategyValues
    line: str
    peak_bytes: Size
    step_seconds: Seconds
    verdict: str
    reason: str
    peak_is: PeakIs = "counted"
    split: Mapping[str, Seconds] = field(default_factory=dict)


@dataclass(frozen=True)
class TimelinePoint:
    """The ledger at one instant of the step. In the file its rows stand next to ``phase``."""

    phase: str
    ledger: Ledger

    @model_validator(mode="before")
    @classmethod
    def _read(cls, point: Any) -> Any:
        if not isinstance(point, dict):
            return point
        rows = {row: size for row, size in point.items() if row != "phase"}
        return {"ledger": rows} | ({"phase": point["phase"]} if "phase" in point else {})

    @model_serializer
    def _written(self) -> dict[str, Any]:
        return {"phase": self.phase, **self.ledger.as_dict()}


@dataclass(frozen=True)
class AllocationSite:
    """Tensors that one module and operation allocated and that are in memory at the peak.

    Attributes:
        row: of the ledger; "" for the sites that are too small to be listed.
        phase: in which they were allocated.
        module: with ``*`` for numbers of blocks; "" outside of modules.
        operation: of PyTorch's dispatcher, such as ``aten::mm``.
    """

    row: str
    phase: str
    module: str
    operation: str
    tensors: Size
    bytes: Size


@dataclass(frozen=True)
class PlannedPeak:
    """The highest instant of the rank that needs most: its memory, the rank, the phase and the module."""

    bytes: Size
    rank: Size
    phase: str
    where: str

    @property
    def in_words(self) -> str:
        return f"{moment(self.phase, self.where)}, on rank {self.rank}"


@dataclass(frozen=True)
class HostMemory:
    """Host memory of a rank at its highest, where the host's memory is not the device's.

    Attributes:
        capacity_bytes: host memory for each device of a node.
    """

    ledger: Ledger
    capacity_bytes: Size

    @property
    def bytes(self) -> int:
        return self.ledger.total

    @model_serializer(mode="wrap")
    def _written(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"bytes": self.bytes, **fields(self)}


@dataclass(frozen=True)
class DiskSpace:
    """What a rank reserves on a disk. Whether there is as much is known when the run is built."""

    bytes: Size


EMPTIES_CACHE = "the allocator empties its cache"
"""How the reason of a plan begins that fits only by that (planner/predict.py)."""


@dataclass(frozen=True, repr=False)
class Plan:
    """What will be trained and what it will need.

    Attributes:
        line: the strategy in one line.
        reserve_bytes: part of the capacity that stays free for memory that is neither counted nor in a table.
        ledger: the rows of ``peak.bytes``.
        allocated_bytes: predicted peak by rank, as the measurement counts it, of every rank that was dry-run.
        reasons: the reasons for this strategy, in sentences, and the scaled learning rate.
        assumptions: values from tables, which were not counted.
        layout: the mesh over all devices.
        pipeline: the schedule with the seconds of its passes, when there is a pipeline.
        sites: bytes at the peak, by allocation site; () in files of earlier versions.
        blocks: which block runs when in the first micro-batch, and what it keeps.
        trained_parameters: of ``parameters``; None in files of earlier versions.
        departures: sentences on what the model's files ask for and the run leaves out, and on weights that adapters do
            not reach.
    """

    strategy: StrategyValues
    line: str
    world_size: Size
    cluster: str
    device: str
    capacity_bytes: Size
    parameters: Size
    peak: PlannedPeak
    ledger: Ledger
    allocated_bytes: Mapping[int, Size]
    step: StepEstimate
    micro_batches: Size
    reserve_bytes: Size
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...]
    timeline: tuple[TimelinePoint, ...]
    host: HostMemory
    disk: DiskSpace
    layout: Degrees
    devices_per_node: PositiveInt
    pipeline: Timetable | None
    sites: tuple[AllocationSite, ...] = ()
    blocks: BlockTimes | None = None
    trained_parameters: Size | None = None
    departures: tuple[str, ...] = ()

    @property
    def parameters_in_words(self) -> str:
        """The number of parameters, and how many of them are trained if not all are."""
        trained = self.trained_parameters
        whole = format_count(self.parameters)
        if trained is None or trained == self.parameters:
            return f"{whole} parameters"
        return f"{format_count(trained)} of {whole} parameters trained"

    @property
    def fits(self) -> bool:
        on_device = self.peak.bytes <= self.capacity_bytes - self.reserve_bytes
        return on_device and self.host.bytes <= self.host.capacity_bytes

    @property
    def tight(self) -> str:
        """How the allocator makes room where the plan fits only by that; "" for others."""
        reasons = (reason for reason in self.reasons if reason.startswith(EMPTIES_CACHE))
        return next(reasons, "") if self.fits else ""

    @property
    def verdict(self) -> str:
        """`fits`, `tight` with the reason, or the excess. The reserve is named: with it, a plan below the capacity may
        not fit."""
        if self.fits:
            return f"tight: {one_line(self.tight)}" if self.tight else "fits"
        missing = []
        if (over := self.peak.bytes + self.reserve_bytes - self.capacity_bytes) > 0:
            reserve = f" with a reserve of {format_bytes(self.reserve_bytes)}" if self.reserve_bytes else ""
            missing.append(f"{format_bytes(over)} too much{reserve}")
        if (excess := self.host.bytes - self.host.capacity_bytes) > 0:
            missing.append(f"{format_bytes(excess)} too much in host memory")
        return f"does not fit: {', '.join(missing)}"

    @property
    def figures(self) -> tuple[str, ...]:
        """Memory, seconds of a step, rate and MFU, in words."""
        step = self.step
        return (
            of_capacity(self.peak.bytes, self.capacity_bytes),
            f"{format_seconds(step.seconds)}/step",
            tokens_rate(step.tokens_per_second, step.unit),
            f"MFU {percent_text(step.mfu, 1)}",
        )

    @property
    def about(self) -> str:
        """The model, the cluster and the batch, in words."""
        batch = f"{format_count(self.step.tokens)} {self.step.unit} per step"
        return f"{self.parameters_in_words} · {one_line(self.cluster)} · {batch}"

    def __str__(self) -> str:
        """The first three lines that ``shardwise plan`` prints."""
        return "\n".join((one_line(self.line), "   ".join(self.figures), f"{self.verdict} · {self.about}"))

    def __repr__(self) -> str:
        return f"<Plan {self.line}: {self.verdict}>"

    @property
    def calibration_offer(self) -> str:
        """The line that offers a measurement of this machine; "" for a plan that used one, or is plan only."""
        if any("measured on" in sentence or PLAN_ONLY in sentence for sentence in self.assumptions):
            return ""
        measure = "run `shardwise doctor --calibrate` to measure this machine"
        return f"the plan used assumed speeds of {self.device}: {measure}"

    def predicted_allocated(self, rank: int) -> int:
        """Predicted peak of ``rank``; one that was not dry-run holds no more than the nearest before it that was."""
        return self.allocated_bytes[max(known for known in self.allocated_bytes if known <= rank)]

    def _repr_html_(self) -> str:
        """The plan in a notebook: what it needs, how long a step takes, and the ledger at the peak."""
        room, step = self.capacity_bytes, self.step
        verdict = "fits" if self.fits else "does not fit"
        facts = [
            f"{format_bytes(self.peak.bytes)} of {format_bytes(room)}: {verdict}",
            f"{format_seconds(step.seconds)} per step of {format_count(step.tokens)} {step.unit}, predicted",
            f"{self.parameters_in_words} on {self.cluster}",
            *self.reasons,
            *self.departures,
        ]
        rows = sorted(((size, row) for row, size in self.ledger.as_dict().items() if size), reverse=True)
        bars = [(row.replace("_", " "), format_bytes(size), size / rows[0][0]) for size, row in rows]
        return notebook_card("Plan", self.line, facts, bars)

    def as_dict(self) -> dict[str, Any]:
        """The object that ``plan --json`` prints and ``plan.json`` holds."""
        return plain(self)

    def to_json(self) -> str:
        return text_of(self)

    @model_serializer(mode="wrap")
    def _written(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {**fields(self), "fits": self.fits}

    @model_validator(mode="after")
    def _checked(self) -> Plan:
        if not any(known <= self.peak.rank for known in self.allocated_bytes):
            raise ValueError(f"allocated_bytes says nothing of rank {self.peak.rank}")
        return self


def read_plan(path: Path, settings: Sequence[Setting[Any]], axes: Sequence[Axis]) -> Plan:
    """The plan in a file. Raises DataError for values of ``settings``, or axes of the mesh, that do not exist."""
    plan = read_json(path, Plan)
    for strategy in (plan.strategy, *(candidate.strategy for candidate in plan.candidates)):
        for setting in settings:
            try:
                setting.parse(strategy.values.get(setting.key, setting.default))
            except ValueError as error:
                raise unusable(f"{path}: strategy.{setting.key}", str(error)) from error
    degrees = plan.layout.degrees
    names = [axis.name for axis in axes]
    if list(degrees) != names or plan.layout.world_size != plan.world_size:
        why = f"it must have the axes {', '.join(names)}, in all {plan.world_size} devices"
        raise unusable(f"{path}: layout", why)
    return replace(plan, layout=Layout(tuple((axis, degrees[axis.name]) for axis in axes)))


def unusable(where: str, why: str) -> DataError:
    """The error for a plan that this version cannot use."""
    fix = "run shardwise train again, which plans anew"
    return DataError("plan.json is not a plan of this version", where=where, why=why, fix=fix)
