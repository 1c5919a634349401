"""Adapters for serving: from a folder in PEFT's format, or from the checkpoint of the run that trained them.

The adapter's tensors give its layers and ranks, not the list of targets in its config. Tensors are read one layer at a
time, when the bank has allocated their place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.adapter import adapter_folder
from shardwise.core.errors import CheckpointError
from shardwise.model.expert_lora import EXPERT_A, EXPERT_B, EXPERT_MAGNITUDE, expert_adapter
from shardwise.model.files.peft import TENSORS, AdapterFiles
from shardwise.model.lora import MAGNITUDE, A, B, is_adapter
from shardwise.recipe.sections import AdapterSpec

_TENSOR_NAME = re.compile(rf"(.+)\.(?:({A}|{B})\.weight|({MAGNITUDE})|{B}\.bias)")
_BIAS = f"{B}.bias"

Layer = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""A [r, i], B [o, r], for DoRA the magnitudes [o], and for lora_bias the bias [o]."""


@dataclass(frozen=True)
class ServedAdapter:
    """One adapter: its name, its origin, and its layers.

    Attributes:
        scales: factor of B A x by path of the layer.
        shapes: shapes of A and B, by path of the layer.
        turns: whether it has magnitudes (DoRA).
        biased: whether B has a bias.
        fingerprint: fingerprint of the base model that it was trained with, if recorded.
        tensor: reads one of its tensors by name.
        modules: shapes of the tensors of modules that were trained in full, by name.
        files: its files; None for a checkpoint's.
        stacks: shapes of A and B of experts, by path of the stack.
    """

    name: str
    where: str
    scales: Mapping[str, float]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    turns: bool
    biased: bool
    fingerprint: str | None
    tensor: Callable[[str], Tensor]
    modules: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    files: AdapterFiles | None = None
    stacks: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def mixtures(self) -> set[str]:
        """Paths of the modules of adapted experts."""
        return {path.rpartition(".")[0] for path in self.stacks}

    @property
    def owners(self) -> set[str]:
        """Paths of the modules that have these tensors themselves."""
        return {name.rpartition(".")[0] for name in self.modules}

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
        magnitude = self.values(f"{path}.{MAGNITUDE}") if self.turns else None
        bias = self.values(f"{path}.{B}.bias") if self.biased else None
        return self.values(f"{path}.{A}.weight"), self.values(f"{path}.{B}.weight"), magnitude, bias

    def values(self, name: str) -> Tensor:
        """One tensor. Raises CheckpointError for values that are not finite."""
        tensor = self.tensor(name)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                "the adapter has values that are not finite",
                where=self.where,
                why=name,
                fix="take an earlier checkpoint",
            )
        return tensor


def open_adapter(name: str, folder: Path) -> ServedAdapter:
    """Open an adapter's folder, or the folder of a run that trained one.

    Raises:
        CheckpointError: a file is missing, damaged or of another kind; the error names it.
    """
    if not folder.is_dir():
        raise CheckpointError("no such adapter", where=str(folder), why="there is no such folder")
    folder = adapter_folder(folder)
    files = AdapterFiles(folder)
    spec = files.spec("all")
    where = str(folder / TENSORS)
    shapes = {name: shape for name, shape in files.shapes.items() if is_adapter(name)}
    layers, stacks = layers_of(shapes, spec, where), stacks_of(shapes, spec, where)
    scales = {path: spec.scale(path) for path in [*layers, *stacks]}
    kinds = (spec.name == "dora", spec.lora_bias)
    saved = {name: files.shapes[name] for name in files.saved}
    return ServedAdapter(
        name, where, scales, layers, *kinds, files.fingerprint, files.read, saved, files, stacks
    )


def adapter_of(name: str, where: str, spec: AdapterSpec, tensors: Mapping[str, Tensor]) -> ServedAdapter:
    """The adapter of a checkpoint, made from its named tensors."""
    shapes = {tensor: tuple(value.shape) for tensor, value in tensors.items()}
    layers, stacks = layers_of(shapes, spec, where), stacks_of(shapes, spec, where)
    scales = {path: spec.scale(path) for path in [*layers, *stacks]}
    kinds = (spec.name == "dora", spec.lora_bias)
    return ServedAdapter(name, where, scales, layers, *kinds, None, tensors.__getitem__, stacks=stacks)


def layers_of(
    shapes: Mapping[str, tuple[int, ...]], spec: AdapterSpec, where: str
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of A and B by linear layer. Raises CheckpointError if the tensors are not a complete adapter."""
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    if not shapes:
        raise _incomplete(where, "it has no tensors")
    for name, shape in shapes.items():
        if expert_adapter(name) is not None:
            continue
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise _incomplete(where, f"{name} is not a tensor of a known adapter type")
        parts.setdefault(match[1], {})[match[2] or match[3] or _BIAS] = shape
    for path, layer_shapes in parts.items():
        turns = spec.name == "dora"
        (rank, _) = spec.strength(path)
        wanted = {A, B, *([MAGNITUDE] if turns else []), *([_BIAS] if spec.lora_bias else [])}
        if layer_shapes.keys() != wanted:
            odd = ", ".join(sorted(wanted ^ layer_shapes.keys()))
            raise _incomplete(where, f"{path} has missing or unknown tensors: {odd}")
        a, b = layer_shapes[A], layer_shapes[B]
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise _incomplete(where, f"{path}: A is {list(a)}, B is {list(b)}, and the rank is {rank}")
        for part in wanted - {A, B}:
            if layer_shapes[part] != (b[0],):
                raise _incomplete(where, f"{path}: {part} has shape {list(layer_shapes[part])}")
    return {path: (layer_shapes[A], layer_shapes[B]) for path, layer_shapes in parts.items()}


def stacks_of(
    shapes: Mapping[str, tuple[int, ...]], spec: AdapterSpec, where: str
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of A [E, r, i] and B [E, o, r] by stack of experts. Raises CheckpointError as ``layers_of``."""
    paths = {adapter[0] for name in shapes if (adapter := expert_adapter(name)) is not None}
    stacks: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for path in sorted(paths):
        a, b = (shapes.get(path + end, ()) for end in (EXPERT_A, EXPERT_B))
        rank, _ = spec.strength(path)
        if len(a) != 3 or len(b) != 3 or (a[0], a[1], b[2]) != (b[0], rank, rank):
            raise _incomplete(where, f"{path}: A is {list(a)}, B is {list(b)}, and the rank is {rank}")
        if (turns := shapes.get(path + EXPERT_MAGNITUDE)) != (b[:2] if spec.name == "dora" else None):
            raise _incomplete(where, f"{path}: its magnitudes are {list(turns or ())}, and it is {spec.name}")
        stacks[path] = a, b
    return stacks


def _incomplete(where: str, why: str) -> CheckpointError:
    return CheckpointError("the adapter is incomplete", where=where, why=why, fix="save or copy it again")
