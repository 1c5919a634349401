"""The form of a model as a Hugging Face folder: its config, and how its tensors become tensors on disk.

A blueprint describes the folder as data, and exporter/hf_writer.py writes it. A group holds tensors that must be in
memory together, such as the three parts of a fused projection. So writing needs the memory of the largest group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TensorShape = tuple[int, ...]
Make = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class StackSlice:
    """A matrix on disk that is a part of a stack of the model: ``stack[index, start:stop]``.

    Attributes:
        stack: canonical name of the tensor [count, rows, columns].
    """

    stack: str
    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class TensorGroup:
    """Tensors on disk that are made together.

    Attributes:
        sources: canonical names of the model's tensors they are made of; the first decides the dtype.
        shapes: names on disk and shapes.
        make: returns the tensors by name on disk, given the sources.
        unconverted: the sources under the names of transformers' model, with their shapes, if it loads them so too.
        slices: by name on disk, where the matrices are in stacks, such as those of experts; {} for other tensors.
        dtype: of a group without sources.
    """

    sources: tuple[str, ...]
    shapes: Mapping[str, TensorShape]
    make: Make
    unconverted: Mapping[str, TensorShape] = field(default_factory=dict)
    slices: Mapping[str, StackSlice] = field(default_factory=dict)
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class HFFolder:
    """A folder to be written: ``config.json`` (none if empty), the groups in file order, and files to copy.

    ``unrounded``: names of the model's tensors that are written in the dtype that training had them in.
    ``untrained``: tensors of the source that the model lacks, such as a vision tower; groups without sources.
    """

    config: Mapping[str, Any]
    groups: Sequence[TensorGroup]
    copied: Sequence[Path] = ()
    unrounded: frozenset[str] = frozenset()
    untrained: Sequence[TensorGroup] = ()


def unchanged_tensor(source: str, stored: str, shape: TensorShape) -> TensorGroup:
    """A tensor with the same values on disk."""
    return TensorGroup((source,), {stored: shape}, lambda tensors: {stored: tensors[0]})
