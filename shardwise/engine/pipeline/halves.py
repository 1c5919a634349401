"""A backward pass in two halves: the gradient of a stage's input at once, those of its weights later.

The graph is divided by torch.distributed.pipelining's own functions: the first half runs what lies between the
result and the input and keeps the graph and the gradients where branches to weights leave that way; the second half
runs those branches. FSDP2 reduces a module's gradients when the gradient of its input is there, which in the first
half is before they are: so its switches are off there, and its work after a backward pass is called by hand once the
second half is done. Weights stay gathered in between (technique/zero.py).

Chosen: dividing the graph, which works for any module. Refused: linear layers that put their operands aside (as the
paper's own code has it), which knows no other weights and fuses into every kind of layer; the price is that the
functions are private to torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


@contextmanager
def without_updates(model: nn.Module) -> Iterator[None]:
    """Within it FSDP2 neither reduces gradients nor lets go of weights at the end of a module's backward pass."""
    root = cast("FSDPModule", model)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


def gradients_of_input(
    end: Tensor, gradient: Tensor | None, given: Tensor, model: nn.Module
) -> tuple[Tensor, list[dict[str, Any]]]:
    """(the gradient of ``given``, what the second half needs). ``end`` is detached from its graph."""
    gradients = None if gradient is None else [gradient]
    found, rest = stage_backward_input([end], gradients, [given], _trained(model))
    assert found[0] is not None
    return found[0], rest


def gradients_of_weights(model: nn.Module, rest: list[dict[str, Any]]) -> None:
    """Accumulate what the first half has left, and let FSDP2 reduce it as its switches say."""
    stage_backward_weight(_trained(model), rest)
    state = cast("FSDPModule", model)._get_fsdp_state()
    for each in reversed(state._state_ctx.all_states):
        for group in reversed(_groups(each)):
            group.post_backward()
    state._root_post_backward_final_callback()


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    return iter([parameter for parameter in model.parameters() if parameter.requires_grad])


def _groups(state: Any) -> list[Any]:
    """A state's groups of parameters; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
