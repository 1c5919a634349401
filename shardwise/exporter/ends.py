"""The tokens after which an answer is over, in the files of a written model (`data/tokenizer_files.py`)."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.data.tokenizer_files import GENERATION_CONFIG, ends_in
from shardwise.exporter.hf_writer import Contents, ExtraFile


def with_ends(contents: Contents, ends: Collection[int]) -> Contents:
    """The contents of a folder whose `eos_token_id` names all of ``ends`` too, after those that it names already.

    They are added where transformers reads them: to `generation_config.json` if the folder has one, else to the config.
    """
    config = dict(contents.layout.config)
    settings = _generation_config(contents)
    vocab = config.get("vocab_size")
    known = ends_of(contents)
    added = [
        end for end in sorted(ends) if end not in known and not (isinstance(vocab, int) and end >= vocab)
    ]
    if not added:
        return contents
    ids = [*known, *added]
    said = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
    if settings is None:
        return replace(contents, layout=replace(contents.layout, config=config | said))
    text = json.dumps(settings | said, indent=2).encode() + b"\n"
    return replace(contents, extra_files={**contents.extra_files, GENERATION_CONFIG: lambda: text})


def ends_of(contents: Contents) -> tuple[int, ...]:
    """The ends that the files of a folder name, in their order."""
    return ends_in(_generation_config(contents)) or ends_in(dict(contents.layout.config))


def _generation_config(contents: Contents) -> dict[str, Any] | None:
    """`generation_config.json` of a folder, or None if it has none."""
    file: ExtraFile | None = contents.extra_files.get(GENERATION_CONFIG)
    if file is None:
        return None
    settings = json.loads(file.read_text(encoding="utf-8") if isinstance(file, Path) else file())
    return settings if isinstance(settings, dict) else {}
