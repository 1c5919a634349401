"""Writes a transformers model in the form of its source folder: same names, shapes and config, new values.

Renamings and conversions (`conversion`) are reversed, by transformers' own converters. A conversion that does not
reverse to the source's names is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.files.folder_layout import StackSlice, TensorGroup, TensorShape, unchanged_tensor
from shardwise.model.files.safetensors_reader import DTYPES_BY_NAME, WeightFiles
from shardwise.model.hf.conversion import Conversion, match_names, require_fit
from shardwise.runtime.parallel.shard_slices import shared_names


class FolderWeights:
    """The tensors of a folder under the names of the model, one at a time.

    Args:
        reference: the whole model on the meta device.

    Raises CheckpointError if the files are damaged or belong to another model.
    """

    def __init__(self, reference: nn.Module, files: WeightFiles) -> None:
        self._reference = reference
        self._files = files
        self._sources = match_names(reference, files)
        aliases = shared_names(reference)
        require_fit(reference, files, self._sources, aliases)
        self._other_names: dict[str, list[str]] = {}
        for alias, first in aliases.items():
            self._other_names.setdefault(first, []).append(alias)

    def kind(self, name: str) -> str:
        """The dtype of a tensor on disk, as safetensors names it."""
        name = self._present(name)
        if name in self._sources.direct:
            return self._files.kinds[self._sources.direct[name]]
        return self._files.kinds[self._sources.converted[name].sources[0][1]]

    def read(self, name: str) -> Tensor:
        name = self._present(name)
        if name in self._sources.direct:
            return self._files.read(self._sources.direct[name])
        return self._sources.converted[name].run(self._files, self._reference)[name]

    def _present(self, name: str) -> str:
        """The name under which the files have a shared tensor."""
        names = [name, *self._other_names.get(name, [])]
        return next((stored for stored in names if self._sources.covers(stored)), name)


def stored_groups(reference: nn.Module, files: WeightFiles) -> Iterator[TensorGroup]:
    """The groups that reproduce these files from the whole model on the meta device."""
    aliases = shared_names(reference)
    sources = match_names(reference, files)
    done: set[int] = set()
    for name in reference.state_dict():
        if name in sources.direct:
            stored = sources.direct[name]
            yield unchanged_tensor(aliases.get(name, name), stored, files.shapes[stored])
        elif name in sources.converted and id(sources.converted[name]) not in done:
            conversion = sources.converted[name]
            done.add(id(conversion))
            names = tuple(n for n, other in sources.converted.items() if other is conversion)
            yield _reversed_group(reference, conversion, names, files)


def untrained_groups(reference: nn.Module, files: WeightFiles) -> Iterator[TensorGroup]:
    """The tensors that the model lacks, as they are stored: a vision tower, blocks of multi-token prediction."""
    for name in match_names(reference, files).extra:
        if not files.is_padding(name):
            make = partial(_read_alone, files, name)
            yield TensorGroup((), {name: files.shapes[name]}, make, dtype=DTYPES_BY_NAME[files.kinds[name]])


def _read_alone(files: WeightFiles, name: str, tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
    return {name: files.read(name)}


def _reversed_group(
    reference: nn.Module, conversion: Conversion, names: tuple[str, ...], files: WeightFiles
) -> TensorGroup:
    shapes = {stored: files.shapes[stored] for _, stored in conversion.sources}

    def make(tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
        stored = _reverse_conversion(reference, conversion, dict(zip(names, tensors, strict=True)))
        if {name: tuple(tensor.shape) for name, tensor in stored.items()} != shapes:
            raise RecipeError(
                "the model cannot be written under the names of its source",
                where=str(files.folder),
                why=f"the conversion of {names[0]} does not reverse to {next(iter(shapes))}",
            )
        return stored

    state = reference.state_dict()
    unconverted = {name: tuple(state[name].shape) for name in names}
    return TensorGroup(names, shapes, make, unconverted, _stack_slices(conversion, unconverted, shapes))


_STACKING = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
"""Operations of converters that stack matrices, and join the stacks of several patterns row by row."""


def _stack_slices(
    conversion: Conversion, targets: Mapping[str, TensorShape], shapes: Mapping[str, TensorShape]
) -> dict[str, StackSlice]:
    """Where a converter puts its sources into the stack [count, rows, columns] that it makes; {} for another one."""
    operations = conversion.converter.operations
    dimensions = [operation.dim for operation in operations if hasattr(operation, "dim")]
    plain = [type(operation).__name__ for operation in operations] in _STACKING
    if not plain or dimensions != [0, 1][: len(dimensions)] or len(targets) != 1:
        return {}
    ((stack, (count, rows, _)),) = targets.items()
    slices = {}
    start = 0
    # The matrices of a pattern are one stack, in the order of their numbers; the next pattern's rows follow.
    for source_pattern in conversion.converter.source_patterns:
        names = [name for pattern, name in conversion.sources if pattern == source_pattern]
        height = shapes[names[0]][0] if names else 0
        for index, name in enumerate(names):
            slices[name] = StackSlice(stack, index, start, start + height)
        start += height
    whole = start == rows and len(slices) == count * len(conversion.converter.source_patterns)
    return slices if whole else {}


def _reverse_conversion(
    reference: nn.Module, conversion: Conversion, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors by name on disk, as transformers' ``revert_weight_conversion`` makes them, for one converter."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_converters, apply_renamings

    converter: Any = None
    first = ""
    for name, tensor in tensors.items():
        back = conversion.converter.reverse_transform()
        renamed, pattern = apply_converters(name, [back])
        if converter is None:  # the first one collects the tensors of all
            converter = back
            first = renamed
        converter.add_tensor(first, name, pattern, tensor)
    model: Any = reference
    stored = converter.convert(first, model=model, config=model.config)
    expected = {stored for _, stored in conversion.sources}
    if stored.keys() != expected:  # the files have older names: reverse the renamings too
        transforms = get_model_conversion_mapping(model)[::-1]
        renamings = [t.reverse_transform() for t in transforms if isinstance(t, WeightRenaming)]
        stored = {apply_renamings(name, renamings): value for name, value in stored.items()}
    return {name: value[0] if isinstance(value, list) else value for name, value in stored.items()}
