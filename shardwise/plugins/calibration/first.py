"""Measures this machine before its first plan: some seconds, once for each number of processes.

A machine that did other work meanwhile is measured again before the next plan while it is idle.

A plan for a preset, for several nodes or for a device of another machine is never measured, and neither are ranks that
torchrun or srun started. ``SHARDWISE_MEASURE=0`` turns this off. ``shardwise doctor --calibrate`` measures more, and
replaces these speeds.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from shardwise.core.errors import one_line
from shardwise.hardware.cluster import Cluster, ClusterRequest, without_maker
from shardwise.hardware.other_work import OtherWork, is_busy_now
from shardwise.hardware.this_machine import cache_folder, read_calibration, usable_cores
from shardwise.launch.placement import launched_by

VARIABLE = "SHARDWISE_MEASURE"
"""0 in the environment: plans measure nothing."""

MOST_PROCESSES = 4
"""Plans for more processes divide the speeds of these."""

DRIVER = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver names every GPU here. Asking torch would take memory on the device."""


def measured_first(request: ClusterRequest, cluster: Cluster) -> bool:
    """Measure this machine if the cluster is this machine and its speeds are unknown; whether they are known now.

    One line on standard error says so, also where it fails: a plan must not fail over optional speeds.
    """
    if os.environ.get(VARIABLE) == "0" or not _is_here(request, cluster) or launched_by() is not None:
        return False
    processes = min(cluster.devices_per_node, usable_cores(), MOST_PROCESSES)
    if _is_known(cluster, processes) or not _can_store():
        return False
    begin = time.monotonic()
    print("measuring this machine (once", end="", file=sys.stderr, flush=True)
    failed = False
    outcome = ""
    try:
        if _measure(cluster, processes):
            outcome = "; it did other work meanwhile, so a plan on an idle machine measures it again"
    except Exception as problem:
        failed = True
        outcome = f" failed, so seconds are assumed: {one_line(str(problem))}"
    print(f", {time.monotonic() - begin:.0f} s){outcome}", file=sys.stderr, flush=True)
    return not failed


def _is_here(request: ClusterRequest, cluster: Cluster) -> bool:
    if request.preset is not None or cluster.nodes != 1:
        return False
    if cluster.device.traits.is_host:
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # GPUs are hidden from torch
        return False
    # Every GPU must be of the cluster's kind: which of several kinds torch would use is not known here.
    gpus = gpus_here()
    return bool(gpus) and gpus <= set(cluster.device.reported)


def gpus_here(driver: Path = DRIVER) -> set[str]:
    """This machine's NVIDIA GPUs, as profiles have their drivers' names."""
    gpus = set()
    for path in driver.glob("*/information"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, model = line.partition(":")
            if key == "Model":
                gpus.add(without_maker(model))
    return gpus


def _is_known(cluster: Cluster, processes: int) -> bool:
    if not cluster.device.traits.is_host:
        return cluster.device.measured is not None
    known = read_calibration()
    if known is None:
        return False
    # Speeds of a busy machine count as known while it is busy: measuring now would give no better ones.
    return any(not speeds.busy or is_busy_now() for speeds in known.speeds if speeds.processes == processes)


def _can_store() -> bool:
    """Whether the result can be kept: otherwise every plan would measure."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _measure(cluster: Cluster, processes: int) -> bool:
    """Measure and store the speeds; whether the processor did other work meanwhile."""
    # torch takes seconds to import, and most plans measure nothing.
    from shardwise.plugins.calibration.run import quick_cpu, quick_gpu
    from shardwise.plugins.calibration.store import add_speeds, store_gpu

    if not cluster.device.traits.is_host:
        store_gpu(cluster.device, quick_gpu())
        return False
    work = OtherWork()
    speeds = replace(quick_cpu(processes), busy=work.cores() > 0)
    add_speeds(speeds)
    return speeds.busy
