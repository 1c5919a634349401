"""From the names and layouts on disk to those of a transformers model, for the part of it this rank holds.

Names differ between a file and a model: older names, a missing or extra base prefix, one tensor per expert
where the model has one for all. transformers describes this as data, renamings and converters, and that data
is used here. A renamed tensor is read by slice. A converted one (experts, fused projections) is read whole,
converted and then cut: one block's worth at a time is the price.

What must be on disk is decided by the whole model, not by the part this rank holds, so all ranks agree on
whether the files fit the model, and an error does not depend on who finds it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError
from shardwise.model.slices import (
    canonical_name,
    local_part,
    local_slices,
    named_parameters,
    share,
    shared_names,
)
from shardwise.model.weights import WeightFiles


@dataclass
class Conversion:
    """Several tensors on disk that together become one or more of the model, the first of them ``first``."""

    converter: Any
    first: str
    sources: list[tuple[str, str]] = field(default_factory=list)  # (pattern that matched, name on disk)

    def run(self, files: WeightFiles, model: nn.Module) -> dict[str, Tensor]:
        """The whole target tensors by name."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.first, name, pattern, files.read(name))
        found = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


@dataclass
class Sources:
    """Where each tensor of a model comes from, and what on disk has no place in it."""

    direct: dict[str, str] = field(default_factory=dict)
    converted: dict[str, Conversion] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)

    def covers(self, name: str) -> bool:
        return name in self.direct or name in self.converted


def fill_from_files(model: nn.Module, reference: nn.Module, folder: Path) -> None:
    """Fill the parameters and saved buffers of ``model`` from a folder of safetensors.

    Args:
        model: materialised; the whole model or a part of it, plain or sharded.
        reference: the whole model on the meta device.

    Raises CheckpointError, naming the tensor, when the files do not fit the model.
    """
    files = WeightFiles(folder)
    aliases = shared_names(reference)
    share(model, aliases)
    sources = match_names(reference, files)
    require_fit(reference, files, sources, aliases)
    names = _one_name_each(aliases, sources)
    conversions: dict[int, tuple[Conversion, list[tuple[str, Tensor]]]] = {}
    for name, tensor in _saved_tensors(model, reference):
        name = names.get(name, name)
        if name in sources.direct:
            files.read_into(tensor, sources.direct[name])
            _check_copies(tensor, name, aliases, sources, files)
        elif name in sources.converted:
            conversion = sources.converted[name]
            conversions.setdefault(id(conversion), (conversion, []))[1].append((name, tensor))
    for conversion, wanted in conversions.values():
        _fill_converted(conversion, wanted, files, reference)


def _check_copies(
    tensor: Tensor, name: str, aliases: dict[str, str], sources: Sources, files: WeightFiles
) -> None:
    """Raise CheckpointError when a shared tensor is on disk under two names with two values."""
    for alias, first in aliases.items():
        if first == name and alias in sources.direct and not files.agrees_with(tensor, sources.direct[alias]):
            raise CheckpointError(
                f"tensors {name} and {alias} differ",
                where=files.file_of(sources.direct[alias]),
                why="config.json says they are one",
                fix="set tie_word_embeddings to false in config.json",
            )


@torch.no_grad()
def _fill_converted(
    conversion: Conversion, wanted: list[tuple[str, Tensor]], files: WeightFiles, reference: nn.Module
) -> None:
    values = conversion.run(files, reference)
    for name, tensor in wanted:
        if name not in values or values[name].shape != tensor.shape:
            found = tuple(values[name].shape) if name in values else "nothing"
            raise CheckpointError(
                f"tensor {name} cannot be put together",
                where=str(files.folder),
                why=f"its parts give {found}, the model wants {tuple(tensor.shape)}",
            )
        local_part(tensor).copy_(values[name][local_slices(tensor)])


def match_names(reference: nn.Module, files: WeightFiles) -> Sources:
    """Say for every name on disk which tensor of the model it belongs to, as transformers would."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    expected = reference.state_dict()
    prefix: str = getattr(reference, "base_model_prefix", "")
    transforms = get_model_conversion_mapping(reference)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources = Sources()
    for name in sorted(files.shapes, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target not in expected:
            sources.extra.append(name)
        elif pattern is None:
            sources.direct[target] = name
        else:
            if target not in sources.converted:
                _add_conversion(sources, by_pattern[pattern], target, expected)
            sources.converted[target].sources.append((pattern, name))
    return sources


def _add_conversion(sources: Sources, converter: Any, target: str, expected: Iterable[str]) -> None:
    first, *others = converter.target_patterns
    targets = (target, *(target.replace(first, other) for other in others))
    conversion = Conversion(converter, target)
    sources.converted.update({name: conversion for name in targets if name in expected})


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts experts.2 before experts.10: a converter stacks its sources in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def require_fit(reference: nn.Module, files: WeightFiles, sources: Sources, aliases: dict[str, str]) -> None:
    """Raise CheckpointError for the first tensor that is missing, of another shape, or has no place."""
    expected = reference.state_dict()
    for name, source in sources.direct.items():
        if files.shapes[source] != tuple(expected[name].shape):
            raise CheckpointError(
                f"tensor {source} has another shape",
                where=files.file_of(source),
                why=f"{list(files.shapes[source])} in the file, {list(expected[name].shape)} in the model",
                fix="check that config.json belongs to these weights",
            )
    groups: dict[str, list[str]] = {}
    for name in expected:
        groups.setdefault(aliases.get(name, name), []).append(name)
    ignored = _pattern(reference, "_keys_to_ignore_on_load_missing")
    for name, group in groups.items():
        if not any(sources.covers(member) or ignored.search(member) for member in group):
            raise CheckpointError(f"tensor {name} is missing", where=str(files.folder), why="no file has it")
    # Buffers that older versions saved and newer ones compute.
    ignored = _pattern(
        reference, "_keys_to_ignore_on_load_unexpected", r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"
    )
    for name in sources.extra:
        if not ignored.search(name):
            raise CheckpointError(
                f"tensor {name} has no place in the model",
                where=files.file_of(name),
                fix="check that config.json belongs to these weights",
            )


def _pattern(model: nn.Module, attribute: str, *more: str) -> re.Pattern[str]:
    patterns = [*(getattr(model, attribute, None) or ()), *more]
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")


def _one_name_each(aliases: dict[str, str], sources: Sources) -> dict[str, str]:
    """For each name of a shared tensor, the one that is on disk; its first name if several are."""
    chosen: dict[str, str] = {}
    for alias, first in aliases.items():
        if not sources.covers(first) and sources.covers(alias):
            chosen.setdefault(first, alias)
    return chosen | {alias: chosen.get(first, first) for alias, first in aliases.items()}


def _saved_tensors(model: nn.Module, reference: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from named_parameters(model)
    saved = reference.state_dict().keys()
    for name, buffer in model.named_buffers():
        if canonical_name(name) in saved:
            yield canonical_name(name), buffer


@torch.no_grad()
def restore_buffers(model: nn.Module) -> None:
    """Compute the buffers that are never saved (rotary frequencies), which ``to_empty`` left undefined.

    transformers makes them where it makes initial weights, in ``_init_weights`` of the model that owns a
    module; its own mark keeps parameters as they are.

    Raises CheckpointError for a buffer of floats that the model does not know how to make.
    """
    from transformers import PreTrainedModel, initialization

    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    owners: list[tuple[str, PreTrainedModel]] = []
    with initialization.guard_torch_init_functions():
        for path, module in model.named_modules():
            if isinstance(module, PreTrainedModel):
                owners.append((path, module))
            unsaved = module._non_persistent_buffers_set
            buffers = {k: b for k, b in module.named_buffers(recurse=False) if k in unsaved}
            if not buffers:
                continue
            for buffer in buffers.values():
                buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
            owner = max((o for o in owners if _within(path, o[0])), key=lambda o: len(o[0]))[1]
            owner._init_weights(module)
            for name, buffer in buffers.items():
                if buffer.is_floating_point() and buffer.isnan().any():
                    raise CheckpointError(
                        f"buffer {path}.{name} cannot be computed",
                        why=f"{type(owner).__name__} does not say how",
                    )


def _within(path: str, ancestor: str) -> bool:
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")
