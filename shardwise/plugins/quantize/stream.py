"""The pass: one block after the other is read, calibrated, quantized and run, and leaves memory.

Per block: the base model's held-out activations go through the original weights; the calibration activations, which
come from quantized blocks (GPTQ, Frantar et al. 2022, arXiv:2210.17323, section 3.3), give the input statistics; every
linear layer and every expert (experts.py) is quantized; both go through the quantized weights. So peak memory is one
block, its activations, and one Hessian per distinct input; those of experts take as much as the block. Embedding, head
and everything else stay as they are; the other matrices of the blocks are reported.

The pass waits for values only inside methods and for the number of an expert's rows. The prediction runs the same code
on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.units import format_percent
from shardwise.model.lora import linear_layers
from shardwise.model.unreached import matrices
from shardwise.plugins.quantize.experts import BlockExperts, ExpertLayer, kept_reason
from shardwise.plugins.quantize.gate import losses
from shardwise.plugins.quantize.methods.base import InputStatistics
from shardwise.plugins.quantize.quantizer import Quantizer, Rounded
from shardwise.plugins.quantize.ranks import ALONE, Ranks
from shardwise.plugins.quantize.state import UNQUANTIZED, LayerRow, QuantizedBlock
from shardwise.plugins.quantize.statistics import input_sums
from shardwise.plugins.quantize.walk import Walk
from shardwise.runtime.quantization.activations import rounded_to_float8, rounded_to_int8
from shardwise.runtime.quantization.stored import weight_of


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


@torch.no_grad()
def quantize_blocks(
    walk: Walk,
    quantizer: Quantizer,
    batches: Batches,
    state: State,
    done: BlockProgress = lambda _: None,
    blocks: Iterable[int] | None = None,
    ranks: Ranks = ALONE,
    experts: Sequence[ExpertLayer] = (),
    original: Walk | None = None,
) -> Tensor:
    """Quantize every block and save it in ``state``; returns the sums of ``losses``.

    Args:
        batches: those of this rank.
        blocks: the blocks to run, in order; a prediction leaves out those that are like others.
        experts: the mixtures' experts that are quantized.
        original: of the base model, where its weights are not those that are quantized (a rotated model in 16 bits).
    """
    calibration = list(walk.embedded(batches.calibration))
    base = list((original or walk).embedded(batches.held_out))
    # Clones, so that every block holds equally much.
    embedded = (hidden.clone() for hidden in base) if original is None else walk.embedded(batches.held_out)
    quantized = list(embedded)
    inside = walk.blueprint.blocks(walk.model)
    targets = set(linear_layers(walk.model, inside))
    kept = kept_matrices(walk.model, inside, quantizer.dtypes, experts)
    for index in range(walk.depth) if blocks is None else blocks:
        if original is not None:
            # Before the block to be quantized is loaded, so that one block's weights are in memory.
            with original.loaded(index, base[0]) as run:
                _advance(run, base)
        with walk.loaded(index, (calibration or base)[0]) as run:
            if original is None:  # while the block still has the weights of the base model
                _advance(run, base)
            block = _Block(walk, index, targets, kept, experts, quantizer)
            # Ranks agree: rank 0 saves a block after the exchange of its results, so all ranks have looked before.
            if index in state:
                result = state.load(index)
            else:
                result = block.quantized(run, calibration, batches.counted, ranks)
                if ranks.rank == 0:
                    state.save(index, result)
            # A block just quantized is read back from its codes too: a pass that starts again gets the same bits.
            block.restore(result)
            del result
            _advance(run, calibration)
            _advance(run, quantized)
        done(index)
    with walk.head() as head, nullcontext(head) if original is None else original.head() as base_head:
        return ranks.add(losses((base_head, head), base, quantized, batches.labels))


def kept_matrices(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    dtypes: Mapping[str, torch.dtype],
    experts: Sequence[ExpertLayer] = (),
) -> list[LayerRow]:
    """The rows of the matrices in the blocks that are neither linear layers nor ``experts``."""
    stacks = {stack for layer in experts for stack in layer.stacks}
    return [
        LayerRow(
            matrix.name,
            matrix.shape,
            UNQUANTIZED,
            0.0,
            8.0 * dtypes[matrix.name].itemsize,
            kept_reason(model.get_submodule(matrix.owner)),
        )
        for matrix in matrices(model, blocks, list(linear_layers(model, blocks)))
        if matrix.name not in stacks
    ]


def _advance(run: Callable[[Tensor], Tensor], batches: list[Tensor]) -> None:
    """Replace the activations before a block by those after it, batch by batch: the old ones are freed one by one."""
    for index in range(len(batches)):
        batches[index] = run(batches[index])


class _Block:
    """A loaded block, whose linear layers and experts get their quantized weights."""

    def __init__(
        self,
        walk: Walk,
        index: int,
        targets: set[str],
        rows: Sequence[LayerRow],
        experts: Sequence[ExpertLayer],
        quantizer: Quantizer,
    ) -> None:
        self._module = walk.block(index)
        self._prefix = walk.path(index)
        self._quantizer = quantizer
        names = [path for path, _ in self._module.named_modules() if self._name(path) in targets]
        self._layers = {path: self._module.get_submodule(path) for path in names}
        self._kept = [row for row in rows if row.name.startswith(f"{self._prefix}.")]
        self._experts = BlockExperts(self._module, self._prefix, experts, quantizer)

    def _name(self, path: str) -> str:
        """The name in the model of a path in the block."""
        return f"{self._prefix}.{path}"

    def restore(self, block_result: QuantizedBlock) -> None:
        """Give the layers the weights of a finished block, exactly as a reader of its file computes them."""
        for name, value in block_result.changed.items():
            owner, _, key = name.removeprefix(f"{self._prefix}.").rpartition(".")
            _replace_parameter(self._module.get_submodule(owner), key, value)
        self._experts.restore(block_result.weights)
        for path, layer in self._layers.items():
            tensors = block_result.weights.get(self._name(path))
            if tensors is None:
                continue
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
            # Layers with one input share the tensors; ``mean`` uses up the sums.
            statistics |= dict.fromkeys(sums.layers, sums.mean())
        touched = self._folded(run, calibration, statistics)
        paths = [*statistics, *(path for path in self._layers if path not in statistics)]
        # ``pop`` frees a Hessian as soon as its last layer is quantized.
        own = {path: self._quantize(path, statistics.pop(path, None)) for path in ranks.part(paths)}
        statistics.clear()  # of the layers of other ranks
        results = ranks.exchanged(paths, own) | self._experts.quantized(run, calibration, counted, ranks)
        block_result = QuantizedBlock()
        for row, tensors in results.values():
            block_result.rows.append(row)
            if tensors is not None:
                block_result.weights[row.name] = tensors
        block_result.rows.extend(self._kept)
        for path in touched:
            for key, parameter in self._module.get_submodule(path).named_parameters(recurse=False):
                # A folded weight that is quantized has its scale in the codes; its bias is stored whole, as norms are.
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
        method = self._quantizer.method
        if not (method.folds and calibration):
            return ()
        hidden = calibration[0]
        before = run(hidden)
        touched = method.prepare(self._module, statistics, self._quantizer.scheme)
        if touched:
            # Without the residual stream, next to which a change of a deep block's own output looks small.
            require_same_output(self._prefix, method.name, before - hidden, run(hidden) - hidden)
        return touched

    def _quantize(self, path: str, statistics: InputStatistics | None) -> Rounded:
        weight = self._layers[path].get_parameter("weight").data
        return self._quantizer.layer(self._name(path), weight, statistics)

    def _serve(self, layer: nn.Module, weight: Tensor) -> None:
        """Give a layer its dequantized weight, and 8-bit inputs if the scheme has them."""
        _replace_parameter(layer, "weight", weight)
        if self._quantizer.scheme.activation_bits == 8:
            layer.register_forward_pre_hook(_IN_8_BITS[self._quantizer.scheme.kind])


_IN_8_BITS = {
    "int": lambda _, args: rounded_to_int8(args[0]),
    "float8": lambda _, args: rounded_to_float8(args[0]),
}
"""Forward pre-hooks that round a layer's input as the reader of the folder does."""


def require_same_output(block: str, method: str, before: Tensor, after: Tensor) -> None:
    """Raise RecipeError if what a block adds to the hidden states [b, s, h] is not the same before and after folding.

    In fp32 it moves by about 1e-6.
    """
    moved = float((after - before).norm())
    size = float(before.norm())
    if not moved <= FOLDING_TOLERANCE * size:  # also for NaN
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
