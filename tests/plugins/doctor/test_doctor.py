"""The doctor: verdicts on machines that we do not have, and on this one."""

from __future__ import annotations

import functools
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from shardwise.cli.main import run
from shardwise.core.units import GiB, MiB
from shardwise.hardware import this_machine as machine
from shardwise.hardware.profiles import PROFILES
from shardwise.plugins.doctor import checks, inspection, speed
from shardwise.plugins.doctor.checks import DeviceSpeed, Diagnosis, Speeds, all_checks, examine, render
from shardwise.plugins.doctor.inspection import (
    Device,
    Disk,
    Facts,
    HostAllocator,
    MachineMemory,
    Measuring,
    Network,
    Processor,
    Torch,
)
from shardwise.runtime.torch_private import TorchDispatchMode

H100 = Device(
    0, "NVIDIA H100 80GB HBM3", PROFILES["H100-80GB"].memory_bytes, 84_000_000_000, "9.0", "H100-80GB"
)
HEALTHY = Facts(
    python="3.12.1",
    system="Linux 6.1 x86_64",
    processor=Processor("Some CPU", 64, ("avx2",)),
    memory=MachineMemory(512 * GiB, 400 * GiB, None, 512 * GiB, 0, 0, 64 * GiB),
    disk=Disk("/run", 900 * GiB, "/cache", 900 * GiB),
    torch=Torch("2.13.0+cu130", "", "13.0", None, 32, True, True, True, (H100,)),
    network=Network("", ""),
    measuring=Measuring(True, "madvise"),
    allocator=HostAllocator("glibc", "2.39", ""),
    driver=True,
    calibrated=True,
    packages=dict.fromkeys(inspection.OPTIONAL_PACKAGES, "1.0"),
)
FULL_SPEED = DeviceSpeed("gpu 0", {"bf16": 700e12, "fp32": 50e12}, (), 3.0e12, 50e9, 50e9)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def verdicts(facts: Facts, speeds: Speeds = Speeds()) -> dict[str, str]:  # noqa: B008 (immutable)
    return {check.name: check.verdict for check in all_checks(facts, speeds)}


def test_a_healthy_machine() -> None:
    found = verdicts(HEALTHY, Speeds((FULL_SPEED,), (1e9, 1e-4)))
    assert set(found.values()) == {"good"}
    assert {"python", "torch", "memory", "disk", "gloo", "loopback", "gpu 0", "gpu 0 speed"} <= set(found)
    assert all(not check.advice for check in all_checks(HEALTHY, Speeds((FULL_SPEED,))))


GPU_TORCH = HEALTHY.torch
SICK: list[tuple[str, str, Mapping[str, object]]] = [
    ("python", "bad", {"python": "3.10.9"}),
    ("torch", "bad", {"torch": Torch(None, "ModuleNotFoundError: No module named 'torch'")}),
    ("torch", "bad", {"torch": replace(GPU_TORCH, version="2.10.1")}),
    ("torch", "bad", {"torch": replace(GPU_TORCH, version="2.16.0a0+git")}),
    ("torch", "bad", {"torch": replace(GPU_TORCH, version="unknown")}),
    ("gloo", "bad", {"torch": replace(GPU_TORCH, gloo=False)}),
    ("gloo", "bad", {"torch": replace(GPU_TORCH, distributed=False)}),
    ("nccl", "bad", {"torch": replace(GPU_TORCH, nccl=False, devices=(H100, replace(H100, index=1)))}),
    ("loopback", "bad", {"network": Network("timed out", "")}),
    ("host name", "warn", {"network": Network("", "Name or service not known")}),
    ("memory", "bad", {"memory": replace(HEALTHY.memory, available=GiB // 2)}),
    ("swap", "warn", {"memory": replace(HEALTHY.memory, swap_total=64 * GiB, swap_used=32 * GiB)}),
    ("shared memory", "warn", {"memory": replace(HEALTHY.memory, shared=64 * MiB)}),
    ("disk", "bad", {"disk": replace(HEALTHY.disk, free=MiB)}),
    ("cache disk", "bad", {"disk": replace(HEALTHY.disk, cache_free=MiB)}),
    ("memory measurement", "warn", {"measuring": Measuring(False, "madvise")}),
    ("memory measurement", "warn", {"measuring": Measuring(True, "always")}),
    ("host allocator", "note", {"measuring": Measuring(True, "never")}),
    ("host allocator", "note", {"allocator": HostAllocator("glibc", "2.31", "")}),
    ("host allocator", "note", {"allocator": HostAllocator("", "", "")}),
    ("host allocator", "note", {"allocator": HostAllocator("glibc", "2.39", "libjemalloc.so.2")}),
    ("gpu", "warn", {"torch": replace(GPU_TORCH, devices=())}),
    ("gpu 0", "warn", {"torch": replace(GPU_TORCH, devices=(replace(H100, free_bytes=GiB),))}),
    ("gpu 0", "note", {"torch": replace(GPU_TORCH, devices=(replace(H100, profile=None),))}),
    ("gpu 0", "note", {"torch": replace(GPU_TORCH, devices=(replace(H100, profile="/c/card.toml"),))}),
    ("packages", "note", {"packages": {"transformers": None, "datasets": "3"}}),
    ("cpu profile", "note", {"calibrated": False}),
    ("load", "warn", {"load": 5.0}),
]


@pytest.mark.parametrize(("name", "verdict", "changes"), SICK)
def test_each_ailment_is_found_and_only_it(name: str, verdict: str, changes: Mapping[str, object]) -> None:
    facts = replace(HEALTHY, **changes)  # type: ignore[arg-type]
    found = verdicts(facts)
    assert found[name] == verdict
    assert [check for check, said in found.items() if said != "good"] == [name]
    diagnosis = Diagnosis(facts, Speeds(), tuple(all_checks(facts, Speeds())))
    assert diagnosis.healthy == (verdict != "bad")
    assert diagnosis.exit_code == (7 if verdict == "bad" else 0)
    advice = next(check.advice for check in diagnosis.checks if check.name == name)
    assert advice
    error = diagnosis.error()
    if verdict == "bad":
        assert error is not None and name in error.line() and "\n" not in error.line()
    else:
        assert error is None


def test_the_order_of_attention_backends_is_shown() -> None:
    facts = replace(HEALTHY, torch=replace(GPU_TORCH, devices=(H100,)))
    shown = next(check.found for check in all_checks(facts, Speeds(())) if check.name == "gpu 0")
    assert shown.endswith("attention cudnn, flash, efficient (not measured)")


def test_speeds_are_judged() -> None:
    slow = replace(FULL_SPEED, flops={"bf16": 300e12})
    narrow = replace(FULL_SPEED, memory_bandwidth=1e12)
    wrong = replace(FULL_SPEED, wrong=("bf16",))
    assert verdicts(HEALTHY, Speeds((slow,)))["gpu 0 speed"] == "warn"
    assert verdicts(HEALTHY, Speeds((narrow,)))["gpu 0 speed"] == "warn"
    assert verdicts(HEALTHY, Speeds((wrong,)))["gpu 0 speed"] == "bad"
    assert verdicts(HEALTHY, Speeds((), None, "connection refused"))["gloo"] == "bad"
    unknown = replace(HEALTHY, torch=replace(GPU_TORCH, devices=(replace(H100, profile=None),)))
    assert verdicts(unknown, Speeds((slow,)))["gpu 0 speed"] == "good"  # nothing was promised


@pytest.mark.parametrize("profile", ["H100-80GB", None])
def test_a_device_that_computes_nothing_is_bad(profile: str | None) -> None:
    """As with a build of torch that has no kernels for it; also where nothing is known that it should reach."""
    facts = replace(HEALTHY, torch=replace(GPU_TORCH, devices=(replace(H100, profile=profile),)))
    none = DeviceSpeed("gpu 0", memory_bandwidth=3e12, problem="no kernel image is available")
    found = {check.name: check for check in all_checks(facts, Speeds((none,)))}["gpu 0 speed"]
    assert (found.verdict, found.found) == ("bad", none.problem)
    assert "torch build" in found.advice
    assert verdicts(facts, Speeds((DeviceSpeed("gpu 0"),)))["gpu 0 speed"] == "bad"
    some = replace(FULL_SPEED, problem="no fp64")
    assert verdicts(facts, Speeds((some,)))["gpu 0 speed"] == "good"


def test_the_error_of_products_that_fail_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device, dtype: torch.dtype) -> speed.Product:
        raise RuntimeError("no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(speed, "matrix_product", fails)
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(speed, "host_bandwidths", lambda device: (1e10, 1e10))
    diagnosis = examine(tmp_path)
    cpu = diagnosis.speeds.devices[0]
    assert (cpu.device, dict(cpu.flops), cpu.problem) == ("cpu", {}, "no kernel image is available")
    assert {check.name: check.verdict for check in diagnosis.checks}["cpu speed"] == "bad"
    assert diagnosis.exit_code == 7
    assert json.loads(json.dumps(diagnosis.data()))["speeds"]["devices"][0]["problem"] == cpu.problem


def test_what_the_container_uses_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have plenty: the limit is shared by all that runs in the container."""
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(f"{8 * GiB}\n")
    (group / "memory.current").write_text(f"{8 * GiB - GiB // 5}\n")
    (group / "memory.stat").write_text("inactive_file 0\n")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=400 * GiB))
    memory = inspection._memory(tmp_path)
    assert (memory.available, memory.limit) == (GiB // 5, 8 * GiB)
    assert verdicts(replace(HEALTHY, memory=memory))["memory"] == "bad"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=MiB))
    assert inspection._memory(tmp_path).available == MiB, "the container may get less than its limit"


def test_the_limit_is_told() -> None:
    limited = replace(
        HEALTHY, memory=replace(HEALTHY.memory, limit=8 * GiB, usable=8 * GiB, available=7 * GiB)
    )
    check = next(check for check in all_checks(limited, Speeds()) if check.name == "memory")
    assert check.verdict == "good" and "cgroup limit 8.00 GiB" in check.found


def test_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(checks.__file__).parents[3] / "pyproject.toml").read_text())["project"]
    low, high = (".".join(map(str, version)) for version in checks.SUPPORTED_TORCH)
    assert f"torch>={low},<{high}" in project["dependencies"]
    assert project["requires-python"] == ">=" + ".".join(map(str, checks.SUPPORTED_PYTHON))


def test_this_machine_without_measuring(tmp_path: Path) -> None:
    diagnosis = examine(tmp_path / "not" / "yet", measure=False)
    facts = diagnosis.facts
    assert facts.torch.version == torch.__version__ and facts.torch.gloo
    assert facts.processor.cores == machine.usable_cores()
    assert 0 < facts.memory.available <= facts.memory.usable <= facts.memory.total
    assert facts.disk.free > 0 and facts.disk.cache_free > 0
    assert json.loads(json.dumps(diagnosis.data()))["healthy"] == diagnosis.healthy
    assert diagnosis.speeds.devices == ()


def test_rendering_shows_every_check() -> None:
    facts = replace(HEALTHY, disk=replace(HEALTHY.disk, free=MiB, folder="/a[bold]b"))
    diagnosis = Diagnosis(facts, Speeds((FULL_SPEED,)), tuple(all_checks(facts, Speeds((FULL_SPEED,)))))
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    render(diagnosis, console)
    text = console.export_text()
    assert all(check.name in text for check in diagnosis.checks)
    assert "/a[bold]b" in text and "bad" in text and "Some CPU, 64 cores" in text


def test_loopback_works_here_and_a_foreign_address_does_not() -> None:
    assert inspection.loopback_problem("127.0.0.1") == ""
    assert inspection.loopback_problem("192.0.2.1", timeout=0.2) != ""  # TEST-NET: not an address of ours


def test_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    assert inspection.huge_pages(path) == "madvise"
    assert inspection.huge_pages(tmp_path / "missing") is None


def test_a_preloaded_allocator_is_named() -> None:
    preloaded = {"LD_PRELOAD": "/usr/lib/libother.so:/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"}
    assert inspection.host_allocator(preloaded).preloaded == "libtcmalloc_minimal.so.4"
    assert inspection.host_allocator({}).preloaded == ""


def test_a_read_only_proc_is_told(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t  1000 kB\n")
    assert not inspection.can_lower_high_water_mark(tmp_path)  # writable, but the mark does not move
    assert not inspection.can_lower_high_water_mark(tmp_path / "missing")


@pytest.mark.parametrize("dtype", speed.DTYPES.values())
def test_matrix_product_is_timed_and_checked(dtype: torch.dtype) -> None:
    product = speed.matrix_product(torch.device("cpu"), dtype, size=128, budget=0.01)
    assert product.correct and product.flops > 1e6


def test_products_are_those_of_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward x @ W.T, backward g @ W and g.T @ x: the speed is that of the three together."""
    layer = torch.nn.Linear(8, 8, bias=False)
    wanted, found = set[tuple[bool, ...]](), set[tuple[bool, ...]]()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                wanted.add(tuple(operand.is_contiguous() for operand in args))
            return func(*args, **(kwargs or {}))

    with Seen():
        layer(torch.randn(8, 8, requires_grad=True)).square().sum().backward()

    def seconds(run: Any, device: torch.device, budget: float) -> float:
        found.add(tuple(operand.is_contiguous() for operand in run.args))
        run()
        return [0.1, 0.2, 0.6][len(found) - 1]

    monkeypatch.setattr(speed, "_best", seconds)
    assert speed.matrix_product(torch.device("cpu"), torch.float32, size=100).flops == pytest.approx(
        2e6 / 0.3
    )
    assert found == wanted and len(found) == 3


def test_a_wrong_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.mm

    def broken(left: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        right(left, other, out=out)
        out[3] += 0.5
        return out

    monkeypatch.setattr(torch, "mm", broken)
    assert not speed.matrix_product(torch.device("cpu"), torch.float32, size=128, budget=0.01).correct


def test_copy_bandwidth_counts_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_best", lambda run, device, budget: 0.5)
    assert speed.copy_bandwidth(torch.device("cpu"), size=4 * MiB) == 2 * 4 * MiB / 0.5


@pytest.mark.long
def test_two_processes_communicate() -> None:
    link = speed.link_speed(2)
    assert link.processes == 2 and link.bandwidth > 1e6 and 0 < link.latency < 1


@pytest.mark.long
def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    monkeypatch.setattr(speed, "loopback_interface", lambda: None)
    with pytest.raises(RuntimeError, match="none0"):
        speed.link_speed(2, timeout=20)


@pytest.mark.cli
def test_the_doctor_without_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine may be unfit; then the command names the fault."""
    monkeypatch.setattr(checks, "examine", functools.partial(checks.examine, measure=False))
    code = run(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"healthy", "checks", "facts", "speeds"}
    assert code == (0 if found["healthy"] else 7)
    code = run(["doctor"])
    out, err = capsys.readouterr()
    assert "torch" in out and code in (0, 7)
    assert err.count("error: ") == (code == 7)
