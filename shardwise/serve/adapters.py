"""Adapters for serving: from a folder in PEFT's format, or from the checkpoint of the run that trained them.

The adapter's tensors give its layers and ranks, not the list of targets in its config. Tensors are read one layer at a
time, when the bank has allocated their place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.run_folder import ADAPTER
from shardwise.core.errors import CheckpointError
from shardwise.model.files.peft import CONFIG, TENSORS, AdapterFiles
from shardwise.model.lora import MAGNITUDE, A, B
from shardwise.recipe.sections import AdapterSpec

_NAME = re.compile(rf"(.+)\.(?:({A}|{B})\.weight|({MAGNITUDE}))")

Layer = tuple[Tensor, Tensor, Tensor | None]
"""A [r, i], B [o, r], and for DoRA the magnitudes [o]."""


@dataclass(frozen=True)
class ServedAdapter:
    """One adapter: its name, its origin, and its layers.

    Attributes:
        scale: factor of B A x.
        shapes: shapes of A and B, by path of the layer.
        turns: whether it has magnitudes (DoRA).
        fingerprint: fingerprint of the base model that it was trained with, if recorded.
        tensor: reads one of its tensors by name.
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
        """The rank by path of the layer."""
        return {path: a[0] for path, (a, _) in self.shapes.items()}

    def shape(self, path: str) -> tuple[int, int]:
        """[o, i] of the layer at `path`."""
        a, b = self.shapes[path]
        return b[0], a[1]

    def read(self, path: str) -> Layer:
        """The tensors for one layer. Raises CheckpointError for values that are not finite."""
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


def open_adapter(name: str, folder: Path) -> ServedAdapter:
    """Open an adapter's folder, or the folder of a run that trained one.

    Raises:
        CheckpointError: a file is missing, damaged or of another kind; the error names it.
    """
    if not folder.is_dir():
        raise CheckpointError("no such adapter", where=str(folder), why="there is no such folder")
    if not (folder / CONFIG).is_file() and (folder / ADAPTER / CONFIG).is_file():
        folder = folder / ADAPTER
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
    return ServedAdapter(name, where, scale, shapes, turns, files.fingerprint, files.read)


def adapter_of(name: str, where: str, spec: AdapterSpec, tensors: Mapping[str, Tensor]) -> ServedAdapter:
    """The adapter of a checkpoint, made from its named tensors."""
    scale = spec.alpha / (math.sqrt(spec.rank) if spec.rank_stabilized else spec.rank)
    turns = spec.name == "dora"
    shapes = {tensor: tuple(value.shape) for tensor, value in tensors.items()}
    layers = layers_of(shapes, spec.rank, turns, where)
    return ServedAdapter(name, where, scale, layers, turns, None, tensors.__getitem__)


def layers_of(
    shapes: Mapping[str, tuple[int, ...]], rank: int, turns: bool, where: str
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of A and B by layer. Raises CheckpointError if the tensors are not a complete adapter."""
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise _incomplete(where, f"{name} is not a tensor of a known adapter type")
        parts.setdefault(match[1], {})[match[2] or match[3]] = shape
    if not parts:
        raise _incomplete(where, "it has no tensors")
    for path, found in parts.items():
        wanted = {A, B, MAGNITUDE} if turns else {A, B}
        if found.keys() != wanted:
            odd = ", ".join(sorted(wanted ^ found.keys()))
            raise _incomplete(where, f"{path} has missing or unknown tensors: {odd}")
        a, b = found[A], found[B]
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise _incomplete(where, f"{path}: A is {list(a)}, B is {list(b)}, and the rank is {rank}")
        if turns and found[MAGNITUDE] != (b[0],):
            raise _incomplete(where, f"{path}: the magnitudes have shape {list(found[MAGNITUDE])}")
    return {path: (found[A], found[B]) for path, found in parts.items()}


def _incomplete(where: str, why: str) -> CheckpointError:
    return CheckpointError("the adapter is incomplete", where=where, why=why, fix="save or copy it again")
