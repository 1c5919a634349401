"""Reserved against allocated memory, as published, against the replayed allocator.

Published pairs of peak active and peak reserved memory of one run are rare. Of those known here one can be
described: torchtitan's first run of FSDP2 with full activation checkpointing
(https://github.com/pytorch/torchtitan/pull/165, Llama-2-7B on 8 H100 of 95.0396 GiB, bf16 with fp32 reduction,
2,048 tokens, micro-batches of 8, eager): 23.92 % active and 32.64 % reserved, 22.73 and 31.02 GiB, ratio 1.36.

What cannot be described, and is therefore not claimed:
  FSDP1 (24.81 and 33.82 %, and 52.98 and 67.23 %): another engine, which gathers into one flat buffer for each unit.
  Selective checkpointing (52.13 and 62.51 %): needs its policy.
  Two dimensions, FSDP and sequence parallel (50.12 and 60.97 %, 76.49 and 90.14 %): needs tensor parallelism.
  DeepSeek-V3 671B on GB300 (ratio 1.12): needs expert parallelism.

The model is written again here, as it was then: a composite RMS norm that keeps fp32 copies, rotary embedding in
complex numbers, fp32 logits that stay alive until the next step's, because a variable of the loop holds them.
Shardwise's own decoder needs less for the same dimensions (18.5 and 23.9 GiB); nothing is fitted.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.allocator_options import AllocatorOptions
from shardwise.core.cluster import cluster_of
from shardwise.core.recipe import recipe_of
from shardwise.core.units import GiB
from shardwise.dryrun.run import dry_run
from shardwise.model.blueprint import Batch, Blueprint, LossSum, SampleShapes, token_shapes, valid_targets
from shardwise.technique import SETTINGS, strategy_from

WIDTH, HEADS, FFN, VOCAB, LAYERS = 4096, 32, 11008, 32000, 32
ACTIVE, RESERVED = 0.2392 * 95.0396, 0.3264 * 95.0396


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
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).contiguous().flatten(2))


class Llama2(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
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

    def build(self, depth: int | None = None) -> nn.Module:
        return Llama2(depth or LAYERS)

    def units(self, model: nn.Module) -> list[nn.Module]:
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


def test_torchtitan_s_first_run_of_fsdp2_with_full_checkpointing() -> None:
    """Predicted 22.80 GiB active and 29.66 reserved: +0.3 % and -4.4 % of what was measured; ratio 1.30 of 1.36."""
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
        "activation_checkpointing": "full",
    }
    trace = dry_run(asked, ThatRun(), strategy_from(settings), cluster_of(asked.cluster)).trace
    assert trace is not None
    replay = trace.replayed(AllocatorOptions())  # PyTorch's defaults, as that run had
    assert replay.allocated / GiB == pytest.approx(ACTIVE, rel=0.02)
    assert replay.reserved / GiB == pytest.approx(RESERVED, rel=0.10)
    assert replay.reserved / replay.allocated == pytest.approx(RESERVED / ACTIVE, rel=0.10)
