"""Runs without dropout, for comparisons: what it drops depends on the rank and on the order of layers.

The recipe turns off that of adapters and of transformers' models, and modules of PyTorch have it as an attribute.
Random numbers that a user's code draws itself remain; ``draws_random_numbers`` tells. Buffers that forward passes read
and change differ between layouts as well; ``reads_changed_buffers`` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.engine.seeding import seed_step
from shardwise.model.blueprint import Batch, LossSum
from shardwise.recipe.sections import Recipe

_DROPPING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def without_dropout(recipe: Recipe) -> Recipe:
    """The recipe with a model and adapters that drop nothing."""
    model = recipe.model.model_copy(update={"dropout": False})
    adapter = recipe.adapter and recipe.adapter.model_copy(update={"dropout": 0.0})
    return recipe.model_copy(update={"model": model, "adapter": adapter})


def drop_nothing(model: nn.Module) -> bool:
    """Set the dropout of PyTorch's modules to 0; whether one of them had any."""
    had_dropout = False
    for module in model.modules():
        key = "p" if isinstance(module, _DROPPING) else "dropout"
        if key == "p" or isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            had_dropout |= bool(getattr(module, key))
            setattr(module, key, 0.0)
    return had_dropout


@torch.no_grad()
def draws_random_numbers(loss: Callable[[nn.Module, Batch], LossSum], model: nn.Module, batch: Batch) -> bool:
    """Whether the loss of a batch depends on the state of random number generators."""
    losses = []
    for step in range(3):
        seed_step(0, step, 0)
        with kept_buffers(model):
            losses.append(loss(model, batch)[0].item())
    return len(set(losses)) > 1


@torch.no_grad()
def reads_changed_buffers(
    loss: Callable[[nn.Module, Batch], LossSum], model: nn.Module, batch: Batch
) -> bool:
    """Whether the loss of a batch depends on buffers that the passes before it changed, such as a running mean."""
    losses = []
    with kept_buffers(model):
        for _ in range(2):
            seed_step(0, 0, 0)
            losses.append(loss(model, batch)[0].item())
    return len(set(losses)) > 1


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """In this block forward passes change the buffers of a model in vain."""
    before = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, values in before:
            buffer.data.copy_(values)  # a plain copy would raise the version that autograd compares
            buffers[name] = buffer
