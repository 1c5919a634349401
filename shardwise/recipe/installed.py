"""The recipes that are installed with the package, and names for one that is not there."""

from __future__ import annotations

import re
from difflib import SequenceMatcher, get_close_matches
from os.path import exists, isfile
from pathlib import Path

from shardwise.core.paths import path_of

RECIPES = Path(__file__).parent.parent / "recipes"
_MOST_NAMES = 8
_MODEL = re.compile(rb"^model\s*:", re.MULTILINE)
"""Every recipe has this section. Other YAML files of a folder are not offered."""


def recipe_file(text: str) -> Path:
    """The file that a user names, or the installed recipe of that name where there is no such file."""
    path = path_of(text)
    if exists(path) or str(path.parent) not in (".", RECIPES.name):
        return path
    installed = RECIPES / (path.name if path.suffix else f"{path.name}.yaml")
    return installed if isfile(installed) else path


def instead_of(path: Path) -> str:
    """What to do where there is no recipe at ``path``: the nearest name, or those in its folder and installed."""

    def distance(name: str) -> float:
        return -SequenceMatcher(None, path.stem, Path(name).stem).ratio()

    files = [file for pattern in ("*.yaml", "*.yml") for file in path.parent.glob(pattern)]
    own = [str(file) for file in files if _MODEL.search(file.read_bytes())]
    installed = [file.stem for file in RECIPES.glob("*.yaml")]
    names = [*sorted(own, key=distance), *sorted(installed, key=distance)]
    stems = {Path(name).stem if name in own else name: name for name in reversed(names)}
    if near := get_close_matches(path.stem, stems, n=1):
        return f"did you mean {stems[near[0]]}?"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"recipes are {', '.join(names[:_MOST_NAMES])}{more}"
