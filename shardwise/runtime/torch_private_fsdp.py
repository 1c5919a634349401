"""Private names of FSDP2 (``fully_shard``); torch_private.py has all others.

All names were checked on torch 2.13.0 (``torch_private.CHECKED``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from shardwise.runtime.torch_private import replaced


def _fsdp_state(model: nn.Module) -> Any:
    return cast("Any", model)._get_fsdp_state()


def fsdp_initialise(model: nn.Module) -> None:
    """What FSDP2 does at the first forward pass: pads shards, and pins those in host memory."""
    _fsdp_state(model)._lazy_init()


def fsdp_gather_streams(model: nn.Module) -> tuple[Any, Any]:
    """The streams on which FSDP2 copies shards in and gathers them."""
    context = _fsdp_state(model)._comm_ctx
    return context.all_gather_copy_in_stream, context.all_gather_stream


def fsdp_after_backward(model: nn.Module) -> None:
    """FSDP2's work after a backward pass, for one that autograd ran in parts: reduce gradients, free weights."""
    root = _fsdp_state(model)
    for state in reversed(root._state_ctx.all_states):
        for group in reversed(_fsdp_groups(state)):
            group.post_backward()
    if getattr(root._state_ctx, "manual_backward_finalization_active", False) is None:  # from torch 2.15 on
        root._state_ctx.manual_backward_finalization_active = False
    root._root_post_backward_final_callback()


def fsdp_reshard(module: nn.Module) -> None:
    """Free the gathered weights of a block that FSDP2 reshards after a forward pass; in a backward pass it does not."""
    if hasattr(module, "_get_fsdp_state"):
        for group in _fsdp_groups(_fsdp_state(module)):
            if group._reshard_after_forward:
                group.reshard()


def _fsdp_groups(state: Any) -> list[Any]:
    """A state's groups of parameters; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


@contextmanager
def fsdp_chunking(chunk: Callable[..., Any]) -> Iterator[None]:
    """In this block FSDP2 splits parameters by ``chunk(tensor, number, dim)``."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with replaced(_fsdp_param, "_chunk_with_empty", chunk):
        yield


class _Modules:
    """torch.nn, whose Parameter may be of integers: they require no gradient."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(data: Any, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())


@contextmanager
def fsdp_integers() -> Iterator[None]:
    """In this block FSDP2 shards integers too. In torch 2.11 every new shard first requires gradients."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with replaced(_fsdp_param, "nn", _Modules()):
        yield


def fsdp_skip_ungathered() -> None:
    """Let FSDP2 keep gradients of several passes where no pass has used a module yet: torch 2.13 fails there."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    widen: Any = FSDPParam.to_accumulated_grad_if_needed
    if widen.__module__ == __name__:
        return

    def widen_gathered(parameter: Any) -> None:
        if hasattr(parameter, "_unsharded_param"):
            widen(parameter)

    cast("Any", FSDPParam).to_accumulated_grad_if_needed = widen_gathered


@contextmanager
def fsdp_copies(
    bring: Callable[[Any, Callable[[], Any]], Any], take_back: Callable[[Any, Callable[[], Any]], Any]
) -> Iterator[None]:
    """In this block two functions of FSDP2 are called through others.

    Args:
        bring: (parameter, call), for the inputs of an all-gather: shards are brought to the device.
        take_back: (parameters, call), for a reduction: gradients are brought to the shards' memory.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    inputs: Any = FSDPParam.all_gather_inputs
    reduce: Any = vars(_fsdp_param_group)["foreach_reduce"]

    def reduced(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return take_back(parameters, lambda: reduce(parameters, *args, **kwargs))

    brought = property(lambda parameter: bring(parameter, lambda: inputs.fget(parameter)))
    with (
        replaced(FSDPParam, "all_gather_inputs", brought),
        replaced(_fsdp_param_group, "foreach_reduce", reduced),
    ):
        yield
