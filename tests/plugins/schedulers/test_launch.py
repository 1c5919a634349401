"""``shardwise launch``: the files say what they should, and do it under schedulers that are stood in for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from shardwise.cli.main import run
from shardwise.plugins.schedulers.job import RESTARTS

RECIPE = """
model: {preset: tiny}
data: {source: stdlib, sequence_length: 128}
steps: 10
batch_size: 32
cluster: {preset: 16xH100-80GB}  # a comment
"""
RANK_STUB = """\
echo "$RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" >> "$SEEN"
{then}
"""


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str, *more: str) -> Path:
    """The file for a recipe of two nodes with eight H100 each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_recipe.yaml").write_text(RECIPE, encoding="utf-8")
    assert run(["launch", scheduler, "my_recipe.yaml", *more]) == 0
    assert (tmp_path / "my_recipe.yaml").read_text(encoding="utf-8") == RECIPE
    [file] = list(tmp_path.glob("my-recipe.*"))
    return file


def stub(folder: Path, name: str, body: str) -> None:
    """A program in a folder of PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/bash\n" + body, encoding="utf-8")
    (folder / name).chmod(0o755)


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SEEN": str(tmp_path / "seen"), **more}


# -- Slurm ---------------------------------------------------------------------------------------------


def options(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_slurm_has_a_task_per_device_and_a_signal_before_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("steps=20", "--time", "12:00:00", "--partition", "gpu", "--image", "reg/shardwise:1")
    script = written(tmp_path, monkeypatch, "slurm", *more).read_text(encoding="utf-8")
    found = options(script)
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("2", "8", "8")
    assert found["signal"] == "TERM@180" and "requeue" in found and found["open-mode"] == "append"
    assert (found["time"], found["partition"]) == ("12:00:00", "gpu")
    command = f"shardwise train {tmp_path}/my_recipe.yaml steps=20 --out /shared/runs/my-recipe"
    assert command in script
    assert f"--container-mounts=/shared:/shared,{tmp_path}:{tmp_path}" in script


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (0, "RUNNING", 0, False),
        (75, "RUNNING", 0, True),
        (75, "CANCELLED", 0, False),
        (75, "RUNNING", RESTARTS, False),
        (5, "RUNNING", 1, True),
        (137, "RUNNING", 0, True),
        (2, "RUNNING", 0, False),
    ],
)
def test_slurm_requeues_what_resumes(
    code: int, state: str, restarts: int, requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, monkeypatch, "slurm", "--out", str(tmp_path / "run"))
    stub(tmp_path / "bin", "srun", f'echo "srun $*" >> "$SEEN"; exit {code}')
    stub(tmp_path / "bin", "scontrol", f'[ "$1" = show ] && echo JobState={state}; echo "$*" >> "$SEEN"')
    env = environment(tmp_path, SLURM_JOB_ID="7", SLURM_RESTART_COUNT=str(restarts))
    done = subprocess.run(["bash", str(file)], env=env, check=False)
    assert done.returncode == (5 if code == 137 else code)
    assert ("requeue 7" in (tmp_path / "seen").read_text().splitlines()) == requeued


@pytest.mark.parametrize(("refused", "code"), [(False, 0), (True, 7)])
def test_submit_lets_sbatch_check_the_file_first(
    refused: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As sbatch does: ``--test-only`` answers on standard error, ``--parsable`` with the number of the job."""
    checks = 'echo "sbatch: error: invalid partition specified: gpu" >&2; exit 1' if refused else "exit 0"
    body = f'echo "$*" >> {tmp_path}/seen\nif [ "$1" = --test-only ]; then {checks}; fi\necho 4711\n'
    stub(tmp_path / "bin", "sbatch", body)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    assert run(["launch", "slurm", "r.yaml", "--submit", "--partition", "gpu"]) == code
    seen, said = (tmp_path / "seen").read_text().splitlines(), capsys.readouterr()
    assert seen == ["--test-only r.sbatch", "--parsable r.sbatch"][: 1 if refused else 2]
    assert "invalid partition" in said.err if refused else said.out.endswith("4711\n")


@pytest.mark.parametrize(
    ("length", "said"),
    [("steps=7", "7 steps on 1 node of 8 ranks"), ("epochs=1.5", "1.5 epochs on 1 node of 8 ranks")],
)
def test_the_length_and_the_nodes_are_said(
    length: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    words = ["--file", "jobs/r.sbatch", length, "cluster.preset=8xH100-80GB"]
    assert run(["launch", "slurm", "r.yaml", *words]) == 0
    assert said in capsys.readouterr().out and (tmp_path / "jobs" / "r.sbatch").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("slurm", "--out", "runs/x"), 2, "--out"),
        (("slurm", "--time", "a day"), 2, "HH:MM:SS"),
        (("kubernetes",), 2, "--image"),
        (("skypilot",), 2, "--image"),
        (("slurm", "--file", "r.yaml"), 2, "that is the recipe"),
        (("skypilot", "--image", "x", "--submit"), 7, "there is no sky"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    scheduler, *more = arguments
    assert run(["launch", scheduler, "r.yaml", *more]) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line


# -- Kubernetes and SkyPilot ------------------------------------------------------------------------------


def test_kubernetes_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, monkeypatch, "kubernetes", "--image", "reg/x:1", "--volume", "nfs")
    config, service, job = yaml.safe_load_all(file.read_text(encoding="utf-8"))
    kinds = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in (config, service, job)]
    assert kinds == [
        ("v1", "ConfigMap", "my-recipe"),
        ("v1", "Service", "my-recipe"),
        ("batch/v1", "Job", "my-recipe"),
    ]
    assert config["data"]["recipe.yaml"] == RECIPE
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    # A failure policy needs restartPolicy: Never; the pod's name in DNS needs the Service's name as subdomain.
    assert (pod["restartPolicy"], pod["subdomain"]) == ("Never", service["metadata"]["name"])
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": "my-recipe"}
    assert service["spec"]["publishNotReadyAddresses"] is True
    [container] = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["env"] == [{"name": "MASTER_ADDR", "value": "my-recipe-0.my-recipe"}]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "nfs"}} in pod["volumes"]
    actions = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in spec["podFailurePolicy"]["rules"]
    ]
    assert actions == [("Ignore", None), ("Ignore", [75]), ("FailJob", [2, 3, 4, 6, 7])]
    for rule in spec["podFailurePolicy"]["rules"][1:]:
        assert rule["onExitCodes"]["containerName"] == container["name"]
    subprocess.run(["bash", "-n", "-c", container["command"][2]], check=True)


def test_skypilot_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = yaml.safe_load(
        written(tmp_path, monkeypatch, "skypilot", "--volume", "bucket", "--image", "reg/x:1").read_text(
            encoding="utf-8"
        )
    )
    assert set(task) == {"name", "num_nodes", "resources", "file_mounts", "run"}
    assert task["resources"]["image_id"] == "docker:reg/x:1"
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75, 5]
    assert task["file_mounts"]["/shared"]["name"] == "bucket"
    assert task["file_mounts"]["/recipe/recipe.yaml"] == str(tmp_path / "my_recipe.yaml")
    subprocess.run(["bash", "-n", "-c", task["run"]], check=True)


@pytest.mark.parametrize(
    ("device", "name"), [("A100-80GB", "A100-80GB"), ("A100-40GB", "A100"), ("RTX4090-24GB", "RTX4090")]
)
def test_accelerators_as_skypilot_calls_them(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, monkeypatch, "skypilot", "--image", "x", f"cluster.preset=4x{device}")
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["resources"]["accelerators"] == f"{name}:4"


def test_the_dockerfile_copies_what_there_is() -> None:
    """docker is not there in tests: what can be checked without it. The image has what the wheel is built from."""
    root = Path(__file__).parents[3]
    lines = [
        line for line in (root / "Dockerfile").read_text(encoding="utf-8").splitlines() if line[:1].isupper()
    ]
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "shardwise", "recipes"} == set(copied)
    assert all((root / name).exists() for name in copied)
    kept = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{name}" for name in copied} <= set(kept)


# -- the ranks of a node ----------------------------------------------------------------------------------


def node(tmp_path: Path, script: str, then: str, **more: str) -> subprocess.Popen[bytes]:
    stub(tmp_path / "bin", "shardwise", RANK_STUB.format(then=then))
    env = environment(tmp_path, NODE="1", MASTER_ADDR="10.0.0.7", **more)
    return subprocess.Popen(["bash", "-c", script], env=env)


def script_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of node 1 of two, with two ranks each."""
    more = ("--image", "x", "cluster={device: cpu, nodes: 2, devices_per_node: 2}")
    file = written(tmp_path, monkeypatch, "kubernetes", *more)
    *_, job = yaml.safe_load_all(file.read_text(encoding="utf-8"))
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container
    return str(container["command"][2]).replace('export NODE="$JOB_COMPLETION_INDEX"\n', "")


@pytest.mark.parametrize(
    ("then", "code"),
    [("exit 0", 0), ("exit 75", 75), ("exit $((RANK == 3 ? 7 : 5))", 7), ("kill -KILL $$", 5)],
)
def test_a_node_starts_its_ranks_and_ends_as_the_worst(
    then: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node(tmp_path, script_of(tmp_path, monkeypatch), then).wait(20) == code
    override = "cluster={device: cpu, nodes: 2, devices_per_node: 2}"
    rest = f"2 4 10.0.0.7 29500 train /recipe/recipe.yaml {override} --out /shared/runs/my-recipe"
    assert sorted((tmp_path / "seen").read_text().splitlines()) == [f"2 0 {rest}", f"3 1 {rest}"]


def test_a_node_passes_a_signal_on_and_waits_for_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = "trap 'sleep 0.2; exit 75' TERM\ntouch $SEEN.$RANK\nwhile true; do sleep 0.02; done"
    process = node(tmp_path, script_of(tmp_path, monkeypatch), saves)
    until = time.monotonic() + 20
    while len(list(tmp_path.glob("seen.*"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75


RAY_STUB = """
import types
class _Ref:
    def __init__(self, value): self.value = value
class _Remote:
    def __init__(self, function): self.function = function
    def options(self, **options): return self
    def remote(self, *arguments): return _Ref(self.function(*arguments))
def remote(**options): return _Remote
def get(ref): return [get(each) for each in ref] if isinstance(ref, list) else ref.value
def init(): pass
class exceptions:
    class RayError(Exception): pass
"""


def test_the_driver_of_ray_starts_again_after_75(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for ray that calls functions at once."""
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    file = written(tmp_path, monkeypatch, "ray", "cluster={device: cpu, nodes: 2, devices_per_node: 2}")
    package = tmp_path / "lib" / "ray"
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").write_text(RAY_STUB)
    (package / "util" / "__init__.py").write_text("def get_node_ip_address(): return '10.0.0.7'\n")
    group = "class _Group:\n    def ready(self):\n        from ray import _Ref\n        return _Ref(0)\n"
    group += "def placement_group(bundles, strategy):\n    assert strategy == 'STRICT_SPREAD' and len(bundles) == 2\n"
    group += "    return _Group()\ndef remove_placement_group(group): pass\n"
    (package / "util" / "placement_group.py").write_text(group)
    strategies = "class PlacementGroupSchedulingStrategy:\n    def __init__(self, *a, **k): pass\n"
    (package / "util" / "scheduling_strategies.py").write_text(strategies)
    once = 'cat recipe.yaml > $SEEN.recipe; [ -e $SEEN.again ] && exit 0; [ "$RANK" = 3 ] && touch $SEEN.again; exit 75'
    stub(tmp_path / "bin", "shardwise", RANK_STUB.format(then=once))
    env = environment(tmp_path, PYTHONPATH=str(tmp_path / "lib"))
    assert subprocess.run([sys.executable, str(file)], env=env, check=False, cwd=tmp_path).returncode == 0
    seen = (tmp_path / "seen").read_text().splitlines()
    assert sorted(line.split()[0] for line in seen) == sorted("0123" * 2)
    assert (tmp_path / "seen.recipe").read_text() == RECIPE


# -- the whole --------------------------------------------------------------------------------------------

TRAINED = """
model: {layers: 1, width: 16, heads: 2, ffn: 48, vocab: 256, context: 16}
data: {source: stdlib, sequence_length: 16}
steps: 400
batch_size: 4
checkpoint: {every: 5, keep: 2}
strategy: {zero_stage: 3, micro_batch_size: 1}
cluster: {device: cpu, nodes: 2, devices_per_node: 1}
"""


@pytest.mark.long
def test_two_nodes_lose_one_and_go_on_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers on this machine run the script of a pod each. One is killed with its rank; the run goes on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(TRAINED, encoding="utf-8")
    stub(tmp_path / "bin", "shardwise", f'exec {sys.executable} -m shardwise "$@"')
    out = tmp_path / "run"

    def started(nodes: int, steps: int) -> list[subprocess.Popen[bytes]]:
        given = [f"cluster.nodes={nodes}", f"steps={steps}", "--out", str(out), "--image", "x"]
        assert run(["launch", "kubernetes", "r.yaml", *given]) == 0
        *_, job = yaml.safe_load_all((tmp_path / "r.k8s.yaml").read_text(encoding="utf-8"))
        script = job["spec"]["template"]["spec"]["containers"][0]["command"][2]
        env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(29611 + nodes), "PYTHONPATH": str(Path(__file__).parents[3])}
        script = script.replace("/recipe/recipe.yaml", str(tmp_path / "r.yaml"))
        command = ["bash", "-c", script]
        return [
            subprocess.Popen(command, env={**env, "JOB_COMPLETION_INDEX": str(index)}, start_new_session=True)
            for index in range(nodes)
        ]

    def saved() -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in (out / "checkpoints").glob("step-*"))

    first, second = started(2, 400)
    until = time.monotonic() + 240
    while (not saved() or saved()[-1] < 10) and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(second.pid, signal.SIGKILL)  # the node is gone, without a word
    assert first.wait(240) == 5
    assert second.wait(10) == -signal.SIGKILL
    reached = saved()[-1]
    assert 10 <= reached < 400
    [alone] = started(1, reached + 5)
    assert alone.wait(240) == 0
    assert saved()[-1] == reached + 5
