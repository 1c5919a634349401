"""Fit the time model to published runs, and say how far it is off: ``python benchmarks/calibrate.py``.

Every run of benchmarks/data/published_runs.csv that can be expressed (published.py) is counted (counted.py, some
minutes the first time; ``--cache`` keeps the counts) and timed by the planner's own ``step_time``. One factor per
software stack stands for kernels that are not this package's; PyTorch's FSDP2 (torchtitan, eager) is this package's
own path, so its factor is one.

CONSTANTS are fitted by iteratively reweighted Gauss-Newton steps on the logarithm of seconds with Huber's loss, over a
sample of at most SAMPLE runs of each source. hardware/profiles has them rounded, and the errors are those of the
profiles. Each stack is also left out in turn: constants come from the others, and its factor from every FEW-th of its
own runs, which do not count.

Writes benchmarks/results/time-accuracy.json, of which `make docs` fills docs/reference/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import tables
from counted import Stages, cluster_for, layout_of, path_of, stages_of, structures_of
from machine import described
from published import NODE, Published, read

from shardwise.core.strategy import Layout
from shardwise.core.timetable import Timetable
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.device import DeviceProfile
from shardwise.plan.timing import step_time

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "time-accuracy.json"

OWN = "torchtitan"
"""The stack whose factor is one."""
UNFITTED = "nanotron"
"""The stack that nothing is fitted to: its runs contradict each other (see ``stalled``). They only test the fit."""
SAMPLE, FEW, HUBER, ROUNDS = 60, 10, 0.15, 8
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


Change = Callable[[DeviceProfile, float], DeviceProfile]


def _efficiency(name: str, *only: str) -> Change:
    def change(device: DeviceProfile, value: float) -> DeviceProfile:
        if only and not device.name.startswith(only):
            return device
        return replace(device, efficiency=replace(device.efficiency, **{name: min(1.0, value)}))

    return change


def _launch(name: str) -> Change:
    return lambda device, value: replace(device, launch=replace(device.launch, **{name: value}))


CONSTANTS: Mapping[str, tuple[float, Change]] = {
    "efficiency.matmul, H100-80GB and H200": (0.80, _efficiency("matmul", "H100-80", "H200")),
    "efficiency.matmul, H100-96GB": (0.65, _efficiency("matmul", "H100-96")),
    "efficiency.matmul, A100": (0.86, _efficiency("matmul", "A")),
    "efficiency.attention, H100": (0.45, _efficiency("attention", "H")),
    "efficiency.attention, A100": (0.60, _efficiency("attention", "A")),
    "launch.kernel_seconds": (8e-6, _launch("kernel")),
    "overlap.interference": (0.15, lambda device, value: replace(device, interference=value)),
    "tiles.inner": (200.0, lambda device, value: replace(device, tiles=replace(device.tiles, inner=value))),
}
"""Start of the fit and what it changes, by the key in the files of hardware/profiles."""


def cases_of(folder: Path, counting: bool) -> tuple[list[Case], Counter[str]]:
    """All expressed runs with a time; without ``counting`` only those whose counts are in the folder."""
    rows, left_out = read("published_runs.csv")
    cases, clusters = list[Case](), dict[tuple[Any, ...], Cluster]()
    for run in rows:
        if run.seconds is None:
            left_out["no time is published"] += 1
            continue
        key = (run.device, run.gpus, run.network)
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
    times = [step_time(cost, case.layout, cluster) for cost in case.stages.costs]
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
            run.pipeline,
            run.stages,
            passes,
            forward,
            backward,
            sending=own[0].sending,
        )
        return timetable.step_seconds(timetable.schedule)

    other = max(t.seconds - count * (f + b) for t, f, b in zip(own, forward, backward, strict=True))
    few = 2 * run.pipeline
    if count <= 2 * few:
        return played(count) + other
    # A full pipeline takes the same time for every further micro-batch.
    each = (played(few + run.pipeline) - played(few)) / run.pipeline
    return played(few) + (count - few) * each + other


def changed(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    device = cluster.device
    for name, value in values.items():
        device = CONSTANTS[name][1](device, value)
    return replace(cluster, device=device)


def logs(
    cases: Sequence[Case], values: Mapping[str, float], quick: bool = False
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Logarithms of predicted over published seconds."""
    clusters = {id(case.cluster): changed(case.cluster, values) for case in cases}
    return np.array([math.log(predicted(c, clusters[id(c.cluster)], quick) / c.seconds) for c in cases])


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


def sample(cases: Sequence[Case]) -> list[Case]:
    """At most SAMPLE of every source, evenly through the file."""
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_source[case.run.family].append(case)
    return [case for some in by_source.values() for case in some[:: max(1, -(-len(some) // SAMPLE))]]


def fitted(cases: Sequence[Case], say: bool = False) -> dict[str, float]:
    """Constants that fit best, with a free factor for every stack but OWN."""
    some = sample([case for case in cases if case.run.stack != UNFITTED])
    stacks = np.array([case.run.stack for case in some])
    sources = Counter(case.run.family for case in some)
    share = np.array([1 / math.sqrt(sources[case.run.family]) for case in some])
    names = list(CONSTANTS)
    point = np.array([math.log(CONSTANTS[name][0]) for name in names])
    start = point.copy()

    def residuals(at: Any) -> Any:
        left = logs(some, dict(zip(names, np.exp(at), strict=True)), quick=True)
        for stack in set(stacks) - {OWN}:
            left[stacks == stack] -= np.median(left[stacks == stack])
        return left

    def loss(left: Any) -> float:
        size = np.abs(left)
        huber = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return float(np.sum(share * huber))

    left = residuals(point)
    prior = 0.02 * len(some) / len(names) * np.mean(share)
    for number in range(ROUNDS):
        slopes = np.stack([(residuals(point + 0.05 * unit) - left) / 0.05 for unit in np.eye(len(names))], 1)
        weight = share * np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-9))
        normal = slopes.T @ (weight[:, None] * slopes) + prior * np.eye(len(names))
        step = np.linalg.solve(normal, -slopes.T @ (weight * left) - prior * (point - start))
        step = np.clip(step, -0.7, 0.7)
        for shorter in (1.0, 0.4, 0.15):
            trial = residuals(point + shorter * step)
            if loss(trial) < loss(left):
                point, left = point + shorter * step, trial
                break
        else:
            break
        if say:
            print(
                f"round {number}: median |error| {np.median(np.abs(left)):.3f}", file=sys.stderr, flush=True
            )
    return {name: float(value) for name, value in zip(names, np.exp(point), strict=True)}


def factors_of(cases: Sequence[Case], errors: Any) -> dict[str, float]:
    """What to multiply predicted seconds by, for every stack."""
    stacks = np.array([case.run.stack for case in cases])
    return {
        stack: 1.0 if stack == OWN else factor_of(errors[stacks == stack]) for stack in sorted(set(stacks))
    }


def factor_of(errors: Any) -> float:
    """The factor with the least median error (Rousseeuw 1984): runs that stall do not move it."""
    each = np.exp(-errors)
    return float(min(each, key=lambda factor: np.median(np.abs(factor / each - 1))))


def quality(cases: Sequence[Case], errors: Any) -> dict[str, Any]:
    """Of predictions with the logarithmic ``errors``, factors included."""
    size = np.abs(np.exp(errors) - 1)
    found = orders(cases, errors)
    low, middle, high = (float(each) for each in np.exp(-np.quantile(errors, (0.95, 0.5, 0.05))))
    row: dict[str, Any] = {
        "runs": len(cases),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(np.exp(np.median(errors)) - 1),
        "published over predicted": {"p5": low, "p50": middle, "p95": high},
    }
    if found:
        row |= {
            "groups": len(found),
            "spearman": statistics.median(each.spearman for each in found),
            "pairs": sum(each.right for each in found) / sum(each.pairs for each in found),
            "regret": statistics.median(each.regret for each in found),
            "worst regret": max(each.regret for each in found),
        }
    return row


@dataclass(frozen=True)
class Ordered:
    """How well one group of equal work is ordered.

    Attributes:
        pairs, right: of runs whose seconds differ, and those that are ordered rightly.
        regret: of the run that is predicted to be fastest, over the fastest.
    """

    spearman: float
    pairs: int
    right: int
    regret: float


def orders(cases: Sequence[Case], errors: Any, least: int = 5) -> list[Ordered]:
    """Each group of equal work with at least so many runs."""
    by_group: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for case, error in zip(cases, errors, strict=True):
        by_group[case.run.group].append((case.seconds, case.seconds * math.exp(error)))
    found = []
    for group in by_group.values():
        if len(group) >= least:
            true, guess = np.array(group).T
            signs = np.sign(true[:, None] - true) * np.sign(guess[:, None] - guess)
            spearman = float(np.corrcoef(_ranks(true), _ranks(guess))[0, 1])
            regret = float(true[np.argmin(guess)] / true.min() - 1)
            right, wrong = int(np.sum(signs > 0)) // 2, int(np.sum(signs < 0)) // 2
            found.append(Ordered(spearman, right + wrong, right, regret))
    return found


def _ranks(values: Any) -> Any:
    order = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)
    for value in set(values):
        order[values == value] = order[values == value].mean()
    return order


def left_out_in_turn(cases: Sequence[Case], known: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of each stack with constants that were fitted without it, on the runs that its factor is not from.

    Args:
        known: rows of an earlier result, whose constants are taken; fitted anew where there is none.
    """
    table: dict[str, Any] = {}
    held, left = list[Case](), list[float]()
    for stack in sorted({_software(case) for case in cases}):
        inside = [case for case in cases if _software(case) == stack]
        others = [case for case in cases if _software(case) != stack]
        values = known[stack]["constants"] if stack in known else fitted(others)
        errors, keep = logs(inside, values), np.ones(len(inside), dtype=bool)
        for name in {case.run.stack for case in inside} - {OWN}:
            own = np.flatnonzero([case.run.stack == name for case in inside])
            errors[own] += math.log(factor_of(errors[own[::FEW]]))
            keep[own[::FEW]] = False
        some = [case for case, kept in zip(inside, keep, strict=True) if kept]
        table[stack] = {**quality(some, errors[keep]), "constants": values}
        if stack != UNFITTED:
            held, left = held + some, left + list(errors[keep])
    return {**table, f"all but {UNFITTED}": quality(held, np.array(left))}


def _software(case: Case) -> str:
    return case.run.stack.split(",")[0]


def place_of(run: Published) -> str:
    """Where in the playbook's sweeps a run is."""
    some = "8 GPUs" if run.gpus <= 8 else "16 to 128 GPUs" if run.gpus <= 128 else "256 and 512 GPUs"
    across = "tensor groups across nodes" if run.tensor > NODE else "tensor groups in a node"
    return f"{some}, {across}"


def by(cases: Sequence[Case], errors: Any, key: Callable[[Published], str]) -> dict[str, Any]:
    names: Iterable[str] = sorted({key(case.run) for case in cases})
    chosen = {name: np.array([key(case.run) == name for case in cases]) for name in names}
    return {
        name: quality([c for c, inside in zip(cases, mask, strict=True) if inside], errors[mask])
        for name, mask in chosen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache") / "calibration", help="folder of counts")
    parser.add_argument("--counted", action="store_true", help="only runs whose counts are in the folder")
    parser.add_argument("--fitted", action="store_true", help="take the constants of the committed results")
    options = parser.parse_args()
    cases, left_out = cases_of(options.cache, counting=not options.counted)
    slower, waiting = repeated(cases), stalled(cases)
    kept = [case for number, case in enumerate(cases) if number not in slower]
    inside = np.array([number not in waiting for number in range(len(cases)) if number not in slower])
    moving = [case for number, case in enumerate(cases) if number not in waiting]
    plain = logs(kept, {})
    factors = factors_of(moving, logs(moving, {}))
    corrected = plain + np.array([math.log(factors[case.run.stack]) for case in kept])
    swept = np.array([case.run.stack == UNFITTED for case in kept])

    def chosen(mask: Any) -> list[Case]:
        return [case for case, kept in zip(kept, mask, strict=True) if kept]

    known = json.loads(RESULTS.read_text(encoding="utf-8")) if options.fitted else {}
    result = {
        "machine": described(),
        "runs": len(kept),
        "dropped": len(slower),
        "stalled": len(waiting),
        "left out": dict(left_out.most_common()),
        "constants": known["constants"] if known else fitted(moving, say=True),
        "factors": factors,
        "held out": left_out_in_turn(moving, known.get("held out", {})),
        "by stack": by(kept, corrected, lambda run: run.stack),
        "without a factor": by(kept, plain, lambda run: run.stack),
        "by source": by(chosen(~swept), corrected[~swept], lambda run: run.family),
        "playbook": by(chosen(swept), corrected[swept], place_of),
        "playbook, without stalls": by(chosen(swept & inside), corrected[swept & inside], place_of),
    }
    result["table"] = tables(result)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(result["table"])


if __name__ == "__main__":
    main()
