"""A first plan measures the machine that it is for: which plans do, in which words, and that it is done once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.hardware import this_machine as machine
from shardwise.hardware.cluster import cluster_of
from shardwise.hardware.measured import IN_PLACE, NEW, Grid, MeasuredSpeeds
from shardwise.jobs.request import measured_cluster
from shardwise.planner.explain import seconds_from
from shardwise.plugins.calibration import first, run
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import ClusterSpec
from tests.harness.commands import Shell

PLAIN = {NEW: ((1e3, 1e-6),), IN_PLACE: ((1e3, 1e-6),)}
TINY = {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": 256}
GRID = Grid(((1, 2), (1,), (1,)), (1e-6, 2e-6))


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of processes that were measured; -1 is a GPU. Nothing is really measured."""
    done: list[int] = []

    def measure(processes: int) -> MeasuredSpeeds:
        done.append(processes)
        return MeasuredSpeeds(abs(processes), 1, {"fp32": GRID}, {}, PLAIN)

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(first.VARIABLE)
    for name in ("RANK", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(first, "usable_cores", lambda: 2)
    idle_for(monkeypatch, True)
    monkeypatch.setattr(run, "quick_cpu", measure)
    monkeypatch.setattr(run, "quick_gpu", lambda: measure(-1))
    return done


def idle_for(patch: pytest.MonkeyPatch, idle: bool) -> None:
    patch.setattr(first.OtherWork, "cores", lambda self: float(not idle))
    patch.setattr(first, "is_busy_now", lambda: not idle)


def asked(spec: ClusterSpec) -> bool:
    return first.measured_first(spec, cluster_of(spec))


def test_this_machine_is_measured_once(measurements: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of({"steps": 1, "batch_size": 2, "model": TINY, "cluster": {"devices_per_node": 2}})
    assert cluster_of(recipe.cluster).device.measured is None
    assert measured_cluster(recipe).device.measured is not None
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("measuring this machine (once, 0 s)") and err.count("\n") == 1
    assert measured_cluster(recipe).device.measured is not None
    assert measurements == [2] and capsys.readouterr().err == ""


def test_a_machine_with_other_work_is_measured_again_when_it_is_idle(
    measurements: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ClusterSpec(devices_per_node=2)
    with monkeypatch.context() as busy:
        idle_for(busy, False)
        assert asked(spec)
        assert "0 s); it did other work meanwhile" in capsys.readouterr().err
        assert not asked(spec)
        assert "while it did other work" in seconds_from(cluster_of(spec))
    assert asked(spec) and not asked(spec)
    assert measurements == [2, 2]
    assert "other work" not in capsys.readouterr().err + seconds_from(cluster_of(spec))
    found = machine.read_calibration()
    assert found is not None and [speeds.busy for speeds in found.speeds] == [False]


def test_each_number_of_processes_up_to_the_cores_is_measured(measurements: list[int]) -> None:
    for devices in (1, 2, 8, 64):
        asked(ClusterSpec(devices_per_node=devices))
    assert measurements == [1, 2]
    found = machine.read_calibration()
    assert found is not None and [speeds.processes for speeds in found.speeds] == [1, 2]


@pytest.mark.parametrize(
    "spec",
    [
        ClusterSpec(preset="2xcpu"),
        ClusterSpec(preset="8xH100-80GB"),
        ClusterSpec(device="cpu", nodes=2),
        ClusterSpec(device="h100"),
    ],
    ids=["a preset of CPUs", "a preset", "several nodes", "a device that is not here"],
)
def test_other_machines_are_not_measured(measurements: list[int], spec: ClusterSpec) -> None:
    assert not asked(spec) and measurements == []


def test_the_variable_and_a_launcher_keep_it_off(
    measurements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as off:
        off.setenv(first.VARIABLE, "0")
        assert not asked(ClusterSpec())
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert not asked(ClusterSpec()) and measurements == []


def test_the_gpu_of_this_machine_is_measured(
    measurements: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for slot in ("0000:01:00.0", "0000:02:00.0"):
        folder = tmp_path / "gpus" / slot
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 16\n")
    here = first.gpus_here(tmp_path / "gpus")
    assert here == {"h100 80gb hbm3"}
    monkeypatch.setattr(first, "gpus_here", lambda: here)
    assert not asked(ClusterSpec(device="a100"))
    with monkeypatch.context() as hidden:
        for nothing in ("", "-1"):
            hidden.setenv("CUDA_VISIBLE_DEVICES", nothing)
            assert not asked(ClusterSpec(device="h100", devices_per_node=2))
    assert asked(ClusterSpec(device="h100", devices_per_node=2)) and measurements == [-1]
    assert cluster_of(ClusterSpec(device="h100")).device.measured is not None
    assert not asked(ClusterSpec(device="h100", devices_per_node=2)) and measurements == [-1]


def test_a_gpu_without_a_profile_is_measured_too(
    measurements: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user's file is of a card of this machine if it names what the driver reports."""
    monkeypatch.setattr(first, "gpus_here", lambda: {"rtx 4060 ti"})
    here, elsewhere = (ClusterSpec(device=str(tmp_path / name)) for name in ("here.toml", "there.toml"))
    (tmp_path / "here.toml").write_text('like = "RTX4090-24GB"\nreported = ["rtx 4060 ti"]\n')
    (tmp_path / "there.toml").write_text('like = "RTX4090-24GB"\n')
    assert not asked(elsewhere) and measurements == []
    assert asked(here) and measurements == [-1]
    assert cluster_of(here).device.measured is not None and cluster_of(elsewhere).device.measured is None


def test_a_machine_that_cannot_be_measured_is_planned_with_assumed_speeds(
    measurements: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(processes: int) -> MeasuredSpeeds:
        raise RuntimeError("no\ngloo")

    monkeypatch.setattr(run, "quick_cpu", fail)
    assert not asked(ClusterSpec())
    err = capsys.readouterr().err
    assert err == "measuring this machine (once, 0 s) failed, so seconds are assumed: no gloo\n"


def test_nothing_is_measured_that_cannot_be_kept(measurements: list[int], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert not asked(ClusterSpec()) and measurements == []


@pytest.mark.long
def test_a_plan_really_measures_and_prints_json_alone(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "model: {layers: 1, width: 16, heads: 2, ffn: 32, vocab: 256}\n"
        "data: {source: stdlib, sequence_length: 16}\nsteps: 2\nbatch_size: 2\n"
        "cluster: {devices_per_node: 2}\nstrategy: {zero_stage: 3, micro_batch_size: 1, precision: fp32}\n"
    )
    environment = {"SHARDWISE_CACHE": str(tmp_path / "cache"), first.VARIABLE: ""}
    done = shell.run("plan", "recipe.yaml", "--json", folder=tmp_path, environment=environment)
    assert done.returncode == 0 and done.stderr.startswith("measuring this machine (once, ")
    assert any("measured on" in sentence for sentence in json.loads(done.stdout)["assumptions"])
    assert (tmp_path / "cache" / "cpu.json").is_file()
