"""A driver for ``ray job submit``: a placement group with a bundle per node, which runs the ranks of that node.

The driver needs nothing but ray. It starts the ranks again after 75 and after a lost node. Ray does not wait for a
process that it stops, so a run that should save first is sent SIGTERM on its nodes.
"""

from __future__ import annotations

from shardwise.core.errors import RankError
from shardwise.plugins.schedulers.job import AGAIN, RESTARTS, ClusterJob, node_script

SUBMIT = (("ray", "job", "submit", "--no-wait", "--", "python"),)

DRIVER_SCRIPT = '''\
"""Trains {name} on {nodes} nodes with {devices} ranks each. Written by `shardwise launch ray`."""

import os
import subprocess
import sys
import tempfile

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, DEVICES, GPUS, RESTARTS = {nodes}, {devices}, {gpus}, {restarts}
AGAIN, LOST = {again}, {lost}
RECIPE = {recipe!r}
SCRIPT = {script!r}


@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def ranks(node, host):
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "recipe.yaml"), "w") as file:
            file.write(RECIPE)
        environment = {{**os.environ, "NODE": str(node), "MASTER_ADDR": host}}
        return subprocess.run(["bash", "-c", SCRIPT], cwd=folder, env=environment).returncode


def attempt():
    """The highest exit code of the nodes; LOST where ray lost one."""
    group = placement_group([{{"CPU": 1, "GPU": GPUS}}] * NODES, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready())
        there = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(NODES)]
        host = ray.get(address.options(num_cpus=0, scheduling_strategy=there[0]).remote())
        run = [
            ranks.options(num_cpus=1, num_gpus=GPUS, scheduling_strategy=place).remote(node, host)
            for node, place in enumerate(there)
        ]
        return max(ray.get(run))
    except ray.exceptions.RayError as error:
        print(f"a node is lost: {{error}}", file=sys.stderr)
        return LOST
    finally:
        remove_placement_group(group)


ray.init()
for again in range(RESTARTS + 1):
    code = attempt()
    if code not in AGAIN:
        break
sys.exit(code)
'''


def job_file(job: ClusterJob) -> str:
    """The driver, in Python."""
    return DRIVER_SCRIPT.format(
        name=job.name,
        nodes=job.nodes,
        devices=job.devices,
        gpus=0 if job.device is None else job.devices,
        restarts=RESTARTS,
        again=AGAIN,
        lost=RankError.exit_code,
        recipe=job.recipe_text,
        script=node_script(job, "recipe.yaml"),
    )
