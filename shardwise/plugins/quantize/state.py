"""The state of a pass on disk: one file per finished block, in a folder next to the one to be written.

A block's file holds its quantized weights and the rows of the report. It appears under its name when it is complete, so
its presence says that the block is done. A pass that starts again computes the activations anew from these weights,
which gives the same bits and needs no activations on disk. Settings are compared first.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.shards import DTYPES_BY_NAME
from shardwise.core.atomic_file import make_folder, more_room, sync_folder, write_whole
from shardwise.core.errors import CheckpointError, RecipeError, ResourceError
from shardwise.exporter.hf_writer import write_tensors
from shardwise.model.files.safetensors_reader import STORED_DTYPES, WeightFiles

SETTINGS_FILE = "settings.json"
UNQUANTIZED = "kept"
"""Method of a weight that stays as it is."""

_METADATA_KEY = "shardwise"


@dataclass(frozen=True)
class LayerRow:
    """One linear layer of the blocks in the report, one matrix of an expert, or another matrix, which is always kept.

    Attributes:
        name: path of the layer, of an expert's matrix that on disk; of another matrix, its own name.
        shape: of the weight; that of stacked matrices has more than two numbers.
        error: relative output error over the calibration tokens, of the weights without them; 0 if kept.
        bits: stored bits per weight.
        why: why the weight is kept; "" if it is quantized.
        tensors: stored tensors by suffix: (dtype as safetensors names it, shape).
        stack: of an expert's matrix, the name of the model's tensor that it is a part of.
        tokens: of an expert's matrix, the calibration tokens that the router sent to it; None without calibration.
    """

    name: str
    shape: tuple[int, ...]
    method: str
    error: float
    bits: float
    why: str = ""
    tensors: Mapping[str, tuple[str, list[int]]] = field(default_factory=dict)
    stack: str = ""
    tokens: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class QuantizedBlock:
    """The result of one block.

    Attributes:
        rows: one per matrix. weights: stored tensors by suffix, by layer.
        changed: whole tensors by canonical name, such as a norm into which scales were folded.
    """

    rows: list[LayerRow] = field(default_factory=list)
    weights: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)


class PassState:
    """The folder of an unfinished pass that will write ``target``.

    Raises RecipeError if an interrupted pass had other settings, ResourceError if the folder cannot be written.
    """

    def __init__(self, target: Path, settings: Mapping[str, Any]) -> None:
        self.folder = target.absolute().with_name(f"{target.name}.quantizing")
        text = json.dumps(settings, indent=1, sort_keys=True) + "\n"
        path = self.folder / SETTINGS_FILE
        if path.is_file():
            # Through JSON like those on disk, in which a tuple is a list.
            _require_equal_settings(path, json.loads(text))
            return
        try:
            make_folder(self.folder)
        except OSError as error:
            raise _cannot_write_state(self.folder, error) from error
        write_whole(path, text.encode())

    def __contains__(self, index: int) -> bool:
        return self._file(index).is_file()

    @property
    def done(self) -> int:
        """Number of finished blocks."""
        return next(index for index in range(10**6) if index not in self)

    def _file(self, index: int) -> Path:
        return self.folder / f"block-{index:05}.safetensors"

    def save(self, index: int, block: QuantizedBlock) -> None:
        """Commit a finished block. Raises ResourceError."""
        tensors = {f"changed/{name}": value for name, value in block.changed.items()}
        for name, stored in block.weights.items():
            tensors |= {f"{name}/{suffix}": value for suffix, value in stored.items()}
        rows = [vars(row) for row in block.rows]
        path = self._file(index)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        forms = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        try:
            staged.unlink(missing_ok=True)  # of a killed process with this number
            # The rows are metadata of the same file, so one rename commits tensors and report together.
            write_tensors(staged, forms, tensors.items(), {_METADATA_KEY: json.dumps(rows)})
            staged.replace(path)
            sync_folder(self.folder)
        except OSError as error:
            raise _cannot_write_state(self.folder, error) from error
        finally:
            staged.unlink(missing_ok=True)

    def load(self, index: int) -> QuantizedBlock:
        """A finished block. Raises CheckpointError for a damaged file."""
        files, rows = self._opened(index)
        weights: dict[str, Mapping[str, Tensor]] = {
            row.name: _row_tensors(files, row) for row in rows if row.method != UNQUANTIZED
        }
        changed = {
            name.removeprefix("changed/"): files.read(name)
            for name in files.shapes
            if name.startswith("changed/")
        }
        return QuantizedBlock(rows, weights, changed)

    def rows(self) -> list[LayerRow]:
        """The rows of all finished blocks."""
        return [row for index in range(self.done) for row in self._opened(index)[1]]

    def changed(self) -> dict[str, int]:
        """Names of changed tensors, with their blocks."""
        blocks = ((index, self._opened(index)[0].shapes) for index in range(self.done))
        return {
            name.removeprefix("changed/"): index
            for index, shapes in blocks
            for name in shapes
            if name.startswith("changed/")
        }

    def read_changed(self, index: int, name: str) -> Tensor:
        return self._opened(index)[0].read(f"changed/{name}")

    def weights(self) -> Iterator[tuple[LayerRow, Callable[[], Mapping[str, Tensor]]]]:
        """Rows of the quantized layers, and what reads their stored tensors by suffix."""
        for index in range(self.done):
            for row in self._opened(index)[1]:
                if row.method != UNQUANTIZED:
                    yield row, partial(self._read, index, row)

    def _read(self, index: int, row: LayerRow) -> Mapping[str, Tensor]:
        return _row_tensors(WeightFiles(self.folder, single=self._file(index).name), row)

    def _opened(self, index: int) -> tuple[WeightFiles, list[LayerRow]]:
        path = self._file(index)
        files = WeightFiles(self.folder, single=path.name)
        try:
            rows = json.loads(files.metadata(path.name)[_METADATA_KEY])
            return files, [LayerRow(**{**row, "shape": tuple(row["shape"])}) for row in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, error) from error

    def remove(self) -> None:
        """Delete the folder after the model was written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _row_tensors(files: WeightFiles, row: LayerRow) -> dict[str, Tensor]:
    return {suffix: files.read(f"{row.name}/{suffix}") for suffix in row.tensors}


def stored_form(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of stored tensors, by suffix."""
    return {suffix: (STORED_DTYPES[t.dtype], list(t.shape)) for suffix, t in tensors.items()}


def form_of(stored: tuple[str, list[int]]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape that ``stored_form`` wrote."""
    return DTYPES_BY_NAME[stored[0]], tuple(stored[1])


def _require_equal_settings(path: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    for key in sorted({*before, *settings}):
        if before.get(key) != settings.get(key):
            raise RecipeError(
                "the interrupted pass had other settings",
                where=str(path),
                why=f"{key} was {before.get(key)}, now it is {settings.get(key)}",
                fix=f"give the same settings, or delete {path.parent}",
            )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        "the state of an interrupted pass is damaged",
        where=str(path),
        why=str(error),
        fix=f"delete {path.parent}",
    )


def _cannot_write_state(folder: Path, error: OSError) -> ResourceError:
    return ResourceError(
        "cannot write the state of the pass",
        where=str(folder),
        why=error.strerror or str(error),
        fix=more_room(error) or "give another folder",
    )
