"""The folder of a model: one on this machine, or what the Hugging Face Hub has under its id."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from shardwise.core.errors import RecipeError, ShardwiseError, one_line
from shardwise.core.extras import install
from shardwise.core.paths import missing, only_a_path, path_of

_LFS = b"version https://git-lfs.github.com/spec/"


def folder_of(source: str, files: list[str]) -> Path:
    """The folder itself, or the local folder with the downloaded ``files`` of a hub id."""
    folder = path_of(source)
    where = f"model.hf: {source}"
    if folder.is_dir():
        if "config.json" in files and not (folder / "config.json").exists():
            fix = _advice(source, folder)
            raise RecipeError("not a model folder", where=where, why="it has no config.json", fix=fix)
        return folder
    if folder.exists():
        raise RecipeError("no such folder", where=where, why="it is a file", fix="give the model's folder")
    if only_a_path(source):
        near = get_close_matches(folder.name, _names_in(folder.parent), n=1)
        fix = f"did you mean {folder.parent / near[0]}?" if near else "check the path"
        raise RecipeError("no such folder", where=where, why=missing(source), fix=fix)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise RecipeError("transformers is not installed", where="model.hf", fix=install("hf")) from error
    try:
        return Path(snapshot_download(source, allow_patterns=files))
    except Exception as error:  # network, name or licence; the text says which
        raise RecipeError(
            "no such model here or on the Hub",
            where=where,
            why=f"{missing(source)}; from the Hub: {_said_by(error)}",
            fix="check the name and the network, or give a local folder",
        ) from error


def _advice(source: str, folder: Path) -> str:
    """What to give instead of a folder without a model: those of runs and of adapters are often given for one."""
    if (folder / "recipe.yaml").exists():
        return f"this is a run: shardwise export {source} OUT writes its model"
    snapshots = sorted((folder / "snapshots").glob("*/config.json"))
    if snapshots:
        return f"this is a repository in the Hub's cache: give its snapshots/{snapshots[-1].parent.name}"
    if (folder / "adapter_config.json").exists():
        return "this is an adapter: give the model that it is of, and adapter.start_from to train on from it"
    if inside := sorted(folder.glob("*/config.json")):
        return f"give {'one of its folders, such as' if len(inside) > 1 else 'its folder'} {inside[-1].parent.name}"
    return ""


def refuse_lfs_pointer(file: Path, kind: type[ShardwiseError]) -> None:
    """Raise an error if a file is only the pointer that a clone without git-lfs has in place of a large file."""
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_LFS)) == _LFS
    except OSError:
        return  # the caller reads it again
    if is_pointer:
        raise kind(
            f"{file.name} is a Git LFS pointer, not the file",
            where=str(file),
            why="the folder was cloned without git-lfs",
            fix="run git lfs pull in it, or download the model with hf download",
        )


def _said_by(error: Exception) -> str:
    """The kind and the start of an error of the Hub's library."""
    return f"{type(error).__name__}: {one_line(str(error))[:40]}…"


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
