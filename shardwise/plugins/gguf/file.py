"""Writes a model as one GGUF file for llama.cpp: ``shardwise export MODEL OUT.gguf``.

The ``gguf`` library of the llama.cpp project names the tensors, writes the file and rounds to its types. Tensors pass
through memory one after the other; they are read back and compared before the file gets its name. What differs between
families is in `families`, the tokenizer in `tokenizer`.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from shardwise.core.errors import CheckpointError, RecipeError, ResourceError
from shardwise.core.extras import install
from shardwise.core.units import format_bytes
from shardwise.exporter.hf_writer import Contents, require_in_range
from shardwise.model.files.folder_layout import TensorShape
from shardwise.plugins.gguf.families import Architecture
from shardwise.plugins.gguf.tokenizer import add_tokenizer

TYPES = {"fp32": "F32", "fp16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
"""GGUF's types of matrices, by their names in the command line."""
LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0, "Q4_0": 8 * 65504.0}
"""The largest value of a type: its own, or that of its fp16 scale with the largest code."""

NO_TOKENIZER = "without a tokenizer: it takes token ids"


@dataclass(frozen=True)
class WrittenFile:
    """A finished file.

    Attributes:
        tokenizer: llama.cpp's name of its tokenizer's kind; None if it has none.
        differences: where llama.cpp computes something else than the model, in sentences.
    """

    path: Path
    tensors: int
    bytes: int
    tokenizer: str | None
    differences: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """The file with its contents, and the differences."""
        kind = f"with its tokenizer ({self.tokenizer})" if self.tokenizer else NO_TOKENIZER
        size = f"{self.tensors} tensors, {format_bytes(self.bytes)}"
        return [f"{self.path}: {size}, {kind}; read back and compared", *self.differences]


def write_gguf(target: Path, contents: Contents, kind: str) -> WrittenFile:
    """Write a model as a GGUF file.

    Args:
        kind: type of the matrices, a key of ``TYPES``. Vectors are fp32. Embedding and output of q4_0 are q8_0, and
            a matrix whose rows are no multiple of 32 is fp16.

    Raises:
        RecipeError: the file exists, gguf is not installed, or the model is of another family.
        ResourceError: the disk is full or not writable.
        CheckpointError: a tensor reads back with other values.
        NumericsError: a value is beyond the range of its type.
    """
    if target.exists():
        raise RecipeError("the file exists already", where=str(target), fix="give another name, or delete it")
    gguf = _library()
    model = Architecture(contents.layout.config)
    names = known_names(contents)
    staged = target.absolute().with_name(f"tmp-{secrets.token_hex(8)}-{target.name}")
    try:
        staged.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(staged, model.name)
        writer.add_type("model")
        model.describe(writer)
        kinds = {"fp32": "ALL_F32"} | {key: f"MOSTLY_{name}" for key, name in TYPES.items() if key != "fp32"}
        writer.add_file_type(gguf.LlamaFileType[kinds[kind]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        tokenizer, others = add_tokenizer(writer, contents, model.vocab)
        hashes = _write_tensors(writer, gguf, contents, model, names, kind)
        _require_readable(gguf, staged, hashes)
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        size = staged.stat().st_size
        staged.rename(target)
    except OSError as error:
        raise ResourceError(
            "cannot write the file",
            where=str(target),
            why=error.strerror or str(error),
            fix="free some space",
        ) from error
    finally:
        staged.unlink(missing_ok=True)
    return WrittenFile(target, len(hashes), size, tokenizer, (*model.differences(), *others))


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise RecipeError("gguf is not installed", where="OUT.gguf", fix=install("gguf")) from error
    return gguf


def known_names(contents: Contents) -> dict[str, str]:
    """GGUF's names of the tensors that are written, by their names in a folder.

    Raises:
        RecipeError: gguf is not installed, llama.cpp cannot compute the model, or a tensor has no name.
    """
    gguf = _library()
    model = Architecture(contents.layout.config)
    stored_names = [name for group in contents.layout.groups for name in group.shapes]
    if why := model.obstacle(stored_names):
        fix = "write a folder, and convert it with llama.cpp's convert_hf_to_gguf.py"
        raise RecipeError("this model cannot be written as GGUF", where="model", why=why, fix=fix)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    named = gguf.get_tensor_name_map(kinds[model.name], model.blocks)
    names: dict[str, str] = {}
    for stored in filter(model.keeps, stored_names):
        name = named.get_name(stored, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise RecipeError("GGUF has no name for a tensor", where=stored, fix="write a folder")
        names[stored] = name
    return names


# ---- tensors ----------------------------------------------------------------------------------------------


def _write_tensors(
    writer: Any, gguf: Any, contents: Contents, model: Architecture, names: Mapping[str, str], kind: str
) -> dict[str, str]:
    """Write all tensors; return the hash of each."""
    factors = model.factors()
    types: dict[str, Any] = {}
    for name, shape in _file_shapes(contents, model, names, factors):
        to = types[name] = gguf.GGMLQuantizationType[_type_of(name, shape, kind)]
        whole = {"F32": np.float32, "F16": np.float16}.get(to.name)
        size = shape if whole else gguf.quant_shape_to_byte_shape(shape, to)
        dtype = np.dtype(whole or np.uint8)
        nbytes = torch.Size(size).numel() * dtype.itemsize
        writer.add_tensor_info(name, size, dtype, nbytes, raw_dtype=to)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        write()
    hashes: dict[str, str] = {}

    def put(name: str, values: Tensor) -> None:
        require_in_range(name, values, LARGEST.get(types[name].name, math.inf))
        data = gguf.quants.quantize(values.contiguous().numpy(), types[name])
        hashes[name] = xxhash.xxh3_128_hexdigest(data.tobytes())
        writer.write_tensor_data(data)

    for group in contents.layout.groups:
        made = group.make([contents.read(name) for name in group.sources])
        for stored in group.shapes:
            if stored in names:
                put(names[stored], model.value(made[stored].float(), stored))
    for name, values in factors.items():
        put(name, values)
    writer.close()
    return hashes


def _file_shapes(
    contents: Contents, model: Architecture, names: Mapping[str, str], factors: Mapping[str, Tensor]
) -> Iterator[tuple[str, TensorShape]]:
    """Name and shape of every tensor in the file, in order."""
    for group in contents.layout.groups:
        for stored, shape in group.shapes.items():
            if stored in names:
                yield names[stored], model.shape(stored, shape)
    for name, values in factors.items():
        yield name, tuple(values.shape)


def _type_of(name: str, shape: TensorShape, kind: str) -> str:
    if len(shape) < 2 or name == "position_embd.weight":
        return "F32"
    if kind in ("fp32", "fp16"):
        return TYPES[kind]
    if shape[-1] % 32:
        return "F16"
    return "Q8_0" if name in ("token_embd.weight", "output.weight") else TYPES[kind]


def _require_readable(gguf: Any, path: Path, hashes: Mapping[str, str]) -> None:
    tensors = gguf.GGUFReader(path).tensors
    if {tensor.name: xxhash.xxh3_128_hexdigest(tensor.data.tobytes()) for tensor in tensors} != hashes:
        raise CheckpointError(
            "the file was not written correctly", where=str(path), why="it reads back with other values"
        )
