"""Reserved against allocated memory, as published, against the replayed allocator.

Published pairs of peak active and peak reserved memory of one run are rare. Of those known here two can be
described, torchtitan's first runs of FSDP2 (https://github.com/pytorch/torchtitan/pull/165, Llama-2-7B on 8 H100 of
95.0396 GiB, bf16 with fp32 reduction, 2,048 tokens, micro-batches of 8, eager):

    full activation checkpointing    23.92 % active, 32.64 % reserved
    selective, by operation          52.13 % active, 62.51 % reserved

What cannot be described, and is therefore not claimed:
  FSDP1 (24.81 and 33.82 %, and 52.98 and 67.23 %): another engine, which gathers into one flat buffer for each unit.
  Two dimensions, FSDP and sequence parallel (50.12 and 60.97 %, 76.49 and 90.14 %): as much of activations lives on a
      rank as in one dimension, and yet twice the memory. That was a fault of the time
      (https://github.com/pytorch/torchtitan/issues/191), which is not imitated.
  DeepSeek-V3 671B on GB300 (ratio 1.12): needs expert parallelism.

The model is written again here, as it was then: a composite RMS norm that keeps fp32 copies, rotary embedding in
complex numbers, fp32 logits that stay alive until the next step's, because a variable of the loop holds them. So is
its selective checkpointing, which keeps attention and every second matrix product of a block, and computes the others
again. Shardwise's own decoder needs less for the same dimensions; nothing is fitted.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.core.units import GiB
from shardwise.dryrun.run import dry_run
from shardwise.hardware.allocator_options import AllocatorOptions
from shardwise.hardware.cluster import cluster_of
from shardwise.model.blueprint import Batch, Blueprint, LossSum, SampleShapes, token_shapes
from shardwise.recipe.load import recipe_of
from shardwise.runtime.language_loss import valid_targets
from shardwise.technique import SETTINGS, strategy_from

WIDTH, HEADS, FFN, VOCAB, LAYERS = 4096, 32, 11008, 32000, 32
DEVICE = 95.0396 * GiB


class CompositeNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([CompositeNorm(), CompositeNorm()])
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), angles)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (HEADS, -1)) for project in (self.q, self.k, self.v))
        q, k = turned(q, angles), turned(k, angles)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # PyTorch of that time had no attention of cuDNN
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).contiguous().flatten(2))


class SelectivelyRecomputed(nn.Module):
    """A block that keeps what attention and every second product of it compute."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        policy = partial(every_second_product, Counter())
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.block, x, angles, use_reentrant=False, context_fn=contexts)


def every_second_product(
    seen: Counter[bool], context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if op == torch.ops.aten.mm.default:
        seen[context.is_recompute] += 1
        kept = seen[context.is_recompute] % 2 == 1
    else:
        kept = op == torch.ops.aten._scaled_dot_product_flash_attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Llama2(nn.Module):
    def __init__(self, depth: int, block: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.norm = CompositeNorm()
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.ones(1, tokens.shape[1], 1, WIDTH // HEADS // 2, dtype=torch.complex64)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.output(self.norm(x)).float()


class ThatRun(Blueprint):
    name, vocab, depth = "llama-2-7b of 2024", VOCAB, LAYERS
    logits_of_last_step: Tensor

    def __init__(self, block: type[nn.Module]) -> None:
        self.block = block

    def build(self, depth: int | None = None) -> nn.Module:
        return Llama2(depth or LAYERS, self.block)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Llama2)
        return list(model.layers)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        logits = self.logits_of_last_step = model(batch["input_ids"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(0, 1), reduction="sum")
        return total, valid_targets(batch["labels"])

    def fill(self, model: nn.Module, seed: int) -> None:
        raise NotImplementedError("it is planned, not trained")

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        return token_shapes(sequence_length)


@pytest.mark.long
@pytest.mark.parametrize(
    ("block", "checkpointing", "active", "reserved"),
    [(Block, "full", 0.2392, 0.3264), (SelectivelyRecomputed, "none", 0.5213, 0.6251)],
)
def test_torchtitan_s_first_runs_of_fsdp2(
    block: type[nn.Module], checkpointing: str, active: float, reserved: float
) -> None:
    """Predicted 23.99 and 31.21 %, 52.20 and 63.11 %: +0.3, -4.4, +0.1 and +1.0 % of the measured values."""
    values = {
        "model": {"preset": "llama-3-8b"},  # not used: the blueprint is given
        "data": {"sequence_length": 2048},
        "steps": 1,
        "batch_size": 64,
        "cluster": {"preset": "8xH100-80GB"},
    }
    asked = recipe_of(values, SETTINGS)
    settings = {
        "precision": "bf16",
        "zero_stage": 3,
        "micro_batch_size": 8,
        "activation_checkpointing": checkpointing,
    }
    trace = dry_run(asked, ThatRun(block), strategy_from(settings), cluster_of(asked.cluster)).trace
    assert trace is not None
    replay = trace.replayed(AllocatorOptions())  # PyTorch's defaults, as that run had
    assert replay.allocated / DEVICE == pytest.approx(active, rel=0.005)
    assert replay.reserved / DEVICE == pytest.approx(reserved, rel=0.05)
    assert replay.reserved / replay.allocated == pytest.approx(reserved / active, rel=0.05)
