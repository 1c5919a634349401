"""``shardwise.merge``."""

from __future__ import annotations

from pathlib import Path

from shardwise.core.paths import path_of
from shardwise.plugins.merge import merging


def merge(
    base: str | Path, adapter: str | Path, out: str | Path, *, dtype: str | None = None, undo: bool = False
) -> Path:
    """Add an adapter into the weights of its base model and write the result; returns its folder.

    Args:
        base: the folder or hub id of a model.
        adapter: the folder of an adapter in PEFT's format.
        dtype: fp32, bf16 or fp16; None keeps the dtype of the base.
        undo: take the adapter out of a merged model instead.
    """
    if undo:
        return merging.unmerge(str(base), path_of(adapter), path_of(out), dtype).folder
    return merging.merge(str(base), path_of(adapter), path_of(out), dtype)[0].folder
