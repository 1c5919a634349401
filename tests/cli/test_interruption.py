"""Ctrl-C at any moment of a command: one line, exit code 130."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.cli import data
from shardwise.cli.main import run

INTERRUPTED_IMPORT = """
import os, signal, sys

module = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Interrupting:
    def find_spec(self, name, *others):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from shardwise.__main__ import main

sys.argv[1:] = ["plan", "recipe.yaml"]
main()
"""


@pytest.mark.parametrize("module", ["shardwise.cli.main", "typer", "pydantic", "ruamel.yaml"])
def test_while_modules_are_imported(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_in_a_module_that_makes_another_error_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C++ extensions do so while they are initialised."""

    def cut_short(*arguments: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("numpy.core.multiarray failed to import") from None

    monkeypatch.setattr(data, "read_request", cut_short)
    assert run(["data", "recipe.yaml"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
