"""A run's folder from another person: sampling, exporting, reporting and merging run no code of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.core.errors import RecipeError, ShardwiseError
from shardwise.exporter.export_run import export_run
from shardwise.plugins.merge.merging import merge_adapter
from shardwise.plugins.serve.serving import load_model
from shardwise.report.run import write_report

RECIPE = "model: {factory: 'planted:make'}\nsteps: 1\nbatch_size: 1\n"
PLANTED = "open('ran', 'w').close()\ndef make(): pass\n"


def test_a_factory_is_refused_before_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    for attempt in (
        lambda: load_model(Path()),
        lambda: export_run(Path(), Path("out")),
        lambda: merge_adapter(".", Path(), Path("out")),
        lambda: write_report(Path()),
    ):
        with pytest.raises(ShardwiseError):
            attempt()
    with pytest.raises(RecipeError, match="a factory's model is not built from the folder of its run"):
        load_model(Path())
    assert "planted" not in sys.modules and not (tmp_path / "ran").exists()


@pytest.mark.cli
def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    for name in ("typer", "xxhash", "numpy", "filelock", "jinja2"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    here = str(Path(__file__).parents[3])
    command = [sys.executable, "-m", "shardwise", "report", "."]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and "not the folder of a run" in done.stderr, done.stderr
    assert not (tmp_path / "ran").exists()
