"""A source whose weights are rotated as they are read (rotation.py), and whose output layer is its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.core.errors import RecipeError
from shardwise.exporter.hf_writer import Contents
from shardwise.model.merging import ReadTensor
from shardwise.model.streaming import max_logit_difference
from shardwise.model.untied import untied
from shardwise.plugins.quantize.rotation import Rotated
from shardwise.plugins.quantize.source import SourceModel, rounded
from shardwise.runtime.parallel.shard_slices import shared_names

SEED = 0
"""Of the random signs. One seed makes a pass repeatable; another one makes no systematic difference."""

LOGIT_TOLERANCE = 1e-2
"""Of the largest logit. In fp32 a rotation moves logits by about 1e-5."""


def rotated_source(source: SourceModel) -> SourceModel:
    """The source with rotated weights. Raises RecipeError for a model that cannot be rotated, with the reason."""
    contents = _untied_contents(source)

    def over(read: ReadTensor) -> ReadTensor:
        return rounded(Rotated(source.blueprint, source.over(read), SEED).read, contents)

    # The tensors outside the blocks are written as ``contents`` reads them, and rotated too.
    rotated_contents = replace(contents, read=over(source.lowest))
    return replace(source, blueprint=untied(source.blueprint), contents=rotated_contents, over=over)


def require_same_logits(source: SourceModel) -> None:
    """Raise RecipeError if the rotation moves the logits of a batch. ``source``: not rotated."""
    read = source.over(source.lowest)
    plain = (source.blueprint, read)
    rotated = (untied(source.blueprint), Rotated(source.blueprint, read, SEED).read)
    moved, largest = max_logit_difference(plain, rotated, torch.float32)
    if not moved <= LOGIT_TOLERANCE * largest:  # also for NaN
        raise RecipeError(
            "this model cannot be rotated",
            where="--rotate",
            why=f"its logits would move by {moved:.3g}, before rounding; the largest is {largest:.3g}",
            fix="leave out --rotate",
        )


def _untied_contents(source: SourceModel) -> Contents:
    """The contents with the tensors that only the untied model has."""
    contents = source.contents
    blueprint = untied(source.blueprint)
    if blueprint is source.blueprint:  # its output layer is its own already
        return contents
    with torch.device("meta"):
        aliases = shared_names(source.blueprint.build())
    added = [group for group in blueprint.hf_folder().groups if group.sources[0] in aliases]
    layout = replace(
        contents.layout,
        config={**contents.layout.config, "tie_word_embeddings": False},
        groups=[*contents.layout.groups, *added],
    )
    dtypes = {name: contents.dtypes[first] for name, first in aliases.items()}
    return replace(contents, layout=layout, dtypes={**contents.dtypes, **dtypes})
