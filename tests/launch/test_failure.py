"""The line of a rank that an exception of the user's model ends, and its way to the launcher."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise import worker
from shardwise.core import heartbeat
from shardwise.core.errors import Preempted, ResourceError
from shardwise.core.heartbeat import ENDED, RUNNING, Beat
from shardwise.launch.failure import rank_failure
from shardwise.launch.placement import LAUNCHER
from shardwise.launch.ranks import BROKEN_CONNECTION


def caught(folder: Path, code: str) -> Exception:
    """What ``code`` of a user's module raises, called by Shardwise."""
    path = folder / "model.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("users_model", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(Exception) as raised:
        worker.attempt(module.loss)
    return raised.value


def test_type_first_line_and_whose_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER, "1")
    error = caught(tmp_path, "def loss():\n    raise ValueError('first line\\nsecond line')\n")
    assert rank_failure(error, 1).line() == (
        "error: rank 1 failed (your model, loss (model.py:2)): ValueError: first line; the trace is in rank-1.log"
    )


def test_an_error_in_a_library_that_the_model_calls_is_the_models(tmp_path: Path) -> None:
    error = caught(tmp_path, "import json\ndef loss():\n    json.loads('{')\n")
    line = rank_failure(error, 0).line()
    assert "your model, loss (model.py:3)" in line and "JSONDecodeError: Expecting property name" in line


def test_an_error_of_shardwise_is_not_the_users() -> None:
    with pytest.raises(AttributeError) as raised:
        heartbeat.own.tell(None)  # type: ignore[arg-type]
    assert "your model" not in rank_failure(raised.value, 0).line()


def test_a_lost_connection_names_the_address_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER, raising=False)
    text = "[/src/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.2]:50880."
    error = RuntimeError(f"{text} This is typically caused by a remote worker crashing. Check the logs.")
    line = rank_failure(error, 0).line()
    assert line == (
        f"error: rank 0 on {socket.gethostname()} failed: RuntimeError: Connection closed by peer [10.77.0.2]:50880"
        " (gloo/transport/tcp/pair.cc:553); another rank was lost first, see its output; the same command resumes"
    )
    assert BROKEN_CONNECTION.search(line)


def test_the_worker_of_a_folder_that_looks_like_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Path] = []
    monkeypatch.setattr(worker, "run_rank", lambda verb, folder, exact: given.append(folder))
    monkeypatch.setattr(heartbeat, "own", heartbeat.own)
    assert worker.main(["train", "--", "-x"]) == 0
    assert given == [Path("-x")]


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> heartbeat.Heartbeat:
    """The heartbeat of rank 1 as its launcher sees it, after the rank has attached."""
    monkeypatch.setattr(heartbeat, "own", heartbeat.own)
    with heartbeat.shared(2) as (descriptor, (_, beat)):
        monkeypatch.setenv(heartbeat.HEARTBEAT_VARIABLE, str(os.dup(descriptor)))
        monkeypatch.setenv("RANK", "1")
        heartbeat.attach()
    assert heartbeat.HEARTBEAT_VARIABLE not in os.environ
    return beat


def test_what_a_rank_tells_its_launcher(launchers: heartbeat.Heartbeat) -> None:
    own = heartbeat.own
    assert launchers.read() == Beat(RUNNING)
    own.at_step(3)
    own.watch(2.5)
    heartbeat.mark()
    own.tell("error: é" + "é" * 2000)
    own.end()
    beat = launchers.read()
    assert (beat.state, beat.marks, beat.step, beat.limit) == (ENDED, 3, 3, 2.5)
    assert beat.line.startswith("error: éé") and len(beat.line) > 300


def fail() -> None:
    raise ValueError("of the user's")


def wrap() -> None:
    try:
        fail()
    except ValueError as error:
        raise ResourceError("cannot go on") from error


def stop() -> None:
    raise Preempted("stopped on request", why="saved")


def test_without_a_log_only_an_error_with_a_cause_has_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for launcher, traced in (("", {wrap}), ("1", {wrap, stop})):
        monkeypatch.delenv(LAUNCHER, raising=False)
        if launcher:
            monkeypatch.setenv(LAUNCHER, launcher)
        for action in (wrap, stop):
            worker.attempt(action)
            told = capsys.readouterr().err
            assert ("Traceback" in told) == (action in traced), told
            assert told.splitlines()[-1].startswith("error: ")
    monkeypatch.delenv(LAUNCHER)
    with pytest.raises(ValueError, match="the user's") as raised:
        worker.attempt(fail)
    assert rank_failure(raised.value, 1).line().endswith("; the trace is above")


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_reaches_the_launcher_when_the_disk_of_the_logs_is_full(
    launchers: heartbeat.Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write() -> None:
        raise ResourceError("cannot write", where="/run", fix="free some space")

    monkeypatch.setattr(sys, "stderr", Full())
    assert worker.attempt(write) == 7
    assert launchers.read().line == "error: cannot write (/run): free some space"
