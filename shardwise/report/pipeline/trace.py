"""One step as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open: planned, and measured.

The format is Chrome's "Trace Event Format" (JSON object form): complete events (``X``) with times in microseconds,
a process for the planned and one for the measured step, and a thread for each rank. The ledger of the planned step is a
counter (``C``). A dry run knows the order of allocations and the seconds of a phase, but not the time of each
allocation, so the points of a phase are spread evenly over its seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from shardwise.core.pipeline.schedule import Played
from shardwise.core.plan import Plan
from shardwise.core.run_files import Outcome
from shardwise.core.units import MiB
from shardwise.report.step_times import PHASE_NAMES

PLANNED, MEASURED = 1, 2
_PASSES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}

Event = dict[str, Any]


def trace_of(plan: Plan, outcome: Outcome | None) -> dict[str, Any]:
    """The trace of one step, to be written as JSON."""
    events = list(_process_name(PLANNED, f"planned: {plan.line}"))
    if plan.pipeline is not None:
        played = plan.pipeline.played(plan.pipeline.schedule, plan.pipeline.micro_batches)
        events += _pass_events(PLANNED, played)
    else:
        events += _phases(PLANNED, plan.step.phases or {"step": plan.step.seconds})
    events += _ledger_events(plan)
    if outcome is not None and (outcome.passes or outcome.phases):
        step = (outcome.passes or outcome.phases).step  # type: ignore[union-attr]
        events += _process_name(MEASURED, f"measured: step {step}")
        if outcome.passes is not None:
            events += _pass_events(MEASURED, outcome.passes.played())
        elif outcome.phases is not None:
            for rank, seconds in enumerate(outcome.phases.ranks or (outcome.phases.seconds,)):
                events += _phases(MEASURED, seconds, rank)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"cluster": plan.cluster}}


def _process_name(process: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _thread(process: int, rank: int) -> Event:
    name = {"name": f"rank {rank}"}
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": name}


def _complete_event(process: int, rank: int, name: str, begin: float, end: float, **about: object) -> Event:
    times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
    return {"ph": "X", "name": name, "cat": "step", "pid": process, "tid": rank, **times, "args": about}


def _pass_events(process: int, played: Played) -> Iterator[Event]:
    for rank, spans in enumerate(played.spans):
        yield _thread(process, rank)
        for action, begin, end in spans:
            name = f"{_PASSES.get(action.kind, action.kind)} {action.micro_batch}"
            yield _complete_event(process, rank, name, begin, end, stage=action.stage)


def _phases(process: int, seconds: Mapping[str, float], rank: int = 0) -> Iterator[Event]:
    """The phases of a rank, one after the other."""
    yield _thread(process, rank)
    begin = 0.0
    for name in (*PHASE_NAMES, *(name for name in seconds if name not in PHASE_NAMES)):
        if seconds.get(name):
            yield _complete_event(process, rank, name, begin, begin + seconds[name])
            begin += seconds[name]


def _ledger_events(plan: Plan) -> Iterator[Event]:
    """The planned memory of the worst rank by row, in MiB."""
    begin = 0.0
    whole = len(plan.timeline)
    for phase, members in groupby(plan.timeline, key=lambda point: point.phase):
        points: Sequence[Any] = list(members)
        length = plan.step.phases.get(phase, plan.step.seconds * len(points) / whole)
        for index, point in enumerate(points):
            rows = {row: round(size / MiB, 3) for row, size in point.ledger.as_dict().items()}
            at = (begin + length * index / len(points)) * 1e6
            yield {"ph": "C", "name": "memory, MiB", "pid": PLANNED, "tid": 0, "ts": at, "args": rows}
        begin += length
