"""Published runs with their counts, the seconds that the planner gives them, and those that others contradict."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counted import Stages, cluster_for, layout_of, path_of, stages_of, structures_of
from published import Published, read

from shardwise.core.strategy import Layout
from shardwise.core.timetable import Timetable
from shardwise.hardware.cluster import Cluster
from shardwise.planner.timing import predicted_step_time

STALE, PASSES = 1.5, 8
"""A run is dropped if its source has another with the same settings that is so many times as fast."""


@dataclass(frozen=True)
class Case:
    """A published run with its counts."""

    run: Published
    stages: Stages
    layout: Layout
    cluster: Cluster

    @property
    def seconds(self) -> float:
        assert self.run.seconds is not None
        return self.run.seconds


def cases_of(folder: Path, counting: bool) -> tuple[list[Case], Counter[str]]:
    """All expressed runs with a time; without ``counting`` only those whose counts are in the folder."""
    rows, left_out = read("published_runs.csv")
    cases, clusters = list[Case](), dict[tuple[Any, ...], Cluster]()
    for run in rows:
        if run.seconds is None:
            left_out["no time is published"] += 1
            continue
        key = (run.stack, run.device, run.gpus, run.network)
        clusters.setdefault(key, cluster_for(run))
        if not counting and not all(path_of(each, folder).exists() for each in structures_of(run)):
            left_out["not counted yet"] += 1
            continue
        try:
            stages = stages_of(run, folder)
        except ValueError as problem:
            left_out[f"not counted: {problem}"[:90]] += 1
            continue
        cases.append(Case(run, stages, layout_of(run), clusters[key]))
    return cases, left_out


def predicted(case: Case, cluster: Cluster | None = None, quick: bool = False) -> float:
    """Seconds of a step, without a factor; ``quick`` takes a closed form instead of playing the schedule."""
    run, cluster = case.run, cluster or case.cluster
    times = [predicted_step_time(cost, case.layout, cluster) for cost in case.stages.costs]
    if run.pipeline == 1:
        return times[0].seconds
    count = run.passes
    own = [times[number] for number in case.stages.of_rank]
    forward, backward = (
        tuple(time.passes.get(phase, 0.0) / count for time in own) for phase in ("forward", "backward")
    )

    def played(passes: int) -> float:
        if quick:
            passing = [f + b + 2 * own[0].sending for f, b in zip(forward, backward, strict=True)]
            return (passes - 1) * max(passing) + (sum(passing) - max(passing)) / run.stages + max(passing)
        timetable = Timetable(
            "interleaved" if run.stages > 1 else "1f1b",
            len(own),
            run.stages,
            passes,
            forward,
            backward,
            sending=own[0].sending,
        )
        return timetable.step_seconds(timetable.schedule)

    other = max(t.seconds - count * (f + b) for t, f, b in zip(own, forward, backward, strict=True))
    few = 2 * len(own)
    if count <= 2 * few:
        return played(count) + other
    # A full pipeline takes the same time for every further micro-batch.
    each = (played(few + len(own)) - played(few)) / len(own)
    return played(few) + (count - few) * each + other


def repeated(cases: Sequence[Case]) -> set[int]:
    """Numbers of runs that their source itself shows STALE times as fast at the same settings."""
    best: dict[tuple[Any, ...], float] = {}

    def settings(run: Published) -> tuple[Any, ...]:
        zero = run.settings["zero_stage"] if run.data > 1 else 0
        return (*_division(run), zero, run.micro_batch)

    for case in cases:
        key = settings(case.run)
        best[key] = min(best.get(key, math.inf), case.seconds)
    return {n for n, case in enumerate(cases) if case.seconds > STALE * best[settings(case.run)]}


def stalled(cases: Sequence[Case]) -> set[int]:
    """Numbers of runs that others of their source contradict: whole sweeps of the playbook take a second a pass.

    A pass of a micro-batch through a stage takes no longer than one of a larger micro-batch or through a stage of more
    blocks, nor k times one of a micro-batch that is k times smaller. Of steps with at least PASSES passes, in which the
    reduction of gradients weighs little, those are stalled whose passes take STALE times that. No prediction is asked.
    """
    alike: dict[tuple[Any, ...], list[tuple[int, int, float]]] = defaultdict(list)
    for case in cases:
        run = case.run
        alike[_division(run)[1:]].append((run.pipeline, run.micro_batch, _pass_seconds(case)))

    def contradicted(case: Case) -> bool:
        run, own = case.run, _pass_seconds(case)
        return run.passes + run.pipeline > PASSES and any(
            own > STALE * each * max(1.0, run.micro_batch / size)
            for stages, size, each in alike[_division(run)[1:]]
            if stages <= run.pipeline
        )

    return {number for number, case in enumerate(cases) if contradicted(case)}


def _pass_seconds(case: Case) -> float:
    return case.seconds / (case.run.passes + case.run.pipeline - 1)


def _division(run: Published) -> tuple[Any, ...]:
    """All of a run but its ZeRO stage and its micro-batch; first what differs between runs of other sizes."""
    return (
        (run.gpus, run.batch, run.pipeline, run.stages),
        run.source,
        run.name,
        run.length,
        run.device,
        run.stack,
        run.tensor,
        run.sequence,
        run.settings["precision"],
        run.settings["activation_checkpointing"],
        run.settings.get("fp8_scaling"),
        run.settings.get("master_weights"),
    )
