"""What a terminal shows while a command works, and what a shell completes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import run
from shardwise.cli.spinner import Working, working
from tests.report.conftest import example_plan, write_run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_as_stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called by a test: pytest replaces the stream between a fixture and its test."""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_the_line_is_gone_before_a_sentence_and_comes_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_as_stderr(monkeypatch)
    seen: list[bool] = []
    with working("reading") as progress:
        shown = progress.stopping(lambda sentence: seen.append(running(progress)))
        assert running(progress)
        shown("a sentence")
        assert not running(progress)
        progress("planning")
        assert running(progress)
    assert seen == [False] and not running(progress)
    assert "reading" in terminal.getvalue() and "planning" in terminal.getvalue()


def running(progress: Working) -> bool:
    return progress._status is not None


def test_a_command_says_what_it_does_in_a_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = terminal_as_stderr(monkeypatch)
    monkeypatch.setattr("shardwise.report.page_parts.svg", lambda figure, name: "<svg></svg>")
    monkeypatch.setattr("shardwise.report.run.png", lambda figure: b"")
    folder = write_run(tmp_path / "run", example_plan())
    assert run(["report", str(folder)]) == 0
    assert "drawing the page" in terminal.getvalue()
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    assert run(["report", str(folder)]) == 0 and pipe.getvalue() == ""


@pytest.mark.parametrize(
    ("shell", "asked", "expected"),
    [
        ("bash", {"COMP_WORDS": "shardwise tr", "COMP_CWORD": "1"}, "train"),
        ("bash", {"COMP_WORDS": "shardwise plan --sna", "COMP_CWORD": "2"}, "--snapshot"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "shardwise wat"}, '"watch"'),
    ],
)
def test_a_shell_completes_verbs_and_options(shell: str, asked: dict[str, str], expected: str) -> None:
    given = {**os.environ, **asked, "_SHARDWISE_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(
        [sys.executable, "-m", "shardwise"], env=given, capture_output=True, text=True, check=True
    )
    assert expected in done.stdout and done.stderr == ""


def test_the_script_of_a_shell_is_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "--show-completion", "bash"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "complete -o default -F _shardwise_completion shardwise" in done.stdout
