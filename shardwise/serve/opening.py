"""A folder as a model that writes: the folder of a run, or one in Hugging Face's format.

Of a run the newest checkpoint is read, which holds all weights: neither the base nor the adapter that a run started
from need be there. Of a run with an adapter the base is what is opened, packed if the recipe packs it, and its adapter
is one adapter of the bank like any other. In a model's folder the weights are as they are on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError, DataError, RecipeError
from shardwise.core.sections import AdapterSpec
from shardwise.model.blueprint import Blueprint, blueprint_of
from shardwise.model.fingerprint import fingerprint_of, refuse_other_base
from shardwise.model.lora import adapt, is_adapter
from shardwise.model.slices import named_parameters, share, shared_names
from shardwise.serve.adapters import Adapter, adapter_of
from shardwise.train.checkpoint import stream_weights
from shardwise.train.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.train.export_run import newest_of
from shardwise.train.folder import RECIPE

OWN = "own"
"""The name of the adapter that the opened run itself trained."""

_CONFIG = "config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Opened:
    """A model without adapters, what cuts its text, and the adapter that was trained with it.

    Attributes:
        context: the longest text that the model reads; None where nothing limits it.
    """

    blueprint: Blueprint
    model: nn.Module
    tokenizer: Tokenizer
    context: int | None
    dtype: torch.dtype
    own: list[Adapter] = field(default_factory=list)


def open_model(folder: Path, tokenizer: str | None, dtype: torch.dtype, device: torch.device) -> Opened:
    """Read a folder; ``tokenizer`` instead of its own.

    Raises CheckpointError for a folder that holds neither, or for damaged files, DataError for the tokenizer,
    RecipeError for a model that does not write text.
    """
    if (folder / RECIPE).is_file():
        return _open_run(folder, tokenizer, dtype, device)
    if (folder / _CONFIG).is_file():
        return _open_folder(folder, tokenizer, dtype, device)
    raise CheckpointError(
        "not the folder of a run, nor of a model",
        where=str(folder),
        why=f"neither {RECIPE} nor {_CONFIG} is in it",
    )


def _open_run(folder: Path, tokenizer: str | None, dtype: torch.dtype, device: torch.device) -> Opened:
    recipe, checkpoint = newest_of(folder)
    spec = recipe.adapter
    blueprint = blueprint_of(recipe.model_copy(update={"adapter": None}))
    _require_text(blueprint)
    cuts = open_tokenizer(tokenizer or recipe.data.tokenizer)
    model = _empty(blueprint, spec, dtype, device)
    blueprint.restore(model)
    trained = _read_checkpoint(model, checkpoint)
    own = [adapter_of(OWN, str(checkpoint), spec, trained)] if spec is not None else []
    return Opened(blueprint, model, cuts, recipe.data.sequence_length, dtype, own)


def _open_folder(folder: Path, tokenizer: str | None, dtype: torch.dtype, device: torch.device) -> Opened:
    from shardwise.model.hf import HuggingFaceModel

    blueprint = HuggingFaceModel(str(folder), sequence_length=1)
    if tokenizer is None and not any((folder / name).is_file() for name in _TOKENIZERS):
        # transformers would make an empty one.
        raise DataError(
            "the model's folder has no tokenizer",
            where=str(folder),
            fix="name one: --tokenizer bytes, or a folder",
        )
    cuts = open_tokenizer(tokenizer or str(folder))
    model = _empty(blueprint, None, dtype, device)
    with torch.no_grad():
        blueprint.fill(model, 0)
    context = getattr(blueprint.config.get_text_config(), "max_position_embeddings", None)
    return Opened(blueprint, model, cuts, context, dtype)


def _empty(
    blueprint: Blueprint, spec: AdapterSpec | None, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The base with undefined values; packed, where the recipe of a run with an adapter packs it."""
    with torch.device("meta"):
        model = blueprint.build()
        if spec is not None and spec.quantize != "none":
            adapt(model, blueprint.units(model), spec.model_copy(update={"targets": ()}))
    aliases = shared_names(model)
    model.to(dtype).to_empty(device=device)
    share(model, aliases)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _read_checkpoint(model: nn.Module, checkpoint: Path) -> dict[str, Tensor]:
    """Fill the base; returns what is an adapter's, by name."""
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


def _require_text(blueprint: Blueprint) -> None:
    """Raise RecipeError, as ``logits`` of the blueprint does, for a model that does not write text."""
    if type(blueprint).logits is Blueprint.logits:
        raise RecipeError("this model does not write text", where=f"model: {blueprint.name}")


def require_base(model: nn.Module, adapters: list[Adapter]) -> None:
    """Raise CheckpointError for an adapter that says it was trained beside other weights than these."""
    if not any(adapter.fingerprint for adapter in adapters):
        return
    found = fingerprint_of(model)
    for adapter in adapters:
        refuse_other_base(adapter.fingerprint, found, adapter.where)
