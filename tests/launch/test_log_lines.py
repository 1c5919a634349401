"""A log gets lines, whatever a terminal shows."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.core.run_files import StepRecord
from shardwise.launch.launcher import _pass_through
from shardwise.launch.log_lines import FRAME_SECONDS, HIDE_CURSOR, SHOW_CURSOR, CursorState, LogLines
from shardwise.trainer.progress import Progressing


def test_plain_output_passes_as_it_comes() -> None:
    lines = LogLines()
    blocks = [b"a\n", b"no end", b" yet\n\n", b"b"]
    assert [lines.take(block) for block in blocks] == blocks
    assert lines.rest() == b""


def test_a_redrawn_line_becomes_a_line_in_a_while() -> None:
    now = [0.0]
    lines, log = LogLines(lambda: now[0]), b""
    for second in range(20):
        now[0] = float(second)
        log += lines.take(b"\r\x1b[2K\x1b[35mstep %d\x1b[0m" % second)
    log += lines.take(b"\r\x1b[2Ksaid aloud\n\x1b[1mstep 20\x1b[0m")
    log += lines.rest()
    shown = log.decode().splitlines()
    assert "\x1b" not in log.decode()
    assert shown[-2:] == ["said aloud", "step 20"]
    assert len(shown) == 2 + round(20 / FRAME_SECONDS)


def test_a_characters_bytes_may_come_apart() -> None:
    lines = LogLines()
    raw = "\x1b[1m━━ é\x1b[0m\n".encode()
    assert b"".join(lines.take(raw[i : i + 1]) for i in range(len(raw))) == "━━ é\n".encode()


def test_the_bar_of_a_thousand_steps_is_a_few_lines() -> None:
    """On a terminal, the log of rank 0 grew by 70 KB a minute without a newline."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    shown = Progressing(1000, 0, console)
    for step in range(1, 1001):
        shown.show(StepRecord(step, 1.0, 1.0, 1e-3, 10, 0.1, 100.0))
        shown._bar.refresh()  # type: ignore[union-attr]
    shown.close()
    lines = LogLines()
    log = lines.take(file.getvalue().encode()) + lines.rest()
    assert len(file.getvalue()) > 50_000 > 1_000 > len(log)
    assert "step 1000/1000" in log.decode().splitlines()[-1] and b"\x1b" not in log


@pytest.mark.parametrize(
    ("written", "hidden"),
    [(HIDE_CURSOR + b"bar", True), (HIDE_CURSOR + b"bar" + SHOW_CURSOR, False), (b"plain", False)],
)
def test_a_killed_rank_leaves_the_terminal_its_cursor(
    written: bytes, hidden: bool, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The pipe of a rank ends with it, whatever it had still to say."""
    reading, writing = os.pipe()
    os.write(writing, written)
    os.close(writing)
    _pass_through(reading, tmp_path / "rank-0.log")
    assert capfdbinary.readouterr().out == written + (SHOW_CURSOR + b"\n" if hidden else b"")
    cursor = CursorState()
    for byte in written:
        cursor.take(bytes([byte]))
    assert cursor.hidden == hidden
