"""Kubernetes without an operator: an indexed Job with a pod per node, a headless Service and the recipe's ConfigMap.

The index of a pod is the number of its node, and the Service gives pod 0 a name that the others find it by. The pod
failure policy (Kubernetes 1.31) starts a pod again after 75 and after a disruption without counting it, ends the job
after a code that would come again, and counts everything else.
"""

from __future__ import annotations

from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from shardwise.core.errors import (
    CheckpointError,
    DataError,
    NumericsError,
    Preempted,
    RankError,
    RecipeError,
    ResourceError,
)
from shardwise.plugins.schedulers.job import (
    RENDEZVOUS_PORT,
    RESTARTS,
    SAVING_SECONDS,
    ClusterJob,
    node_script,
)

SUBMIT = (("kubectl", "apply", "--dry-run=server", "-f"), ("kubectl", "apply", "-f"))
MOUNTED_RECIPE = "/recipe/recipe.yaml"
FINAL = tuple(
    error.exit_code for error in (RecipeError, DataError, CheckpointError, NumericsError, ResourceError)
)
assert RankError.exit_code not in FINAL


def job_file(job: ClusterJob) -> str:
    """Three objects as YAML."""
    image_of(job, "pods run images")
    return as_yaml(*objects(job))


def image_of(job: ClusterJob, why: str) -> str:
    """The container image. Raises RecipeError where none is asked for, with the reason ``why`` one is needed."""
    if job.image is None:
        fix = "build the Dockerfile of the repository, push it, and give --image REGISTRY/NAME:TAG"
        raise RecipeError("no container image", where="--image", why=why, fix=fix)
    return job.image


def objects(job: ClusterJob) -> tuple[dict[str, Any], ...]:
    """ConfigMap, Service and Job."""
    meta = {"name": job.name, "labels": {"app": "shardwise", "shardwise/run": job.name}}
    recipe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}
    recipe["data"] = {"recipe.yaml": LiteralScalarString(job.recipe_text)}
    ports = [{"name": "store", "port": RENDEZVOUS_PORT}]
    network = {"clusterIP": "None", "publishNotReadyAddresses": True, "ports": ports}
    network["selector"] = {"job-name": job.name}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": network}
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": RESTARTS * job.nodes,
        "podFailurePolicy": {"rules": _rules()},
        "template": {"metadata": {"labels": meta["labels"]}, "spec": _pod(job)},
    }
    return recipe, service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}


def _rules() -> list[dict[str, Any]]:
    """What a pod's end means: the first that applies."""

    def after(action: str, *codes: int) -> dict[str, Any]:
        exits = {"containerName": "ranks", "operator": "In", "values": list(codes)}
        return {"action": action, "onExitCodes": exits}

    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [disrupted, after("Ignore", Preempted.exit_code), after("FailJob", *FINAL)]


def _pod(job: ClusterJob) -> dict[str, Any]:
    """One node: a container that runs all of its ranks."""
    script = 'export NODE="$JOB_COMPLETION_INDEX"\n' + node_script(job, MOUNTED_RECIPE)
    container: dict[str, Any] = {
        "name": "ranks",
        "image": job.image,
        "command": ["bash", "-c", LiteralScalarString(script)],
        "env": [{"name": "MASTER_ADDR", "value": f"{job.name}-0.{job.name}"}],
        "ports": [{"containerPort": RENDEZVOUS_PORT}],
        "volumeMounts": [
            {"name": "recipe", "mountPath": "/recipe"},
            {"name": "shared", "mountPath": job.shared},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if job.device is not None:
        vendor = "amd.com/gpu" if job.device.startswith("MI") else "nvidia.com/gpu"
        container["resources"] = {"limits": {vendor: job.devices}}
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVING_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "recipe", "configMap": {"name": job.name}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def as_yaml(*documents: Any) -> str:
    """YAML documents, with scripts as blocks."""
    yaml = YAML()
    yaml.width = 4096
    yaml.representer.ignore_aliases = lambda _: True
    text = StringIO()
    yaml.dump_all(documents, text)
    return text.getvalue()
