"""Collects what calibrated methods read: the sums over the inputs of every linear layer of a block.

Layers that read the same tensor (queries, keys and values; gate and up) share one Hessian. The first batch shows which
do. Sums are in fp32. Padding is not counted, except by layers that read some of the tokens only, such as experts: their
rows do not tell which tokens they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plugins.quantize.methods.base import InputStatistics


@dataclass(eq=False)
class InputSums:
    """Sums over the tokens that some layers read.

    Attributes:
        layers: names of the layers.
        hessian: [in, in], the sum of x xᵀ. magnitude: [in], the sum of |x|.
    """

    layers: list[str] = field(default_factory=list)
    hessian: Tensor | None = None
    magnitude: Tensor | None = None
    tokens: int = 0

    @classmethod
    def zero(cls, layers: list[str], width: int, like: Tensor) -> InputSums:
        """The sums of no token. ``like``: a tensor of the device."""
        device = like.device
        return cls(layers, torch.zeros(width, width, device=device), torch.zeros(width, device=device))

    def add(self, layer_input: Tensor, counted: Tensor | None) -> None:
        """Add the rows of an input; those of padding count as zero if there is one row for each token."""
        x = layer_input.reshape(-1, layer_input.shape[-1]).float()  # [t, in]
        tokens = x.shape[0]
        if counted is not None and counted.numel() == tokens:
            # A row of zeros adds nothing to either sum, and shapes depend on no value.
            x = x * counted.reshape(-1, 1)
            tokens = int(counted.sum())
        if self.hessian is None or self.magnitude is None:
            self.hessian = x.new_zeros(x.shape[1], x.shape[1])
            self.magnitude = x.new_zeros(x.shape[1])
        self.hessian.addmm_(x.t(), x)
        self.magnitude += x.abs().sum(0)
        self.tokens += tokens

    def mean(self) -> InputStatistics:
        """The means, in the memory of the sums, which are used up."""
        assert self.hessian is not None and self.magnitude is not None
        hessian, magnitude = self.hessian, self.magnitude
        # The statistics alone hold the Hessian now, so it is freed with them.
        self.hessian = self.magnitude = None
        divisor = max(1, self.tokens)  # an expert may have got no token
        return InputStatistics(hessian.div_(divisor), magnitude.div_(divisor), self.tokens)


def shrunk(statistics: InputStatistics) -> InputStatistics:
    """The statistics of few rows, with the Hessian moved towards a multiple of the identity; its memory is reused.

    The Hessian of fewer rows than channels is singular, and GPTQ moves errors into the directions that no row showed.
    The oracle-approximating shrinkage of Chen et al. 2010 (arXiv:0907.4698, equation 23) has a closed form for the
    share ρ of the identity: next to 1 for few rows without structure, next to 0 for many rows or a steep spectrum.
    """
    hessian = statistics.hessian
    size = hessian.shape[0]
    trace = float(hessian.trace())
    squares = float(torch.linalg.vector_norm(hessian)) ** 2  # tr(H²)
    numerator = (1 - 2 / size) * squares + trace**2
    denominator = (statistics.tokens + 1 - 2 / size) * (squares - trace**2 / size)
    # The denominator is 0 for a multiple of the identity, to which every share leads; rounding may make it negative.
    share = min(1.0, numerator / denominator) if denominator > 0 else 1.0
    hessian.mul_(1 - share).diagonal().add_(share * trace / size)
    return statistics


@torch.no_grad()
def input_sums(
    layers: dict[str, nn.Module],
    run: Callable[[Tensor], Tensor],
    batches: Sequence[Tensor],
    counted: Sequence[Tensor | None],
) -> list[InputSums]:
    """The sums of every distinct input of ``layers``, over calls of ``run`` with each batch.

    A layer that no batch reaches, such as an expert without tokens, is in no group.

    Args:
        batches: [b, s, h]. counted: of each batch, bool [b, s], false for padding; None without padding.
    """
    sums: list[InputSums] = []
    for batch, real in zip(batches, counted, strict=True):
        with _observed(layers, sums, real):
            run(batch)
    return sums


@contextmanager
def _observed(
    layers: dict[str, nn.Module], all_sums: list[InputSums], counted: Tensor | None
) -> Iterator[None]:
    """Add the inputs of one forward pass to the sums."""
    # Weak references: the pass keeps its activations no longer than without the hooks.
    seen: list[tuple[weakref.ref[Tensor], InputSums]] = []
    groups = {name: sums for sums in all_sums for name in sums.layers}  # from earlier batches

    def observe(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            layer_input: Tensor = args[0]
            if name in groups:
                if groups[name].layers[0] == name:  # the first layer of a group adds for all of them
                    groups[name].add(layer_input, counted)
                return
            # The same tensor object, not equal values: a comparison would wait for the device.
            sums = next((sums for reference, sums in seen if reference() is layer_input), None)
            if sums is None:
                sums = InputSums()
                sums.add(layer_input, counted)
                all_sums.append(sums)
                seen.append((weakref.ref(layer_input), sums))
            sums.layers.append(name)

        return hook

    hooks = [layer.register_forward_pre_hook(observe(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
