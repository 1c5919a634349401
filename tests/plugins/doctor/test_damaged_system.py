"""Facts of a system that answers with errors."""

from __future__ import annotations

import os
import socket
from importlib import metadata
from typing import Any

import pytest

from shardwise.plugins.doctor import inspection


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
