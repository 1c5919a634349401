"""A split backward pass: the gradient of a stage's input first, those of its weights later.

Functions of torch.distributed.pipelining split the graph. The first half runs the nodes between output and input. It
keeps the graph and the gradients at the branches to weights. The second half runs those branches. FSDP2 reduces a
module's gradients when the gradient of its input is ready, which is too early in the first half. So its switches are
off there, and its post-backward work is called after the second half. Weights stay all-gathered in between
(technique/zero.py).

Splitting the graph works for any module. Linear layers that store their operands (the paper's own code) would cover
only linear weights. The functions are private to torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.runtime.torch_private import backward_of_input, backward_of_weights
from shardwise.runtime.torch_private_fsdp import fsdp_after_backward


@contextmanager
def without_updates(model: nn.Module) -> Iterator[None]:
    """Within it FSDP2 neither reduces gradients nor lets go of weights at the end of a module's backward pass."""
    root = cast("FSDPModule", model)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    try:
        yield
    finally:
        # Resharding stays off: the second half needs the weights.
        root.set_requires_gradient_sync(True)


def gradients_of_input(
    end: Tensor, gradient: Tensor | None, stage_input: Tensor, model: nn.Module
) -> tuple[Tensor, list[dict[str, Any]]]:
    """(the gradient of ``stage_input``, what the second half needs). ``end`` is detached from its graph."""
    gradients = None if gradient is None else [gradient]
    input_gradients, rest = backward_of_input([end], gradients, [stage_input], _trained_parameters(model))
    assert input_gradients[0] is not None
    return input_gradients[0], rest


def gradients_of_weights(model: nn.Module, rest: list[dict[str, Any]]) -> None:
    """Accumulate what the first half has left, and let FSDP2 reduce it as its switches say."""
    backward_of_weights(_trained_parameters(model), rest)
    fsdp_after_backward(model)


def _trained_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    # An iterator, as torch's functions declare their argument.
    return iter([parameter for parameter in model.parameters() if parameter.requires_grad])
