"""Reads a folder of safetensors files by slice.

The file is opened again for each tensor: memory-mapped pages count as process memory until the map is closed, so a
rank would hold its weights twice while loading. Tensors are copied into their destination in pieces, so loading needs
PIECE bytes beyond the model.

Refused: ``.bin`` and ``.pt`` files, which are pickles and run code when read.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.core.errors import CheckpointError
from shardwise.core.hub_folder import folder_of, refuse_lfs_pointer
from shardwise.runtime.parallel.shard_slices import Slices, local_part, local_slices

PIECE = 64 * 2**20
"""Bytes of a tensor in memory at once while it is copied."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, as safetensors calls them. Others need quantized_files.py."""
_PICKLES = ("*.bin", "*.pt", "*.pth")


STORED_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names of torch's dtypes."""

DTYPES_BY_NAME = {name: dtype for dtype, name in STORED_DTYPES.items()}


class WeightFiles:
    """The tensors of a folder by name: one ``model.safetensors``, or the files of its index.

    Raises CheckpointError, naming the file, if there are no weights or a file is missing or damaged.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, str] = {}  # dtypes, as safetensors calls them
        self._files: dict[str, Path] = {}
        index = _read_index(folder) if single == SINGLE else {}
        for file in sorted(set(index.values())) if index else [single]:
            with _opened_file(folder / file) as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                    self.kinds[name] = opened.get_slice(name).get_dtype()
                    self._files[name] = folder / file
        # A file that is there may lack a tensor of the index, or have it in the place of another file.
        for name, file in index.items():
            if self._files.get(name) != folder / file:
                raise CheckpointError(
                    f"tensor {name} is missing", where=str(folder / file), why=f"{INDEX} names this file"
                )

    def file_of(self, name: str) -> str:
        return str(self._files[name])

    def require_floating(self, name: str) -> None:
        """Raise CheckpointError if a tensor of weights has a dtype that is not of weights, such as I8."""
        if (kind := self.kinds[name]) not in FLOATING:
            raise CheckpointError(
                f"tensor {name} is not of weights",
                where=self.file_of(name),
                why=f"its dtype is {kind}, and weights are {', '.join(FLOATING)}",
                fix="copy the file again; quantized weights need quantization_config in config.json",
            )

    def stored_name(self, name: str) -> str:
        """The tensor's name in its file."""
        return name

    def is_padding(self, name: str) -> bool:
        """Whether a tensor that the model lacks has no effect."""
        return False

    def metadata(self, file: str) -> dict[str, str]:
        """The metadata in the header of a file."""
        with _opened_file(self.folder / file) as opened:
            return dict(opened.metadata() or {})

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        with _opened_file(self._files[name]) as opened:
            return opened.get_tensor(self.stored_name(name))

    def read_matrix(self, name: str, index: int) -> Tensor:
        """The tensor's part at an index of the first dim, on the CPU."""
        with _opened_file(self._files[name]) as opened:
            return opened.get_slice(self.stored_name(name))[index]

    @torch.no_grad()
    def read_into(self, tensor: Tensor, name: str) -> None:
        """Copy this rank's slice of ``name`` into ``tensor``, plain or DTensor, of the same global shape."""
        for part, value in self._matched_pieces(tensor, name):
            part.copy_(value)

    def agrees_with(self, tensor: Tensor, name: str) -> bool:
        """Whether ``tensor`` already has the values that ``read_into`` would write."""
        return all(torch.equal(part, value.to(part)) for part, value in self._matched_pieces(tensor, name))

    def _matched_pieces(self, tensor: Tensor, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of this rank's shard of ``tensor``, each with the same piece on disk."""
        part = local_part(tensor)
        slices = local_slices(tensor)
        if part.numel() == 0:
            return
        with _opened_file(self._files[name]) as opened:
            if not slices:  # a scalar, which no slice reads
                yield part, opened.get_tensor(self.stored_name(name))
                return
            source = opened.get_slice(self.stored_name(name))
            for piece, piece_slices in _row_pieces(part, slices):
                yield piece, source[piece_slices]


def weights_folder(source: str) -> Path:
    """The folder with the weights of a folder or Hub id. Raises RecipeError and CheckpointError.

    Of a Hub id no other files are downloaded: authors publish their own format next to that of transformers.
    """
    folder = folder_of(source, [SINGLE, INDEX])
    shards = sorted(set(_read_index(folder).values()))
    return folder_of(source, shards) if shards else folder


def _row_pieces(part: Tensor, slices: Slices) -> Iterator[tuple[Tensor, Slices]]:
    """Cut a shard and its slices of the global tensor into groups of rows of at most PIECE bytes."""
    first = slices[0]
    rest = slices[1:]
    rows = max(1, PIECE * part.shape[0] // (part.numel() * part.element_size()))
    for start in range(first.start, first.stop, rows):
        stop = min(start + rows, first.stop)
        yield part[start - first.start : stop - first.start], (slice(start, stop), *rest)


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name to file name; empty if the weights are one file, which comes first, as in transformers."""
    path = folder / INDEX
    if (folder / SINGLE).is_file():
        return {}
    if not path.is_file():
        raise _no_weights(folder)
    refuse_lfs_pointer(path, CheckpointError)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "the index of the weights cannot be read", where=str(path), why=str(error)
        ) from error
    for file in names.values():
        # A path would read a file outside of the folder, and another suffix perhaps a pickle.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"the index names {file!r}", where=str(path), why="not a safetensors file in this folder"
            )
    return names


def _no_weights(folder: Path) -> CheckpointError:
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    unfinished = (
        *folder.glob(".cache/huggingface/download/*.incomplete"),
        *folder.parent.parent.glob("blobs/*.incomplete"),  # of the Hub's cache
    )
    what = "no weights"
    why = f"neither {SINGLE} nor {INDEX} is there"
    fix = "check the folder; of a model that is published as .bin alone, save it with transformers' save_pretrained"
    if unfinished:
        what = "the download of the weights is not complete"
        fix = "download them again"
    elif any("-of-" in name for name in others):
        what = "the index of the weights is missing"
        fix = f"download {INDEX} too"
    elif any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        what = "the weights are pickles"
        why = "reading a pickle runs the code in it"
        fix = "convert them: load them with transformers if you trust them, then save_pretrained"
    elif others or any(folder.glob("original/*")):
        why += f", only {others[0] if others else 'original/'}, the format of its authors"
        fix = "download the files in transformers' format, model*.safetensors"
    return CheckpointError(what, where=str(folder), why=why, fix=fix)


@contextmanager
def _opened_file(file: Path) -> Iterator[Any]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError("a file of the weights is not a regular file", where=str(file))
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except FileNotFoundError as error:
        fix = "download or copy it again"
        raise CheckpointError("a file of the weights is missing", where=str(file), fix=fix) from error
    except (SafetensorError, OSError, ValueError) as error:
        refuse_lfs_pointer(file, CheckpointError)
        raise CheckpointError(
            "a file of the weights is damaged",
            where=str(file),
            why=str(error),
            fix="copy or download it again",
        ) from error
