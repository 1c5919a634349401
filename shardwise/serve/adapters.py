"""An adapter as it is served: from a folder in PEFT's format, or from the checkpoint of the run that trained it.

Which layers it is for, and of what rank, is read off its tensors and not off the list of targets in its config, so that
what is there is what is added. Tensors are read when the bank has a place for them, one layer at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.core.errors import CheckpointError
from shardwise.core.sections import AdapterSpec
from shardwise.model.lora import MAGNITUDE, A, B
from shardwise.model.peft import CONFIG, TENSORS, AdapterFiles
from shardwise.train.export import FOLDER

_NAME = re.compile(rf"(.+)\.(?:({A}|{B})\.weight|({MAGNITUDE}))")

Layer = tuple[Tensor, Tensor, Tensor | None]
"""A [r, i], B [o, r], and of DoRA the magnitudes [o]."""


@dataclass(frozen=True)
class Adapter:
    """One adapter: its name, where it is from, and the layers that it is for.

    Attributes:
        scale: what B A x is multiplied with.
        shapes: of A and B of every layer, by its path.
        turns: whether it has magnitudes (DoRA).
        fingerprint: of the base that it was trained beside, where that is said.
        tensor: reads one of its tensors by its name.
    """

    name: str
    where: str
    scale: float
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    turns: bool
    fingerprint: str | None
    tensor: Callable[[str], Tensor]

    @property
    def ranks(self) -> Mapping[str, int]:
        """The rank on every layer, by its path."""
        return {path: a[0] for path, (a, _) in self.shapes.items()}

    def shape(self, path: str) -> tuple[int, int]:
        """[o, i] of the layer that this is for."""
        a, b = self.shapes[path]
        return b[0], a[1]

    def read(self, path: str) -> Layer:
        """What is added to one layer. Raises CheckpointError for values that are not finite."""
        names = [f"{path}.{A}.weight", f"{path}.{B}.weight", *([f"{path}.{MAGNITUDE}"] if self.turns else [])]
        tensors = [self.tensor(name) for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(
                    "the adapter has values that are not finite",
                    where=self.where,
                    why=name,
                    fix="take an earlier checkpoint",
                )
        return tensors[0], tensors[1], tensors[2] if self.turns else None


def open_adapter(name: str, folder: Path) -> Adapter:
    """An adapter's folder, or that of a run which trained one.

    Raises CheckpointError, naming the place, for what is missing, damaged or of another kind.
    """
    if not folder.is_dir():
        raise CheckpointError("no such adapter", where=str(folder), why="there is no such folder")
    if not (folder / CONFIG).is_file() and (folder / FOLDER / CONFIG).is_file():
        folder = folder / FOLDER
    files = AdapterFiles(folder)
    rank, alpha = files.config.get("r"), files.config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(
            "the adapter's config cannot be read",
            where=str(folder / CONFIG),
            why=f"r is {rank}, lora_alpha {alpha}",
        )
    scale = alpha / (math.sqrt(rank) if files.config.get("use_rslora") else rank)
    where, turns = str(folder / TENSORS), bool(files.config.get("use_dora"))
    shapes = layers_of(files.shapes, rank, turns, where)
    return Adapter(name, where, scale, shapes, turns, files.fingerprint, files.read)


def adapter_of(name: str, where: str, spec: AdapterSpec, tensors: Mapping[str, Tensor]) -> Adapter:
    """The adapter of a checkpoint, from its tensors by name."""
    scale = spec.alpha / (math.sqrt(spec.rank) if spec.rank_stabilized else spec.rank)
    turns = spec.name == "dora"
    shapes = {tensor: tuple(value.shape) for tensor, value in tensors.items()}
    layers = layers_of(shapes, spec.rank, turns, where)
    return Adapter(name, where, scale, layers, turns, None, tensors.__getitem__)


def layers_of(
    shapes: Mapping[str, tuple[int, ...]], rank: int, turns: bool, where: str
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of A and B by layer. Raises CheckpointError for tensors that make no whole adapter."""
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise _incomplete(where, f"{name} is no part of an adapter that is known here")
        parts.setdefault(match[1], {})[match[2] or match[3]] = shape
    if not parts:
        raise _incomplete(where, "it has no tensors")
    for path, found in parts.items():
        wanted = {A, B, MAGNITUDE} if turns else {A, B}
        if found.keys() != wanted:
            odd = ", ".join(sorted(wanted ^ found.keys()))
            raise _incomplete(where, f"of {path} there is too much or too little: {odd}")
        a, b = found[A], found[B]
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise _incomplete(where, f"of {path}, A is {list(a)} and B {list(b)}, and the rank is {rank}")
        if turns and found[MAGNITUDE] != (b[0],):
            raise _incomplete(where, f"of {path}, there are {list(found[MAGNITUDE])} magnitudes")
    return {path: (found[A], found[B]) for path, found in parts.items()}


def _incomplete(where: str, why: str) -> CheckpointError:
    return CheckpointError("the adapter is not whole", where=where, why=why, fix="save or copy it again")
