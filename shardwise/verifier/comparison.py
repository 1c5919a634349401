"""A run's parameters against those in a file, without an all-gather: each rank compares its own shards.

In fp32 and fp64 a parameter's difference is taken in L2 norm, relative to the larger of two norms: the file's, and the
norm of a parameter of its size at the model's root mean square (a bias that just left zero consists only of updates).
Elements that are NaN in the file are not compared: the loss does not determine them.

In fewer bits two correct runs differ by a tenth of their updates, in directions that rounding chose. Along the
way of the other run they differ by a hundredth. So inner products are compared: of gradients, and of the ways that
parameters went from their initial values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from shardwise.engine.run import Run
from shardwise.runtime.parallel.shard_slices import local_part, local_slices, named_parameters
from shardwise.verifier.verdict import Products


def parameter_differences(run: Run, weights: Path) -> dict[str, float]:
    """The relative L2 difference of each parameter from the file; equal on all ranks. NaN counts as infinite."""
    counted = set(run.own_parameters())
    with safe_open(weights, framework="pt") as file:
        names: list[str] = sorted(file.keys())
        slices = {name: file.get_slice(name) for name in names}
        sizes = [math.prod(tensor_slice.get_shape()) for tensor_slice in slices.values()]
        # Quantized weights are bytes; their magnitude is unrelated to the model's.
        counts = [size * (slices[name].get_dtype() != "U8") for name, size in zip(names, sizes, strict=True)]
        # A rank may hold some of the parameters; each row is summed over the ranks that hold it.
        sums = torch.zeros((len(names), 2), dtype=torch.float64, device=run.device)
        for name, parameter in named_parameters(run.model):
            if parameter not in counted:
                continue
            mine = local_part(parameter).double()
            theirs = _slice(file, name, parameter).to(mine.device).double()
            mine = mine.where(~theirs.isnan(), 0.0)
            theirs = theirs.nan_to_num(nan=0.0)
            row = torch.stack([(mine - theirs).square().sum(), theirs.square().sum()])
            sums[names.index(name)] = row / run.ranks_of(parameter)
    dist.all_reduce(sums)
    real = torch.tensor([count > 0 for count in counts], device=run.device)
    mean_square = float(sums[real, 1].sum()) / sum(counts)
    differences = {}
    for name, size, (difference, norm) in zip(names, sizes, sums.tolist(), strict=True):
        # A tensor of values far below the model's mean square counts by that: its own norm may be rounding noise.
        distance = (difference / max(norm, mean_square * size)) ** 0.5
        differences[name] = math.inf if math.isnan(distance) else distance
    return differences


def inner_products(mine: Tensor, theirs: Tensor) -> Products:
    """Of two pieces of the same tensor: <mine, theirs>, <mine, mine>, <theirs, theirs>."""
    mine, theirs = mine.double().flatten(), theirs.double().flatten()
    return float(mine @ theirs), float(mine @ mine), float(theirs @ theirs)


def gradient_products(run: Run, gradients: Path) -> dict[str, Products]:
    """Per trained parameter of its gradient, without the loss scale, and that in the file; equal on all ranks."""

    def mine(parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            return torch.zeros(())
        return local_part(parameter.grad).double().cpu() / run.loss_scale.value.item()

    return _inner_products(run, mine, gradients)


def way_products(run: Run, start: Path, end: Path) -> dict[str, Products]:
    """Per trained parameter of its way since ``start``, and that from ``start`` to ``end``; equal on all ranks."""
    return _inner_products(run, lambda parameter: local_part(parameter).double().cpu(), end, start)


def _inner_products(
    run: Run, mine: Callable[[nn.Parameter], Tensor], file: Path, less: Path | None = None
) -> dict[str, Products]:
    """Inner products of local tensors with this rank's slices of those in a file, summed over all ranks.

    Those in ``less`` are subtracted from both.
    """
    counted = set(run.own_parameters())
    with safe_open(file, framework="pt") as opened, safe_open(less or file, framework="pt") as subtracted:
        names: list[str] = sorted(opened.keys())
        sums = torch.zeros((len(names), 3), dtype=torch.float64, device=run.device)
        for name, parameter in named_parameters(run.model):
            if parameter not in counted or name not in names:
                continue
            theirs = _slice(opened, name, parameter)
            origin = _slice(subtracted, name, parameter) if less is not None else torch.zeros(())
            products = inner_products((mine(parameter) - origin).expand_as(theirs), theirs - origin)
            row = torch.tensor(products, dtype=torch.float64, device=run.device)
            sums[names.index(name)] = row / run.ranks_of(parameter)
    dist.all_reduce(sums)
    return {name: (a, b, c) for name, (a, b, c) in zip(names, sums.tolist(), strict=True)}


def _slice(file: Any, name: str, parameter: nn.Parameter) -> Tensor:
    slices = local_slices(parameter)
    return torch.as_tensor(file.get_slice(name)[slices] if slices else file.get_tensor(name))
