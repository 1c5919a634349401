"""A run's newest checkpoint as a folder that transformers loads, with the tokenizer of its recipe.

One tensor after the other goes from the checkpoint's files, whatever ranks wrote them, into the folder's. Without
``dtype`` weights are written in the dtype that the run computed in: fp32 masters that a bf16 run trained are rounded
once, here. Of a run with adapters the merged model is written (model/merging.py); the adapters alone are in its folder
already, in PEFT's format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardwise.core.errors import CheckpointError, DataError
from shardwise.core.recipe import Recipe, load_recipe
from shardwise.model.blueprint import Blueprint, blueprint_of
from shardwise.model.merging import Merged, Read
from shardwise.model.streamed import greatest_difference
from shardwise.technique import SETTINGS, precision_of
from shardwise.train.checkpoint import SavedWeights, latest
from shardwise.train.data import open_tokenizer
from shardwise.train.folder import RECIPE
from shardwise.train.meter import frees_returned
from shardwise.train.model_folder import Beside, Contents, Written, config_in, require_new, write_model

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "fp8": torch.bfloat16,  # it computes in bf16 but for some products
}
"""What weights are written in, by the precision of a run or the word of the option."""

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)


@dataclass(frozen=True)
class Merge:
    """What merging did.

    Attributes:
        layers: how many layers have been merged.
        unpacked: how the weights of the base were packed (nf4, int8), which the merged ones are not.
        difference: the greatest between the logits of the adapted and of the merged model, for one fixed batch.
        logit: the greatest logit of that batch, to compare with.
    """

    layers: int
    unpacked: tuple[str, ...]
    difference: float
    logit: float


@frees_returned()
def export_run(folder: Path, target: Path, dtype: str | None = None) -> tuple[Written, Merge | None]:
    """Write the newest whole checkpoint of a run; what was merged, where it has adapters. Raises ShardwiseError."""
    require_new(target)
    recipe, checkpoint = newest_of(folder)
    blueprint = blueprint_of(recipe)
    layout, weights = blueprint.layout(), SavedWeights(checkpoint)
    wanted = DTYPES[dtype or precision_of(weights.strategy)]
    config, beside = dict(layout.config), dict[str, Beside]()
    if "eos_token_id" not in config:
        ends = {"eos_token_id": open_tokenizer(recipe.data.tokenizer).separator}
        config |= ends
        beside["generation_config.json"] = lambda: json.dumps(ends).encode() + b"\n"
    beside |= {path.name: path for path in layout.copied}
    if recipe.data.tokenizer != "bytes":
        beside |= tokenizer_files(recipe.data.tokenizer)
    held = weights.dtypes
    kept = {name: kind for name, kind in held.items() if not kind.is_floating_point}
    names = {name for group in layout.groups for name in group.sources}
    dtypes = {name: kept.get(name, wanted) for name in names}
    with torch.device("meta"):
        merged = Merged(blueprint.build(), weights.read)
    contents = Contents(replace(layout, config=config_in(config, wanted)), dtypes, merged.read, beside)
    written = write_model(target, contents)
    if not merged.layers:
        return written, None
    plain = blueprint_of(recipe.model_copy(update={"adapter": None}))
    return written, compared(merged, (blueprint, weights.read), plain, dtypes)


def compared(
    merged: Merged, adapted: tuple[Blueprint, Read], plain: Blueprint, dtypes: Mapping[str, torch.dtype]
) -> Merge:
    """The merged model, rounded as it was written, beside the adapted one; both computed in fp32 or wider."""

    def rounded(name: str) -> torch.Tensor:
        value = merged.read(name)
        return value.to(dtypes.get(name, value.dtype))

    dtype = torch.float64 if torch.float64 in dtypes.values() else torch.float32
    found = greatest_difference(adapted, (plain, rounded), dtype)
    return Merge(len(merged.layers), tuple(sorted(merged.packings)), *found)


def newest_of(folder: Path) -> tuple[Recipe, Path]:
    """The recipe of a run and its newest whole checkpoint. Raises CheckpointError."""
    if not (folder / RECIPE).is_file():
        raise CheckpointError("not the folder of a run", where=str(folder), why=f"no {RECIPE} in it")
    recipe = load_recipe(folder / RECIPE, [], SETTINGS)
    checkpoint = latest(folder / "checkpoints")
    if checkpoint is None:
        raise CheckpointError(
            "no checkpoint", where=str(folder), fix="train first: shardwise train --out DIR"
        )
    return recipe, checkpoint


def tokenizer_files(source: str, required: bool = True) -> dict[str, Beside]:
    """The files of a tokenizer: of a folder, of a hub id, or beside a ``tokenizer.json``."""
    from shardwise.model.hf import folder_of

    path = Path(source).expanduser()
    where = path.parent if path.is_file() else folder_of(source, list(_TOKENIZER))
    found: dict[str, Beside] = {name: where / name for name in _TOKENIZER if (where / name).is_file()}
    if path.is_file():
        found["tokenizer.json"] = path
    if required and not found:
        raise DataError(
            "no tokenizer's files", where=source, why=f"none of {', '.join(_TOKENIZER[:2])}, … is there"
        )
    return found
