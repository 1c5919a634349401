"""Export a run's checkpoint as a folder that transformers loads, with the tokenizer of its recipe.

Tensors are copied one after the other from the checkpoint's shards to the folder. Without ``dtype``, weights are
written in the compute dtype of the run: the fp32 master weights of a bf16 run are rounded once, here. For a run with
adapters, the merged model is written (model/merging.py), or the base that they were trained on. The adapters alone are
already in the run's folder, in PEFT's format. Of a factory's model the tensors alone are written (module_weights.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.chosen import chosen_checkpoint, recipe_in
from shardwise.checkpoint.run_folder import RECIPE, require_base_in_place
from shardwise.checkpoint.saved_weights import SavedWeights
from shardwise.core.atomic_file import require_new
from shardwise.core.errors import DataError, RecipeError
from shardwise.core.hub_folder import folder_of
from shardwise.core.paths import path_of
from shardwise.core.run_files import Which
from shardwise.data import Tokenizer, open_tokenizer
from shardwise.data.tokenizer_files import GENERATION_CONFIG, settings_next_to
from shardwise.exporter.ends import with_ends
from shardwise.exporter.hf_writer import Contents, ExtraFile, Written, config_in, write_model
from shardwise.exporter.module_weights import write_weights
from shardwise.model.blueprint import Blueprint
from shardwise.model.files.safetensors_reader import DTYPES_BY_NAME
from shardwise.model.merging import Merged, ReadTensor
from shardwise.model.open import base_of, model_of, with_head
from shardwise.model.streaming import max_logit_difference
from shardwise.recipe.data_sections import TOKENIZER_FILES
from shardwise.recipe.sections import Recipe
from shardwise.technique import precision_of
from shardwise.trainer.meter import frees_returned

if TYPE_CHECKING:
    from shardwise.model.hf import HuggingFaceModel  # loads transformers' conversions

EXPORT_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "fp8": torch.bfloat16,  # only some matrix products are in fp8, the rest is bf16
}
"""Dtype of the written weights, by the run's precision or the value of ``--dtype``."""

_TOKENIZER = (
    *TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class Merge:
    """Result of a merge.

    Attributes:
        layers: number of merged layers.
        unpacked: quantization of the base (nf4, int8); the merged weights are not quantized.
        difference: largest difference between the logits of the adapted and the merged model, for one fixed batch.
        logit: largest logit of that batch, for comparison.
    """

    layers: int
    unpacked: tuple[str, ...]
    difference: float
    logit: float


@dataclass(frozen=True)
class OpenedRun:
    """A checkpoint of a run as a plain model, without adapters.

    Attributes:
        blueprint: the trained model, with its adapters if it has some. plain: the model without them.
        weights: the tensors of the checkpoint. contents: the plain model in the form of a Hugging Face folder.
    """

    recipe: Recipe
    blueprint: Blueprint
    plain: Blueprint
    weights: SavedWeights
    merged: Merged
    contents: Contents


def open_run(
    folder: Path, dtype: str | None = None, base: bool = False, which: Which = "latest"
) -> OpenedRun:
    """Open a complete checkpoint of a run, or the ``base`` of its adapters. Raises ShardwiseError."""
    recipe, checkpoint = checkpoint_of(folder, which)
    if base:
        _require_frozen_base(recipe, folder)
    blueprint = model_of(recipe)
    if base and blueprint.new_layers:
        raise _trained_in_full(recipe, folder, blueprint.new_layers)
    weights = SavedWeights(checkpoint)
    with torch.device("meta"):
        merged = Merged(blueprint.build(), weights.read, with_adapters=not base)
    float_dtype = EXPORT_DTYPES[dtype or precision_of(weights.strategy)]
    contents = _contents_of_run(recipe, blueprint, weights, merged, float_dtype)
    plain = with_head(base_of(recipe), recipe) if merged.weights or base else blueprint
    return OpenedRun(recipe, blueprint, plain, weights, merged, contents)


def _require_frozen_base(recipe: Recipe, folder: Path) -> None:
    """Raise RecipeError unless all weights of the base are as they were before the run."""
    if recipe.adapter is None:
        why = "it trains all weights, and has no adapter"
        raise RecipeError("this run has no frozen base", where=str(folder), why=why, fix="leave out --base")
    if recipe.adapter.modules_to_save:
        raise _trained_in_full(recipe, folder, recipe.adapter.modules_to_save)


def _trained_in_full(recipe: Recipe, folder: Path, modules: Sequence[str]) -> RecipeError:
    return RecipeError(
        "the base's own weights are not in this run",
        where=str(folder),
        why=f"it has trained {', '.join(modules)} in full",
        fix=f"take the base from {recipe.model.hf}" if recipe.model.hf else "leave out --base",
    )


def _contents_of_run(
    recipe: Recipe, blueprint: Blueprint, weights: SavedWeights, merged: Merged, dtype: torch.dtype
) -> Contents:
    """The plain model in the form of a folder, with the run's tokenizer; its weights in ``dtype``."""
    layout = blueprint.hf_folder()
    tokenizer = open_tokenizer(recipe.data.tokenizer)
    config = dict(layout.config)
    extra_files: dict[str, ExtraFile] = {path.name: path for path in layout.copied}
    if "eos_token_id" not in config:
        end = {"eos_token_id": tokenizer.separator}
        config |= end
        if not blueprint.new_layers:
            extra_files[GENERATION_CONFIG] = lambda: json.dumps(end).encode() + b"\n"
    if blueprint.new_layers:
        config["pad_token_id"] = padding_of(tokenizer, config)
    if recipe.data.tokenizer != "bytes":
        extra_files |= tokenizer_files(recipe.data.tokenizer)
    own = {n: k for n, k in weights.dtypes.items() if not k.is_floating_point or n in layout.unrounded}
    names = {name for group in layout.groups for name in group.sources}
    dtypes = {name: own.get(name, dtype) for name in names}
    contents = Contents(replace(layout, config=config_in(config, dtype)), dtypes, merged.read, extra_files)
    return with_ends(contents, tokenizer.ends) if blueprint.objective == "causal" else contents


def padding_of(tokenizer: Tokenizer, config: Mapping[str, Any]) -> int | None:
    """The token by which transformers tells where a text ends: it reads the score of the last other one.

    So it is not the token that ends documents. None if the tokenizer and the config name no other one: then
    transformers scores texts one by one, and refuses several together.
    """
    known = (tokenizer.pad, config.get("pad_token_id"))
    return next((token for token in known if token is not None and token != tokenizer.separator), None)


def contents_of(model: HuggingFaceModel, dtype: str | None = None) -> Contents:
    """A model of transformers in the form of its folder, without quantization. ``dtype`` replaces that on disk."""
    layout, weights = model.hf_folder(), model.weights()
    names = sorted({name for group in layout.groups for name in group.sources})
    stored = {name: DTYPES_BY_NAME[weights.kind(name)] for name in names}
    dtypes = {
        name: EXPORT_DTYPES[dtype] if dtype and kind.is_floating_point else kind
        for name, kind in stored.items()
    }
    floats = {kind for kind in dtypes.values() if kind.is_floating_point}
    config = config_in(layout.config, floats.pop()) if len(floats) == 1 else layout.config
    extra_files: dict[str, ExtraFile] = {path.name: path for path in layout.copied}
    extra_files |= tokenizer_files(model.source, required=False)
    return Contents(replace(layout, config=config), dtypes, weights.read, extra_files)


@frees_returned()
def export_model(folder: Path, target: Path, dtype: str | None = None) -> Written:
    """Write the model of a Hugging Face folder with dequantized weights. Raises ShardwiseError."""
    from shardwise.model.hf import HuggingFaceModel

    require_new(target)
    return write_model(target, contents_of(HuggingFaceModel(str(folder), 1, objective=None), dtype))


@frees_returned()
def export_run(
    folder: Path, target: Path, dtype: str | None = None, base: bool = False, which: Which = "latest"
) -> tuple[Written, Merge | None]:
    """Write a complete checkpoint of a run; return the merge, if it has adapters. Raises ShardwiseError.

    Args:
        base: write the frozen weights, dequantized, without the adapters that were trained on them.
    """
    require_new(target)
    recipe = recipe_in(folder)
    if recipe.model.factory is not None and not base:
        own = EXPORT_DTYPES[dtype] if dtype else None
        return write_weights(recipe, chosen_checkpoint(folder, which), target, own), None
    run = open_run(folder, dtype, base, which)
    written = write_model(target, run.contents)
    if not run.merged.weights:
        return written, None
    return written, compared(run.merged, (run.blueprint, run.weights.read), run.plain, run.contents.dtypes)


def compared(
    merged: Merged, adapted: tuple[Blueprint, ReadTensor], plain: Blueprint, dtypes: Mapping[str, torch.dtype]
) -> Merge:
    """Compare the merged model, rounded as written, with the adapted one; both compute in fp32 or wider."""

    def rounded(name: str) -> torch.Tensor:
        value = merged.read(name)
        return value.to(dtypes.get(name, value.dtype))

    dtype = torch.float64 if torch.float64 in dtypes.values() else torch.float32
    comparison = max_logit_difference(adapted, (plain, rounded), dtype)
    return Merge(len(merged.weights), tuple(sorted(merged.packings)), *comparison)


def checkpoint_of(folder: Path, which: Which = "latest") -> tuple[Recipe, Path]:
    """The recipe of a run and a complete checkpoint. No code of the run's folder is imported.

    The checkpoint has the adapter's values, so the adapter that the run started from is not needed.

    Raises CheckpointError, and RecipeError for a factory's model or a base model that is gone.
    """
    recipe = recipe_in(folder)
    if recipe.model.factory is not None:  # before anything imports it: the folder may be another person's
        raise RecipeError(
            "a factory's model is not built from the folder of its run",
            where=f"{folder / RECIPE}: model.factory",
            why=f"that would run the code of {recipe.model.factory}",
            fix="load its weights with your own code: shardwise.load_into(module, DIR), or shardwise export DIR OUT",
        )
    require_base_in_place(folder, recipe)
    checkpoint = chosen_checkpoint(folder, which)
    if recipe.adapter is not None:
        recipe = recipe.model_copy(update={"adapter": recipe.adapter.model_copy(update={"start_from": None})})
    return recipe, checkpoint


def tokenizer_files(source: str, required: bool = True) -> dict[str, ExtraFile]:
    """The files of a tokenizer: from a folder, a hub id, or the folder of a ``tokenizer.json``."""
    path = path_of(source)
    where = path.parent if path.is_file() else folder_of(source, list(_TOKENIZER))
    paths = [path for name in _TOKENIZER for path in sorted(where.glob(name)) if path.is_file()]
    files: dict[str, ExtraFile] = {path.relative_to(where).as_posix(): path for path in paths}
    settings = settings_next_to(where / "tokenizer.json")
    if settings.pop("auto_map", None):  # its code is not copied
        files["tokenizer_config.json"] = lambda: json.dumps(settings, indent=2).encode() + b"\n"
    if path.is_file():
        files["tokenizer.json"] = path
    if required and not files:
        raise DataError(
            "no tokenizer files", where=source, why=f"none of {', '.join(_TOKENIZER[:2])}, … exists"
        )
    return files
