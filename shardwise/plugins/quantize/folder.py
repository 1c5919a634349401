"""Writes the quantized model as a Hugging Face folder: packed tensors in place of weights, all else as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.exporter.hf_writer import Contents, Written, write_model
from shardwise.model.blueprint import Blueprint
from shardwise.model.files.compressed_tensors import METHOD
from shardwise.model.files.folder_layout import TensorGroup, unchanged_tensor
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.lora import linear_layers
from shardwise.model.unreached import matrices
from shardwise.plugins.quantize.state import UNQUANTIZED, LayerRow, PassState, form_of

QUANTIZATION_REPORT = "quantization.json"
"""File of the folder with the report."""


def require_packable(blueprint: Blueprint, contents: Contents) -> None:
    """Raise RecipeError if a linear layer of the blocks is stored transposed, or joined with others."""
    with torch.device("meta"):
        model = blueprint.build()
    stored = _stored_names(contents)
    blocks = blueprint.blocks(model)
    if not blocks:
        raise RecipeError("the blocks of this model are not known", where=f"model: {blueprint.name}")
    layers = list(linear_layers(model, blocks))
    if not layers:
        raise RecipeError("no linear layers to quantize", where=f"model: {blueprint.name}")
    for path in layers:
        if path not in stored or not isinstance(model.get_submodule(path), nn.Linear):
            raise RecipeError(
                "this model cannot be written with packed weights",
                where=f"model: {blueprint.name}",
                why=f"{path}.weight is stored transposed, or joined with other tensors",
                fix="take a model whose layers are stored one by one, such as the llama family",
            )


def _stored_names(contents: Contents) -> dict[str, str]:
    """Path on disk of every module whose weight [out, in] is stored as it is, by its path in the model."""
    paths = {}
    for group in contents.layout.groups:
        if len(group.sources) != 1 or len(group.shapes) != 1:
            continue
        source = group.sources[0]
        (name,) = group.shapes
        if source.endswith(".weight") and name.endswith(".weight") and _kept_shape(group):
            paths[source.removesuffix(".weight")] = name.removesuffix(".weight")
    return paths


def _kept_shape(group: TensorGroup) -> bool:
    """Whether the tensor on disk is the source itself."""
    (name,) = group.shapes
    # Identity: an operation would return another tensor, even one of the same shape.
    probe = torch.empty(group.shapes[name], device="meta")
    return group.make([probe])[name] is probe


def ignored(blueprint: Blueprint, contents: Contents, rows: Sequence[LayerRow]) -> list[str]:
    """Modules that stay as they are: linear layers of every class, and owners of the blocks' other matrices.

    By their paths on disk and, where transformers has others, in the model: it compares a config with the latter.
    """
    with torch.device("meta"):
        model = blueprint.build()
    stacks = {row.stack for row in rows}
    stored = _stored_names(contents)
    quantized = {row.name for row in rows if row.method != UNQUANTIZED and not row.stack}
    linear = [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear) and path not in quantized
    ]
    others = matrices(model, blueprint.blocks(model), [*quantized, *linear])
    owners = [matrix.owner for matrix in others if matrix.name not in stacks]
    names = []
    for path in [*linear, *owners]:
        names.append(stored.get(path, path))
        if isinstance(blueprint, HuggingFaceModel):  # a native model's paths are its own, not transformers'
            names.append(path)
    for group in contents.layout.untrained:  # of a vision tower
        names += [name.removesuffix(".weight") for name in group.shapes if name.endswith(".weight")]
    return list(dict.fromkeys(names))


def other_rows(contents: Contents, rows: Sequence[LayerRow]) -> list[LayerRow]:
    """The rows of the folder's tensors that are no matrices of the blocks, by their names on disk."""
    known = {row.stack or row.name for row in rows}
    others = []
    for group in contents.layout.groups:
        # The rows of stacks have the names of tensors, those of linear layers the paths of modules.
        if not known & {path for name in group.sources for path in (name, name.removesuffix(".weight"))}:
            bits = 8.0 * contents.dtypes[group.sources[0]].itemsize
            others += [
                LayerRow(name.removesuffix(".weight"), shape, UNQUANTIZED, 0.0, bits, _OUTSIDE)
                for name, shape in group.shapes.items()
            ]
    return others


_OUTSIDE = "embeddings, the output layer and vectors are not quantized"


def write_quantized(
    target: Path,
    contents: Contents,
    state: PassState,
    config: Mapping[str, Any],
    report: Mapping[str, Any],
) -> Written:
    """Write the folder from the finished blocks of a pass. Raises as ``write_model``.

    Args:
        config: the value of ``quantization_config``. report: written as ``quantization.json``.
    """
    reading = _Reading(contents, state, readable=config["quant_method"] == METHOD)
    groups = [tensor_group for group in contents.layout.groups for tensor_group in reading.groups(group)]
    whole = {**contents.layout.config, "quantization_config": dict(config)}
    layout = replace(contents.layout, config=whole, groups=groups)
    text = json.dumps(report, indent=1).encode() + b"\n"
    extra = {**contents.extra_files, QUANTIZATION_REPORT: lambda: text}
    return write_model(target, Contents(layout, reading.dtypes, reading.read, extra))


class _Reading:
    """The tensors of the quantized model: packed, changed, or as before. ``readable``: transformers reads them."""

    def __init__(self, contents: Contents, state: PassState, readable: bool) -> None:
        self._contents = contents
        self._state = state
        self._readable = readable
        self._changed = state.changed()
        self._weights = {f"{row.name}.weight": (row, read) for row, read in state.weights()}
        # The stored tensors of the layer that was read last: the writer asks for all of one layer in a row.
        self._newest: tuple[str, Mapping[str, Tensor]] = "", {}
        self.dtypes = dict(contents.dtypes)
        self._packed: dict[str, tuple[str, str]] = {}
        for name, (row, _) in self._weights.items():
            for suffix, stored in row.tensors.items():
                self.dtypes[f"{row.name}.{suffix}"] = form_of(stored)[0]
                self._packed[f"{row.name}.{suffix}"] = name, suffix

    def groups(self, group: TensorGroup) -> list[TensorGroup]:
        """The tensors of the folder. What transformers converts while it loads, it has already converted.

        Its readers of packed weights expect the sources of every conversion to be packed too.
        """
        names = list(group.shapes) if group.slices else group.sources[:1]
        packed = [self._weights[name][0] for name in names if name in self._weights]
        if not packed:
            unconverted = group.unconverted.items() if self._readable else ()
            return [unchanged_tensor(name, name, shape) for name, shape in unconverted] or [group]
        return [
            unchanged_tensor(
                f"{row.name}.{suffix}", f"{stored.removesuffix('.weight')}.{suffix}", form_of(form)[1]
            )
            for row, stored in zip(packed, group.shapes, strict=True)
            for suffix, form in row.tensors.items()
        ]

    def read(self, name: str) -> Tensor:
        if name in self._packed:
            layer, suffix = self._packed[name]
            if self._newest[0] != layer:
                self._newest = "", {}  # frees the layer before, so that one is in memory
                self._newest = layer, self._weights[layer][1]()
            return self._newest[1][suffix]
        if name in self._changed:
            return self._state.read_changed(self._changed[name], name)
        return self._contents.read(name)
