"""A run that fails on a terminal: one line below the progress bar, and the cursor is shown again."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.harness.plans import NOTHING_TO_SEARCH

RECIPE = f"""
model: {{preset: tiny}}
data: {{source: corpus.txt, sequence_length: 32, held_out: 0}}
steps: 4
batch_size: 1
cluster: {{device: cpu, devices_per_node: 1}}
strategy: {NOTHING_TO_SEARCH | {"micro_batch_size": 1}}
callbacks: ["failing:Failing"]
"""

CALLBACK = """
class Failing:
    def on_step(self, *_, **__):
        raise ValueError("no such luck")
"""


def seen_on_a_terminal(arguments: list[str], folder: Path) -> tuple[int, str]:
    """The exit code of a command, and all that its terminal got."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "SHARDWISE_CACHE": str(folder / "cache")}
    with subprocess.Popen(
        [sys.executable, "-m", "shardwise", *arguments],
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        blocks = []
        try:
            while block := os.read(ours, 1 << 16):
                blocks.append(block)
        except OSError:  # Linux's end of a terminal whose processes have all ended
            pass
        os.close(ours)
    return process.returncode, b"".join(blocks).decode()


def test_a_failed_run_is_one_line_below_its_bar(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("one two three four five " * 50, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "failing.py").write_text(CALLBACK, encoding="utf-8")
    code, shown = seen_on_a_terminal(["train", "recipe.yaml", "--out", "run"], tmp_path)
    assert code == 2, shown
    assert "Traceback" not in shown
    assert shown.count("no such luck") == 1
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is hidden"
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert "Traceback" in log and "no such luck" in log
