"""Safetensors storage for torch's distributed checkpoint (DCP): streamed and hashed writes, sliced reads.

DCP decides which rank writes which shard of a DTensor (a replicated shard once, distributed over its holders), and
which shards a rank of another world size needs. Its two-phase protocol also reports a failed rank to all ranks. Its own
storage layer is not used: the writer holds all bytes of a rank in memory twice, computes no hash, and can report
success after a full disk (pytorch#191391); the reader ignores a missing file. Here one tensor at a time passes through
memory, the hash covers the bytes sent to the disk, and the verified manifest is the index of the shards.

The files are plain safetensors. Their headers carry the offsets in DCP's format, so DCP's ``HuggingFaceStorageReader``
reads them without Shardwise. Weights and optimizer state are in separate files, so text generation reads a third of the
checkpoint.

No pickle is written to or read from disk. DCP sends pickles between the ranks of one run, which trust each other.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint import commit
from shardwise.checkpoint.manifest import FileEntry, Manifest, TensorEntry, TensorPiece
from shardwise.core import heartbeat
from shardwise.core.errors import CheckpointError
from shardwise.engine.run_state import OPTIMIZER
from shardwise.model.files.safetensors_reader import DTYPES_BY_NAME as DTYPES_BY_NAME
from shardwise.model.files.safetensors_reader import STORED_DTYPES

# A heartbeat follows each piece, so that a slow disk does not look like a hang.
_WRITE_BYTES = 1 << 24


@dataclass(frozen=True)
class Shard:
    """A file that a rank has written and synced, with (tensor name, offsets, sizes) of its shards."""

    name: str
    entry: FileEntry
    pieces: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


# ---- writing ----------------------------------------------------------------------------------------------


def write_shard(path: Path, items: Sequence[tuple[WriteItem, Tensor]]) -> Shard:
    """Write shards of tensors to a new safetensors file and sync it. Raises OSError.

    Holds one tensor in host memory at a time. The widest dtypes come first, which keeps every tensor aligned in a
    memory map.
    """
    tensors = {item.index.fqn: tensor for item, tensor in items}
    ordered, text, end = _layout_of([item for item, _ in items])
    if len(tensors) != len(items):
        raise RuntimeError(f"{path.name} would hold two pieces of one tensor")
    digest = xxhash.xxh3_128()
    with path.open("xb", buffering=0) as file:
        for content in (
            len(text).to_bytes(8, "little"),
            text,
            *_contents(tensors[item.index.fqn] for item in ordered),
        ):
            view = memoryview(content)
            while view:
                written = file.write(view[:_WRITE_BYTES])
                digest.update(view[:written])
                heartbeat.mark()
                view = view[written:]
        os.fsync(file.fileno())
    pieces = tuple(
        (i.index.fqn, tuple(_chunk_metadata(i).offsets), tuple(_chunk_metadata(i).sizes)) for i in ordered
    )
    return Shard(path.name, FileEntry(8 + len(text) + end, digest.hexdigest()), pieces)


def _layout_of(items: Sequence[WriteItem]) -> tuple[list[WriteItem], bytes, int]:
    """The layout of a file: the items in the order of their bytes, the header, and the bytes after the header."""
    ordered = sorted(items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
    header: dict[str, Any] = {}
    offsets: dict[str, Any] = {}
    end = 0
    for item in ordered:
        name = item.index.fqn
        chunk = _chunk_metadata(item)
        start = end
        end += chunk.sizes.numel() * _dtype(item).itemsize
        header[name] = {
            "dtype": STORED_DTYPES[_dtype(item)],
            "shape": list(chunk.sizes),
            "data_offsets": [start, end],
        }
        offsets[name] = {"saved_offsets": list(chunk.offsets)}
    header["__metadata__"] = {
        "DCP_SHARDING_INFO": json.dumps(offsets),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces after the header: tensors begin at a multiple of 8 bytes.
    return ordered, text + b" " * (-len(text) % 8), end


def _contents(tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of one tensor after the other, copied to the host one at a time."""
    for tensor in tensors:
        if tensor.numel():
            yield tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _chunk_metadata(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _items_by_file(plan: SavePlan) -> dict[str, list[WriteItem]]:
    """The items of a rank's files, by the first part of the file's name."""
    parts: dict[str, list[WriteItem]] = {"weights": [], "optimizer": []}
    for item in plan.items:
        parts["optimizer" if item.index.fqn.startswith(OPTIMIZER) else "weights"].append(item)
    return {part: items for part, items in parts.items() if items}


def _file_bytes(items: Sequence[WriteItem]) -> int:
    """Bytes of the file that ``write_shard`` would write."""
    _, header, end = _layout_of(items)
    return 8 + len(header) + end  # the header's length takes 8 bytes


class ShardWriter(StorageWriter):
    """Writes one DCP checkpoint and commits it; it adds files and tensors to ``manifest``."""

    def __init__(self, folder: Path, manifest: Manifest, keep: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.keep = keep
        self.rank = 0
        self.staged: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs["rank"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave out empty shards (of a tensor with fewer rows than ranks)."""
        return replace(plan, items=[item for item in plan.items if _occupied(item)])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: create the staging folder for all ranks. Raises ResourceError if the disk is too small."""
        # Not tensor_storage_size(): that is the size of the whole tensor, once per rank that holds a piece.
        needed = sum(_file_bytes(items) for plan in plans for items in _items_by_file(plan).values())
        try:
            self.staged = commit.stage(self.folder, self.manifest.state.step, needed)
        except OSError as error:
            raise commit.unwritable(error, self.folder, needed) from error
        return [replace(plan, storage_data=(self.staged, needed)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        staged, needed = cast("tuple[Path, int]", plan.storage_data)
        results = []
        for part, items in _items_by_file(plan).items():
            pairs = [(item, cast("Tensor", planner.resolve_data(item)).detach()) for item in items]
            try:
                shard = write_shard(staged / f"{part}-{self.rank:05}.safetensors", pairs)
            except OSError as error:
                raise commit.unwritable(error, self.folder, needed) from error
            results.append(WriteResult(MetadataIndex(shard.name), shard.entry.bytes, shard))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, after every rank has written: write the manifest and commit."""
        assert self.staged is not None
        shards = [cast("Shard", result.storage_data) for written in results for result in written]
        pieces: dict[str, list[TensorPiece]] = {}
        for shard in shards:
            for name, offsets, sizes in shard.pieces:
                pieces.setdefault(name, []).append(TensorPiece(shard.name, offsets, sizes))
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            parts = sorted(pieces[name], key=lambda piece: piece.offsets)
            tensors[name] = TensorEntry(
                STORED_DTYPES[entry.properties.dtype], tuple(entry.size), tuple(parts)
            )
        manifest = replace(self.manifest, files={s.name: s.entry for s in shards}, tensors=tensors)
        try:
            commit.publish(self.staged, manifest, self.keep)
        except OSError as error:
            raise commit.unwritable(error, self.folder) from error
        self.staged = None

    def abandon(self) -> None:
        """Delete the files of a failed save."""
        if self.staged is not None:
            shutil.rmtree(self.staged, ignore_errors=True)


def _occupied(item: WriteItem) -> bool:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() > 0 or item.tensor_data.size.numel() == 0


# ---- reading ----------------------------------------------------------------------------------------------


class ShardReader(StorageReader):
    """Reads the slices that this rank needs from a verified DCP checkpoint."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self.checkpoint = checkpoint
        self.manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _dcp_metadata(entry) for name, entry in self.manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, so that at most one file is memory-mapped."""
        pieces = {
            (name, piece.offsets): piece
            for name, entry in self.manifest.tensors.items()
            for piece in entry.pieces
        }
        by_file: dict[str, list[tuple[ReadItem, TensorPiece]]] = {}
        for item in plan.items:
            piece = pieces[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file.setdefault(piece.file, []).append((item, piece))
        for items in by_file.values():
            files = ShardFiles(self.checkpoint)
            for item, piece in items:
                spans = zip(item.storage_offsets, item.lengths, strict=True)
                part = tuple(slice(start, start + length) for start, length in spans)
                target = planner.resolve_tensor(item).detach()
                target.copy_(files.block(item.storage_index.fqn, piece, part))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _dcp_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES_BY_NAME[entry.dtype]),
        torch.Size(entry.shape),
        [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces],
    )


class ShardFiles:
    """The memory-mapped files of one checkpoint, opened on first use."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._open: dict[str, Any] = {}

    def block(self, name: str, piece: TensorPiece, part: tuple[slice, ...]) -> Tensor:
        """``part`` of a shard of tensor ``name``. Raises CheckpointError if the file lacks it."""
        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(self.checkpoint / piece.file, framework="pt")
            stored = self._open[piece.file].get_slice(name)
            if tuple(stored.get_shape()) == piece.sizes:
                return cast("Tensor", stored[part])
        except Exception as error:  # safetensors raises its own class, OSError, KeyError
            self._refuse(piece, str(error))
        self._refuse(piece, f"{name!r} has the shape {stored.get_shape()} instead of {list(piece.sizes)}")

    def _refuse(self, piece: TensorPiece, why: str) -> NoReturn:
        raise CheckpointError("cannot read the checkpoint", where=str(self.checkpoint / piece.file), why=why)
