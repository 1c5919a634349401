"""How a model lies in a folder of the Hugging Face kind: its config, and which tensors of it make which on disk.

A model says this as data, and train/model_folder.py writes it. A group is what must be in memory at once to be written:
one tensor as a rule, all experts of a block or the three projections that a file has as one otherwise. So the memory
that writing needs is that of the largest group, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

Shape = tuple[int, ...]
Make = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Group:
    """Tensors of a folder that are made together.

    Attributes:
        sources: the model's tensors that they are made of, by canonical name; the first decides their dtype.
        shapes: what they are called on disk, and their shapes.
        make: the tensors by their names on disk, of the sources'.
    """

    sources: tuple[str, ...]
    shapes: Mapping[str, Shape]
    make: Make


@dataclass(frozen=True)
class Layout:
    """A folder before it is written: ``config.json``, the groups in the order of the files, and files to copy."""

    config: Mapping[str, Any]
    groups: Sequence[Group]
    copied: Sequence[Path] = ()


def as_it_is(source: str, stored: str, shape: Shape) -> Group:
    """A tensor that is the same on disk."""
    return Group((source,), {stored: shape}, lambda tensors: {stored: tensors[0]})
