"""What a user's module may not have, because a run allocates its parameters and buffers anew."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.core.errors import RecipeError
from shardwise.runtime.torch_private import has_hooks


def require_kept(module: nn.Module) -> None:
    """Raise RecipeError if the run would lose something: it stores the shards of a module's tensors in others."""
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            where = f"module: {path or type(part).__name__}"
            fix = "give the module that it was made of, and compile with strategy.compile: block"
            raise RecipeError("TorchScript modules cannot be sharded", where=where, fix=fix)
        if isinstance(part, nn.SyncBatchNorm):
            raise RecipeError(
                "SyncBatchNorm cannot be planned",
                where=f"module: {path or type(part).__name__}",
                why="it runs on accelerators only, and a plan on the host",
                fix="use GroupNorm, or BatchNorm, which normalizes each micro-batch",
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise RecipeError(
                "a lazy module has no shape yet", where=f"module: {name}", fix="call it with a batch before"
            )
        if has_hooks(parameter):
            raise RecipeError(
                "a hook of a parameter is not kept",
                where=f"module: {name}",
                why="it would see the gradient of one micro-batch, or of a shard",
                fix="change gradients in a torch.autograd.Function of forward(), or in an optimizer of your own",
            )
    first: dict[int, str] = {}
    for path, owner in module.named_modules():
        for key, buffer in owner.named_buffers(recurse=False):
            name = f"{path}.{key}" if path else key
            # Sharding and ``to_empty`` would give each name a tensor of its own, with a value of its own.
            if (other := first.setdefault(id(buffer), name)) != name:
                fix = "register it once, and read it from the module that has it"
                raise RecipeError("two buffers are one tensor", where=f"module: {other}, {name}", fix=fix)
