"""In a notebook: functions on ranks, a bar that follows a run, and plans and runs as HTML."""

from __future__ import annotations

import inspect
import os
import pickle
import pydoc
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardwise
from shardwise.core.errors import RankError
from shardwise.core.plan import Plan
from shardwise.jobs.live_bar import in_notebook, live_bar
from shardwise.report.record import read_run
from tests.report.conftest import example_plan, write_run


class Tags(HTMLParser):
    """The tags of HTML that is well-formed, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("br", "path", "use"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def test_a_plan_and_a_run_are_html(tmp_path: Path) -> None:
    plan = example_plan()
    said = Tags(plan._repr_html_()).text
    assert "69.45 GiB of 79.10 GiB: fits" in said and "1.65 s per step of 131.1K tokens, predicted" in said
    assert said.index("activations 43.12 GiB") < said.index("optimizer state 7.48 GiB")
    html = read_run(write_run(tmp_path / "<b>", plan))._repr_html_()
    said = Tags(html).text
    assert "<b>" in said and "<b></b>" not in html
    assert "peak of a device: 70.38 GiB measured, 66.86 GiB predicted" in said
    assert "held-out loss 1.5213" in said and 'aria-label="Loss of &lt;b>"' in html


def test_the_bar_follows_the_metrics_of_a_notebook_s_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ZMQInteractiveShell:
        pass

    shown: list[str] = []
    handle = SimpleNamespace(update=lambda html: shown.append(html.data))

    def display(html: Any, display_id: bool) -> Any:
        shown.append(html.data)
        return handle

    module = SimpleNamespace(get_ipython=ZMQInteractiveShell)
    html = SimpleNamespace(HTML=lambda data: SimpleNamespace(data=data), display=display)
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", html)
    monkeypatch.setattr("shardwise.jobs.live_bar.METRICS_POLL_SECONDS", 0.01)
    folder = tmp_path / "run"
    with live_bar(folder, 30):
        time.sleep(0.05)
        assert shown == []
        write_run(folder, example_plan(), steps=3, finished=False)
    assert 'value="3" max="30"' in shown[-1] and "step 3 of 30 · loss " in shown[-1]
    with live_bar(folder, 30, shown=False):
        pass
    assert len(shown) <= 3


def test_a_script_has_no_bar_unless_it_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", example_plan(), steps=4, finished=False)
    with live_bar(folder, 4):
        pass
    assert capsys.readouterr().out == ""
    with live_bar(folder, 4, shown=True):
        pass
    assert capsys.readouterr().out.startswith("step 4/4  loss ")


def test_a_module_that_is_a_function_has_its_signature_and_its_help() -> None:
    import shardwise.trainer.loop

    assert list(inspect.signature(shardwise.train).parameters)[:3] == ["recipe", "plan", "out"]
    said = pydoc.plain(pydoc.render_doc(shardwise.train))
    assert "Train exactly" in said and "exact_memory: measure memory over the whole run" in said


def test_functions_of_a_cell_may_name_the_package() -> None:
    import cloudpickle

    import shardwise.planner.search

    for module in (shardwise, shardwise.plan):
        assert pickle.loads(cloudpickle.dumps(module)) is module  # noqa: S301 - made in this line


CELL = """
import os, shardwise
from shardwise.core.errors import RankError

def cell(folder, fails):
    def run():
        rank = os.environ["RANK"]
        if fails and rank == "1":
            raise ValueError("in the cell")
        assert shardwise.__version__
        open(f"{folder}/{rank}", "w").close()
        print("rank", rank)
    return run

if __name__ == "__main__":
    shardwise.spawn(cell(os.environ["WHERE"], False), ranks=2, logs=os.environ["WHERE"] + "/logs")
    try:
        shardwise.spawn(cell(os.environ["WHERE"], True), ranks=2)
    except RankError as error:
        print(error.line())
"""


@pytest.mark.long
def test_a_function_runs_on_ranks(tmp_path: Path) -> None:
    script = tmp_path / "cell.py"
    script.write_text(CELL, encoding="utf-8")
    given = {**os.environ, "WHERE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], env=given, capture_output=True, text=True, cwd=Path.cwd(), check=True
    )
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}
    first, *_, last = done.stdout.splitlines()
    assert first == "rank 0" and "rank 1 failed" in last and "ValueError: in the cell" in last
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "rank 1\n"


def test_a_plan_of_another_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a rank reaches the cell."""

    def failed(*arguments: Any, **options: Any) -> tuple[int, str]:
        return 2, "error: the plan is for 4 processes"

    monkeypatch.setattr("shardwise.api.run_ranks", failed)
    with pytest.raises(RankError, match="the plan is for 4 processes"):
        shardwise.spawn(lambda: None, ranks=2)
    assert isinstance(example_plan(), Plan)
