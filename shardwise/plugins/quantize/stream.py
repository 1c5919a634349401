"""The pass: one block after the other is read, calibrated, quantized and run, and leaves memory.

Per block: the base model's held-out activations go through the original weights; the calibration activations, which
come from quantized blocks (GPTQ, Frantar et al. 2022, arXiv:2210.17323, section 3.3), give the input statistics; every
linear layer is quantized; both go through the quantized weights. So peak memory is one block, its activations, and one
Hessian per distinct input. Embedding, head and everything that is not a linear layer of a block stay as they are; the
other matrices of the blocks are reported.

The pass never waits for a value except inside methods. The prediction runs the same code on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.scheme import Scheme
from shardwise.core.units import format_percent
from shardwise.model.lora import linear_layers
from shardwise.model.unreached import matrices
from shardwise.plugins.quantize.gate import losses
from shardwise.plugins.quantize.methods.base import (
    InputStatistics,
    NotConverged,
    QuantizationMethod,
    relative_output_error,
)
from shardwise.plugins.quantize.ranks import ALONE, Ranks
from shardwise.plugins.quantize.state import UNQUANTIZED, LayerRow, QuantizedBlock, stored_form
from shardwise.plugins.quantize.statistics import input_sums
from shardwise.plugins.quantize.walk import Walk
from shardwise.runtime.quantization.activations import rounded_to_float8, rounded_to_int8
from shardwise.runtime.quantization.stored import weight_of
from shardwise.runtime.quantization.weights import PACKED, ZERO


class State(Protocol):
    """Where finished blocks are (state.py)."""

    def __contains__(self, index: int) -> bool: ...

    def load(self, index: int) -> QuantizedBlock: ...

    def save(self, index: int, block: QuantizedBlock) -> None: ...


@dataclass(frozen=True)
class Batches:
    """Token batches of one shape, int64 [b, s].

    Attributes:
        labels: of ``held_out``.
        counted: of ``calibration``: bool [b, s], false for padding; None without padding.
    """

    calibration: Sequence[Tensor]
    held_out: Sequence[Tensor]
    labels: Sequence[Tensor]
    counted: Sequence[Tensor | None]


FOLDING_TOLERANCE = 1e-3
"""Largest move of the hidden states by folding, relative to the change that the block makes."""

BlockProgress = Callable[[int], None]
"""Called after each block with its number."""


@dataclass(frozen=True)
class Quantizer:
    """Quantizes every linear layer alike. ``dtypes``: those of the written folder, by name of the tensor."""

    method: QuantizationMethod
    scheme: Scheme
    dtypes: Mapping[str, torch.dtype]


@torch.no_grad()
def quantize_blocks(
    walk: Walk,
    quantizer: Quantizer,
    batches: Batches,
    state: State,
    done: BlockProgress = lambda _: None,
    blocks: Iterable[int] | None = None,
    ranks: Ranks = ALONE,
) -> Tensor:
    """Quantize every block and save it in ``state``; returns the sums of ``losses``.

    Args:
        batches: those of this rank.
        blocks: the blocks to run, in order; a prediction leaves out those that are like others.
    """
    calibration = list(walk.embedded(batches.calibration))
    base = list(walk.embedded(batches.held_out))
    quantized = [each.clone() for each in base]  # so that every block holds equally much
    inside = walk.blueprint.blocks(walk.model)
    targets, kept = (
        set(linear_layers(walk.model, inside)),
        kept_matrices(walk.model, inside, quantizer.dtypes),
    )
    for index in range(walk.depth) if blocks is None else blocks:
        with walk.loaded(index, (calibration or base)[0]) as run:
            _advance(run, base)
            block = _Block(walk, index, targets, kept, quantizer)
            if index in state:
                found = state.load(index)
            else:
                found = block.quantized(run, calibration, batches.counted, ranks)
                if ranks.rank == 0:
                    state.save(index, found)
            block.restore(found)
            del found
            _advance(run, calibration)
            _advance(run, quantized)
        done(index)
    with walk.head() as head:
        return ranks.add(losses(head, base, quantized, batches.labels))


def kept_matrices(
    model: nn.Module, blocks: Sequence[nn.Module], dtypes: Mapping[str, torch.dtype]
) -> list[LayerRow]:
    """The rows of the matrices in the blocks that are no linear layers, such as the experts of a mixture."""
    return [
        LayerRow(
            matrix.name,
            matrix.shape,
            UNQUANTIZED,
            0.0,
            8.0 * dtypes[matrix.name].itemsize,
            f"{matrix.kind} is no linear layer",
        )
        for matrix in matrices(model, blocks, list(linear_layers(model, blocks)))
    ]


def _advance(run: Callable[[Tensor], Tensor], batches: list[Tensor]) -> None:
    """Replace the activations before a block by those after it, batch by batch."""
    for index in range(len(batches)):
        batches[index] = run(batches[index])


class _Block:
    """A loaded block, whose linear layers get their quantized weights."""

    def __init__(
        self, walk: Walk, index: int, targets: set[str], rows: Sequence[LayerRow], quantizer: Quantizer
    ) -> None:
        self._module, self._prefix, self._quantizer = walk.block(index), walk.path(index), quantizer
        names = [path for path, _ in self._module.named_modules() if self._name(path) in targets]
        self._layers = {path: self._module.get_submodule(path) for path in names}
        self._kept = [row for row in rows if row.name.startswith(f"{self._prefix}.")]

    def _name(self, path: str) -> str:
        """The name in the model of a path in the block."""
        return f"{self._prefix}.{path}"

    def restore(self, block_result: QuantizedBlock) -> None:
        """Give the layers the weights of a finished block, exactly as a reader of its file computes them."""
        for name, value in block_result.changed.items():
            owner, _, key = name.removeprefix(f"{self._prefix}.").rpartition(".")
            _replace_parameter(self._module.get_submodule(owner), key, value)
        for name, tensors in block_result.weights.items():
            layer = self._layers[name.removeprefix(f"{self._prefix}.")]
            rows, columns = layer.get_parameter("weight").shape
            weight = weight_of(tensors, self._quantizer.scheme.bits, (rows, columns))
            self._serve(layer, weight.dequantize())

    def quantized(
        self,
        run: Callable[[Tensor], Tensor],
        calibration: Sequence[Tensor],
        counted: Sequence[Tensor | None],
        ranks: Ranks,
    ) -> QuantizedBlock:
        """Quantize the layers for the inputs that the calibration activations give them; the layers keep weights."""
        groups = input_sums(self._layers, run, calibration, counted)
        ranks.sum_inputs(groups)
        statistics: dict[str, InputStatistics] = {}
        for sums in groups:
            statistics |= dict.fromkeys(sums.layers, sums.mean())
        touched = self._folded(run, calibration, statistics)
        paths = [*statistics, *(path for path in self._layers if path not in statistics)]
        own = {path: self._quantize(path, statistics.pop(path, None)) for path in ranks.part(paths)}
        statistics.clear()
        block_result = QuantizedBlock()
        for path, (row, tensors) in ranks.exchanged(paths, own).items():
            block_result.rows.append(row)
            if tensors is not None:
                block_result.weights[self._name(path)] = tensors
        block_result.rows.extend(self._kept)
        for path in touched:
            for key, parameter in self._module.get_submodule(path).named_parameters(recurse=False):
                if self._name(path) not in block_result.weights or key != "weight":
                    name = self._name(f"{path}.{key}")
                    block_result.changed[name] = parameter.data.to(self._quantizer.dtypes[name])
        return block_result

    def _folded(
        self,
        run: Callable[[Tensor], Tensor],
        calibration: Sequence[Tensor],
        statistics: dict[str, InputStatistics],
    ) -> Sequence[str]:
        """The modules that the method changes before it rounds. Raises RecipeError if the block's output moves."""
        method, scheme = self._quantizer.method, self._quantizer.scheme
        if not (method.folds and calibration):
            return ()
        hidden = calibration[0]
        before = run(hidden)
        touched = method.prepare(self._module, statistics, scheme)
        if touched:
            require_same_output(self._prefix, method.name, before - hidden, run(hidden) - hidden)
        return touched

    def _quantize(
        self, path: str, statistics: InputStatistics | None
    ) -> tuple[LayerRow, Mapping[str, Tensor] | None]:
        """The row of a layer, and its stored tensors unless it is kept."""
        name, method = self._name(path), self._quantizer.method
        weight = self._layers[path].get_parameter("weight").data
        shape = int(weight.shape[0]), int(weight.shape[1])
        stored = self._quantizer.dtypes[f"{name}.weight"]  # of the scales too
        why = "no calibration token reaches it" if statistics is None and method.calibrated else ""
        if not why:
            try:
                result = method.quantize(weight.to(stored), self._quantizer.scheme, statistics)
                tensors = _stored_tensors(result.tensors())
            except NotConverged as reason:
                why = str(reason) or "it does not converge"
        if why:
            return LayerRow(name, shape, UNQUANTIZED, 0.0, 8.0 * stored.itemsize, why), None
        error = relative_output_error(weight, result.dequantize(), statistics)
        return LayerRow(name, shape, method.name, error, result.bits, tensors=stored_form(tensors)), tensors

    def _serve(self, layer: nn.Module, weight: Tensor) -> None:
        """Give a layer its dequantized weight, and 8-bit inputs if the scheme has them."""
        _replace_parameter(layer, "weight", weight)
        if self._quantizer.scheme.activation_bits == 8:
            layer.register_forward_pre_hook(_IN_8_BITS[self._quantizer.scheme.kind])


def _stored_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The stored tensors. Raises NotConverged for zero points of several groups in one row of words.

    compressed-tensors up to 0.20 fails to unpack them: their transpose counts as contiguous, with a stride of 2.
    """
    zero = tensors.get(ZERO)
    if zero is not None and PACKED in tensors and zero.shape[0] == 1 < zero.shape[1]:
        raise NotConverged("compressed-tensors cannot read zero points of so few output channels")
    return tensors


_IN_8_BITS = {
    "int": lambda _, args: rounded_to_int8(args[0]),
    "float8": lambda _, args: rounded_to_float8(args[0]),
}
"""Forward pre-hooks that round a layer's input as the reader of the folder does."""


def require_same_output(block: str, method: str, before: Tensor, after: Tensor) -> None:
    """Raise RecipeError if what a block adds to the hidden states [b, s, h] is not the same before and after folding.

    In fp32 it moves by about 1e-6.
    """
    moved, size = float((after - before).norm()), float(before.norm())
    if not moved <= FOLDING_TOLERANCE * size:
        raise RecipeError(
            f"{method} would change this model before it rounds",
            where=f"--method: {block}",
            why="the scales that it folds into norms and layers move the block's output by"
            f" {format_percent(moved / size, 1)}",
            fix="take a method that leaves norms as they are, such as gptq",
        )


def _replace_parameter(module: nn.Module, key: str, value: Tensor) -> None:
    """Replace a parameter by a value of its dtype. The old tensor may be a mapped file, so it is not written to."""
    old = module.get_parameter(key)
    module.register_parameter(key, nn.Parameter(value.to(old.dtype), requires_grad=False))
