"""A closed output pipe or a full disk under the output ends no command; incomplete output is exit code 7."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
model: {preset: tiny}
data: {source: corpus.txt, sequence_length: 32, held_out: 0}
steps: 1
batch_size: 1
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-m", "shardwise", "--help"], 0),  # printed by typer
        (["-m", "shardwise", "data", "recipe.yaml"], 0),  # by rich
        (["-u", "-m", "shardwise", "data", "recipe.yaml"], 0),
        (["-m", "shardwise", "plan", "absent.yaml"], 2),  # to standard error
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_closed_pipes(words: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("one two three four five " * 20, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "SHARDWISE_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        assert process.wait(60) == code


@pytest.mark.parametrize(("words", "code"), [(["--help"], 7), (["plan", "absent.yaml"], 2)])
def test_a_full_disk_under_the_output(words: list[str], code: int, tmp_path: Path) -> None:
    """The kernel's device that is always full stands for the file that the output goes to."""
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "shardwise", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert ("the output is incomplete" in done.stderr) == (code == 7)


def test_text_ends_when_nobody_reads_it() -> None:
    code = (
        "from shardwise.cli.terminal_output import keep_writing, while_read\n"
        "import itertools, sys\n"
        "keep_writing()\n"
        "for number in while_read(itertools.count()):\n"
        "    print(number, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.wait(60) == 0


def test_what_is_read_is_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "plan", "absént.yaml"],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
