"""The trace of a step: what Perfetto and Chrome read, with the seconds and the bytes of the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardwise.core.plan import Plan
from shardwise.core.run_files import Outcome, PassesRecord, PhasesRecord, RankMemory, RankPasses
from shardwise.core.timetable import Timetable
from shardwise.core.units import MiB
from shardwise.report.pipeline.trace import trace_of

REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
}
"""Of Chrome's Trace Event Format: the fields of complete, counter and metadata events."""


def events(plan: Plan, outcome: Outcome | None, kind: str) -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(trace_of(plan, outcome)))
    for event in trace["traceEvents"]:
        assert REQUIRED[event["ph"]] <= event.keys()
        assert all(event.get(name, 0) >= 0 for name in ("ts", "dur"))
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_phases_follow_each_other_and_memory_reaches_the_peak(plan: Plan) -> None:
    phases = {"forward": 0.5, "backward": 1.0, "optimizer": 0.145}
    planned = replace(plan, step=replace(plan.step, phases=phases))
    measured = PhasesRecord(4, {"forward": 0.25}, ({"forward": 0.25}, {"forward": 0.75}))
    outcome = Outcome((RankMemory(0, 1, 1),), 1.0, 1.1, plan.ledger, phases=measured)
    spans = events(planned, outcome, "X")
    assert [(e["name"], e["ts"], e["dur"], e["pid"], e["tid"]) for e in spans] == [
        ("forward", 0, 5e5, 1, 0), ("backward", 5e5, 1e6, 1, 0), ("optimizer", 1.5e6, pytest.approx(1.45e5), 1, 0),
        ("forward", 0, 2.5e5, 2, 0), ("forward", 0, 7.5e5, 2, 1),
    ]  # fmt: skip
    counters = events(planned, outcome, "C")
    assert len(counters) == len(plan.timeline)
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)
    assert max(sum(e["args"].values()) for e in counters) * MiB == pytest.approx(
        max(point.ledger.total for point in plan.timeline), rel=1e-6
    )
    assert [e["name"] for e in events(plan, None, "X")] == ["step"], "a plan without phases"


def test_passes_of_stages_are_on_their_ranks(plan: Plan) -> None:
    timetable = Timetable("1f1b", 2, 1, 2, (0.1, 0.1), (0.2, 0.2))
    record = PassesRecord(
        5, (RankPasses(0, (("F", 0, 0, 0.0, 0.3),)), RankPasses(1, (("B", 1, 0, 0.3, 0.9),)))
    )
    outcome = Outcome((RankMemory(0, 1, 1),), 1.0, 1.1, plan.ledger, passes=record)
    spans = events(replace(plan, pipeline=timetable), outcome, "X")
    planned = [(e["tid"], e["name"]) for e in spans if e["pid"] == 1]
    names = [f"{kind} {number}" for kind in ("backward", "forward") for number in (0, 1)]
    assert sorted(planned) == [(rank, name) for rank in (0, 1) for name in names]
    first, second = (
        (e["tid"], e["name"], e["ts"], e["dur"], e["args"]["stage"]) for e in spans if e["pid"] == 2
    )
    assert first == (0, "forward 0", 0, 3e5, 0)
    assert second == (1, "backward 0", 3e5, pytest.approx(6e5), 1)
