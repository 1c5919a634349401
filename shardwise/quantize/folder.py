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
from shardwise.export.hf_writer import Contents, Written, write_model
from shardwise.model.blueprint import Blueprint
from shardwise.model.files.hf_folder import TensorGroup, unchanged_tensor
from shardwise.model.lora import linear_layers
from shardwise.quantize.state import KEPT, LayerRow, PassState, form_of

REPORT = "quantization.json"
"""File of the folder with the report."""


def require_packable(blueprint: Blueprint, contents: Contents) -> None:
    """Raise RecipeError if a linear layer of the blocks is stored transposed, or joined with others."""
    with torch.device("meta"):
        model = blueprint.build()
    stored = _stored_names(contents)
    found = list(linear_layers(model, blueprint.blocks(model)))
    if not found:
        raise RecipeError("no linear layers to quantize", where=f"model: {blueprint.name}")
    for path in found:
        if path not in stored or not isinstance(model.get_submodule(path), nn.Linear):
            raise RecipeError(
                "this model cannot be written with packed weights",
                where=f"model: {blueprint.name}",
                why=f"{path}.weight is stored transposed, or joined with other tensors",
                fix="take a model whose layers are stored one by one, such as the llama family",
            )


def _stored_names(contents: Contents) -> dict[str, str]:
    """Path on disk of every module whose weight [out, in] is stored as it is, by its path in the model."""
    found = {}
    for group in contents.layout.groups:
        source, names = group.sources[0], list(group.shapes)
        single = len(group.sources) == len(names) == 1
        if single and source.endswith(".weight") and names[0].endswith(".weight") and _kept_shape(group):
            found[source.removesuffix(".weight")] = names[0].removesuffix(".weight")
    return found


def _kept_shape(group: TensorGroup) -> bool:
    """Whether the tensor on disk is the source itself."""
    (name,) = group.shapes
    probe = torch.empty(group.shapes[name], device="meta")
    return group.make([probe])[name] is probe


def ignored(blueprint: Blueprint, contents: Contents, rows: Sequence[LayerRow]) -> list[str]:
    """Linear layers that stay as they are, by their names on disk."""
    with torch.device("meta"):
        model = blueprint.build()
    paths = {module: path for path, module in model.named_modules()}
    quantized, stored = {row.name for row in rows if row.method != KEPT}, _stored_names(contents)
    output = blueprint.output(model)
    names = [*linear_layers(model, []), *([paths[output]] if output is not None else [])]
    return list(dict.fromkeys(stored.get(path, path) for path in names if path not in quantized))


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
    reading = _Reading(contents, state)
    groups = [each for group in contents.layout.groups for each in reading.groups(group)]
    whole = {**contents.layout.config, "quantization_config": dict(config)}
    layout = replace(contents.layout, config=whole, groups=groups)
    text = json.dumps(report, indent=1).encode() + b"\n"
    extra = {**contents.extra_files, REPORT: lambda: text}
    return write_model(target, Contents(layout, reading.dtypes, reading.read, extra))


class _Reading:
    """The tensors of the quantized model: packed, changed, or as before."""

    def __init__(self, contents: Contents, state: PassState) -> None:
        self._contents, self._state = contents, state
        self._changed = state.changed()
        self._weights = {f"{row.name}.weight": (row, read) for row, read in state.weights()}
        self._newest: tuple[str, Mapping[str, Tensor]] = "", {}
        self.dtypes = dict(contents.dtypes)
        self._packed: dict[str, tuple[str, str]] = {}
        for name, (row, _) in self._weights.items():
            for suffix, stored in row.tensors.items():
                self.dtypes[f"{row.name}.{suffix}"] = form_of(stored)[0]
                self._packed[f"{row.name}.{suffix}"] = name, suffix

    def groups(self, group: TensorGroup) -> list[TensorGroup]:
        if group.sources[0] not in self._weights:
            return [group]
        row, _ = self._weights[group.sources[0]]
        (stored,) = group.shapes
        path = stored.removesuffix(".weight")
        return [
            unchanged_tensor(f"{row.name}.{suffix}", f"{path}.{suffix}", form_of(form)[1])
            for suffix, form in row.tensors.items()
        ]

    def read(self, name: str) -> Tensor:
        if name in self._packed:
            layer, suffix = self._packed[name]
            if self._newest[0] != layer:
                self._newest = "", {}
                self._newest = layer, self._weights[layer][1]()
            return self._newest[1][suffix]
        if name in self._changed:
            return self._state.read_changed(self._changed[name], name)
        return self._contents.read(name)
