"""Whose code a frame of a stack is: the user's, Shardwise's, torch's, or of another library.

Only paths are compared; torch is not imported.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Frame:
    """One Python frame: file, line and function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}:{self.line})"

    @property
    def is_torchs(self) -> bool:
        return self.file.startswith(_torch_folder())

    @property
    def is_collective(self) -> bool:
        """Whether it runs a collective. DTensor's dispatch also runs plain operations, so it does not count."""
        inside = self.file.removeprefix(_torch_folder())
        return (
            inside != self.file and inside.startswith("distributed/") and "distributed/tensor/" not in inside
        )

    @property
    def intercepts_torch(self) -> bool:
        """Whether torch calls it before a function of its own, as a mode of PyTorch (runtime/layer_inputs.py)."""
        return self.function in ("__torch_function__", "__torch_dispatch__")

    @property
    def is_ours(self) -> bool:
        return self.file.startswith(_PACKAGE)

    @property
    def is_pythons(self) -> bool:
        """Of the standard library, or of the interpreter."""
        return self.file.startswith("<") or (self.file.startswith(_STANDARD) and not self._is_installed)

    @property
    def is_users(self) -> bool:
        """Of none of these, nor of an installed library."""
        return not (self.is_ours or self.is_pythons or self._is_installed or self.is_torchs)

    @property
    def _is_installed(self) -> bool:
        return self.file.startswith(_INSTALLED)


def _folder(path: str | Path) -> str:
    return f"{path}/"


_PACKAGE = _folder(Path(__file__).parent.parent)
_STANDARD = tuple(_folder(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(_folder(path) for path in sys.path if path.endswith(("site-packages", "dist-packages")))


def innermost_of_user(stack: Iterable[Frame]) -> Frame | None:
    """The user's innermost frame of a stack, innermost first. What calls Shardwise, as a test does, is not meant."""
    frames = list(stack)
    called = max((at for at, frame in enumerate(frames) if frame.is_ours), default=len(frames))
    return next((frame for frame in frames[:called] if frame.is_users), None)


def place_in(error: BaseException) -> str:
    """Where in the user's code an error was raised, as " at FILE:LINE"; "" if that is not known."""
    stack = reversed(traceback.extract_tb(error.__traceback__))
    frame = innermost_of_user(
        [
            Frame(frame_summary.filename, frame_summary.lineno or 0, frame_summary.name)
            for frame_summary in stack
        ]
    )
    return "" if frame is None else f" at {frame.file}:{frame.line}"


@cache
def _torch_folder() -> str:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return _folder(next(iter(spec.submodule_search_locations)))
