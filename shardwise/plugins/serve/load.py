"""Load a model for generation from the folder of a run or from a Hugging Face folder.

For a run, the newest checkpoint is read. It holds all weights, so the base model that the run started from is not
needed. For a run with an adapter, the base model is opened (quantized if the recipe quantizes it), and the adapter goes
into the bank like any other adapter. A Hugging Face folder's weights are loaded as they are on disk: quantized layers
of the blocks stay packed, and are dequantized for each product.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.run_folder import RECIPE
from shardwise.checkpoint.saved_weights import stream_weights
from shardwise.core.errors import CheckpointError, DataError, RecipeError
from shardwise.core.hub_folder import folder_of
from shardwise.core.paths import no_folder
from shardwise.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.data.tokenizer_files import GENERATION_CONFIG, ends_of_model
from shardwise.exporter.export_run import checkpoint_of
from shardwise.model.adapted import shapes_of
from shardwise.model.blueprint import Blueprint
from shardwise.model.filling import fill_packed, without_adapters
from shardwise.model.lora import adapt, is_adapter
from shardwise.model.narrow import narrow
from shardwise.model.open import base_of, with_head
from shardwise.plugins.serve.adapters import ServedAdapter, adapter_of
from shardwise.recipe.data_sections import brings_tokenizer
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.fingerprint import fingerprint_of, refuse_other_base
from shardwise.runtime.parallel.shard_slices import named_parameters, share, shared_names

OWN_ADAPTER = "own"
"""Name of the adapter that the opened run trained."""

_CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class OpenedModel:
    """A model without adapters, its tokenizer, and the adapter of its run.

    Attributes:
        context: the longest sequence that the model reads, in tokens; None for no limit.
        ends: the tokens after which an answer is over: those of the tokenizer and those of the model's files.
        trained: modules that the run has trained in full, whose base's weights are not here.
    """

    blueprint: Blueprint
    model: nn.Module
    tokenizer: Tokenizer
    context: int | None
    dtype: torch.dtype
    ends: frozenset[int]
    own: list[ServedAdapter] = field(default_factory=list)
    trained: tuple[str, ...] = ()


def open_model(folder: Path, tokenizer: str | None, dtype: torch.dtype, device: torch.device) -> OpenedModel:
    """Read a folder; ``tokenizer`` replaces the folder's own.

    Raises:
        CheckpointError: the folder holds neither a run nor a model, or a file is damaged.
        DataError: the tokenizer is missing or unreadable.
        RecipeError: the model does not generate text.
    """
    if (folder / RECIPE).is_file():
        return _open_run(folder, tokenizer, dtype, device)
    if (folder / _CONFIG_FILE).is_file():
        return _open_folder(folder, tokenizer, dtype, device)
    raise CheckpointError(
        "not the folder of a run or of a model",
        where=str(folder),
        why=f"it has neither {RECIPE} nor {_CONFIG_FILE}" if folder.is_dir() else no_folder(folder),
    )


def _open_run(folder: Path, tokenizer: str | None, dtype: torch.dtype, device: torch.device) -> OpenedModel:
    recipe, checkpoint = checkpoint_of(folder)
    spec = recipe.adapter
    blueprint = base_of(recipe)
    require_text(with_head(blueprint, recipe))
    cuts = open_tokenizer(tokenizer or recipe.data.tokenizer, recipe.data.begin)
    model = allocated(meta_model(blueprint, spec, dtype), device)
    blueprint.restore(model)
    trained = _read_checkpoint(model, checkpoint)
    own = [adapter_of(OWN_ADAPTER, str(checkpoint), spec, trained)] if spec is not None else []
    ends = cuts.ends.union(() if recipe.model.hf is None else _end_tokens(recipe.model.hf))
    # A base that was trained before reads more than the sequences of a fine-tuning run.
    context = recipe.data.sequence_length if recipe.model.hf is None else blueprint.context
    whole = () if spec is None else spec.modules_to_save
    return OpenedModel(blueprint, model, cuts, context, dtype, ends, own, whole)


def _end_tokens(source: str) -> tuple[int, ...]:
    """The ends that the files of a folder or of a hub id name."""
    return ends_of_model(folder_of(source, ["config.json", GENERATION_CONFIG]))


def _open_folder(
    folder: Path, tokenizer: str | None, dtype: torch.dtype, device: torch.device
) -> OpenedModel:
    from shardwise.model.hf import HuggingFaceModel

    blueprint = HuggingFaceModel(str(folder), sequence_length=1, objective=None)
    require_text(blueprint)
    blueprint.require_objective()
    if tokenizer is None and not brings_tokenizer(str(folder)):
        # transformers would create an empty tokenizer.
        raise DataError(
            "the model's folder has no tokenizer",
            where=str(folder),
            fix="name one: --tokenizer bytes, or a folder",
        )
    cuts = open_tokenizer(tokenizer or str(folder))
    model = allocated(meta_model(blueprint, AdapterSpec(), dtype), device)
    with torch.no_grad(), without_adapters(model):
        blueprint.fill(model, 0)
    fill_packed(model, blueprint, 0)
    ends = cuts.ends.union(ends_of_model(folder))
    return OpenedModel(blueprint, model, cuts, blueprint.context, dtype, ends)


def meta_model(blueprint: Blueprint, spec: AdapterSpec | None, dtype: torch.dtype) -> nn.Module:
    """The base model on the meta device; quantized if its files or the recipe of the run quantize it.

    ``spec``: of adapters on the frozen base; None if all its weights were trained, which dequantized them.
    """
    with torch.device("meta"):
        model = blueprint.build()
        packings = blueprint.packings() if spec is not None and spec.quantize == "none" else {}
        if spec is not None and (spec.quantize != "none" or packings):
            adapt(model, blueprint.blocks(model), spec.model_copy(update={"targets": ()}), packings)
    return narrow(model, dtype).eval().requires_grad_(False)


def allocated(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with uninitialised values on a device."""
    aliases = shared_names(model)
    model.to_empty(device=device)
    share(model, aliases)
    return model


@torch.no_grad()
def _read_checkpoint(model: nn.Module, checkpoint: Path) -> dict[str, Tensor]:
    """Fill the base model; return the adapter's tensors by name."""
    places: dict[str, Tensor] = {**dict(named_parameters(model)), **dict(model.named_buffers())}
    missing = {name for name, _ in named_parameters(model)}
    trained: dict[str, Tensor] = {}
    for name, weights in stream_weights(checkpoint):
        if is_adapter(name):
            trained[name] = weights
        elif name in places and places[name].shape == weights.shape:
            places[name].copy_(weights)
            missing.discard(name)
    if missing:
        raise CheckpointError(
            "the checkpoint is not of this model", where=str(checkpoint), why=f"it lacks {min(missing)}"
        )
    return trained


def require_text(blueprint: Blueprint) -> None:
    """Raise RecipeError, as the blueprint's ``logits`` does, if the model does not generate text."""
    where = f"model: {blueprint.name}"
    if type(blueprint).logits is Blueprint.logits:
        raise RecipeError("this model does not generate text", where=where)
    if blueprint.new_layers:
        why = f"its output layer is {blueprint.new_layers[0]}, a number for each token"
        raise RecipeError(
            "this model does not generate text", where=where, why=why, fix="export it for transformers"
        )
    if blueprint.objective != "causal":
        why = f"its objective is {blueprint.objective}, and only causal models are decoded here"
        raise RecipeError(
            "this model does not generate text", where=where, why=why, fix="export it for transformers"
        )


def require_same_base(model: nn.Module, adapters: list[ServedAdapter]) -> None:
    """Raise CheckpointError if an adapter was trained with another base model than ``model``."""
    for adapter in adapters:
        if adapter.files is not None:
            adapter.files.require_base(shapes_of(model))
            adapter.files.require_copies(model.named_parameters(remove_duplicate=False))
    fingerprints: dict[frozenset[str], str | None] = {}
    for adapter in adapters:
        whole = frozenset(adapter.modules)
        if adapter.fingerprint is not None:
            if whole not in fingerprints:
                fingerprints[whole] = fingerprint_of(model, without=whole)
            refuse_other_base(adapter.fingerprint, fingerprints[whole], adapter.where)
