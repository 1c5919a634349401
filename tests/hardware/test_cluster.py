"""The hardware table and what a group of ranks can send."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, fields

import pytest

from shardwise.core.errors import RecipeError
from shardwise.hardware.cluster import (
    Cluster,
    cluster_of,
    device_profile,
    parse_preset,
    recognise,
)
from shardwise.hardware.device import RATED_DTYPES, DeviceProfile, Efficiency, Overhead
from shardwise.hardware.profiles import PROFILES
from shardwise.recipe.sections import ClusterSpec


@dataclass(frozen=True)
class Request:
    preset: str | None = None
    device: str | None = None
    nodes: int = 1
    devices_per_node: int = 1
    memory_gib: float | None = None
    host_memory_gib: float | None = None


def made(preset: str) -> Cluster:
    return cluster_of(Request(preset=preset))


ALL = [*PROFILES.values(), cluster_of(Request()).device]


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
def test_every_figure_has_a_source(profile: DeviceProfile) -> None:
    figures = {
        "memory_bytes",
        "flops",
        "memory_bandwidth",
        "link_bandwidth",
        "network_bandwidth",
        "host_bandwidth",
        "host_memory_bytes",
        "host_memory_bandwidth",
        "disk_bandwidth",
    }
    figures |= {"latency", "launch"}
    figures |= {"tiles", "bulk", "interference"} if profile.kind != "cpu" else set()
    figures |= {f"efficiency.{each.name}" for each in fields(Efficiency)}
    figures |= {f"overhead.{each.name}" for each in fields(Overhead)}
    assert set(profile.source) == figures
    assert all(len(text) > 3 for text in profile.source.values())


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
def test_figures_are_sane(profile: DeviceProfile) -> None:
    assert set(profile.flops) <= set(RATED_DTYPES)
    assert all(rate > 1e9 for rate in profile.flops.values())
    assert profile.memory_bandwidth >= profile.host_bandwidth > 0
    assert profile.host_memory_bandwidth > 0
    assert profile.host_bandwidth > profile.disk_bandwidth > 0
    # A Grace processor has 236 GB for each GB300 of 297 GB, a DGX B300 has 2 TB for eight devices of 287 GB.
    small = {"GB300-288GB": 236_000_000_000, "B300-288GB": 2048 * 2**30 // 8}
    assert (
        profile.host_memory_bytes >= small.get(profile.name, profile.memory_bytes) or profile.kind != "cuda"
    )
    assert all(0 < getattr(profile.efficiency, each.name) <= 1 for each in fields(Efficiency))
    assert profile.memory_bytes > profile.overhead.outside_allocator(communicators=3) > 0
    assert profile.overhead.outside_allocator(3) - profile.overhead.outside_allocator(2) == (
        profile.overhead.communicator_bytes
    )
    assert profile.topology in ("switch", "mesh", "host")
    hash(profile)


@pytest.mark.parametrize(("name", "profile"), PROFILES.items())
def test_the_driver_sees_less_than_the_box_says_but_not_much_less(name: str, profile: DeviceProfile) -> None:
    box = float(name.rpartition("-")[2].removesuffix("GB"))
    # Some boxes say decimal GB (H200, 141e9 B is 131 GiB) and are then exceeded in bytes.
    least = 0.75 * box * 2**30 if profile.kind == "mps" else 0.90 * box * 1e9  # of unified memory, a share
    assert least <= profile.memory_bytes < box * 2**30


def test_known_datasheet_figures() -> None:
    """Guards the halving of sparse and two-way figures, the classical mistakes of such tables."""
    h100, l4, v100 = PROFILES["H100-80GB"], PROFILES["L4-24GB"], PROFILES["V100-32GB"]
    assert h100.flops["bf16"] == 989e12 and h100.flops["fp8"] == 1979e12
    assert h100.link_bandwidth == 450e9
    assert l4.flops["bf16"] == 121e12 and l4.memory_bandwidth == 300e9
    assert PROFILES["A100-80GB"].memory_bandwidth == 2039e9
    assert not v100.supports("bf16") and v100.peak_flops("bf16") == v100.flops["fp32"]
    assert PROFILES["A100-40GB"].peak_flops("fp8") == 312e12
    t4, rtx3090, m3 = PROFILES["T4-16GB"], PROFILES["RTX3090-24GB"], PROFILES["M3-Max-128GB"]
    assert t4.peak_flops("bf16") == 8.1e12 and t4.flops["fp16"] == 65e12
    assert not rtx3090.supports("fp8") and rtx3090.peak_flops("fp8") == 71.2e12
    assert PROFILES["L40S-48GB"].flops["bf16"] == 362e12 and PROFILES["H20-96GB"].link_bandwidth == 450e9
    assert PROFILES["H800-80GB"].link_bandwidth == 200e9 and PROFILES["B300-288GB"].flops["bf16"] == 2250e12
    assert m3.nearest("fp64") == "fp32" and m3.memory_bytes + m3.host_memory_bytes == 128 * 2**30
    with pytest.raises(KeyError):
        h100.peak_flops("int8")


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name"),
    [
        ("8xH100-80GB", 1, 8, "H100-80GB"),
        ("h100", 1, 1, "H100-80GB"),
        (" 4 x a100 ", 1, 4, "A100-80GB"),
        ("16384xH100-80GB", 2048, 8, "H100-80GB"),
        ("4x16xV100-32GB", 4, 16, "V100-32GB"),
        ("8×mi300x", 1, 8, "MI300X-192GB"),
        ("2x4090", 1, 2, "RTX4090-24GB"),
        ("RTX 4090", 1, 1, "RTX4090-24GB"),
        ("NVIDIA L4", 1, 1, "L4-24GB"),
        ("40xcpu", 1, 40, None),
    ],
)
def test_presets(text: str, nodes: int, devices: int, name: str | None) -> None:
    found = parse_preset(text)
    assert found[:2] == (nodes, devices)
    assert (found[2] and found[2].name) == name


@pytest.mark.parametrize("key", ["preset", "device"])
def test_names_that_yaml_reads_as_numbers(key: str) -> None:
    device = cluster_of(ClusterSpec.model_validate({key: 4090})).device
    assert device.name == "RTX4090-24GB"


@pytest.mark.parametrize("name", ["cpu", *PROFILES])
def test_every_name_is_its_own_preset(name: str) -> None:
    profile = device_profile(name)
    assert (profile.name if profile else "cpu") == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xH10", "did you mean 'H100-80GB'"),
        ("12xh100", "multiple of the 8"),
        ("8xmy-card.toml", "write cluster: {device: my-card.toml, devices_per_node: 8}"),
        ("0xh100", "count of 0"),
        ("-8xh100", "expected COUNTxDEVICE"),
        ("", "expected COUNTxDEVICE"),
        ("8x", "unknown device"),
        (
            "rtx4060",
            "docs/reference/presets.md lists the names; for another, name a file such as my-card.toml",
        ),
        ("99999999xh100", "unknown device"),
        ("٣xh100", "expected COUNTxDEVICE"),
        ("x" * 10_000, "unknown device"),
    ],
)
def test_malformed_presets(text: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        made(text)
    assert says in caught.value.line()
    assert caught.value.where == "cluster.preset"
    assert len(caught.value.line()) <= 300


def test_conflicts_and_device_errors() -> None:
    with pytest.raises(RecipeError, match="both given"):
        cluster_of(Request(preset="8xh100", device="cpu"))
    with pytest.raises(RecipeError, match="devices_per_node says 4"):
        cluster_of(Request(preset="8xh100", devices_per_node=4))
    with pytest.raises(RecipeError, match=r"cluster\.device"):
        cluster_of(Request(device="tpu"))
    for gib in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(RecipeError, match="memory_gib"):
            cluster_of(Request(device="h100", memory_gib=gib))
        with pytest.raises(RecipeError, match="host_memory_gib"):
            cluster_of(Request(device="h100", host_memory_gib=gib))


def test_counts_and_memory_of_a_recipe() -> None:
    cluster = cluster_of(ClusterSpec(preset="8xH100-80GB", nodes=4, memory_gib=64.0))
    assert (cluster.nodes, cluster.devices_per_node, cluster.world_size) == (4, 8, 32)
    assert cluster.capacity_bytes == 64 * 2**30
    assert cluster.name == "4x8xH100-80GB"
    assert PROFILES["H100-80GB"].memory_bytes != cluster.capacity_bytes
    assert cluster_of(ClusterSpec(device="h200", nodes=2, devices_per_node=4)).world_size == 8


def test_links_inside_and_across_nodes() -> None:
    cluster = made("16384xH100-80GB")
    inside, alone = cluster.link(8), cluster.link(1)
    assert inside.nodes == 1 and inside.bandwidth == pytest.approx(0.82 * 450e9)
    assert alone.seconds(1e9) == 0.0
    # One member in each node: one adapter each. All eight: eight adapters together, as fast as NVLink allows.
    replicas, sharded = cluster.link(16, stride=8), cluster.link(16)
    assert (replicas.nodes, sharded.nodes) == (16, 2)
    assert replicas.bandwidth == pytest.approx(45e9)
    assert sharded.bandwidth == pytest.approx(8 * 45e9)
    assert cluster.link(8, stride=2).nodes == 2  # four members of a node, two nodes
    assert cluster.link(8, stride=2).bandwidth == pytest.approx(4 * 45e9)
    assert cluster.link(4, stride=2).nodes == 1
    assert inside.latency < sharded.latency < cluster.link(16384).latency


def test_groups_that_straddle_nodes_are_not_taken_for_local() -> None:
    cluster = cluster_of(Request(device="h100", nodes=2, devices_per_node=6))
    assert cluster.link(6).nodes == 1
    assert cluster.link(4).nodes > 1  # ranks 4 to 7
    assert cluster.link(4).bandwidth == pytest.approx(45e9)
    assert cluster_of(Request(device="h100", devices_per_node=6)).link(4).nodes == 1


def test_rings_and_all_to_alls_cross_nodes_by_single_adapters() -> None:
    """An all-gather's ring is cut into as many as there are adapters; a block for one rank is not."""
    size = 1e12  # so much that latency does not count
    one, two = made("8xH100-80GB"), made("16xH100-80GB")
    link, adapter = one.link(8).bandwidth, one.network_bandwidth * one.device.efficiency.network
    assert one.seconds_to_next(size, 8) == pytest.approx(size / link, rel=1e-3)
    assert two.seconds_to_next(size, 16) == pytest.approx(size / adapter, rel=1e-3)
    assert one.seconds_to_all(size, 8) == pytest.approx(7 / 8 * size / link, rel=1e-3)
    assert two.seconds_to_all(size, 16) == pytest.approx(8 / 16 * size / adapter, rel=1e-3)
    assert two.seconds_to_all(size, 2, 8) == pytest.approx(size / 2 / adapter, rel=1e-3)
    assert one.seconds_to_next(size, 1) == one.seconds_to_all(size, 1) == 0


def test_a_mesh_gives_small_groups_only_their_own_links() -> None:
    cluster = made("8xMI300X")
    assert cluster.link(8).bandwidth == pytest.approx(7 * 48e9)
    assert cluster.link(2).bandwidth == pytest.approx(48e9)


def test_ring_time() -> None:
    link = made("8xH100-80GB").link(8)
    # NCCL's tuning.cc, ring over NVLink: 8.4 us and 3.4 us per hop (Simple), 6.6 us and 0.6 us (LL).
    expected = 8.4e-6 + 7 * 3.4e-6 + 7 / 8 * 1e9 / link.bandwidth
    assert link.seconds(1e9) == pytest.approx(expected)
    assert link.seconds(1e9, rounds=2) == pytest.approx(2 * expected)
    assert link.seconds(8) == pytest.approx(6.6e-6 + 7 * 0.6e-6, rel=1e-4)
    # A ring of 16 nodes passes 112 times to a neighbour and 15 times over the network; a tree goes up and down.
    wide = made("128xH100-80GB").link(128)
    assert wide.seconds(8) == pytest.approx(6.6e-6 + 112 * 0.6e-6 + 15 * 2.7e-6, rel=1e-3)
    assert wide.seconds(8, rounds=2) == pytest.approx(6.6e-6 + 2 * (7 * 0.6e-6 + 4 * 2.7e-6), rel=1e-3)
    assert wide.seconds(1e10, rounds=2) == pytest.approx(2 * wide.seconds(1e10), rel=1e-3)
    sizes = [2.0**n for n in range(34)]
    times = [link.seconds(size) for size in sizes]
    assert times == sorted(times)
    with pytest.raises(ValueError, match="positive"):
        made("8xh100").link(0)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA B200", "B200-180GB"),
        ("NVIDIA L4", "L4-24GB"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("NVIDIA L40", None),
        ("Tesla T4", "T4-16GB"),
        ("NVIDIA A10G", "A10G-24GB"),
        ("NVIDIA GeForce RTX 3090", "RTX3090-24GB"),
        ("NVIDIA RTX A6000", "RTXA6000-48GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA B300 SXM6 AC", "B300-288GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("NVIDIA H100 PCIe", None),
    ],
)
def test_recognise(reported: str, name: str | None) -> None:
    profile = recognise(reported)
    assert (profile and profile.name) == name


def test_torch_is_not_imported() -> None:
    code = "import sys, shardwise.hardware.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rings_over_elastic_fabric_adapters_are_as_slow_as_measured() -> None:
    """All-gathers of the Ultra-Scale Playbook's nodes, bytes/s of the bus. Their payload is not published: 256 MB."""
    measured = {2: 184.6e9, 4: 119.0e9, 8: 69.0e9, 16: 55.0e9, 32: 28.0e9, 64: 11.0e9}
    for nodes, expected in measured.items():
        ranks = 8 * nodes
        bus = 256e6 * (ranks - 1) / ranks / made(f"{ranks}xP5-H100-80GB").link(ranks).seconds(256e6)
        assert bus == pytest.approx(expected, rel=0.35), nodes
