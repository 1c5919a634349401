"""What of a run outlives a step: the tensors that a checkpoint stores and a snapshot copies.

One list for both, so that nothing can come back from one and be missing in the other. Progress that is no tensor
is the trainer's (``engine/train_state.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.optim.norm import local
from shardwise.engine.run import Run
from shardwise.runtime.parallel.shard_slices import canonical_name, named_parameters
from shardwise.runtime.torch_private import non_persistent_buffers

OPTIMIZER = "optimizer/"
"""Starts the names of optimizer state: ``optimizer/exp_avg/layers.0.norm.weight``. No module has a slash."""


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Every tensor that survives a restart, by name, as this rank holds it: DTensors or plain, not copied.

    Parameters and persistent buffers under their canonical names, a shared one once; optimizer state under
    OPTIMIZER, with the loss scale and what clipping has learned. Complex buffers are pairs of real numbers.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters_of(run).items():
        tensors[name] = parameter.detach()
        for key, value in run.optimizer.stored(parameter).items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{key}/{name}"] = value.detach()
    for key, value in (run.loss_scale.state() | run.norm_limit.state()).items():
        tensors[f"{OPTIMIZER}{key}"] = value
    tensors.update(_persistent_buffers(run.model))
    return tensors


def parameters_of(run: Run) -> dict[str, nn.Parameter]:
    """The parameters as this rank holds them between steps: sharded, under their canonical names."""
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation, ZeRO 1 and 2 still hold gathered parameters
    return dict(named_parameters(run.model))


def share_buffers(run: Run) -> None:
    """Give every rank the buffers of rank 0. Collective.

    Norms of a user's module update running statistics from the samples of their rank. As in DistributedDataParallel,
    those of rank 0 count. They are shared where they are used or stored, not before every forward pass. Buffers that
    forward passes read are shared before every step (engine/forward_backward.py).
    """
    if run.blueprint.objective is None and dist.get_world_size() > 1:
        for buffer in run.model.buffers():
            dist.broadcast(local(buffer), 0)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in non_persistent_buffers(module):
                real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                yield canonical_name(f"{path}.{name}" if path else name), real.detach()
