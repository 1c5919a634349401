"""Names and settings of a run, as several trackers write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe by path, as ``optimizer.learning_rate``; empty ones are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def project() -> str:
    """The project under which runs are listed."""
    return "shardwise"


def first_name(folder: Path, run: Mapping[str, Any], name: str) -> str:
    """``name``, or the one that the run had when it began: its folder may have moved since.

    Args:
        folder: of the tracker, which remembers the name.
    """
    remembered = folder / "run_id"
    if remembered.exists() and run["step"]:
        return remembered.read_text(encoding="utf-8")
    remember(folder, name)
    return name


def remember(folder: Path, name: str) -> None:
    """The tracker's own name of the run, for the process that resumes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run_id").write_text(name, encoding="utf-8")


def name_of(run: Mapping[str, Any]) -> str:
    """The run's name: that of its folder."""
    return Path(run["folder"]).resolve().name
