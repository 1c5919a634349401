"""A run built anew around the weights it has, for a step that broke off: other process groups, another micro-batch.

FSDP has no way back from the middle of a step: which parameters are gathered, which reductions are under way and
which communicators they use is spread over its modules. So nothing is mended. What outlives a step is taken out of
the run, everything else is let go of, and ``build`` makes the rest again. ``Run`` stays the same object, so whoever
holds it need not be told.

On an accelerator what was taken out waits in host memory, because a second copy of it on the device is what does not
fit. On the CPU it stays where it is and is freed tensor by tensor as it is copied, so for a moment weights and state
are there twice. State in a file is in two files until it is copied: their disk needs room for both. Refused: handing
the old storages to the new modules, which FSDP pads as it pleases. The price is that initial values are made once more
and overwritten.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwise.core.strategy import Strategy
from shardwise.engine.build import Run, build
from shardwise.engine.persistent import tensors_beside, tensors_of
from shardwise.model.host import apart
from shardwise.model.slices import local_part

_STAYING = ("recipe", "blueprint", "strategy", "device")


@torch.no_grad()
def strip(run: Run, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Take out what outlives a step, and let go of everything else but recipe, blueprint, strategy and device.

    ``parameters`` are those that the run held between steps (``parameters_of``). Until ``rebuild`` it is no run.
    """
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)  # streams beside the current one may still use what is given back
    pieces = {name: local_part(tensor) for name, tensor in tensors_beside(run, parameters).items()}
    kept = {name: piece.cpu() if apart(run.device) else piece for name, piece in pieces.items()}
    for name in vars(run).keys() - set(_STAYING):
        delattr(run, name)
    return kept


def free(device: torch.device) -> None:
    """Give back what nobody refers to any more, cycles included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        _empty_host_cache()


def _empty_host_cache() -> None:
    """Give back pinned memory: it is kept by size, and halved buffers are of other sizes."""
    for owner, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if (empty := getattr(owner, name, None)) is not None:  # a public one is not in every version of torch
            empty()
            return


@torch.no_grad()
def rebuild(run: Run, strategy: Strategy, kept: dict[str, Tensor] | None) -> None:
    """Build a stripped run again with ``strategy``, which divides tensors as before, and fill it from ``kept``.

    ``kept`` is emptied. None leaves initial values. Needs a default process group of the same ranks.
    """
    vars(run).update(vars(build(run.recipe, run.blueprint, strategy, run.device)))
    if kept is None:
        return
    for name, tensor in tensors_of(run).items():
        local_part(tensor).copy_(kept.pop(name))
    free(run.device)
