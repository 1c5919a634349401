"""A job for a scheduler: what to run on how many nodes, and when to start it again.

A run that was told to stop saves and exits with 75, and after out of memory it exits with 75 to go on with a smaller
micro-batch. A lost or hung rank ends the others with 5. The same command then resumes, so these two are started again,
up to ``RESTARTS`` times. All other codes end the job, because the same command would fail again.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from shardwise.core.errors import Preempted, RankError

AGAIN = (Preempted.exit_code, RankError.exit_code)
RESTARTS = 20
RENDEZVOUS_PORT = 29500
SAVING_SECONDS = 180
"""Seconds between the signal and the kill: a step and a checkpoint."""


@dataclass(frozen=True)
class ClusterJob:
    """A run on several nodes.

    Attributes:
        name: of the job, in lower-case letters, digits and dashes.
        recipe: the recipe's path on the nodes. folder: where its other relative paths start.
        recipe_text: its content, for schedulers that bring files along.
        out: the folder of the run, which all nodes share.
        devices: on every node.
        device: name of the device's profile; None for CPUs.
        time: limit as HH:MM:SS, where the scheduler has one.
        image: container image.
        partition, account: of Slurm.
        volume: what holds the shared folder: a claim of Kubernetes, a bucket of SkyPilot.
        shared: where that is mounted.
    """

    name: str
    recipe: str
    folder: str
    recipe_text: str
    overrides: tuple[str, ...]
    out: str
    nodes: int
    devices: int
    device: str | None = None
    time: str | None = None
    image: str | None = None
    partition: str | None = None
    account: str | None = None
    volume: str = "shared"
    shared: str = "/shared"

    def command(self, recipe: str | None = None) -> str:
        """The command of every rank, for a shell."""
        return shlex.join(["shardwise", "train", recipe or self.recipe, *self.overrides, "--out", self.out])


NODE_SCRIPT = """\
# The ranks of one node: NODE is its number, MASTER_ADDR the address of node 0. Ends with the highest exit code.
set -u
export MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-{port}}}" WORLD_SIZE={world} LOCAL_WORLD_SIZE={devices}
ranks=()
trap 'kill -TERM "${{ranks[@]}}" 2>/dev/null' TERM INT
for ((local = 0; local < {devices}; local++)); do
  RANK=$((NODE * {devices} + local)) LOCAL_RANK=$local {command} &
  ranks+=($!)
done
code=0
for rank in "${{ranks[@]}}"; do
  wait "$rank"
  one=$?
  while ((one > 128)) && kill -0 "$rank" 2>/dev/null; do  # a signal has interrupted the wait; the rank still saves
    wait "$rank"
    one=$?
  done
  if ((one > 128)); then one={lost}; fi  # killed
  if ((one > code)); then code=$one; fi
done
exit "$code"
"""


def node_script(job: ClusterJob, recipe: str | None = None) -> str:
    """Bash that runs the ranks of one node, for schedulers that start one process per node."""
    return NODE_SCRIPT.format(
        port=RENDEZVOUS_PORT,
        world=job.nodes * job.devices,
        devices=job.devices,
        command=job.command(recipe),
        lost=RankError.exit_code,
    )
