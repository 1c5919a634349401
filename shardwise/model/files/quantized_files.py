"""A folder of quantized weights, read as if it held the dequantized ones.

``PATH.weight`` of a quantized layer replaces its stored tensors, with the shape [out, in]. It is computed from them
whenever it is read, in fp32 and without rounding. ``stored`` returns the quantized weight itself. Stacks of matrices
(experts) are dequantized one matrix at a time. Settings are in ``quantization_config`` of config.json, which is checked
without reading weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import CheckpointError, RecipeError, one_line
from shardwise.model.files.compressed_tensors import METHOD, OWN_METHOD
from shardwise.model.files.float_layers import BitsAndBytesFormat, BlockScaledFormat, MXFP4Stack
from shardwise.model.files.quantized_layers import AWQFormat, CompressedTensors, Format, GPTQFormat
from shardwise.model.files.safetensors_reader import DTYPES_BY_NAME, FLOATING, WeightFiles
from shardwise.runtime.parallel.shard_slices import local_part, local_slices
from shardwise.runtime.quantization.as_parameter import StoredPacking, stored_packing
from shardwise.runtime.quantization.weights import QuantizedWeight

Formats = Callable[[str], Format]
"""The format of a layer, by its path in the files."""

_READABLE = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_WITHOUT_SETTINGS: Mapping[str, Format] = {
    "fbgemm_fp8": CompressedTensors(8),
    "mxfp4": MXFP4Stack(4),
    "bitsandbytes": BitsAndBytesFormat(4),
}
"""Methods of which config.json says nothing that a reader needs."""
_CACHE_SCALES = re.compile(r"\.(k|v|q)_(scale|zero_point)$")
"""Of a quantized key-value cache; ours is not quantized."""


def formats_of(config: Mapping[str, Any], where: str) -> Formats:
    """How the layers of a folder are stored, from the value of ``quantization_config``.

    Raises RecipeError for a format that is not read.
    """
    try:
        readers = {
            METHOD: _compressed,
            OWN_METHOD: _own,
            "gptq": _gptq,
            "awq": _awq,
            "fp8": _block_scaled,
            "modelopt": _modelopt,
        }
        method = str(config.get("quant_method"))
        if method in _WITHOUT_SETTINGS:
            return lambda path: _WITHOUT_SETTINGS[method]
        if method not in readers:
            raise _unreadable_format(f"quant_method is {method}", where)
        return readers[method](config, where)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _unreadable_format(f"{type(error).__name__}: {error}", where) from error


def _unreadable_format(why: str, where: str) -> RecipeError:
    return RecipeError(
        "the quantized weights are in a format that is not read",
        where=where,
        why=why,
        fix="give a folder of fp8, MXFP4, compressed-tensors, GPTQ, AWQ or bitsandbytes, or the unquantized model",
    )


def _compressed(config: Mapping[str, Any], where: str) -> Formats:
    formats: dict[str, CompressedTensors] = {}
    for group in config["config_groups"].values():
        form = group.get("format") or config["format"]
        weights = group["weights"]
        bits = weights["num_bits"]
        block = weights.get("block_structure")
        if form not in _READABLE or bits > 8 or (weights["type"] == "float" and bits != 8):
            raise _unreadable_format(f"its format is {form} with {bits} bits", where)
        formats |= dict.fromkeys(group["targets"], CompressedTensors(bits, tuple(block) if block else None))
    # As in compressed-tensors: a layer's path goes before patterns, these before its class.
    ordered = sorted(formats, key=lambda target: (target.startswith("re:"), target))
    of_class = formats.get("Linear") or next(iter(formats.values()))

    def of(path: str) -> Format:
        return next((formats[target] for target in ordered if _is_target(target, path)), of_class)

    return of


def _is_target(target: str, path: str) -> bool:
    """Whether a target is this layer's path, or a pattern of it; a class such as Linear is not."""
    return re.match(target[3:], path) is not None if target.startswith("re:") else target == path


def _own(config: Mapping[str, Any], where: str) -> Formats:
    read = CompressedTensors(int(config["bits"]))
    return lambda path: read


def _gptq(config: Mapping[str, Any], where: str) -> Formats:
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2") or config.get("dynamic"):
        why = "dynamic bits" if config.get("dynamic") else f"checkpoint_format is {version}"
        raise _unreadable_format(why, where)
    # Version 1 stores zero points less one.
    read = GPTQFormat(int(config["bits"]), int(config["group_size"]), 1 if version == "gptq" else 0)
    return lambda path: read


def _awq(config: Mapping[str, Any], where: str) -> Formats:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm" or config["bits"] != 4:
        raise _unreadable_format(f"AWQ's version is {version} with {config['bits']} bits", where)
    return lambda path: AWQFormat(4)


def _block_scaled(config: Mapping[str, Any], where: str) -> Formats:
    block = config.get("weight_block_size")
    read = BlockScaledFormat(8, (int(block[0]), int(block[1])) if block else None)
    return lambda path: read


def _modelopt(config: Mapping[str, Any], where: str) -> Formats:
    if config.get("quant_algo") != "FP8":
        raise _unreadable_format(f"quant_algo is {config.get('quant_algo')}", where)
    return lambda path: CompressedTensors(8)


@dataclass(frozen=True)
class _StoredLayer:
    """A quantized layer: its format, its shape (out, in) or that of a stack, and its stored tensors by suffix."""

    form: Format
    shape: tuple[int, ...]
    names: Mapping[str, str]


class QuantizedFiles(WeightFiles):
    """The tensors of a folder with quantized weights.

    Args:
        formats: see ``formats_of``.
        kind: dtype of the model as safetensors names it, which dequantized weights are said to have.

    Raises CheckpointError as ``WeightFiles``, and for a layer whose tensors do not fit one another.
    """

    def __init__(self, folder: Path, formats: Formats, kind: str) -> None:
        # Two views of the folder: its own tensors change here, and ``_raw`` reads the stored ones.
        super().__init__(folder)
        self._raw = WeightFiles(folder)
        self._layers: dict[str, _StoredLayer] = {}
        for name in self._raw.shapes:
            form = formats(name.rpartition(".")[0])
            mark = next((mark for mark in form.marks if name.endswith(form.separator + mark)), "")
            if mark:
                self._add(name.removesuffix(form.separator + mark), form, kind)
            elif _CACHE_SCALES.search(name):
                self._hide(name)

    def _add(self, path: str, form: Format, kind: str) -> None:
        stored = {part: f"{path}{form.separator}{part}" for part in form.parts}
        names = {part: name for part, name in stored.items() if name in self._raw.shapes}
        if all(self._raw.kinds[name] in FLOATING for name in names.values()):
            return  # a parameter that is called like a scale
        with self._checked(path):
            shape = form.shape(self._meta_tensors(names), lambda part: self._raw.read(names[part]))
        # Before the weight is added: its name may be that of a stored tensor.
        for name in names.values():
            self._hide(name)
        weight = path + form.weight_suffix
        self._layers[weight] = _StoredLayer(form, shape, names)
        self.shapes[weight] = shape
        self.kinds[weight] = kind
        self._files[weight] = Path(self._raw.file_of(next(iter(names.values()))))

    def _meta_tensors(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Stored tensors by suffix, on the meta device."""
        return {
            part: torch.empty(
                self._raw.shapes[name], dtype=DTYPES_BY_NAME[self._raw.kinds[name]], device="meta"
            )
            for part, name in names.items()
        }

    def _hide(self, name: str) -> None:
        for table in (self.shapes, self.kinds, self._files):
            table.pop(name, None)

    @contextmanager
    def _checked(self, path: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, ValueError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"the quantized layer {path} cannot be read",
                where=str(self.folder),
                why=f"{type(error).__name__}: {one_line(str(error))}",
                fix="check that config.json belongs to these weights",
            ) from error

    def is_quantized(self, name: str) -> bool:
        return name in self._layers

    def stored(self, name: str) -> QuantizedWeight:
        """The quantized weight ``PATH.weight``, which is not a stack."""
        return self._weight(name, self._raw.read)

    def _weight(self, name: str, read: Callable[[str], Tensor]) -> QuantizedWeight:
        layer = self._layers[name]
        with self._checked(name):
            tensors = {part: read(stored) for part, stored in layer.names.items()}
            return layer.form.weight(tensors, _matrix_shape(layer))

    def packing(self, name: str) -> StoredPacking:
        """How ``stored`` becomes one parameter. Reads at most one small tensor, and no weight."""
        layer = self._layers[name]
        tensors = self._meta_tensors(layer.names)
        tensors |= {
            part: self._raw.read(layer.names[part]) for part in layer.form.read_to_plan if part in tensors
        }
        with self._checked(name):
            weight = layer.form.weight(tensors, _matrix_shape(layer))
            forms = {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in weight.tensors().items()}
        return stored_packing(weight.kind, weight.width, weight.shape, forms)

    def read(self, name: str) -> Tensor:
        if name not in self._layers:
            return super().read(name)
        layer = self._layers[name]
        if not layer.form.stacked:
            return self.stored(name).dequantize()
        return torch.stack([self.read_matrix(name, index) for index in range(layer.shape[0])])

    def read_matrix(self, name: str, index: int) -> Tensor:
        if name not in self._layers:
            return super().read_matrix(name, index)
        return self._weight(name, lambda stored: self._raw.read_matrix(stored, index)).dequantize().t()

    def is_padding(self, name: str) -> bool:
        """GPTQ's tools write a bias of zeros to layers that have none."""
        owner = f"{name.removesuffix('.bias')}.weight"
        return name.endswith(".bias") and owner in self._layers and not self.read(name).any()

    def _matched_pieces(self, tensor: Tensor, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        if name not in self._layers:
            yield from super()._matched_pieces(tensor, name)
            return
        part = local_part(tensor)
        slices = local_slices(tensor)
        if part.numel() == 0:
            return
        # Scales and codes of a layer do not follow the shard's borders, so it is dequantized whole.
        if not self._layers[name].form.stacked:
            yield part, self.read(name)[slices]
            return
        matrices, *rest = slices or (slice(0, part.shape[0]),)
        for local_index, index in enumerate(range(matrices.start, matrices.stop)):
            yield part[local_index], self.read_matrix(name, index)[tuple(rest)]


def _matrix_shape(layer: _StoredLayer) -> tuple[int, int]:
    """(out, in) of a layer, or of each matrix of a stack, which stores them transposed."""
    rows, columns = layer.shape[-2:]
    return (columns, rows) if layer.form.stacked else (rows, columns)
