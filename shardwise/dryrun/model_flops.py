"""Model FLOPs of one optimizer step, for MFU: the forward and backward pass of the whole batch, by the model alone.

They are counted on fake tensors of one device that recomputes nothing, so every strategy of a recipe has the same
number. Frozen weights have no gradient, so their products count once forward and once backward. Causal attention counts
as half of the full product, with two products forward and four backward; the scores that its backward kernel computes
again are left out. PaLM's formula (Chowdhery et al. 2022, appendix B), 6 N + 12 L H Q T per token, counts the other
half of attention too, and trains all weights.
"""

from __future__ import annotations

import functools

import torch

from shardwise.dryrun.counting import dtype_named
from shardwise.dryrun.target import TARGET_KERNELS
from shardwise.model.blueprint import Blueprint, batch_shapes, loss_of
from shardwise.model.plain_passes import PlainPasses
from shardwise.recipe.sections import DataSpec
from shardwise.runtime.flops import FlopCounter
from shardwise.runtime.torch_private import cast_floats
from shardwise.runtime.torch_private_fake import StaticFakeMode

_FUSED = ("flash", "efficient")
"""Every fused backend counts the same FLOPs."""


@functools.lru_cache(maxsize=16)
def model_flops(blueprint: Blueprint, data: DataSpec, batch_size: int, dtype: str, device_kind: str) -> int:
    """FLOPs of a step of ``batch_size`` sequences.

    Args:
        dtype: of compute, as named in device profiles; some operators exist only in 16 bits.
        device_kind: cpu, cuda or rocm, whose kernels are counted.
    """

    def counted(depth: int | None) -> int:
        return _counted_flops(blueprint, data, batch_size, dtype, device_kind, depth)

    depth = blueprint.depth
    if depth is None or depth <= 2:
        return counted(None)
    # Blocks cost the same, so two shallow models tell the cost of a block, and the rest is that of one block.
    one = counted(1)
    two = counted(2)
    return one + (depth - 1) * (two - one)


def _counted_flops(
    blueprint: Blueprint, data: DataSpec, batch_size: int, dtype: str, device_kind: str, depth: int | None
) -> int:
    others = blueprint.minimises.frozen_models()
    with torch.device("meta"):
        model = blueprint.build(depth).train()
        frozen = {role: other.build().eval().requires_grad_(False) for role, other in others.items()}
    for module in (model, *frozen.values()):
        cast_floats(module, dtype_named(dtype))
    shapes = batch_shapes(blueprint, data)
    counter = FlopCounter()
    fake = StaticFakeMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]), fake, counter, TARGET_KERNELS[device_kind].kernels(1, _FUSED):
        blueprints = {model: blueprint, **{frozen[role]: other for role, other in others.items()}}
        for module, owner in blueprints.items():
            module.to_empty(device="cpu")
            owner.compute_in(module, dtype_named(dtype))
        batch = {
            name: torch.zeros((batch_size, *shape), dtype=kind) for name, (shape, kind) in shapes.items()
        }
        (prepared,) = PlainPasses(blueprint, model, frozen).prepared([batch])
        loss, _ = loss_of(blueprint.minimises, blueprint, model, frozen, prepared)
        loss.backward()
    return counter.flops - counter.recomputed  # attention's backward kernel computes the scores again
