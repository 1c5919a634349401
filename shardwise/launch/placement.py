"""This process's rank, from the environment variables of its launcher.

Three launchers are known: Shardwise's own, torchrun (or any other that sets RANK, WORLD_SIZE and MASTER_ADDR), and
srun. This module uses neither torch nor the network, so the command line can import it first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.errors import RecipeError

LAUNCHER = "SHARDWISE_LAUNCHER"
"""Set by Shardwise's launcher: its process id."""

STORE_SOCKET = "SHARDWISE_STORE_SOCKET"
"""Set by Shardwise's launcher for rank 0: descriptor of a listening socket on loopback, for the store."""

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Placement:
    """This process's place in the job.

    Attributes:
        by: the launcher: "shardwise", "torchrun" or "srun".
        local_rank: index of this process, and of its device, on its machine.
        nodes: machines in the job; 0 if unknown.
        host, port: address of rank 0's store.
    """

    by: str
    rank: int
    world_size: int
    local_rank: int
    nodes: int
    host: str
    port: int


def launched_by(environment: Mapping[str, str] | None = None) -> Placement | None:
    """This process's place in a job of several ranks; None for a process that no launcher started.

    Raises RecipeError when variables are missing or wrong.
    """
    values = os.environ if environment is None else environment
    if "RANK" in values and "WORLD_SIZE" in values:
        return _from_env(values)
    # srun sets the size of its step. A batch script also has SLURM_PROCID=0, but no step. In a step of one task,
    # Shardwise starts the processes itself.
    if "SLURM_PROCID" in values and values.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _from_slurm(values)
    return None


def _from_env(values: Mapping[str, str]) -> Placement:
    world_size = _number_variable(values, "WORLD_SIZE")
    per_node = _number_variable(values, "LOCAL_WORLD_SIZE", 0)
    return _checked_placement(
        Placement(
            by="shardwise" if LAUNCHER in values else "torchrun",
            rank=_number_variable(values, "RANK"),
            world_size=world_size,
            local_rank=_number_variable(values, "LOCAL_RANK", 0),
            nodes=-(-world_size // per_node) if per_node else 0,
            host=_text_variable(values, "MASTER_ADDR"),
            port=_number_variable(values, "MASTER_PORT"),
        )
    )


def _from_slurm(values: Mapping[str, str]) -> Placement:
    nodes = _number_variable(values, "SLURM_STEP_NUM_NODES", 1)
    hosts = values.get("SLURM_STEP_NODELIST") or _text_variable(values, "SLURM_JOB_NODELIST")
    job = _number_variable(values, "SLURM_JOB_ID", 0)
    return _checked_placement(
        Placement(
            by="srun",
            rank=_number_variable(values, "SLURM_PROCID"),
            world_size=_number_variable(values, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number_variable(values, "SLURM_LOCALID"),
            nodes=nodes,
            host=values.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else first_host(hosts)),
            # One port per job, below those that the kernel hands out.
            port=_number_variable(values, "MASTER_PORT", 20_000 + job % 10_000),
        )
    )


def _checked_placement(placement: Placement) -> Placement:
    if not 0 <= placement.rank < placement.world_size:
        raise _contradiction(f"rank {placement.rank} of {placement.world_size}", "ranks count from 0")
    if not 0 < placement.port < 65_536:
        raise _contradiction(f"MASTER_PORT is {placement.port}", "ports are 1 to 65535")
    return placement


def _text_variable(values: Mapping[str, str], name: str) -> str:
    if not values.get(name):
        raise _contradiction(f"{name} is not set", "the other variables of a distributed job are")
    return values[name]


def _number_variable(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not values.get(name):
        return default
    text = _text_variable(values, name)
    if not re.fullmatch(r"\d{1,9}", text):
        raise _contradiction(f"{name} is {text!r}", "it must be a whole number")
    return int(text)


def _contradiction(what: str, why: str) -> RecipeError:
    fix = "start with torchrun or srun, or unset RANK and WORLD_SIZE"
    return RecipeError(what, where="environment", why=why, fix=fix)


def first_host(nodelist: str) -> str:
    """The first machine of a SLURM host list such as ``gpu[07-09,12],cpu1``."""
    if shutil.which("scontrol"):
        asked = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.split()[0]
    match = re.match(r"([^,\[\]]+)(?:\[([^\]]+)\])?([^,\[\]]*)", nodelist)
    if match is None:
        raise _contradiction(f"SLURM_JOB_NODELIST is {nodelist!r}", "it names no host")
    number = re.split(r"[-,]", match[2])[0] if match[2] else ""
    return match[1] + number + match[3]


def require_processes(planned: int, started: int) -> None:
    """Raise RecipeError for another number of processes than planned, which the same command would start again."""
    if planned != started:
        raise RecipeError(
            f"the plan is for {planned} process{'es' * (planned > 1)}",
            where="cluster",
            why="this is the only one" if started == 1 else f"this is one of {started}",
            fix="start as many with torchrun or srun, or set cluster.nodes and cluster.devices_per_node",
        )
