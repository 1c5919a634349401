"""A managed job of SkyPilot: nodes of any cloud, on spot instances too, started again after a preemption or 75."""

from __future__ import annotations

import re
from typing import Any

from ruamel.yaml.scalarstring import LiteralScalarString

from shardwise.plugins.schedulers.job import AGAIN, RESTARTS, ClusterJob, node_script
from shardwise.plugins.schedulers.kubernetes import MOUNTED_RECIPE, as_yaml, image_of

SUBMIT = (("sky", "jobs", "launch", "--yes", "--detach-run"),)
NAMES_WITH_MEMORY = {"A100-80GB": "A100-80GB", "V100-32GB": "V100-32GB"}
"""Accelerators whose memory is part of SkyPilot's name; other names end before the memory."""


def job_file(job: ClusterJob) -> str:
    """A task as YAML."""
    resources: dict[str, Any] = {
        "use_spot": True,
        "image_id": f"docker:{image_of(job, 'a new node has no Shardwise')}",
    }
    if job.device is not None:
        name = NAMES_WITH_MEMORY.get(job.device) or re.sub(r"-\d+GB$", "", job.device)
        resources["accelerators"] = f"{name}:{job.devices}"
    resources["job_recovery"] = {
        "max_restarts_on_errors": RESTARTS,
        "recover_on_exit_codes": list(AGAIN),
    }
    script = (
        'export NODE="$SKYPILOT_NODE_RANK" MASTER_ADDR="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"\n'
        + node_script(job, MOUNTED_RECIPE)
    )
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "file_mounts": {MOUNTED_RECIPE: job.recipe, job.shared: {"name": job.volume, "mode": "MOUNT"}},
        "run": LiteralScalarString(script),
    }
    return as_yaml(task)
