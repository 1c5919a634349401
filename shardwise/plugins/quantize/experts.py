"""The experts of a mixture, stacks of matrices in one module: each matrix is quantized on its own.

    stacks    gate_up_proj [e, 2m, h] (without a gate up_proj [e, m, h]), down_proj [e, h, m]
    inputs    of an expert's gate and up: the hidden states of the tokens that the router sends to it;
              of its down: their gated activations, without the router's weight

A block runs once more for every group of experts, with a stand-in that records these inputs and computes no output.
All Hessians of a group are in memory at once, e (h² + m²) floats; a group has as many experts as fit into the bytes of
the block's weights. Holding those of all experts would need e times one; running expert by expert, e times the block.

Some experts get few rows, or none. Their Hessians are shrunk (statistics.py): on Gaussian rows of any spectrum GPTQ and
AWQ then lose at most 0.1 % against rounding to nearest, where they lost up to 77 %
(`python benchmarks/expert_rows.py`). Without any row, an expert is rounded to nearest.

A method with scales (AWQ) divides the rows of an expert's up projection and multiplies the columns of its down
projection: what down reads is up's output times a function of the gate. Where it is not (gpt-oss), there are no scales.

Packed are the experts that the files have one by one: transformers' readers of packed weights take no others. The
modules are transformers' and the native one's (model/mixture.py), which are called alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.files.folder_layout import StackSlice, TensorGroup
from shardwise.model.mixture import Experts
from shardwise.plugins.quantize.methods.base import InputStatistics
from shardwise.plugins.quantize.quantizer import Quantizer, Rounded
from shardwise.plugins.quantize.ranks import Ranks
from shardwise.plugins.quantize.state import UNQUANTIZED, LayerRow
from shardwise.plugins.quantize.statistics import InputSums, shrunk
from shardwise.runtime.quantization.stored import weight_of

DOWN = "down_proj"
"""The stack that reads activations; the other one reads hidden states."""

BlockForward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one module.

    Attributes:
        path: of the module in the model.
        count: of experts.
        matrices: where each matrix is, by its path on disk.
    """

    path: str
    count: int
    matrices: Mapping[str, StackSlice]

    @property
    def stacks(self) -> set[str]:
        """Canonical names of the stacks."""
        return {part.stack for part in self.matrices.values()}


def expert_layers(model: nn.Module, groups: Sequence[TensorGroup]) -> list[ExpertLayer]:
    """The experts of a model that can be packed.

    Args:
        groups: the tensors of its folder.
    """
    slices: dict[str, dict[str, StackSlice]] = {}
    for group in groups:
        for name, part in group.slices.items():
            slices.setdefault(part.stack.rpartition(".")[0], {})[name.removesuffix(".weight")] = part
    layers = []
    for path, matrices in slices.items():
        if not _experts_obstacle(model.get_submodule(path)):
            count = 1 + max(part.index for part in matrices.values())
            layers.append(ExpertLayer(path, count, matrices))
    return layers


def kept_reason(module: nn.Module) -> str:
    """Why a matrix of a module that is no linear layer stays as it is."""
    why = f"{type(module).__name__} is no linear layer"
    if not hasattr(module, "has_gate"):  # of transformers' experts only
        return why
    return f"{why}, and {_experts_obstacle(module) or 'its files do not have the experts one by one'}"


def _experts_obstacle(module: nn.Module) -> str:
    """Why the experts of a module cannot be quantized; "" if they can. transformers' decorator sets the attributes."""
    if isinstance(module, Experts):
        return ""
    if getattr(module, "has_gate", None) is None:
        return "its experts are not called as transformers calls experts"
    for name, value in (("has_bias", False), ("is_transposed", False), ("has_post_expert_norm", False)):
        if getattr(module, name) != value:
            return f"its experts are stored with {name}"
    return "" if module.is_concatenated else "its gates and ups are interleaved"


class BlockExperts:
    """The experts of a loaded block, whose stacks get the quantized weights."""

    def __init__(
        self, block: nn.Module, prefix: str, layers: Sequence[ExpertLayer], quantizer: Quantizer
    ) -> None:
        self._block = block
        self._prefix = prefix
        self._quantizer = quantizer.of_experts()
        self._layers = [layer for layer in layers if layer.path.startswith(f"{prefix}.")]

    def quantized(
        self, run: BlockForward, calibration: Sequence[Tensor], counted: Sequence[Tensor | None], ranks: Ranks
    ) -> dict[str, Rounded]:
        """The rows and stored tensors of all matrices by their paths; a stack is kept whole or not at all."""
        results: dict[str, Rounded] = {}
        for layer in self._layers:
            scaled = self._quantizer.method.folds and _passes_scales(self._module(layer))
            matrices = self._of_layer(layer, run, calibration, counted, ranks, scaled)
            if scaled and any(tensors is None for _, tensors in matrices.values()):
                # A kept down_proj is not multiplied by the scales, so up_proj must not be divided by them.
                matrices = self._of_layer(layer, run, calibration, counted, ranks, scaled=False)
            results |= matrices
        return self._whole_stacks(results)

    def _of_layer(
        self,
        layer: ExpertLayer,
        run: BlockForward,
        calibration: Sequence[Tensor],
        counted: Sequence[Tensor | None],
        ranks: Ranks,
        scaled: bool,
    ) -> dict[str, Rounded]:
        """The rows and stored tensors of the matrices of a module. ``scaled``: with the method's scales."""
        results: dict[str, Rounded] = {}
        module = self._module(layer)
        for members in self._groups(layer, bool(calibration)):
            inputs = _Inputs.of(module, members, layer)
            with _recorded_inputs(module, inputs):
                for batch, real in zip(calibration, counted, strict=True):
                    inputs.counted = None if real is None else real.flatten()
                    run(batch)
            ranks.sum_inputs(inputs.sums)
            statistics = inputs.statistics() if calibration else {}
            names = [name for name, part in layer.matrices.items() if part.index in members]
            scales: dict[int, Tensor | None] = {}
            own: dict[str, Rounded] = {}
            for name in ranks.part(names):
                part = layer.matrices[name]
                # Ranks share the matrices of one expert. Statistics are equal on all ranks, so each rank computes
                # the same scale by itself.
                if scaled and part.index not in scales:
                    scales[part.index] = self._scale(layer, part.index, statistics)
                own[name] = self._rounded(name, part, statistics.get(name), scales.get(part.index))
            del statistics, inputs  # before the next group makes its Hessians
            results |= ranks.exchanged(names, own)
        return results

    def _scale(
        self, layer: ExpertLayer, index: int, statistics: Mapping[str, InputStatistics]
    ) -> Tensor | None:
        """The scale of the input of an expert's down projection."""
        name, part = next(
            (name, part)
            for name, part in layer.matrices.items()
            if part.index == index and part.stack.endswith(f".{DOWN}")
        )
        return self._quantizer.scale_of(self._matrix(part), statistics.get(name))

    def restore(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Give the stacks the weights of a finished block, as a reader of its file computes them."""
        bits = self._quantizer.scheme.bits
        for layer in self._layers:
            for stack in sorted(layer.stacks):
                parts = {name: part for name, part in layer.matrices.items() if part.stack == stack}
                if not parts.keys() <= weights.keys():  # the stack is kept
                    continue
                whole = torch.empty_like(self._stack(stack))  # the old memory may be a mapped file
                for name, part in parts.items():
                    matrix = whole[part.index, part.start : part.stop]
                    shape = int(matrix.shape[0]), int(matrix.shape[1])
                    matrix.copy_(weight_of(weights[name], bits, shape).dequantize())
                key = stack.rpartition(".")[2]
                self._module(layer).register_parameter(key, nn.Parameter(whole, requires_grad=False))

    def _rounded(
        self, name: str, part: StackSlice, statistics: InputStatistics | None, scale: Tensor | None
    ) -> Rounded:
        matrix = self._matrix(part)
        if scale is not None and part.stack.endswith(f".{DOWN}"):
            matrix = matrix * scale
            statistics = statistics and statistics.divided(scale)
        elif scale is not None:
            # The stack has the gate's rows first, and only those of up are divided. A matrix is a range of its rows.
            gate = torch.ones(self._stack(part.stack).shape[1] - len(scale), device=scale.device)
            matrix = matrix / torch.cat([gate, scale])[part.start : part.stop].unsqueeze(1)
        return self._quantizer.expert(name, part.stack, matrix, statistics)

    def _module(self, layer: ExpertLayer) -> nn.Module:
        return self._block.get_submodule(layer.path.removeprefix(f"{self._prefix}."))

    def _matrix(self, part: StackSlice) -> Tensor:
        return self._stack(part.stack)[part.index, part.start : part.stop]

    def _stack(self, name: str) -> Tensor:
        return self._block.get_parameter(name.removeprefix(f"{self._prefix}.")).data

    def _groups(self, layer: ExpertLayer, calibrated: bool) -> Iterator[range]:
        """The experts whose statistics are in memory together."""
        size = layer.count
        if calibrated:
            widths = {part.stack: self._matrix(part).shape[1] for part in layer.matrices.values()}
            hessian_bytes = sum(4 * width**2 for width in widths.values())  # fp32, of one expert
            block_bytes = sum(parameter.nbytes for parameter in self._block.parameters())
            size = max(1, min(layer.count, block_bytes // hessian_bytes))
        for start in range(0, layer.count, size):
            yield range(start, min(start + size, layer.count))

    def _whole_stacks(self, results: dict[str, Rounded]) -> dict[str, Rounded]:
        """Replace the matrices of a stack by one row for it if some cannot be represented: readers take all or none."""
        broken = {row.stack: row for row, tensors in results.values() if tensors is None}
        kept: dict[str, Rounded] = {
            name: rounded for name, rounded in results.items() if rounded[0].stack not in broken
        }
        for stack, row in broken.items():
            shape = tuple(self._stack(stack).shape)
            kept[stack] = LayerRow(stack, shape, UNQUANTIZED, 0.0, row.bits, row.why), None
        return kept


@dataclass
class _Inputs:
    """The sums over what some experts read.

    Attributes:
        experts: the module. members: indices of the experts.
        hidden, activations: sums of each member's rows, in order.
        counted: [t], false for the padding of the batch that runs; None without padding.
    """

    experts: Any
    members: range
    hidden: list[InputSums]
    activations: list[InputSums]
    counted: Tensor | None = field(default=None)

    @classmethod
    def of(cls, experts: Any, members: range, layer: ExpertLayer) -> _Inputs:
        """Zero sums. The layers of each are the matrices that read it."""
        names: dict[tuple[int, bool], list[str]] = {}
        for name, part in layer.matrices.items():
            names.setdefault((part.index, part.stack.endswith(f".{DOWN}")), []).append(name)
        first = _first_stack(experts)
        down = experts.down_proj
        hidden = [InputSums.zero(names[index, False], first.shape[2], first) for index in members]
        activations = [InputSums.zero(names[index, True], down.shape[2], down) for index in members]
        return cls(experts, members, hidden, activations)

    @property
    def sums(self) -> list[InputSums]:
        return [*self.hidden, *self.activations]

    def statistics(self) -> dict[str, InputStatistics]:
        """The means by path of the matrix, for few rows; the sums are used up."""
        means = [(sums.layers, shrunk(sums.mean())) for sums in self.sums]
        return {name: mean for names, mean in means for name in names}

    def add(self, hidden: Tensor, chosen: Tensor) -> None:
        """Add the rows of a batch: hidden states [t, h] and the experts [t, k] that each token goes to."""
        experts, order = chosen.flatten().sort(stable=True)  # [t k], the choices by expert
        tokens = order // chosen.shape[1]  # choice i is one of the k choices of token i // k
        borders = torch.arange(self.members.start, self.members.stop + 1, device=experts.device)
        # One copy to the host for all experts. Member i has the sorted choices from bounds[i] to bounds[i + 1].
        bounds = torch.searchsorted(experts, borders.to(experts.dtype)).tolist()
        first = _first_stack(self.experts)
        for position, expert in enumerate(self.members):
            routed = tokens[bounds[position] : bounds[position + 1]]
            counted = None if self.counted is None else self.counted[routed]
            rows = hidden[routed]
            self.hidden[position].add(rows, counted)
            self.activations[position].add(self._activations(F.linear(rows, first[expert])), counted)

    def _activations(self, product: Tensor) -> Tensor:
        """What the expert's down projection reads."""
        if isinstance(self.experts, Experts):
            gate, up = product.chunk(2, dim=-1)
            activations: Tensor = self.experts.act_fn(gate) * up
        else:
            activations = (
                self.experts._apply_gate(product) if self.experts.has_gate else self.experts.act_fn(product)
            )
        return activations


@torch.no_grad()
def _passes_scales(experts: Any) -> bool:
    """Whether what the down projection reads is the up projection times a function of the gate: measured."""
    wide = _first_stack(experts).shape[1]
    # Large products reach the limits at which some gates clamp.
    product = 20 * torch.randn(4, wide, generator=torch.Generator().manual_seed(0))
    # Doubles up, the second half. Without a gate this doubles half of the channels, and the answer is no.
    scale = torch.cat([torch.ones(wide // 2), torch.full((wide - wide // 2,), 2.0)])
    inputs = _Inputs(experts, range(0), [], [])
    try:
        plain, scaled = (inputs._activations(rows) for rows in (product, product * scale))
    except RuntimeError:
        return False
    return float((2 * plain - scaled).norm()) <= 1e-5 * float(scaled.norm())


def _first_stack(experts: Any) -> Tensor:
    """The stack that reads hidden states."""
    gated = isinstance(experts, Experts) or experts.has_gate
    stack: Tensor = experts.gate_up_proj if gated else experts.up_proj
    return stack


@contextmanager
def _recorded_inputs(module: nn.Module, inputs: _Inputs) -> Iterator[None]:
    """Within the block, the module adds what it is given to ``inputs`` and returns zeros."""
    signature = inspect.signature(type(module).forward)

    def stand_in(*args: Any, **named: Any) -> Tensor:
        # By position in the signature: classes name their arguments differently. (self, hidden, chosen, weights)
        _, hidden, chosen, *_ = signature.bind(module, *args, **named).arguments.values()
        inputs.add(hidden.reshape(-1, hidden.shape[-1]), chosen)
        return torch.zeros_like(hidden)

    # An attribute of the instance hides the method of its class until it is deleted.
    module.forward = stand_in
    try:
        yield
    finally:
        del module.forward
