"""The commands that a finished run is ready for. `train` and `finetune` end with them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.run_folder import load_run_recipe
from shardwise.core.errors import ShardwiseError
from shardwise.core.plugins import plugin
from shardwise.data.opening import open_part, tokenizer_of
from shardwise.exporter.export_run import open_run
from shardwise.recipe.sections import Recipe

MODEL, GGUF = "model", "model.gguf"
"""Names in a run's folder: of its model as a folder for transformers, and as a file for llama.cpp."""

JUDGES = ("pairs", "scored", "unpaired")
"""Kinds of samples from which a model learns to tell answers apart."""


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """The commands that work on a finished run, each with what it does; [] if there is none."""
    try:
        return list(_commands(folder, load_run_recipe(folder)))
    except ShardwiseError:  # its data is gone: the run has ended well nevertheless
        return []


def _commands(folder: Path, recipe: Recipe) -> Iterator[tuple[str, str]]:
    here = shlex.quote(str(folder))
    if recipe.model.factory is not None:  # a user's code: no text, and no config.json for other readers
        if recipe.adapter is None:
            yield f"shardwise export {here} {shlex.quote(str(folder / MODEL))}", "for shardwise.load_into"
        return
    if recipe.writes_text:
        if trained_on_chats(recipe):
            yield f"shardwise chat {here}", "talk with it"
        else:
            yield f"shardwise generate {here} --prompt TEXT", "let it continue a text"
    if recipe.samples in JUDGES and plugin("serve.preference_measures") is not None:
        yield f"shardwise eval {here} --preferences PAIRS", "judge other pairs"
    merged = "" if recipe.adapter is None else "the merged model, "
    for name, reader in _forms(folder):
        if not (folder / name).exists():
            yield f"shardwise export {here} {shlex.quote(str(folder / name))}", f"{merged}for {reader}"


def _forms(folder: Path) -> Iterator[tuple[str, str]]:
    """The forms that the run's model can be exported in: their names in the folder, and who reads them."""
    try:
        contents = open_run(folder).contents
    except ShardwiseError:  # a model that transformers has no class for
        return
    yield MODEL, "transformers"
    gguf = plugin("gguf.export")
    if gguf is not None and gguf.can_write(contents):
        yield GGUF, "llama.cpp"


def trained_on_chats(recipe: Recipe) -> bool:
    """Whether a chat template wrote a part of the data. Raises ShardwiseError if the data cannot be opened."""
    if recipe.data.stream_window is not None:
        return False
    parts = [(part, tokenizer_of(part)) for part in recipe.data.parts]
    return any(open_part(recipe, part, tokenizer).train.chats for part, tokenizer in parts)
