"""This machine without measuring: cgroup limits, cores, calibration, the CPU profile."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shardwise.core.units import GiB
from shardwise.hardware import this_machine as machine
from shardwise.hardware.device import DeviceProfile
from shardwise.hardware.measured import IN_PLACE, NEW, Grid, MeasuredSpeeds


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_cgroup_on_the_way_up_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "1000000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    assert machine.memory_limit(system(tmp_path, files)) == 1_000_000


def test_a_container_sees_its_limit_at_the_root(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/beef\n", "sys/fs/cgroup/memory.max": "2000000\n"}
    assert machine.memory_limit(system(tmp_path, files)) == 2_000_000


def test_cgroup_v1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    }
    root = system(tmp_path, files)
    assert machine.memory_limit(root) == 3_000_000
    assert machine.usable_memory(root) == 3_000_000
    assert machine.usable_cores(root) == 1


def test_what_a_container_uses_is_not_left(tmp_path: Path) -> None:
    """The inactive file cache counts as free."""
    group = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "0::/docker/beef\n",
        f"{group}.max": f"{8 * GiB}\n",
        f"{group}.current": f"{8 * GiB - GiB // 5}\n",
        f"{group}.stat": "anon 1\ninactive_file 0\nactive_file 12\n",
    }
    assert machine.memory_left(system(tmp_path, files)) == GiB // 5
    stat = f"anon 1\ntotal_inactive_file 7\ninactive_file {2 * GiB}\n"
    assert machine.memory_left(system(tmp_path, {f"{group}.stat": stat})) == GiB // 5 + 2 * GiB
    assert machine.memory_left(system(tmp_path, {f"{group}.current": f"{11 * GiB}\n"})) == 0
    assert machine.memory_left(system(tmp_path, {f"{group}.current": "nonsense"})) == 8 * GiB
    assert machine.memory_limit(tmp_path) == 8 * GiB, "the limit is the same whatever is in use"


def test_least_is_left_by_the_fullest_cgroup_on_the_way_up(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": f"{10 * GiB}\n",
        "sys/fs/cgroup/a/memory.current": f"{9 * GiB}\n",
        "sys/fs/cgroup/a/b/memory.max": f"{8 * GiB}\n",
        "sys/fs/cgroup/a/b/memory.current": f"{2 * GiB}\n",
    }
    root = system(tmp_path, files)
    assert (machine.memory_limit(root), machine.memory_left(root)) == (8 * GiB, GiB)
    system(tmp_path, {"sys/fs/cgroup/a/memory.max": "max\n"})
    assert machine.memory_left(root) == 6 * GiB


def test_what_is_left_in_cgroup_v1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "2900000\n",
        "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 400000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "9000000\n",
    }
    assert machine.memory_left(system(tmp_path, files)) == 500_000


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"},
        {"proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/memory.max": "12\n"},
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        },
    ],
)
def test_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    root = system(tmp_path, files)
    assert machine.memory_limit(root) is None
    assert machine.memory_left(root) is None
    assert machine.usable_memory(root) == machine.physical_memory() > 2**28


def test_a_quota_takes_cores_away_but_never_all(tmp_path: Path) -> None:
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    root = system(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert machine.usable_cores(root) == 1
    quota.write_text("max 100000\n")
    assert machine.usable_cores(root) == machine.usable_cores() >= 1


def test_processor(tmp_path: Path) -> None:
    text = "processor: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx2 avx512f\n"
    root = system(tmp_path, {"proc/cpuinfo": text})
    assert machine.cpu_model(root) == "Some CPU @ 2 GHz"
    assert machine.cpu_flags(root) == {"fpu", "avx2", "avx512f"}
    assert machine.cpu_flags(tmp_path / "nowhere") == frozenset()
    assert machine.cpu_model(tmp_path / "nowhere")


def test_default_flops_follow_the_instruction_set() -> None:
    plain, wide = (
        machine.default_flops(4, frozenset()),
        machine.default_flops(4, frozenset({"avx512f", "avx2"})),
    )
    assert wide["fp32"] == 4 * 50e9 > plain["fp32"]
    assert wide["bf16"] < wide["fp32"]  # emulated
    assert machine.default_flops(1, frozenset({"avx512f", "amx_bf16"}))["bf16"] == 400e9


def calibration(**changes: object) -> machine.Calibration:
    values: dict[str, object] = {
        "cpu_model": machine.cpu_model(),
        "cores": machine.usable_cores(),
        "flops": {"fp32": 3e11, "bf16": 9e11},
        "memory_bandwidth": 5e10,
        "link_bandwidth": 7e8,
    }
    return machine.Calibration(**(values | changes))  # type: ignore[arg-type]


def test_a_calibration_of_this_machine_is_used() -> None:
    assert machine.read_calibration() is None
    before = machine.cpu_profile(2)
    path = machine.write_calibration(calibration())
    assert path == machine.calibration_file() and [path] == list(path.parent.iterdir())
    assert machine.read_calibration() == calibration()
    after = machine.cpu_profile(2)
    assert after.flops == {"fp32": 1.5e11, "bf16": 4.5e11}
    assert (after.memory_bandwidth, after.link_bandwidth) == (2.5e10, 7e8)
    assert "measured here" in after.source["flops"] and "measured here" not in before.source["flops"]
    assert after.memory_bytes == before.memory_bytes


def test_a_calibration_without_link_keeps_the_default_link() -> None:
    default = machine.cpu_profile(1).link_bandwidth
    machine.write_calibration(calibration(link_bandwidth=None))
    profile = machine.cpu_profile(1)
    assert profile.link_bandwidth == default and "measured here" not in profile.source["link_bandwidth"]


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_model": "another"},
        {"cores": 10_000},
        {"flops": {"fp32": 0.0}},
        {"flops": {"bf16": 1e12}},
        {"flops": {"fp32": float("nan")}},
        {"memory_bandwidth": float("inf")},
    ],
)
def test_a_calibration_of_another_machine_is_ignored(changes: dict[str, object]) -> None:
    machine.write_calibration(calibration(**changes))
    assert machine.read_calibration() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', '{"version": 99}', "\xff"])
def test_a_damaged_calibration_is_ignored(text: str) -> None:
    path = machine.calibration_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    assert machine.read_calibration() is None
    assert machine.cpu_profile(1).flops["fp32"] > 0


def test_a_calibration_with_wrong_types_is_ignored() -> None:
    path = machine.write_calibration(calibration())
    stored = json.loads(path.read_text())
    for key, value in (("flops", 3), ("flops", {"fp32": "x"}), ("memory_bandwidth", None), ("cores", "many")):
        path.write_text(json.dumps(stored | {key: value}))
        assert machine.read_calibration() is None, key


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("processes",), 0),
        (("slower",), -5.0),
        (("plain",), {}),
        (("plain", NEW), []),
        (("plain", NEW), [[1e3, 0.0], [1e6, 1e-4]]),
        (("plain", NEW), [[1e6, 1e-4], [1e3, 1e-6]]),
        (("host",), {"forward": math.nan}),
        (("products", "fp32", "seconds"), [1e-6] * 3),
        (("products", "fp32", "seconds"), [-1e-6] * 8),
        (("products", "fp32", "axes"), [[64, 16], [16, 64], [16, 64]]),
        (("products", "fp32"), {"axes": [[16], [16]], "seconds": [1e-6]}),
    ],
)
def test_damaged_speeds_are_ignored(keys: tuple[str, ...], value: object) -> None:
    path = machine.write_calibration(calibration(speeds=(speeds(1, 1),)))
    stored = json.loads(path.read_text())
    inner = stored["speeds"][0]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(stored))
    assert machine.read_calibration() is None


def test_processes_share_the_machine() -> None:
    one, four = machine.cpu_profile(1), machine.cpu_profile(4)
    shared = ("memory_bandwidth", "network_bandwidth", "host_bandwidth")
    whole = one.memory_bytes + machine._INTERPRETER
    assert whole // 4 == four.memory_bytes + machine._INTERPRETER
    assert all(getattr(one, name) == pytest.approx(4 * getattr(four, name)) for name in shared)
    assert one.flops["fp32"] == pytest.approx(4 * four.flops["fp32"])
    assert isinstance(one, DeviceProfile) and one.name == "cpu" and one.kind == "cpu"


def speeds(processes: int, threads: int) -> MeasuredSpeeds:
    curve = ((1e3, 1e-6), (1e6, 1e-4))
    grid = Grid(((16, 64), (16, 64), (16, 64)), (1e-6,) * 8)
    return MeasuredSpeeds(processes, threads, {"fp32": grid}, {}, {NEW: curve, IN_PLACE: curve})


def test_measured_speeds_come_back_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    every = (speeds(1, 1), speeds(2, 1))
    machine.write_calibration(calibration(speeds=every, day="2026-11-23", disk_bandwidth=3e8))
    profile = machine.cpu_profile(2)
    assert profile.measured == every[1] and profile.measured_on == "2026-11-23"
    assert profile.disk_bandwidth == 1.5e8 and "measured here" in profile.source["disk_bandwidth"]
    assert machine.cpu_profile(1).measured == every[0]


def test_speeds_of_as_many_threads_are_preferred() -> None:
    found = calibration(speeds=(speeds(1, 8), speeds(2, 4), speeds(4, 2)), cores=8)
    near = found.speeds_of(1, 2)
    assert near is not None and (near.processes, near.threads, near.slower) == (1, 2, 1.0)
    most = found.speeds_of(16, 1)
    assert most is not None and (most.processes, most.slower) == (16, 4.0)
    assert calibration().speeds_of(1, 1) is None


def test_a_calibration_with_another_torch_is_ignored() -> None:
    machine.write_calibration(calibration(torch="1.0.0"))
    assert machine.read_calibration() is None
    machine.write_calibration(calibration(torch=machine.torch_version()))
    assert machine.read_calibration() is not None
