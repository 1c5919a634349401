"""Memory at the peak by allocation site: the module and the operation that allocated it, and its row of the ledger.

Blocks have equal sites: a number in a module's name becomes ``*``, and their bytes are added.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shardwise.core.plan import AllocationSite
from shardwise.dryrun.reading import category, highest
from shardwise.dryrun.tracker import Allocation, Tracker

MOST_SITES = 40
"""Most sites; the smallest of more are one row without a module."""

WORKSPACE = "workspace of a collective"

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def sites_at_peak(tracker: Tracker, since: int) -> tuple[AllocationSite, ...]:
    """Device memory at the highest moment since a time, the largest site first; together the counted ledger."""
    phase, (_, time) = max(highest(tracker, since).items(), key=lambda pair: pair[1])
    sizes: dict[SiteKey, tuple[int, int]] = {}
    if workspace := dict(tracker.workspaces).get(time, 0):
        sizes[SiteKey("communication", phase, "", WORKSPACE)] = 1, workspace
    for allocation in tracker.allocations:
        if not allocation.on_host and allocation.lives_at(time):
            key = site_of(allocation, tracker)
            count, size = sizes.get(key, (0, 0))
            sizes[key] = (count + 1, size + allocation.size)
    # Sites of equal size are in the order of their names, so that equal plans have equal tables.
    listed = sorted(sizes.items(), key=lambda pair: (-pair[1][1], pair[0]))
    sites = [AllocationSite(*key, tensors=count, bytes=size) for key, (count, size) in listed[:MOST_SITES]]
    rest = [pair for _, pair in listed[MOST_SITES:]]
    if rest:
        others = AllocationSite(
            "", "", "", "", sum(count for count, _ in rest), sum(size for _, size in rest)
        )
        sites.append(others)
    return tuple(sites)


class SiteKey(NamedTuple):
    """What the allocations of one site have in common (core/plan.py, ``AllocationSite``)."""

    row: str
    phase: str
    module: str
    operation: str


def site_of(allocation: Allocation, tracker: Tracker) -> SiteKey:
    """The site of an allocation; its module without numbers."""
    module = _INDEX.sub("*", allocation.where)
    return SiteKey(category(allocation, tracker), allocation.phase, module, allocation.operation)
