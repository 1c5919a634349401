"""Name of the running module in the forward pass, in recomputation and in the backward pass.

Forward: module hooks keep a stack. Backward: the autograd node of a module's last operation carries the module's name.
The name holds until a node with another name runs. It is exact for leaf modules. An operation between two leaf modules
gets the name of the later one.

``torch.utils.module_tracker`` is not used: its tensor hooks keep the graph of a recomputed block alive. On a small
model with activation checkpointing that changed the counted memory by 31 %.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwise.core.errors import RecipeError
from shardwise.runtime.parallel.shard_slices import canonical_name
from shardwise.runtime.torch_private import current_autograd_node, reading_a_value, tree_iter

_MODULE_KEY = "shardwise.module"


def refused(operation: str, module: str, in_optimizer: bool = False) -> RecipeError:
    """The error of an operation that a dry run cannot run."""
    in_model = f"model: {module}" if module else "model"
    if operation == reading_a_value().name():
        why = "reads a value of a tensor into Python"
        fix = (
            "leave out .item(), float(), bool() and if of tensors, such as the checks of torch.distributions "
            "(validate_args=False)"
        )
    else:
        why = "gives a result whose shape depends on values"
        fix = "use an implementation with fixed shapes"
    return RecipeError(
        "the step cannot be planned",
        where="optimizer.factory" if in_optimizer else in_model,
        why=f"{operation} {why}, and a dry run has none",
        fix=fix,
    )


class RunningModule:
    """Context manager that knows the running module of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: canonical_name(f"{name}.")[:-1] for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._last_in_backward = ""

    def __enter__(self) -> RunningModule:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            # Called after an error, too: the stack must lose the module's name.
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def named(self, module: nn.Module) -> str:
        """The name of a module of the model; "" for another one."""
        return self._names.get(module, "")

    def calls(self) -> bool:
        """Whether a module runs forward, in the forward pass or again, rather than backward."""
        return bool(self._stack)

    def name(self) -> str:
        """The innermost running module; "" outside of every module."""
        if self._stack:
            return self._stack[-1]
        node: Any = current_autograd_node()
        if node is None:  # neither in a module nor in a backward pass: the loss or the optimizer
            self._last_in_backward = ""
        else:
            self._last_in_backward = node.metadata.get(_MODULE_KEY, self._last_in_backward)
        return self._last_in_backward

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._stack.append(self._names.get(module, ""))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._stack.pop()
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                node: Any = tensor.grad_fn
                # Inner modules leave first, so a node that an outer module returns too keeps the inner one's name.
                if _MODULE_KEY not in node.metadata:
                    node.metadata[_MODULE_KEY] = name
                    # Not every node allocates, or runs an operation at all: an addition passes gradients on.
                    node.register_prehook(partial(self._backward_of, name))

    def _backward_of(self, name: str, gradients: Any) -> None:
        self._last_in_backward = name
