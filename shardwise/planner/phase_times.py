"""Predicted seconds of a step by phase, as a run measures them (trainer/phase_stopwatch.py)."""

from __future__ import annotations

from shardwise.core.cost import StepCost
from shardwise.hardware.cluster import Cluster
from shardwise.planner.kernel_time import kernel_seconds
from shardwise.planner.timing import StepTime

COMMUNICATION = "exposed communication"
"""Its name in the split of StepTime."""


def phase_seconds(cost: StepCost, time: StepTime, cluster: Cluster) -> dict[str, float]:
    """Seconds of kernels by phase, and of communication that is not hidden. Sampling is a phase where there is any."""
    spent = {"rollout": 0.0, "forward": 0.0, "backward": 0.0, "communication": 0.0, "optimizer": 0.0}
    for kernel in cost.kernels:
        if not kernel.on_host:
            phase = kernel.phase if kernel.phase in spent else "optimizer"
            spent[phase] += kernel.calls * kernel_seconds(kernel, cluster.device)
    spent["communication"] = time.split.get(COMMUNICATION, 0.0)
    return {phase: seconds for phase, seconds in spent.items() if seconds or phase != "rollout"}
