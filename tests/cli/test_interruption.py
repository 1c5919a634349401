"""Ctrl-C or SIGTERM at any moment of a command: one line, exit code 130 or 143."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import data
from shardwise.cli.main import run

INTERRUPTED_IMPORT = """
import os, signal, sys

module, number = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Interrupting:
    def find_spec(self, name, *others):
        if name == module:
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Interrupting())
from shardwise.__main__ import main

sys.argv[1:] = sys.argv[3:]
main()
"""


@pytest.mark.parametrize("module", ["shardwise.cli.main", "typer", "pydantic", "ruamel.yaml"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_modules_are_imported(module: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, str(int(number)), "plan", "recipe.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "error: interrupted\n")


TERMINATED_PLANNER = """
import os, signal, sys
from shardwise.jobs import planning

planning.make_plan = lambda *given, **named: os.kill(os.getpid(), signal.SIGTERM)
from shardwise.__main__ import main

main()
"""


def test_a_termination_while_planning_unwinds_the_stack(tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    text = "model: {preset: tiny}\nsteps: 1\nbatch_size: 1\ncluster: {device: cpu, devices_per_node: 1}\n"
    recipe.write_text(text, encoding="utf-8")
    command = [sys.executable, "-c", TERMINATED_PLANNER, "train", str(recipe), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "error: interrupted\n")
    assert not out.exists(), "the folder was made for the run"


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
