"""Run every kind of kernel once before the memory level is taken.

The first matrix product, collective and optimizer step of a process allocate thread pools, library buffers
and communicators (tens of MiB on the CPU). They are the device's, not the run's, so they must lie below the
level from which a run's memory is measured. A library's packing buffers grow with the product until its blocks are
full (MKL on Intel Sapphire Rapids: 6 MiB), so one product of full blocks is among them.
"""

from __future__ import annotations

import gc

import torch

from shardwise.core.recipe import recipe_of
from shardwise.core.strategy import Strategy
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.model.blueprint import blueprint_of

_TINY = {
    "model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256},
    "data": {"sequence_length": 32},
    "steps": 2,
    "batch_size": 1,
}

_BLOCKS = 1024


def warm_kernels(device: torch.device, strategy: Strategy) -> None:
    """Train a tiny decoder for two steps with ``strategy`` and throw it away."""
    recipe = recipe_of(_TINY)
    run = build(recipe, blueprint_of(recipe), strategy.with_values(micro_batch_size=1), device)
    for _ in range(2):
        tokens = torch.zeros((1, 32), dtype=torch.int64, device=device)
        step(run, [{"input_ids": tokens, "labels": tokens}] * 2, 1e-4)
    torch.ones(_BLOCKS, _BLOCKS, device=device) @ torch.ones(_BLOCKS, 2 * _BLOCKS, device=device)
    del run
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
