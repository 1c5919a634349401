"""What a checkpoint contains, and whether it still does: the manifest beside its files.

A checkpoint is a folder of safetensors files, which have no checksums, and one ``manifest.json``, which lists
every file with its size and XXH3-128 hash, every tensor with its dtype, shape and pieces, and the training
state. The manifest ends with its own hash and must be, byte for byte, what writing its content again gives: a
changed bit anywhere in a checkpoint is found, be it in a blank. Nothing is believed before that: not a name
(which could lead out of the folder), not a size, not a step number.

Chosen: XXH3-128, which runs at the speed of memory, because the enemy is the disk. Refused: SHA-256 (thirty
times slower here); the price is that a manifest does not prove who wrote it. Refused too: a ``latest`` file,
which is one more thing to be wrong; readers scan the folder and verify.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from shardwise.core.errors import CheckpointError
from shardwise.train.state import TrainState

FORMAT = 2
NAME = "manifest.json"
LARGEST = 1 << 30
"""Bytes of a manifest beyond which it is not read."""

_FILE = re.compile(r"(weights|optimizer)-\d{5,}\.safetensors")
_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
_CHUNK = 1 << 20


class Damaged(Exception):
    """A checkpoint that cannot be used as it is: which file, and what is wrong with it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


class UnknownFormat(ValueError):
    """A sound manifest of another version of this software."""


@dataclass(frozen=True)
class FileEntry:
    """One file: its size in bytes and the hexadecimal XXH3-128 hash of its content."""

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, stored in ``file`` under the tensor's name: where it starts, and its shape."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor, however it was divided. ``dtype`` is safetensors' name for it, such as F32."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        state: progress of the run.
        world_size: how many ranks wrote it.
        order: what decides which sample comes when (seed, batch size); must be equal on resume.
        data: fingerprint of the data set; must be equal on resume.
        recipe: hash of the resolved recipe, and ``strategy``: for people, may change from run to run.
        versions: of the software that wrote it.
    """

    state: TrainState
    world_size: int
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    order: Mapping[str, int]
    data: str
    recipe: str
    strategy: Mapping[str, Any]
    versions: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """The one way in which this manifest is written."""
        numbers = {name: number for number, name in enumerate(sorted(self.files))}
        tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "pieces": [[numbers[p.file], p.offsets, p.sizes] for p in entry.pieces],
            }
            for name, entry in sorted(self.tensors.items())
        }
        return _sealed(
            {
                "format": FORMAT,
                "state": self.state.to_json(),
                "world_size": self.world_size,
                "order": dict(self.order),
                "data": self.data,
                "recipe": self.recipe,
                "strategy": dict(self.strategy),
                "versions": dict(self.versions),
                "files": {
                    name: {"bytes": self.files[name].size, "xxh3_128": self.files[name].xxh3_128}
                    for name in sorted(self.files)
                },
                "tensors": tensors,
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Raises ValueError, in words, for anything that ``to_bytes`` has not written."""
        try:
            values = json.loads(raw)
        except (ValueError, RecursionError):
            raise ValueError("it is not JSON") from None
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        body = {name: value for name, value in values.items() if name != "xxh3_128"}
        if _sealed(body) != raw:
            raise ValueError("its content does not match its hash")
        if body.get("format") != FORMAT:
            raise UnknownFormat(f"its format is {body.get('format')!r}, this version reads {FORMAT}")
        try:
            return cls._from_body(body)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"a field is missing or malformed ({error})") from None

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Self:
        files = {
            _checked_name(name): FileEntry(_whole(entry["bytes"]), str(entry["xxh3_128"]))
            for name, entry in body["files"].items()
        }
        names = list(files)
        return cls(
            state=TrainState.from_json(body["state"]),
            world_size=_whole(body["world_size"]),
            files=files,
            tensors={name: _tensor(name, entry, names) for name, entry in body["tensors"].items()},
            order={str(name): _whole(value) for name, value in body["order"].items()},
            data=str(body["data"]),
            recipe=str(body["recipe"]),
            strategy=dict(body["strategy"]),
            versions=dict(body["versions"]),
        )


def _sealed(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, indent=None, separators=(",", ":"), ensure_ascii=True)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return (text[:-1] + f',"xxh3_128":"{digest}"}}\n').encode()


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _checked_name(name: str) -> str:
    if not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a checkpoint's file")
    return name


def _tensor(name: str, entry: dict[str, Any], files: list[str]) -> TensorEntry:
    """Checks that the pieces lie within the tensor and have as many elements as it has."""
    shape = tuple(_whole(size) for size in entry["shape"])
    pieces = []
    for number, offsets, sizes in entry["pieces"]:
        piece = Piece(files[_whole(number)], tuple(map(_whole, offsets)), tuple(map(_whole, sizes)))
        inside = len(piece.offsets) == len(piece.sizes) == len(shape) and all(
            offset + size <= whole
            for offset, size, whole in zip(piece.offsets, piece.sizes, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"a piece of {name!r} is not within the tensor")
        pieces.append(piece)
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        raise ValueError(f"the pieces of {name!r} do not make the tensor")
    return TensorEntry(str(entry["dtype"]), shape, tuple(pieces))


# ---- on disk ----------------------------------------------------------------------------------------------


def step_of(checkpoint: Path) -> int | None:
    """The N of a folder named step-N, else None."""
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def committed(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, newest first: folders named step-N that hold a manifest, unverified."""
    if not folder.is_dir():
        return []
    found = [
        (step, path)
        for path in folder.iterdir()
        if (step := step_of(path)) is not None and not path.is_symlink() and (path / NAME).exists()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def read(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint, itself verified. Raises Damaged; CheckpointError for another format."""
    path = checkpoint / NAME
    try:
        size = _regular(path)
        if size > LARGEST:
            raise Damaged(path, f"it has {size} bytes")
        manifest = Manifest.from_bytes(path.read_bytes())
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
    except UnknownFormat as error:
        raise CheckpointError(
            "the checkpoint was written by another version of Shardwise", where=str(path), why=str(error)
        ) from None
    except ValueError as error:
        raise Damaged(path, str(error)) from None
    if step_of(checkpoint) not in (None, manifest.state.step):
        raise Damaged(path, f"it is of step {manifest.state.step}")
    return manifest


def verify(checkpoint: Path, name: str, entry: FileEntry) -> None:
    """Read a whole file and compare it with its entry. Raises Damaged."""
    path = checkpoint / name
    try:
        size = _regular(path)
        if size != entry.size:
            raise Damaged(path, f"it has {size} bytes instead of {entry.size}")
        digest = hash_of(path)
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
    if digest != entry.xxh3_128:
        raise Damaged(path, "its content does not match its hash")


def has_all_bytes(checkpoint: Path, manifest: Manifest) -> bool:
    """Whether all files are there with as many bytes as they should have; their contents are not looked at."""
    try:
        return all(_regular(checkpoint / name) == entry.size for name, entry in manifest.files.items())
    except (OSError, Damaged):
        return False


def hash_of(path: Path) -> str:
    """XXH3-128 of a file's content, read in pieces that stay in the processor's cache."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _regular(path: Path) -> int:
    """Size of a file that is one: opening a pipe would wait, and a link leads elsewhere."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(path, "it is not a regular file")
    return status.st_size
