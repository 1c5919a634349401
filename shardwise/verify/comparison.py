"""Distances of a run's parameters from those in a file, without an all-gather.

Each rank compares its own shards. A parameter's difference is taken in L2 norm, relative to the larger of two norms:
the file's, and the norm of a parameter of its size at the model's root mean square (a bias that just left zero consists
only of updates). Elements that are NaN in the file are not compared: the loss does not determine them.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from shardwise.engine.optim.norm import holders
from shardwise.engine.run import Run
from shardwise.runtime.parallel.shard_slices import local_part, local_slices, named_parameters


def parameter_differences(run: Run, weights: Path) -> dict[str, float]:
    """The relative L2 difference of each parameter from the file; equal on all ranks. NaN counts as infinite."""
    counted = set(run.own_parameters())
    with safe_open(weights, framework="pt") as file:
        names: list[str] = sorted(file.keys())
        slices = {name: file.get_slice(name) for name in names}
        sizes = [math.prod(held.get_shape()) for held in slices.values()]
        # Quantized weights are bytes; their magnitude is unrelated to the model's.
        counts = [size * (slices[name].get_dtype() != "U8") for name, size in zip(names, sizes, strict=True)]
        # A rank may hold some of the parameters; each row is summed over the ranks that hold it.
        sums = torch.zeros((len(names), 2), dtype=torch.float64, device=run.device)
        for name, parameter in named_parameters(run.model):
            if parameter not in counted:
                continue
            mine = local_part(parameter).double()
            place = local_slices(parameter)
            reference = torch.as_tensor(file.get_slice(name)[place] if place else file.get_tensor(name))
            theirs = reference.to(mine.device).double()
            mine, theirs = mine.where(~theirs.isnan(), 0.0), theirs.nan_to_num(nan=0.0)
            row = torch.stack([(mine - theirs).square().sum(), theirs.square().sum()])
            sums[names.index(name)] = row / holders(parameter, run.stage_ranks)
    dist.all_reduce(sums)
    real = torch.tensor([count > 0 for count in counts], device=run.device)
    mean_square = float(sums[real, 1].sum()) / sum(counts)
    found = {}
    for name, size, (difference, norm) in zip(names, sizes, sums.tolist(), strict=True):
        distance = (difference / max(norm, mean_square * size)) ** 0.5
        found[name] = math.inf if math.isnan(distance) else distance
    return found
