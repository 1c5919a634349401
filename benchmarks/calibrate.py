"""Fit the time model to published runs, and say how far it is off: ``python benchmarks/calibrate.py``.

Every run of benchmarks/data/published_runs.csv that can be expressed (published.py) is counted (counted.py, some
minutes the first time; ``--cache`` keeps the counts) and timed by the planner's own ``step_time``. One factor per
software stack stands for kernels that are not this package's; PyTorch's FSDP2 (torchtitan, eager) is this package's
own path, so its factor is one.

What a stack does otherwise than Shardwise is in stacks.py and nanotron.py, with sources.

CONSTANTS are fitted by iteratively reweighted Gauss-Newton steps on the logarithm of seconds with Huber's loss, over a
sample of at most SAMPLE runs of each source. hardware/profiles has them rounded, and the errors are those of the
profiles. Each stack is also left out in turn: constants come from the others, and its factor from every FEW-th of its
own runs, which do not count. The playbook's sweeps also have two constants of their own (SWEPT), from the runs of one
model size: the held-out errors are stated without them, and with them for the other sizes.

Writes benchmarks/results/time-accuracy.json, of which `make docs` fills docs/reference/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nanotron
import numpy as np
from accuracy import tables
from agreement import factor_of, quality
from cases import Case, cases_of, predicted, repeated, stalled
from machine import described
from published import NODE, Published

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.device import DeviceProfile

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "time-accuracy.json"

OWN = "torchtitan"
"""The stack whose factor is one."""
UNFITTED = "nanotron"
"""The stack that no constant of a device is fitted to: its runs contradict each other (see ``stalled``)."""
SAMPLE, FEW, HUBER, ROUNDS = 60, 10, 0.15, 8
TAKEN = 0.8
"""Of the bias of a stack, what its factor takes in the fit. The rest moves the constants: factors stay near 1."""
PINNED = 3
"""Weight of OWN's runs: they alone say how fast kernels are, as the factors of others are free."""

Change = Callable[[DeviceProfile, float], DeviceProfile]


def _efficiency(name: str, *only: str) -> Change:
    def change(device: DeviceProfile, value: float) -> DeviceProfile:
        if not any(each in device.name for each in only):
            return device
        return replace(device, efficiency=replace(device.efficiency, **{name: min(1.0, value)}))

    return change


CONSTANTS: Mapping[str, tuple[float, Change]] = {
    "efficiency.matmul, H100-80GB and H200": (0.80, _efficiency("matmul", "H100-80", "H200")),
    "efficiency.matmul, H100-96GB": (0.65, _efficiency("matmul", "H100-96")),
    "efficiency.matmul, A100": (0.86, _efficiency("matmul", "A100")),
    "efficiency.attention, H100": (0.45, _efficiency("attention", "H100", "H200")),
    "efficiency.attention, A100": (0.60, _efficiency("attention", "A100")),
    "launch.kernel_seconds": (
        8e-6,
        lambda device, x: replace(device, launch=replace(device.launch, kernel=x)),
    ),
    "overlap.interference": (0.15, lambda device, x: replace(device, interference=x)),
    "tiles.inner": (200.0, lambda device, x: replace(device, tiles=replace(device.tiles, inner=x))),
}
"""Start of the fit and what it changes, by the key in the files of hardware/profiles."""

STARTS: Mapping[str, float] = {name: start for name, (start, _) in CONSTANTS.items()}
LAUNCH, WAIT = "playbook: seconds to launch a kernel", "playbook: seconds of a wait"
SWEPT: Mapping[str, float] = {LAUNCH: 4e-5, WAIT: 3e-4}
"""The same of the playbook's sweeps, fitted to the runs of one model size after the others."""


def changed(case: Case, values: Mapping[str, float]) -> Cluster:
    """The case's cluster with these constants, and with the playbook's own where it ran there."""
    device = case.cluster.device
    for name, value in values.items():
        device = CONSTANTS[name][1](device, value) if name in CONSTANTS else device
    if case.run.stack == UNFITTED:
        waited = nanotron.waits(case.run) * values.get(WAIT, nanotron.WAIT_SECONDS)
        collective = device.launch.collective + waited
        launch = replace(
            device.launch, kernel=values.get(LAUNCH, nanotron.LAUNCH_SECONDS), collective=collective
        )
        device = replace(device, launch=launch)
    return replace(case.cluster, device=device)


def logs(
    cases: Sequence[Case], values: Mapping[str, float], quick: bool = False
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Logarithms of predicted over published seconds."""
    clusters: dict[tuple[int, int], Cluster] = {}
    found = []
    for case in cases:
        key = (id(case.cluster), nanotron.waits(case.run))
        if key not in clusters:
            clusters[key] = changed(case, values)
        found.append(math.log(predicted(case, clusters[key], quick) / case.seconds))
    return np.array(found)


def sample(cases: Sequence[Case]) -> list[Case]:
    """At most SAMPLE of every source, evenly through the file."""
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_source[case.run.family].append(case)
    return [case for some in by_source.values() for case in some[:: max(1, -(-len(some) // SAMPLE))]]


def fitted(cases: Sequence[Case], say: bool = False) -> dict[str, float]:
    """Constants of devices that fit best."""
    return _fitted(sample([case for case in cases if case.run.stack != UNFITTED]), STARTS, {}, say)


def swept(cases: Sequence[Case], given: Mapping[str, float]) -> dict[str, float]:
    """Constants of the playbook's sweeps that fit the runs of one model size best, with ``given`` ones of devices."""
    some = [case for case in cases if case.run.stack == UNFITTED and case.run.name == nanotron.FITTED]
    return _fitted(some, SWEPT, given)


def _fitted(
    some: Sequence[Case], starts: Mapping[str, float], given: Mapping[str, float], say: bool = False
) -> dict[str, float]:
    """Values of the constants in ``starts`` that fit best, with a free factor for every stack but OWN."""
    stacks = np.array([case.run.stack for case in some])
    sources = Counter(case.run.family for case in some)
    share = np.array([1 / math.sqrt(sources[case.run.family]) for case in some])
    share[stacks == OWN] *= PINNED
    names = list(starts)
    point = np.array([math.log(starts[name]) for name in names])
    start = point.copy()

    def residuals(at: Any) -> Any:
        left = logs(some, {**given, **dict(zip(names, np.exp(at), strict=True))}, quick=True)
        for stack in set(stacks) - {OWN}:
            left[stacks == stack] -= TAKEN * np.median(left[stacks == stack])
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
        if stack == UNFITTED:
            table |= _playbook(inside, values, known)
            continue
        row, some, errors = _held_out(inside, values)
        table[stack] = row
        held, left = held + some, left + list(errors)
    return {**table, f"all but {UNFITTED}": quality(held, np.array(left))}


def _held_out(inside: Sequence[Case], values: Mapping[str, float]) -> tuple[dict[str, Any], list[Case], Any]:
    """The row of one stack, the runs in it and their errors."""
    errors, keep = logs(inside, values), np.ones(len(inside), dtype=bool)
    for name in {case.run.stack for case in inside} - {OWN}:
        own = np.flatnonzero([case.run.stack == name for case in inside])
        errors[own] += math.log(factor_of(errors[own[::FEW]]))
        keep[own[::FEW]] = False
    some = [case for case, kept in zip(inside, keep, strict=True) if kept]
    return {**quality(some, errors[keep]), "constants": dict(values)}, some, errors[keep]


def _playbook(
    inside: Sequence[Case], values: Mapping[str, float], known: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Rows of the playbook: with one factor alone, and with two constants from one model size, of the other sizes."""
    alone = {**values, LAUNCH: values["launch.kernel_seconds"], WAIT: 0.0}
    own = known[SIZES]["constants"] if SIZES in known else {**values, **swept(inside, values)}
    others = [case for case in inside if case.run.name != nanotron.FITTED]
    return {UNFITTED: _held_out(inside, alone)[0], SIZES: _held_out(others, own)[0]}


SIZES = f"{UNFITTED}, other sizes"


def _software(case: Case) -> str:
    return case.run.software


FEW_GPUS = 256
"""On 512 GPUs, the playbook's next and last size, nearly all runs with stages stall (docs/reference/accuracy.md)."""


def place_of(run: Published) -> str:
    """Where in the playbook's sweeps a run is."""
    some = "16 to 128 GPUs" if 8 < run.gpus <= 128 else f"{run.gpus} GPUs"
    across = "tensor groups across nodes" if run.tensor > NODE else "tensor groups in a node"
    return f"{some}, {across}"


def by(cases: Sequence[Case], errors: Any, key: Callable[[Published], str]) -> dict[str, Any]:
    names: Iterable[str] = sorted({key(case.run) for case in cases})
    chosen = {name: np.array([key(case.run) == name for case in cases]) for name in names}
    return {
        name: quality([c for c, inside in zip(cases, mask, strict=True) if inside], errors[mask])
        for name, mask in chosen.items()
    }


def places(cases: Sequence[Case], errors: Any) -> dict[str, Any]:
    """Rows of the playbook's runs by place, of those on few devices, and of all of them."""
    few = np.array([case.run.gpus <= FEW_GPUS for case in cases])
    smaller = quality([case for case, inside in zip(cases, few, strict=True) if inside], errors[few])
    return {
        **by(cases, errors, place_of),
        f"all on up to {FEW_GPUS} GPUs": smaller,
        "all": quality(cases, errors),
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
    moving = [case for number, case in enumerate(cases) if number not in slower | waiting]
    plain = logs(kept, {})
    factors = factors_of(moving, logs(moving, {}))
    corrected = plain + np.array([math.log(factors[case.run.stack]) for case in kept])
    sweeps = np.array([case.run.stack == UNFITTED for case in kept])

    def chosen(mask: Any) -> list[Case]:
        return [case for case, kept in zip(kept, mask, strict=True) if kept]

    known = json.loads(RESULTS.read_text(encoding="utf-8")) if options.fitted else {}
    constants = known["constants"] if known else fitted(moving, say=True)
    if not known:
        constants |= swept(moving, constants)
    result = {
        "machine": described(),
        "runs": len(kept),
        "dropped": len(slower),
        "stalled": len(waiting),
        "left out": dict(left_out.most_common()),
        "constants": constants,
        "factors": factors,
        "held out": left_out_in_turn(moving, known.get("held out", {})),
        "by stack": by(kept, corrected, lambda run: run.stack),
        "without a factor": by(kept, plain, lambda run: run.stack),
        "by source": by(chosen(~sweeps), corrected[~sweeps], lambda run: run.family),
        "playbook": places(chosen(sweeps), corrected[sweeps]),
        "playbook, without stalls": places(chosen(sweeps & inside), corrected[sweeps & inside]),
    }
    result["table"] = tables(result)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(result["table"])


if __name__ == "__main__":
    main()
