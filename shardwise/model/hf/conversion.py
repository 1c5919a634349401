"""Reads Hugging Face weight files into this rank's shards of a transformers model.

Names in a file can differ from the model's: older names, other prefixes, one tensor per expert. transformers describes
the differences as renamings and converters, which are used here. A renamed tensor is read by slice. A converted one
(experts, fused projections) is read whole, one block's at a time.

The whole model decides which tensors the files must contain, so all ranks report the same error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError
from shardwise.model.files.safetensors_reader import WeightFiles
from shardwise.model.hf.source import MTP_BLOCKS
from shardwise.runtime.parallel.expert_load import COUNTS
from shardwise.runtime.parallel.shard_slices import (
    canonical_name,
    local_part,
    local_slices,
    named_parameters,
    share,
    shared_names,
)
from shardwise.runtime.torch_private import non_persistent_buffers, version_of


@dataclass
class Conversion:
    """Tensors on disk that a converter turns into one or more tensors of the model; ``first`` is the first of these."""

    converter: Any
    first: str
    sources: list[tuple[str, str]] = field(default_factory=list)  # (pattern that matched, name on disk)

    def run(self, files: WeightFiles, model: nn.Module) -> dict[str, Tensor]:
        """The whole converted tensors by name."""
        converter = copy.deepcopy(self.converter)  # adding tensors changes it, and `run` may be called again
        for pattern, name in self.sources:
            converter.add_tensor(self.first, name, pattern, files.read(name))
        tensors = converter.convert(self.first, model=model, config=model.config)
        # Some converters give a list of one tensor.
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


@dataclass
class Sources:
    """The file name of each tensor of the model, its conversion if any, and the file's extra tensors."""

    direct: dict[str, str] = field(default_factory=dict)
    converted: dict[str, Conversion] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)

    def covers(self, name: str) -> bool:
        return name in self.direct or name in self.converted


_OTHER_HEADS = (r"(^|\.)pooler\.", r"^cls\.seq_relationship\.")
"""Heads of BERT's pretraining that a masked language model does not use."""


_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"attn\.masked_bias$")
"""Older versions of transformers saved these; newer ones compute them."""

# Attributes of transformers' models: patterns of tensors that files may lack, and may have in addition.
_MISSING = "_keys_to_ignore_on_load_missing"
_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"


def excuse(model: nn.Module, missing: str, unexpected: str = "") -> None:
    """Let the files of a model lack the layer ``missing``, and have the layer ``unexpected``."""
    for attribute, layer in ((_MISSING, missing), (_UNEXPECTED, unexpected)):
        if layer:
            known = getattr(model, attribute, None) or ()
            setattr(model, attribute, [*known, rf"^{re.escape(layer)}\."])


def excuse_non_text(model: nn.Module) -> None:
    """Let the files have weights outside of this language model, such as those of a vision tower."""
    kept = {".".join(name.split(".")[:2]) for name in model.state_dict()}
    unexpected = getattr(model, _UNEXPECTED, None) or ()
    pattern = rf"^(?!.*language_model\.)(?!{'|'.join(map(re.escape, sorted(kept)))})"
    setattr(model, _UNEXPECTED, [*unexpected, pattern])


def fill_from_files(model: nn.Module, reference: nn.Module, files: WeightFiles) -> None:
    """Fill the parameters and saved buffers of ``model`` from files.

    Args:
        model: materialized; the whole model or a stage, plain or sharded.
        reference: the whole model on the meta device.

    Raises CheckpointError, naming the tensor, if the files do not fit.
    """
    # The whole model tells which tensors are shared: a stage may have one name of two.
    aliases = shared_names(reference)
    share(model, aliases)
    sources = match_names(reference, files)
    require_fit(reference, files, sources, aliases)
    names = _one_name_each(aliases, sources)
    conversions: dict[int, tuple[Conversion, list[tuple[str, Tensor]]]] = {}
    for name, tensor in _saved_tensors(model, reference):
        name = names.get(name, name)  # of a shared tensor, the name that the files have
        if name in sources.direct:
            files.read_into(tensor, sources.direct[name])
            _check_copies(tensor, name, aliases, sources, files)
        elif name in sources.converted:
            conversion = sources.converted[name]
            # All tensors of a conversion are filled together, so its sources are read once.
            conversions.setdefault(id(conversion), (conversion, []))[1].append((name, tensor))
    for conversion, wanted in conversions.values():
        _fill_converted(conversion, wanted, files, reference)


def _check_copies(
    tensor: Tensor, name: str, aliases: dict[str, str], sources: Sources, files: WeightFiles
) -> None:
    """Raise CheckpointError if a shared tensor is on disk under two names with different values."""
    for alias, first in aliases.items():
        if first == name and alias in sources.direct and not files.agrees_with(tensor, sources.direct[alias]):
            raise CheckpointError(
                f"tensors {name} and {alias} differ",
                where=files.file_of(sources.direct[alias]),
                why="config.json says they are tied",
                fix="set tie_word_embeddings to false in config.json",
            )


@torch.no_grad()
def _fill_converted(
    conversion: Conversion, wanted: list[tuple[str, Tensor]], files: WeightFiles, reference: nn.Module
) -> None:
    values = conversion.run(files, reference)
    for name, tensor in wanted:
        if name not in values or values[name].shape != tensor.shape:
            shape = tuple(values[name].shape) if name in values else "nothing"
            raise CheckpointError(
                f"tensor {name} cannot be converted",
                where=str(files.folder),
                why=f"the conversion gives {shape}, the model needs {tuple(tensor.shape)}",
            )
        local_part(tensor).copy_(values[name][local_slices(tensor)])


def match_names(reference: nn.Module, files: WeightFiles) -> Sources:
    """Map each name on disk to a tensor of the model, as transformers does."""
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
        # A renaming of older files matches a name of newer ones.
        if target not in expected and name in expected:
            target = name
            pattern = None
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
    # A converter names its targets by patterns that differ in a part of the name, such as q, k and v.
    first, *others = converter.target_patterns
    targets = (target, *(target.replace(first, other) for other in others))
    conversion = Conversion(converter, target)
    sources.converted.update({name: conversion for name in targets if name in expected})


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts experts.2 before experts.10; converters stack their sources in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def require_fit(reference: nn.Module, files: WeightFiles, sources: Sources, aliases: dict[str, str]) -> None:
    """Raise CheckpointError for the first tensor that is missing, has another shape, or is not in the model."""
    expected = reference.state_dict()
    for name, source in sources.direct.items():
        if files.shapes[source] != tuple(expected[name].shape):
            raise CheckpointError(
                f"tensor {source} has another shape",
                where=files.file_of(source),
                why=f"{list(files.shapes[source])} in the file, {list(expected[name].shape)} in the model",
                fix="check that config.json belongs to these weights",
            )
        if expected[name].is_floating_point():
            files.require_floating(source)
    for name, conversion in sources.converted.items():
        if expected[name].is_floating_point():
            for _, source in conversion.sources:
                files.require_floating(source)
    groups: dict[str, list[str]] = {}
    for name in expected:
        groups.setdefault(aliases.get(name, name), []).append(name)
    ignored = _pattern(reference, _MISSING)
    for name, group in groups.items():
        if not any(sources.covers(member) or ignored.search(member) for member in group):
            raise CheckpointError(f"tensor {name} is missing", where=str(files.folder), why="no file has it")
    ignored = _pattern(reference, _UNEXPECTED, *_OLD_BUFFERS, *_OTHER_HEADS, *_mtp_blocks(reference))
    for name in sources.extra:
        if not ignored.search(name) and not files.is_padding(name):
            raise CheckpointError(
                f"tensor {name} is not in the model",
                where=files.file_of(name),
                fix="check that config.json belongs to these weights",
            )


def _mtp_blocks(model: Any) -> Iterator[str]:
    """Patterns of the weights of multi-token prediction."""
    text = model.config.get_text_config()
    for index in range(getattr(text, MTP_BLOCKS, None) or 0):
        yield rf"(^|\.)layers\.{text.num_hidden_layers + index}\."


def _pattern(model: nn.Module, attribute: str, *more: str) -> re.Pattern[str]:
    patterns = [*(getattr(model, attribute, None) or ()), *more]
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")  # (?!) matches nothing


def _one_name_each(aliases: dict[str, str], sources: Sources) -> dict[str, str]:
    """Map each name of a shared tensor to the name on disk; to its first name if several are."""
    chosen: dict[str, str] = {}
    for alias, first in aliases.items():
        # A file has one of them, not always the first.
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

    transformers computes them in ``_init_weights``, of the buffer's module or of a module around it; its flag
    ``_is_hf_initialized`` protects the parameters. Raises CheckpointError for a buffer that the model does not compute.
    """
    from transformers import PreTrainedModel, initialization

    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    modules = dict(model.named_modules())
    missing = {
        path: {name: (module.get_buffer(name), version_of(module.get_buffer(name))) for name in names}
        for path, module in modules.items()
        if (names := non_persistent_buffers(module) - {COUNTS})
    }
    with initialization.guard_torch_init_functions():
        for path, buffers in missing.items():
            around = [modules[part] for part in _ancestors(path)]  # innermost first, with itself
            owner = next(module for module in around if isinstance(module, PreTrainedModel))
            for module in around:
                # A buffer that was replaced, or written in place, is defined.
                undefined = [
                    name
                    for name, (buffer, version) in buffers.items()
                    if modules[path].get_buffer(name) is buffer and version_of(buffer) == version
                ]
                if not undefined:
                    break
                owner._init_weights(module)
            else:
                raise CheckpointError(
                    f"buffer {path}.{undefined[0]} cannot be computed",
                    why=f"{type(owner).__name__} does not initialize it",
                )


def _ancestors(path: str) -> Iterator[str]:
    """The path of a module, those of the modules around it, and "", the model's."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
