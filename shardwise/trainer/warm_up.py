"""Runs every kind of kernel once, before memory is measured.

The first matrix product, collective and optimizer step of a process allocate thread pools, library buffers and
communicators (tens of MiB on the CPU). They belong to the device, not to the run, so they are allocated before the
measurement starts. MKL keeps a buffer for every size into which it packs a matrix, unless one that it has is larger. So
the product with the largest is included, in the dtype of the run. Products with few columns to sum over have other ones
(MKL on Intel Sapphire Rapids: 5 MiB with two threads), so a layer of a small model is included as well.
"""

from __future__ import annotations

import gc
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Layout, Strategy
from shardwise.engine.build import build
from shardwise.engine.run import ListedBatches
from shardwise.engine.sampling import SamplingObjective
from shardwise.engine.step import step
from shardwise.hardware.kinds import kind_of
from shardwise.model.blueprint import TrainingObjective
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import OptimizerSpec, Recipe
from shardwise.technique import layout_of, stages_of
from shardwise.trainer.meter import return_large_frees

_FULL_BLOCKS = (512, 384, 8192)
"""Of a product [m, k] [k, n] in 30 ms: MKL packs up to 384 rows and 8,192 columns of the right matrix. RssAnon grows by
12.6 MiB in fp32 and 15.2 in fp64 (Intel with AMX), by 2 to 7 MiB where another dimension is the largest."""
_ROWS = 1024
_NARROW = 256
"""Of a product [rows, narrow] [narrow, rows], which sums over few columns, as a layer of a small model does."""


def _tiny(layout: Layout, layers: int, optimizer: OptimizerSpec) -> Recipe:
    """The smallest model that the axes of a layout can shard, with ``layers`` blocks, and experts if they are divided.

    The run reuses the small blocks of memory that this model frees, which are not measured.
    """
    sharing = layout.ranks(lambda axis: axis.within_layer)
    dividing = layout.ranks(lambda axis: bool(axis.layers))
    heads = math.lcm(4, 2 * sharing)  # there are half as many KV heads, which ``sharing`` must divide, too
    model: dict[str, object] = {
        "layers": layers,
        "width": max(64, 8 * heads),
        "heads": heads,
        "kv_heads": heads // 2,
        "ffn": 128,
        "vocab": 256,
    }
    if dividing > 1:
        model |= {"experts": dividing * sharing, "experts_per_token": 2, "expert_ffn": 16}
    data = {"sequence_length": math.lcm(32, 2 * sharing)}
    tiny = recipe_of({"model": model, "data": data, "steps": 2, "batch_size": 2 * layout.data_degree})
    return tiny.model_copy(update={"optimizer": optimizer})


def warm_kernels(
    device: torch.device,
    strategy: Strategy,
    optimizer: OptimizerSpec | None = None,
    *,
    convolves: bool = False,
    objective: TrainingObjective | None = None,
) -> None:
    """Train a tiny decoder for two steps with ``strategy``, and drop it.

    On the CPU, large freed blocks go back to the system from here on, until a ``MemoryMeter`` has measured. Otherwise
    the run would reuse what a kernel check has freed, and its peak would be measured too low.

    Args:
        optimizer: of a library, whose kernels are its own. One that cannot train this model is left out.
        convolves: whether the model may have convolutions or an LSTM. oneDNN takes 12 MiB and 8 MiB at their first
            calls on a CPU.
        objective: one that samples has kernels of its own.
    """
    if kind_of(device).is_host:
        return_large_frees(True)
    small_strategy = strategy.with_values(micro_batch_size=1)
    layout = layout_of(small_strategy, dist.get_world_size())
    layers = max(2, stages_of(small_strategy))
    recipe = _tiny(layout, layers, optimizer or OptimizerSpec())
    try:
        run = build(recipe, blueprint_of(recipe), small_strategy, device)
    except RecipeError:
        if optimizer is None:
            raise
        warm_kernels(device, strategy, convolves=convolves, objective=objective)
        return
    tokens = torch.zeros((1, recipe.data.sequence_length), dtype=torch.int64, device=device)
    # Two micro-batches and two steps: the first of each makes what the second reuses.
    batches = [{"input_ids": tokens, "labels": tokens}] * 2
    run.passes.begin(ListedBatches([batches] * recipe.steps), 0)
    for _ in range(recipe.steps):
        step(run, batches, 1e-4)
    dist.barrier()  # PipeDream's last messages leave while the run lives
    compute = run.options.dtypes.compute
    _warm_products(compute if compute.itemsize > 2 else torch.float32, device)
    if compute.itemsize == 2:
        _warm_attention(compute, device)
    if convolves:
        _convolve(compute, device)
    if isinstance(objective, SamplingObjective):
        objective.warm_up(run)
    del run
    gc.collect()  # modules and hooks refer to each other, so counting references does not free the model
    if not kind_of(device).is_host:
        torch.get_device_module(device).empty_cache()


def _warm_products(dtype: torch.dtype, device: torch.device) -> None:
    m, k, n = _FULL_BLOCKS
    torch.ones(m, k, dtype=dtype, device=device) @ torch.ones(k, n, dtype=dtype, device=device)
    x, weight = (torch.ones(_ROWS, _NARROW, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    F.linear(x, weight).sum().backward()


def _warm_attention(dtype: torch.dtype, device: torch.device) -> None:
    """Attention over full tiles in 16 bits, because short sequences use other kernels.

    With 8-bit products in the blocks, a stage may have no other 16-bit products; their code is 6 MiB (MKL on
    the CPU). In fp32 the product of full blocks has loaded that code already.
    """
    q, k, v = (torch.ones(1, 1, 512, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def _convolve(dtype: torch.dtype, device: torch.device) -> None:
    """An LSTM, and convolutions of the kinds with kernels of their own: dense, strided, of points, of images."""
    for channels, window, stride in ((16, 3, 1), (16, 3, 2), (16, 1, 1), (3, 3, 1)):
        x = torch.ones(2, channels, 8, 8, dtype=dtype, device=device, requires_grad=True)
        weight = torch.ones(16, channels, window, window, dtype=dtype, device=device, requires_grad=True)
        F.conv2d(x, weight, stride=stride, padding=window // 2).sum().backward()
    lstm = torch.nn.LSTM(8, 8).to(device, dtype)
    lstm(torch.ones(2, 2, 8, dtype=dtype, device=device, requires_grad=True))[0].sum().backward()
