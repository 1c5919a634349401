"""Write a model as a folder that transformers loads: streamed, read back, then renamed.

The header of a safetensors file lists every tensor and its position, so it is written first. Then one group of tensors
after the other passes through memory (model/files/folder_layout.py). So writing a model of any size needs the memory of
its largest tensor. Files have at most ``LARGEST_SHARD`` bytes, with an index if there are several. transformers'
``save_pretrained`` and safetensors' own writer hold a whole model, or a whole file, in memory.

Every tensor is hashed as it is written, read back through the safetensors library and compared. So neither a full disk
nor a bug of this writer is reported as success. Until then the folder has a temporary name.
"""

from __future__ import annotations

import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from shardwise.core.atomic_file import make_folder, require_new, sync_folder
from shardwise.core.errors import CheckpointError, NumericsError, ResourceError
from shardwise.core.units import format_bytes
from shardwise.model.files.folder_layout import HFFolder, TensorGroup, TensorShape
from shardwise.model.files.safetensors_reader import INDEX, SINGLE, STORED_DTYPES, WeightFiles
from shardwise.model.merging import ReadTensor

LARGEST_SHARD = 5 * 10**9
"""Bytes of the tensors of one file; a larger tensor has a file of its own."""


ExtraFile = Path | Callable[[], bytes]


@dataclass(frozen=True)
class Contents:
    """Content of a folder to write.

    Attributes:
        layout: the tensors in order, and the config. dtypes: dtypes to write, by tensor name. read: reads a tensor of
        the model by name, in any dtype. extra_files: further files by name: a file to copy, or a function that returns
        the bytes after all tensors were read.
    """

    layout: HFFolder
    dtypes: Mapping[str, torch.dtype]
    read: ReadTensor
    extra_files: Mapping[str, ExtraFile]


@dataclass(frozen=True)
class Written:
    """A finished folder. ``bytes`` counts the tensors."""

    folder: Path
    files: int
    tensors: int
    bytes: int


def write_model(target: Path, contents: Contents) -> Written:
    """Write a new folder.

    Raises:
        RecipeError: the folder exists.
        ResourceError: the disk is full or not writable.
        CheckpointError: a tensor reads back with other values.
        NumericsError: a value would become infinite in the dtype to write.
    """
    require_new(target)
    files = list(_files(contents))
    size = sum(_size_as(shape, dtype) for file in files for shape, dtype in file.tensors.values())
    with _staging_folder(target, size) as staged:
        hashes: dict[str, str] = {}
        index: dict[str, str] = {}
        for number, file in enumerate(files, 1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else SINGLE
            hashes |= _write_file(staged / name, file, contents)
            index |= dict.fromkeys(file.tensors, name)
        if len(files) > 1:
            text = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
            _write_synced(staged / INDEX, json.dumps(text, indent=2).encode() + b"\n")
        if contents.layout.config:
            config = json.dumps(contents.layout.config, indent=2, sort_keys=True).encode() + b"\n"
            _write_synced(staged / "config.json", config)
        for name, what in contents.extra_files.items():
            _write_synced(staged / name, what.read_bytes() if isinstance(what, Path) else what())
        _require_equal_hashes(staged, hashes)
    return Written(target, len(files), len(index), size)


def config_in(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config with the weights' ``dtype``, under the keys of old and new versions of transformers."""
    word = str(dtype).removeprefix("torch.")
    said: dict[str, Any] = {"dtype": word, "torch_dtype": word}
    inner = {key: value for key, value in config.items() if isinstance(value, dict) and "model_type" in value}
    parts = {key: {**value, **{name: word for name in said if name in value}} for key, value in inner.items()}
    return {**config, **parts, **said}


# ---- files ------------------------------------------------------------------------------------------------


@dataclass
class _File:
    """The groups of one file, and the shape and dtype of each of its tensors, in order."""

    groups: list[TensorGroup]
    tensors: dict[str, tuple[TensorShape, torch.dtype]]


def _files(contents: Contents) -> Iterator[_File]:
    """Assign groups to files, in order; a group is never split over files."""
    file = _File([], {})
    used = 0
    for group in (*contents.layout.groups, *contents.layout.untrained):
        dtype = group.dtype or contents.dtypes[group.sources[0]]
        size = sum(_size_as(shape, dtype) for shape in group.shapes.values())
        if file.groups and used + size > LARGEST_SHARD:
            yield file
            file = _File([], {})
            used = 0
        file.groups.append(group)
        file.tensors |= {name: (shape, dtype) for name, shape in group.shapes.items()}
        used += size
    yield file


def _size_as(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _write_file(path: Path, file: _File, contents: Contents) -> dict[str, str]:
    """Write one file; return the hash of every tensor."""

    def made() -> Iterator[tuple[str, Tensor]]:
        for group in file.groups:
            tensors = group.make([contents.read(name) for name in group.sources])
            for name in group.shapes:
                shape, dtype = file.tensors[name]
                if tuple(tensors[name].shape) != tuple(shape):
                    raise CheckpointError(
                        f"tensor {name} has another shape",
                        where=str(path),
                        why=f"it is {list(tensors[name].shape)}, expected {list(shape)}",
                    )
                rounded = tensors[name].to(dtype)
                if rounded.is_floating_point() and rounded.dtype != tensors[name].dtype:
                    require_in_range(name, tensors[name], torch.finfo(dtype).max)
                yield name, rounded

    return write_tensors(path, file.tensors, made(), {"format": "pt"})


def require_in_range(name: str, tensor: Tensor, largest: float) -> None:
    """Raise NumericsError if a finite value is above the largest one of the format to write."""
    if tensor.numel() and largest < (value := float(tensor.abs().max())) < math.inf:
        raise NumericsError(
            "a weight is too large to be written in this format",
            where=name,
            why=f"its largest value is {value:.3g}, that of the format {largest:.3g}",
            fix="write bf16 or fp32",
        )


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[TensorShape, torch.dtype]],
    values: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> dict[str, str]:
    """Write a new, durable safetensors file, one tensor after the other; return their hashes. Raises OSError.

    Args:
        tensors: shapes and dtypes by name. values: the tensors, in the same order. metadata: text for the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start = end
        end += _size_as(shape, dtype)
        header[name] = {"dtype": STORED_DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hashes = {}
    with path.open("xb", buffering=0) as out:
        _send(out, memoryview(len(text).to_bytes(8, "little") + text))
        for name, value in values:
            content = _tensor_content(value)
            hashes[name] = xxhash.xxh3_128_hexdigest(content)
            _send(out, content)
        os.fsync(out.fileno())
    return hashes


def _tensor_content(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def _send(out: Any, content: memoryview) -> None:
    while content:
        content = content[out.write(content[: 1 << 24]) :]


def _write_synced(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _require_equal_hashes(staged: Path, hashes: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the files hold exactly the written tensors."""
    files = WeightFiles(staged)
    for name in files.shapes.keys() | hashes.keys():
        if name not in files.shapes or (
            xxhash.xxh3_128_hexdigest(_tensor_content(files.read(name))) != hashes.get(name)
        ):
            raise CheckpointError(
                "the model was not written correctly",
                where=str(staged),
                why=f"{name} reads back with other values",
                fix="check the disk, and write it again",
            )


@contextmanager
def _staging_folder(target: Path, needed: int) -> Iterator[Path]:
    """A temporary folder next to ``target``: renamed to it on success, deleted on failure, or here after a kill."""
    staged = target.absolute().with_name(f"tmp-{target.name}-{secrets.token_hex(8)}")
    for left in staged.parent.glob(f"tmp-{glob.escape(target.name)}-{'[0-9a-f]' * 16}"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        make_folder(staged.parent)
        free = shutil.disk_usage(staged.parent).free
        if needed > free:
            raise _cannot_write_model(target, f"{format_bytes(needed)} needed, {format_bytes(free)} free")
        staged.mkdir()
        yield staged
        sync_folder(staged)
        if target.exists():
            target.rmdir()
        staged.rename(target)
        sync_folder(staged.parent)
    except OSError as error:
        raise _cannot_write_model(target, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _cannot_write_model(target: Path, why: str) -> ResourceError:
    return ResourceError(
        "cannot write the model", where=str(target), why=why, fix="give another folder, or free some space"
    )
