"""What of a run outlives a step: the tensors that a checkpoint stores and a snapshot copies.

One list for both, so that nothing can come back from one and be missing in the other. Progress that is no tensor
is the trainer's (``train/state.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.build import Run
from shardwise.model.slices import canonical_name, named_parameters

OPTIMIZER = "optimizer/"
"""Starts the names of optimizer state: ``optimizer/exp_avg/layers.0.norm.weight``. No module has a slash."""


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Every tensor that survives a restart, by name, as this rank holds it: DTensors or plain, not copied.

    Parameters and persistent buffers under their canonical names, a shared one once; optimizer state under
    OPTIMIZER, with the loss scale and what clipping has learned.
    """
    return tensors_beside(run, parameters_of(run))


def parameters_of(run: Run) -> dict[str, nn.Parameter]:
    """The parameters as this rank holds them between steps. They stay the same objects while the run lives."""
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation, ZeRO 1 and 2 still hold gathered parameters
    return dict(named_parameters(run.model))


def tensors_beside(run: Run, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """As ``tensors_of``, for a run in any state, given its parameters: a step that broke off leaves gathered ones."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[name] = parameter.detach()
        for key, value in run.optimizer.stored(parameter).items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{key}/{name}"] = value.detach()
    for key, value in (run.loss_scale.state() | run.norm_limit.state()).items():
        tensors[f"{OPTIMIZER}{key}"] = value
    tensors.update(_persistent_buffers(run.model))
    return tensors


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield canonical_name(f"{path}.{name}" if path else name), buffer.detach()
