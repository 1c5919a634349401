"""What a plan says in sentences beside its figures: what is offloaded and whether compute hides it, and what comes from
tables and is not counted.

Chosen: sentences made from the values that the plan holds, for the terminal, the page and plan.json alike. Refused:
sentences in the report, which does not have the predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.core.allocator_options import options_in
from shardwise.core.cluster import Cluster
from shardwise.core.units import format_bytes, format_seconds
from shardwise.plan.predict import Prediction
from shardwise.plan.timing import phases_beside_host

LANES: Mapping[str, str] = {
    "to_host": "copies to the host",
    "to_device": "copies to the device",
    "disk_read": "reads of the disk",
    "disk_write": "writes of the disk",
    "processor": "updates on the processor",
}


def offload_in_words(chosen: Prediction, cluster: Cluster) -> Iterator[str]:
    """Whether what the device computes hides what is copied to the host and done there, by phase."""
    if chosen.disk_bytes:
        node = format_bytes(chosen.disk_bytes * cluster.devices_per_node)
        yield f"on the disk: {format_bytes(chosen.disk_bytes)} of a rank, {node} of a node"
    for phase in phases_beside_host(chosen.cost, cluster):
        if phase.exposed > 0:
            end = f"beside {format_seconds(phase.device)} of compute: the device waits {format_seconds(phase.exposed)}"
        else:
            end = f"which {format_seconds(phase.device)} of compute hide"
        lanes = ", ".join(f"{LANES[lane]} {format_seconds(spent)}" for lane, spent in phase.beside.items())
        yield f"offload in the {phase.phase} phase: {lanes}, {end}"


def assumptions(cluster: Cluster, reserve: float) -> Iterator[str]:
    """What the plan takes from tables; ``reserve`` is the share of the capacity that it leaves free."""
    overhead = cluster.device.overhead
    yield (
        f"overhead is from the profile of {cluster.device.name}, not counted: context"
        f" {format_bytes(overhead.context_bytes)}, {format_bytes(overhead.communicator_bytes)} per communicator,"
        f" workspaces {format_bytes(overhead.workspace_bytes)}"
    )
    if reserve > 0:
        options = options_in(cluster.device.kind)
        yield (
            f"fragmentation is that of CUDA's caching allocator, replayed with {options.described() or 'its defaults'};"
            f" {reserve:.0%} of the capacity is left free for what kernels take while they run; for the other"
            " strategies considered it is taken in proportion to the chosen one's"
        )
        if options.ignored:
            yield f"of the allocator's settings these are not modelled: {', '.join(options.ignored)}"
    yield f"seconds are a roofline over the profile's peaks ({cluster.device.name}), not a measurement"
