"""A GPU without a profile is planned from CUDA's figures. There is none here: CUDA's properties are fakes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.core.errors import RecipeError
from shardwise.hardware.cluster import cluster_of, recognise
from shardwise.hardware.device import DeviceProfile
from shardwise.hardware.profiles import PROFILES, read_own_profile
from shardwise.hardware.this_gpu import (
    CUDA_GENERATIONS,
    ROCM_GENERATIONS,
    ReportedGpu,
    device_here,
    profile_toml,
)
from shardwise.hardware.this_machine import usable_memory
from shardwise.jobs.objects import cluster_named
from shardwise.planner.explain import assumptions
from shardwise.recipe.load import recipe_of

# As torch.cuda.get_device_properties has them: bytes, kHz, bits.
RTX_4060_TI = SimpleNamespace(
    name="NVIDIA GeForce RTX 4060 Ti",
    total_memory=16_700_000_000,
    multi_processor_count=34,
    major=8,
    minor=9,
    clock_rate=2_535_000,
    memory_clock_rate=9_001_000,
    memory_bus_width=128,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rtx_4060_ti(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: RTX_4060_TI)


def profile_of(gpu: ReportedGpu, folder: Path, count: int = 1) -> DeviceProfile:
    path = folder / "gpu.toml"
    path.write_text(profile_toml(gpu, count), encoding="utf-8")
    return read_own_profile(path)


@pytest.mark.parametrize("capability", CUDA_GENERATIONS)
def test_a_profile_follows_from_its_own_multiprocessors_and_clock(
    capability: tuple[int, int], tmp_path: Path
) -> None:
    """The clocks of the table are right: FLOPs per clock and multiprocessor are powers of two, within 2 %."""
    generation = CUDA_GENERATIONS[capability]
    like = PROFILES[generation.like]
    per_clock = like.flops["fp16"] / (like.tiles.units * generation.clock)
    assert min(abs(per_clock / 2**n - 1) for n in range(8, 15)) < 0.02
    made = profile_of(ReportedGpu("Some Card", like.memory_bytes, like.tiles.units, capability), tmp_path)
    assert made.flops == pytest.approx(like.flops)
    assert made.memory_bandwidth == pytest.approx(like.memory_bandwidth)


def test_figures_are_nominal(rtx_4060_ti: None) -> None:
    assert recognise(RTX_4060_TI.name) is None
    path = Path(device_here())
    profile = read_own_profile(path)
    assert (profile.memory_bytes, profile.tiles.units, profile.node_devices) == (
        pytest.approx(16_700_000_000, rel=1e-5),
        34,
        2,
    )
    # Published: 22.1 TFLOP/s of fp32, 44.1 of fp16 in tensor cores, 288 GB/s.
    assert profile.flops["fp32"] == pytest.approx(22.1e12, rel=0.01)
    assert profile.flops["bf16"] == pytest.approx(44.1e12, rel=0.01)
    assert profile.memory_bandwidth == pytest.approx(288e9, rel=0.001)
    assert profile.host_memory_bytes == pytest.approx(usable_memory() / 2, rel=1e-5)
    assert "CUDA reports 34 multiprocessors at 2.54 GHz" in profile.source["flops"]
    assert profile.reported == ("rtx 4060 ti",)
    first = path.read_bytes()
    assert device_here() == str(path) and path.read_bytes() == first
    assert [file.name for file in path.parent.iterdir()] == ["rtx-4060-ti.toml"], (
        "no half-written file is left"
    )


def test_a_plan_says_where_its_figures_come_from(rtx_4060_ti: None) -> None:
    values = {"model": {"preset": "tiny"}, "steps": 1, "batch_size": 2, "cluster": cluster_named("auto")}
    cluster = cluster_of(recipe_of(values).cluster)
    assert (cluster.name, cluster.world_size) == ("2xrtx-4060-ti.toml", 2)
    said = " ".join(assumptions(cluster, 0.02))
    assert "nominal: CUDA reports 34 multiprocessors" in said and cluster.device.file in said


@pytest.mark.parametrize(
    ("gpu", "like"),
    [
        (ReportedGpu("Some Blackwell", 10**10, 48, (12, 1)), "RTX5090-32GB"),
        (ReportedGpu("Some Hopper", 10**10, 114, (9, 0)), "H100-80GB"),
        (ReportedGpu("AMD Instinct MI300A", 10**11, 228, (9, 4), "gfx942"), "MI300X-192GB"),
    ],
)
def test_what_is_not_reported_comes_from_the_generation(gpu: ReportedGpu, like: str, tmp_path: Path) -> None:
    made, base = profile_of(gpu, tmp_path), PROFILES[like]
    share = gpu.units / base.tiles.units
    assert made.kind == base.kind and made.efficiency.matmul == base.efficiency.matmul
    assert made.flops["bf16"] == pytest.approx(share * base.flops["bf16"], rel=1e-5)
    assert made.memory_bandwidth == pytest.approx(share * base.memory_bandwidth, rel=1e-5)
    assert (made.topology, made.link_bandwidth) == ("host", base.host_bandwidth), "NVLink is not assumed"
    assert made.link_bandwidth * made.efficiency.link == pytest.approx(10e9, rel=1e-5)


@pytest.mark.parametrize(
    "gpu", [ReportedGpu("Tesla P100", 1, 56, (6, 0)), ReportedGpu("RX 7900 XT", 1, 84, (11, 0), "gfx1100")]
)
def test_an_unknown_generation_is_refused(gpu: ReportedGpu) -> None:
    with pytest.raises(RecipeError, match=r"there is no profile of .*write its profile: docs/how-to/"):
        profile_toml(gpu, 1)


def test_every_generation_has_a_profile() -> None:
    assert {each.like for each in (*CUDA_GENERATIONS.values(), *ROCM_GENERATIONS.values())} <= set(PROFILES)


def test_a_known_gpu_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="NVIDIA L4"))
    assert device_here() == "L4-24GB"


def test_a_cache_that_cannot_be_written_is_one_line(
    rtx_4060_ti: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(RecipeError, match="this GPU cannot be described"):
        device_here()
