"""Run every kind of kernel once before the memory level is taken.

The first matrix product, collective and optimizer step of a process allocate thread pools, library buffers
and communicators (tens of MiB on the CPU). They are the device's, not the run's, so they must lie below the
level from which a run's memory is measured. A library's packing buffers grow with the product until its blocks are
full (MKL on Intel Sapphire Rapids: 6 MiB), so one product of full blocks is among them.
"""

from __future__ import annotations

import gc
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise.core.recipe import Recipe, recipe_of
from shardwise.core.strategy import Layout, Strategy
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.model.blueprint import blueprint_of
from shardwise.technique import layout_of, stages_of

_BLOCKS = 1024


def _tiny(layout: Layout, layers: int) -> Recipe:
    """The smallest model that a layout divides: axes share out heads and tokens; with so many blocks.

    What it frees is reused by the run and lies below its level: a larger one takes from what is measured.
    """
    heads = math.lcm(4, 2 * layout.degree("sequence+tensor"))
    model = {
        "layers": layers,
        "width": max(64, 8 * heads),
        "heads": heads,
        "kv_heads": heads // 2,
        "ffn": 128,
        "vocab": 256,
    }
    data = {"sequence_length": math.lcm(32, 2 * layout.degree("sequence") * layout.degree("tensor"))}
    return recipe_of({"model": model, "data": data, "steps": 2, "batch_size": 1})


def warm_kernels(device: torch.device, strategy: Strategy) -> None:
    """Train a tiny decoder for two steps with ``strategy`` and throw it away."""
    layout = layout_of(strategy, dist.get_world_size())
    recipe = _tiny(layout, max(2, stages_of(strategy)))
    run = build(recipe, blueprint_of(recipe), strategy.with_values(micro_batch_size=1), device)
    for _ in range(2):
        tokens = torch.zeros((1, recipe.data.sequence_length), dtype=torch.int64, device=device)
        step(run, [{"input_ids": tokens, "labels": tokens}] * 2, 1e-4)
    torch.ones(_BLOCKS, _BLOCKS, device=device) @ torch.ones(_BLOCKS, 2 * _BLOCKS, device=device)
    if run.dtypes.compute.itemsize == 2:
        _attend(run.dtypes.compute, device)
    del run
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _attend(dtype: torch.dtype, device: torch.device) -> None:
    """Attention over whole tiles in 16 bits: its products are of other kernels than those of a few tokens.

    With 8-bit products in the blocks a stage has no others in 16 bits, whose code is 6 MiB (MKL's, on the CPU). In fp32
    the product of full blocks has met that code, and what more would be freed here is reused by the run.
    """
    q, k, v = (torch.ones(1, 1, 512, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
