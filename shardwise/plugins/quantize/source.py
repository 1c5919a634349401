"""The model to be quantized: a Hugging Face folder or hub id, or the newest checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from shardwise.checkpoint.run_folder import RECIPE
from shardwise.checkpoint.shards import DTYPES_BY_NAME
from shardwise.core.errors import RecipeError
from shardwise.core.paths import path_of
from shardwise.exporter.export_run import contents_of, open_run
from shardwise.exporter.hf_writer import Contents
from shardwise.model.blueprint import Blueprint
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.merging import Merged, ReadTensor
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import named_parameters

CALIBRATION_LENGTH = 2048
"""Tokens of a calibration sequence, unless the model's context is shorter or the run's recipe says otherwise."""


@dataclass(frozen=True)
class SourceModel:
    """A model on disk.

    Attributes:
        blueprint: the plain model. contents: its form as a Hugging Face folder.
        lowest: reads a tensor as it is stored. over: returns what reads the tensors of the plain model, rounded to the
            dtypes of ``contents``, over ``lowest`` or over a dry run's fake tensors.
        stored: shape and dtype of the tensors that ``lowest`` reads.
        identity: text that is equal for the same weights, to compare settings.
        recipe: the run's recipe; None for a model.
        length: tokens of a calibration sequence.
    """

    blueprint: Blueprint
    contents: Contents
    lowest: ReadTensor
    over: Callable[[ReadTensor], ReadTensor]
    stored: Callable[[str], tuple[torch.Size, torch.dtype]]
    identity: str
    recipe: Recipe | None
    length: int


def open_source_model(model: str, length: int | None) -> SourceModel:
    """Open a run's folder, a model's folder or a hub id. Raises ShardwiseError."""
    folder = path_of(model)
    source = _run_source(folder, length) if (folder / RECIPE).is_file() else _model_source(model, length)
    if source.blueprint.objective != "causal":
        raise RecipeError(
            "this model does not generate text",
            where=model,
            why=f"its objective is {source.blueprint.objective}, and the gate measures perplexity",
        )
    return source


def _run_source(folder: Path, length: int | None) -> SourceModel:
    run = open_run(folder)
    dtypes = run.weights.dtypes
    shapes = _tensor_shapes(run.blueprint)

    def over(read: ReadTensor) -> ReadTensor:
        # The run may train an adapter: ``Merged`` adds it to the weights as they are read.
        with torch.device("meta"):
            merged = Merged(run.blueprint.build(), read)
        return rounded(merged.read, run.contents)

    return SourceModel(
        run.plain,
        run.contents,
        run.weights.read,
        over,
        lambda name: (shapes[name], dtypes[name]),
        f"{run.weights.checkpoint.resolve()}",
        run.recipe,
        length or run.recipe.data.sequence_length,
    )


def _model_source(model: str, length: int | None) -> SourceModel:
    blueprint = HuggingFaceModel(model, length or 1, objective=None)
    blueprint.require_objective()
    if blueprint.quantized:
        raise RecipeError(
            "the model is quantized already", where=model, fix="give the model that it was made from"
        )
    contents = contents_of(blueprint)
    weights = blueprint.weights()
    context = blueprint.context or CALIBRATION_LENGTH
    shapes = _tensor_shapes(blueprint)
    return SourceModel(
        blueprint,
        contents,
        weights.read,
        lambda read: rounded(read, contents),
        lambda name: (shapes[name], DTYPES_BY_NAME[weights.kind(name)]),
        _model_identity(model),
        None,
        length or min(CALIBRATION_LENGTH, context),
    )


def _tensor_shapes(blueprint: Blueprint) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = blueprint.build()
    return {name: tensor.shape for name, tensor in (*named_parameters(model), *model.named_buffers())}


def rounded(read: ReadTensor, contents: Contents) -> ReadTensor:
    """Reads tensors with the values that the written folder gives them."""

    def rounded(name: str) -> Tensor:
        value = read(name)
        return value.to(contents.dtypes.get(name, value.dtype))

    return rounded


def _model_identity(model: str) -> str:
    """The path of a folder with the hash of its config and the times of its weights; a hub id."""
    folder = path_of(model)
    if not folder.exists():
        return model
    # Times instead of contents: a hash of the weights would read the whole model.
    times = sorted(path.stat().st_mtime_ns for path in folder.glob("*.safetensors"))
    config = xxhash.xxh3_64_hexdigest((folder / "config.json").read_bytes())
    return " ".join(map(str, [folder.resolve(), config, *times]))
