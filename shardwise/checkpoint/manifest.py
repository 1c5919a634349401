"""The manifest of a checkpoint: the list of its files with their hashes, and the training state.

A checkpoint is a folder of safetensors files, which have no checksums, and one ``manifest.json``. The manifest lists
every file with its size and XXH3-128 hash, every tensor with its dtype, shape and pieces, and the training state. It
ends with its own hash, and must be byte for byte what writing its content again gives. So a changed bit anywhere in a
checkpoint is found, even in white space. Nothing of a manifest is used before this check: no file name, which could
lead out of the folder, no size, no step number.

XXH3-128 runs at the speed of memory and protects against faults of the disk. SHA-256 would be thirty times slower here;
the price is that a manifest does not prove who wrote it. There is no ``latest`` file, which could be wrong too: readers
scan the folder and verify.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import xxhash
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from shardwise.core.errors import CheckpointError
from shardwise.core.file_hash import hash_of
from shardwise.core.json_file import PositiveInt, checked, fault_of, plain
from shardwise.engine.train_state import TrainState

MANIFEST_FORMAT = 2
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 30
"""A manifest of more bytes is not read."""

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element, by safetensors' name of the dtype. Other dtypes are not saved."""
MOST_DIMS = 16

_SHARD_FILE = re.compile(r"(weights|optimizer)-\d{5,}\.safetensors")
# Of each step one name, without leading zeros, and no number beyond 63 bits.
_STEP_FOLDER = re.compile(r"step-(0|[1-9]\d{0,17})")


class Damaged(Exception):
    """A checkpoint has a damaged file: its path, and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


class UnknownFormat(ValueError):
    """A whole manifest that another version of Shardwise wrote."""


def _file_name(number: Any, info: ValidationInfo) -> str:
    """The name of a file of the manifest, which the context lists. Raises ValueError."""
    names: Sequence[str] = info.context or ()
    if type(number) is not int or not 0 <= number < len(names):
        raise ValueError(f"there is no file {number!r}")
    return names[number]


def _checked_name(name: str) -> str:
    if not _SHARD_FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a checkpoint's file")
    return name


Whole = Annotated[int, Field(ge=0)]
FileName = Annotated[str, AfterValidator(_checked_name)]
FileNumber = Annotated[str, BeforeValidator(_file_name)]
"""The name of a file; in the manifest, its position in ``files``."""


@dataclass(frozen=True)
class FileEntry:
    """One file: its size in bytes and the hexadecimal XXH3-128 hash of its content."""

    bytes: Whole
    xxh3_128: str


class TensorPiece(NamedTuple):
    """A block of a tensor, stored in ``file`` under the tensor's name: where it starts, and its shape."""

    file: FileNumber
    offsets: tuple[Whole, ...]
    sizes: tuple[Whole, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor, however it was sharded. ``dtype`` is safetensors' name for it, such as F32."""

    dtype: str
    shape: tuple[Whole, ...]
    pieces: tuple[TensorPiece, ...]

    @model_validator(mode="after")
    def _checked(self) -> Self:
        """The dtype is known, and the pieces cover each element of the tensor once."""
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.dtype!r} is not a dtype of a checkpoint")
        if len(self.shape) > MOST_DIMS or math.prod(self.shape) >= 2**60:  # of 8 bytes each, 2**63 bytes
            raise ValueError("a tensor is too large")
        for piece in self.pieces:
            inside = len(piece.offsets) == len(piece.sizes) == len(self.shape) and all(
                offset + size <= whole
                for offset, size, whole in zip(piece.offsets, piece.sizes, self.shape, strict=True)
            )
            if not inside:
                raise ValueError("a piece is not within the tensor")
        if not _tiles(self.shape, self.pieces):
            raise ValueError("the pieces do not make the tensor")
        return self


def _tiles(shape: tuple[int, ...], pieces: Sequence[TensorPiece]) -> bool:
    """Whether boxes cover each element of a tensor exactly once.

    The signed corners of a box (+1, or -1 with an odd number of upper ends) are the mixed differences of its indicator
    function, which they determine. So the boxes sum to the tensor's indicator exactly if their corners sum to its own.
    """
    if len(pieces) == 1:
        return pieces[0].sizes == shape
    corners: dict[tuple[int, ...], int] = {}
    for sign, (offsets, sizes) in [(-1, ((0,) * len(shape), shape)), *((1, piece[1:]) for piece in pieces)]:
        ends = [((offset, 1), (offset + size, -1)) for offset, size in zip(offsets, sizes, strict=True)]
        for corner in itertools.product(*ends):
            at = tuple(position for position, _ in corner)
            corners[at] = corners.get(at, 0) + sign * math.prod(side for _, side in corner)
    return not any(corners.values())


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
    world_size: PositiveInt
    files: Mapping[FileName, FileEntry]
    tensors: Mapping[str, TensorEntry]
    order: Mapping[str, Whole]
    data: str
    recipe: str
    strategy: Mapping[str, Any]
    versions: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """The only valid bytes of this manifest."""
        files, tensors = dict(sorted(self.files.items())), dict(sorted(self.tensors.items()))
        return _with_digest(
            {"format": MANIFEST_FORMAT} | _manifest_json(replace(self, files=files, tensors=tensors))
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read a manifest. Raises ValueError, with a reason for users, for bytes that ``to_bytes`` did not write."""
        try:
            values = json.loads(raw)
        except (ValueError, RecursionError):
            raise ValueError("it is not JSON") from None
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        body = {name: value for name, value in values.items() if name != "xxh3_128"}
        if _with_digest(body) != raw:
            raise ValueError("its content does not match its hash")
        if body.get("format") != MANIFEST_FORMAT:
            raise UnknownFormat(f"its format is {body.get('format')!r}, this version reads {MANIFEST_FORMAT}")
        try:
            files = body.get("files")
            manifest = checked(raw, cls, list(files) if isinstance(files, dict) else [])
        except ValidationError as error:
            raise ValueError(f"a field is missing or malformed ({': '.join(fault_of(error))})") from None
        if {"format": MANIFEST_FORMAT} | _manifest_json(manifest) != body:
            raise ValueError("a field is missing or unknown")
        return manifest


def _manifest_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as its file holds it, where pieces name their file by its position."""
    numbers = {name: number for number, name in enumerate(manifest.files)}
    body = plain(manifest)
    for key in ("cursor", "best", "capacity"):  # left out where there is nothing to say
        if not body["state"][key]:
            del body["state"][key]
    for entry in body["tensors"].values():
        entry["pieces"] = [[numbers[file], offsets, sizes] for file, offsets, sizes in entry["pieces"]]
    return body


def _with_digest(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, indent=None, separators=(",", ":"), ensure_ascii=True)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return (text[:-1] + f',"xxh3_128":"{digest}"}}\n').encode()


# ---- on disk ----------------------------------------------------------------------------------------------


def step_of(checkpoint: Path) -> int | None:
    """The N of a folder named step-N, else None."""
    match = _STEP_FOLDER.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def committed(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, newest first: folders named step-N that hold a manifest or shards, unverified.

    Shards without a manifest are those of a checkpoint that was copied in part: a damaged one.
    """
    if not folder.is_dir():
        return []
    checkpoints = [
        (step, path)
        for path in folder.iterdir()
        if (step := step_of(path)) is not None and not path.is_symlink() and _has_files(path)
    ]
    return [path for _, path in sorted(checkpoints, reverse=True)]


def _has_files(checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST).exists() or any(checkpoint.glob("*.safetensors"))


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint, itself verified. Raises Damaged; CheckpointError for another format."""
    path = checkpoint / MANIFEST
    try:
        size = _regular(path)
        if size > LARGEST_MANIFEST:
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
    if not _has_room(manifest):
        raise Damaged(path, "its files are smaller than its tensors")
    if step_of(checkpoint) not in (None, manifest.state.step):
        raise Damaged(path, f"it is of step {manifest.state.step}")
    return manifest


def _has_room(manifest: Manifest) -> bool:
    """Whether each file has the bytes of its pieces: then reading a tensor needs no more memory than the disk."""
    used = dict.fromkeys(manifest.files, 0)
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            used[piece.file] += math.prod(piece.sizes) * ITEM_BYTES[entry.dtype]
    return bool(used) and all(size <= manifest.files[name].bytes for name, size in used.items())


def verify_file(checkpoint: Path, name: str, entry: FileEntry) -> None:
    """Read a whole file and compare it with its entry. Raises Damaged."""
    path = checkpoint / name
    try:
        size = _regular(path)
        if size != entry.bytes:
            raise Damaged(path, f"it has {size} bytes instead of {entry.bytes}")
        digest = hash_of(path)
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
    if digest != entry.xxh3_128:
        raise Damaged(path, "its content does not match its hash")


def has_all_bytes(checkpoint: Path, manifest: Manifest) -> bool:
    """Whether all files exist with the sizes of the manifest. Their contents are not read."""
    try:
        return all(_regular(checkpoint / name) == entry.bytes for name, entry in manifest.files.items())
    except (OSError, Damaged):
        return False


def _regular(path: Path) -> int:
    """Size of a regular file. Raises Damaged for others: opening a pipe would block, and a link leads elsewhere."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(path, "it is not a regular file")
    return status.st_size
