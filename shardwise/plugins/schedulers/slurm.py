"""A batch script for Slurm: one task per device, a signal before the time limit, and a requeue after it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePath

from shardwise.core.errors import RankError
from shardwise.plugins.schedulers.job import AGAIN, RESTARTS, SAVING_SECONDS, ClusterJob

SUBMIT = (("sbatch", "--test-only"), ("sbatch", "--parsable"))
"""Commands that take the file: a check by the scheduler, and the submission, which prints the job's number."""


def job_file(job: ClusterJob) -> str:
    """The script. ``srun`` sets what ranks need to find each other (launch/placement.py)."""
    shared, here = shlex.quote(job.shared), shlex.quote(str(PurePath(job.recipe).parent))
    container = f" --container-image={shlex.quote(job.image)}" if job.image else ""
    container += f" --container-mounts={shared}:{shared},{here}:{here}" if job.image else ""
    again = " || ".join(f"code == {code}" for code in AGAIN)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _sbatch_options(job)),
        "",
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}",
        f"mkdir -p {shlex.quote(job.out)}",
        f"cd {shlex.quote(job.folder)}",
        f"srun{container} {job.command()}",
        "code=$?",
        f"if ((code > 128)); then code={RankError.exit_code}; fi  # a rank was killed",
        'running() { [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; }  # and not cancelled',
        f"if (( ({again}) && ${{SLURM_RESTART_COUNT:-0}} < {RESTARTS} )) && running; then",
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _sbatch_options(job: ClusterJob) -> Iterator[str]:
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.devices}"
    if job.device is not None:
        yield f"--gpus-per-node={job.devices}"
    yield f"--time={job.time or '24:00:00'}"
    yield f"--signal=TERM@{SAVING_SECONDS}"  # without B: to the tasks of the step, not to the shell
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--output={job.name}-%j.log"
    if job.partition:
        yield f"--partition={job.partition}"
    if job.account:
        yield f"--account={job.account}"
