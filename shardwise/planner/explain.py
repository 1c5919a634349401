"""The plan in sentences: why this strategy, whether compute hides offloading, and which figures are table values.

The sentences are part of the plan, so the terminal, the page and plan.json have the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.core.answer import TELLS
from shardwise.core.plan import PLAN_ONLY
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes, format_percent, format_seconds
from shardwise.hardware.allocator_options import options_in
from shardwise.hardware.cluster import Cluster
from shardwise.planner import checkpoint_interval
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.timing import offload_phases
from shardwise.planner.verdicts import UNKNOWN
from shardwise.technique import MICRO_BATCH_SIZE, SETTINGS

_NEGLIGIBLE_SHARE = 1e-3
"""Compute of less than this share of the transfers hides none of them."""

LANE_NAMES: Mapping[str, str] = {
    "to_host": "copies to the host",
    "to_device": "copies to the device",
    "disk_read": "disk reads",
    "disk_write": "disk writes",
    "processor": "optimizer step on the CPU",
}


def once_in_words(strategy: Strategy) -> Iterator[str]:
    """Values that cost seconds once."""
    for setting in SETTINGS:
        if cost := setting.once.get(strategy[setting]):
            yield f"{setting.key} {strategy[setting]} is assumed to take {cost:g} s once, at the start of the run"


def reasons(predictor: Predictor, chosen: Prediction) -> Iterator[str]:
    """Why this strategy was chosen: what its run notes, and which plainer strategies do not fit."""
    yield from chosen.run.hints.notes
    if words := chosen.in_words():
        yield words
    yield from offload_in_words(chosen, predictor.cluster)
    yield from checkpoint_interval.advice(predictor.recipe, chosen, predictor.cluster)
    for candidate in predictor.candidates.values():
        if candidate.verdict == "does not fit" and candidate.strategy != chosen.strategy:
            changed = chosen.strategy.differences(candidate.strategy)
            if len(changed) == 1:
                [(key, (mine, theirs))] = changed.items()
                yield f"{key} {mine}, because {key} {theirs} needs at least {format_bytes(candidate.peak_bytes)}"
    failed = [candidate for candidate in predictor.candidates.values() if candidate.verdict == UNKNOWN]
    if failed:
        first = f"{failed[0].line}: {failed[0].reason}"
        yield f"{len(failed)} of the compared strategies could not be predicted, the first is {first}"
    pinned = predictor.recipe.strategy
    free = [
        s.key
        for s in SETTINGS
        if s.key not in pinned and (s.candidates or s is MICRO_BATCH_SIZE or chosen.strategy[s] != s.default)
    ]
    if free and chosen.peak.bytes <= predictor.budget_bytes:
        by = {"seconds": "fastest", "memory": "smallest"}[predictor.recipe.plan.objective]
        size = "fastest" if _is_smaller_than_fits(predictor, chosen) else "largest"
        # On the CPU the first strategy that fits is chosen, the plainest of all.
        near = (
            ""
            if predictor.cluster.device.traits.is_host
            else f"; within {format_percent(TELLS)}, the plainer"
        )
        yield f"chosen by the planner: {', '.join(free)}; the {by} that fits, {size} micro-batch{near}"


def _is_smaller_than_fits(predictor: Predictor, chosen: Prediction) -> bool:
    """Whether the chosen micro-batch is smaller than the largest that fits, so that ranks wait less."""
    size = chosen.strategy[MICRO_BATCH_SIZE]
    larger = (
        set(chosen.strategy.differences(candidate.strategy)) == {MICRO_BATCH_SIZE.key}
        and candidate.strategy[MICRO_BATCH_SIZE] > size
        and candidate.verdict == "fits"
        for candidate in predictor.candidates.values()
    )
    return chosen.timetable is not None and any(larger)


def offload_in_words(chosen: Prediction, cluster: Cluster) -> Iterator[str]:
    """Disk use, and per phase whether the device's compute hides copies and CPU work."""
    if chosen.disk_bytes:
        node = format_bytes(chosen.disk_bytes * cluster.devices_per_node)
        yield f"on disk: {format_bytes(chosen.disk_bytes)} per rank, {node} per node"
    for phase in offload_phases(chosen.cost, cluster):
        compute = format_seconds(phase.device)
        if phase.device < _NEGLIGIBLE_SHARE * phase.longest:
            end = f"which no compute hides: the device waits {format_seconds(phase.exposed)}"
        elif phase.exposed > 0:
            end = f"not hidden by {compute} of compute: the device waits {format_seconds(phase.exposed)}"
        else:
            end = f"hidden by {compute} of compute"
        lanes = ", ".join(
            f"{LANE_NAMES[lane]} {format_seconds(spent)}" for lane, spent in phase.concurrent.items()
        )
        yield f"offload in the {phase.phase} phase: {lanes}, {end}"


def assumptions(cluster: Cluster, reserve: float) -> Iterator[str]:
    """The plan's figures from tables, and memory or time that is not modelled.

    Args:
        reserve: share of the capacity that the plan leaves free.
    """
    overhead = cluster.device.overhead
    yield (
        f"overhead is a table value for {cluster.device.name}: context"
        f" {format_bytes(overhead.context_bytes)}, {format_bytes(overhead.communicator_bytes)} per communicator,"
        f" workspaces {format_bytes(overhead.workspace_bytes)}"
    )
    if reserve > 0:
        options = options_in(cluster.device.kind)
        yield (
            f"fragmentation comes from replaying CUDA's caching allocator with {options.described() or 'its defaults'};"
            f" {format_percent(reserve)} of the capacity is left free for workspaces of kernels; for the"
            " other strategies, marked ~, fragmentation is assumed in proportion to the chosen one's"
        )
        if options.ignored:
            yield f"allocator settings that are not modelled: {', '.join(options.ignored)}"
    yield seconds_from(cluster)
    if not cluster.device.traits.is_host and (order := cluster.device.attention):
        measured = cluster.device.measured is not None and cluster.device.measured.attention_order
        why = "as measured here" if measured else f"the order for {cluster.device.name}"
        yield f"attention runs the first of {', '.join(order)} that takes the call, {why}; a run checks it against fp64"
    if cluster.device.traits.plan_only:
        yield f"{PLAN_ONLY}: Shardwise cannot train on {cluster.device.name}, and no run was compared with this plan"


def seconds_from(cluster: Cluster) -> str:
    """Where a plan's seconds come from."""
    device = cluster.device
    if device.measured is None and device.traits.is_host:
        return "seconds are assumed: this CPU was not measured; shardwise doctor --calibrate measures it"
    if device.measured is None:
        figures = f" ({device.source['flops']})" if device.file else ""
        return (
            f"seconds come from the time model with the figures of {device.file or device.name}{figures}; it is"
            " compared with published runs in docs/reference/accuracy.md, and not measured here"
        )
    if not device.traits.is_host:
        return f"seconds of kernels were measured on {device.measured_on}, on a {device.name} of this machine"
    processes = device.measured.processes
    busy = ", while it did other work; it is measured again when it is idle" if device.measured.busy else ""
    return (
        f"seconds come from kernels, collectives and host times measured on {device.measured_on}, on this"
        f" {device.name}, in {processes} process{'es' if processes > 1 else ''} of {device.measured.threads}"
        f" thread{'s' if device.measured.threads > 1 else ''}{busy}"
    )
