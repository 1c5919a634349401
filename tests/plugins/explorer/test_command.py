"""``shardwise explore`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli.main import run as command
from shardwise.hardware.profiles import PROFILES
from tests.harness.plans import NOTHING_TO_SEARCH

pytestmark = pytest.mark.cli
PINS = [
    f"strategy.{key}={str(value).lower()}"
    for key, value in (NOTHING_TO_SEARCH | {"precision": "bf16"}).items()
]


def test_a_page_is_written(recipe_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert (
        command(["explore", str(recipe_path), "batch_size=4", *PINS, "--seconds", "0", "--out", str(page)])
        == 0
    )
    devices = [name for name, profile in PROFILES.items() if profile.kind == "cuda"]
    told = f"explorer: {page} ({len(devices)} points; --seconds for more)\n"
    assert capfd.readouterr().out == told, "the first strategy on every card"
    assert "batch_size: 4" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--port", "1"], "--port needs --serve"),
        (["--serve", "--out", "x.html"], "--out and --serve exclude each other"),
        (["batch_size=0"], "batch_size"),
    ],
)
def test_wrong_options(
    options: list[str], what: str, recipe_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(["explore", str(recipe_path), *options]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and what in line
