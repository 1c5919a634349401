"""Exports of a run, or of the folder of a model, as a GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shardwise.checkpoint.run_folder import RECIPE
from shardwise.core.errors import RecipeError
from shardwise.core.run_files import Which
from shardwise.exporter.export_run import contents_of, open_run
from shardwise.exporter.hf_writer import Contents
from shardwise.plugins.gguf.file import WrittenFile, known_names, write_gguf
from shardwise.plugins.gguf.tokenizer import kind_of_tokenizer
from shardwise.trainer.meter import frees_returned


@frees_returned()
def export_gguf(
    source: Path, target: Path, kind: str, base: bool = False, which: Which = "latest"
) -> WrittenFile:
    """Write the model of a run or of a Hugging Face folder as a GGUF file of a type (``file.TYPES``)."""
    if (source / RECIPE).is_file():
        return write_gguf(target, open_run(source, base=base, which=which).contents, kind)
    from shardwise.model.hf import HuggingFaceModel

    return write_gguf(target, contents_of(HuggingFaceModel(str(source), 1, objective=None)), kind)


def can_write(contents: Contents) -> bool:
    """Whether llama.cpp knows the model and its tokenizer, and the package gguf is installed."""
    if kind_of_tokenizer(contents) is None or importlib.util.find_spec("gguf") is None:
        return False
    try:
        known_names(contents)
    except RecipeError:
        return False
    return True
