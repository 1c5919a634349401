"""Facts of a system that answers with errors."""

from __future__ import annotations

import os
import shutil
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.hardware import other_work
from shardwise.plugins.doctor import inspection
from shardwise.plugins.doctor.checks import examine


def raising(error: Exception) -> Any:
    def raises(*_: object) -> None:
        raise error

    return raises


def test_damaged_metadata_of_a_package_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", raising(KeyError("Version")))
    assert inspection._installed("torch") == "of an unknown version"
    monkeypatch.setattr(metadata, "version", raising(metadata.PackageNotFoundError("torch")))
    assert inspection._installed("torch") is None


def test_a_system_without_a_load_average_has_a_load_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", raising(OSError()))
    assert inspection._load() == 0.0


def test_a_hostname_that_cannot_be_encoded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", raising(UnicodeError("label too long")))
    assert inspection.loopback_problem("x" * 80) == "label too long"


def test_memory_and_disks_that_cannot_be_read_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = PermissionError(13, "Permission denied", "/proc/meminfo")
    monkeypatch.setattr(psutil, "virtual_memory", raising(denied))
    monkeypatch.setattr(shutil, "disk_usage", raising(OSError(5, "Input/output error", "/run")))
    diagnosis = examine(tmp_path, measure=False)
    told = {check.name: (check.verdict, check.found, check.advice) for check in diagnosis.checks}
    verdict, found, advice = told["memory"]
    assert verdict == "warn" and found.startswith("unknown available of ")
    assert "/proc/meminfo" in advice and "cannot be read" in advice
    for name in ("disk", "cache disk"):
        verdict, found, advice = told[name]
        assert verdict == "warn" and "unknown" in found and "Input/output error" in advice
    assert diagnosis.data()["facts"]["memory"]["available"] is None


def test_a_system_that_does_not_tell_its_load_has_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_times", raising(FileNotFoundError(2, "No such file", "/proc/stat")))
    assert other_work.OtherWork().cores() == 0
