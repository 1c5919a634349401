"""``starts.jsonl``: when, by which command, on which host, from which commit and with which versions a run was started.

A line per start of the run, for the page, and for a recipe whose paths were written before the folder moved. A line
that cannot be written or read is left out.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

STARTS = "starts.jsonl"
_PACKAGES = ("shardwise", "torch", "transformers")


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        time: local time with its offset, ISO 8601.
        commit: of the git repository of the working directory, with ``-dirty`` if files differ; "" outside of one.
        versions: of Python and of packages, by name.
        folder: of the run, as a whole path; the run may have moved since.
    """

    time: str
    command: str
    host: str
    commit: str
    versions: dict[str, str] = field(default_factory=dict)
    folder: str = ""

    @classmethod
    def now(cls, folder: Path) -> Start:
        """The start that this process makes in ``folder``."""
        return cls(
            datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            shlex.join([_program(Path(sys.argv[0])), *sys.argv[1:]]),
            platform.node(),
            _commit(),
            dict(_library_versions()),
            str(folder.absolute()),
        )

    def sentences(self) -> list[str]:
        """For a reader."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        commit = f", commit {self.commit}" if self.commit else ""
        return [f"{self.time} on {self.host}{commit}", self.command, versions]


def append(folder: Path, start: Start) -> None:
    with contextlib.suppress(OSError), (folder / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(start)) + "\n")


def starts(folder: Path) -> list[Start]:
    """The starts of a run, in order."""
    records = []
    with contextlib.suppress(OSError):
        for line in (folder / STARTS).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                start = Start(**json.loads(line))
                texts = (start.time, start.command, start.host, start.commit, start.folder)
                if all(isinstance(text, str) for text in texts) and isinstance(start.versions, dict):
                    records.append(start)
    return records


def _program(path: Path) -> str:
    """The name of a program; of a package that Python runs with -m, the package's."""
    return path.parent.name if path.name == "__main__.py" else path.name


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _library_versions() -> list[tuple[str, str]]:
    versions = [("Python", platform.python_version())]
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append((package, importlib.metadata.version(package)))
    return versions
