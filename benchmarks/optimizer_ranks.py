"""Worker processes of benchmarks/library_optimizers.py: a plain loop, and a run with some layout."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import resolve
from shardwise.engine.build import build
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import step
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import strategy_from
from shardwise.verifier.reference import reference_model

STEPS, WARMUP, BATCH, LENGTH, VOCABULARY = 60, 5, 4, 16, 61  # token ids that occur
MODEL = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 24, "vocab": 256}


def muon(named: list[tuple[str, nn.Parameter]], lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, and the AdamW within it for the others."""
    import pytorch_optimizer

    matrices = [p for name, p in named if p.ndim == 2 and "layers" in name]
    others = [p for name, p in named if p.ndim != 2 or "layers" not in name]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return [pytorch_optimizer.Muon(groups, lr=lr)]


def lookahead(named: list[tuple[str, nn.Parameter]], lr: float) -> list[torch.optim.Optimizer]:
    """Lookahead around AdamW: it holds another optimizer, and its slow weights from its construction on."""
    import pytorch_optimizer

    return [pytorch_optimizer.Lookahead(torch.optim.AdamW([p for _, p in named], lr=lr))]


def recipe(optimizer: dict[str, Any]) -> Recipe:
    schedule = {"name": "cosine", "warmup": WARMUP}
    values = {"model": MODEL, "steps": STEPS, "batch_size": BATCH, "schedule": schedule}
    return recipe_of(
        values | {"data": {"sequence_length": LENGTH}, "optimizer": {"clip_norm": None, **optimizer}}
    )


def batch(index: int) -> dict[str, Tensor]:
    """Half of the targets can be learned."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(index))
    tokens[:, 1::2] = (3 * tokens[:, 0:-1:2] + 1) % VOCABULARY
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def rate_at(peak: float, index: int) -> float:
    """Linear warmup, then half a cosine to a tenth."""
    if index < WARMUP:
        return peak * (index + 1) / WARMUP
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * (index - WARMUP) / (STEPS - WARMUP))) / 2)


def seed(index: int) -> None:
    """Seed every generator that an optimizer may draw from: both loops draw the same numbers."""
    torch.manual_seed(index)
    random.seed(index)
    np.random.seed(index)


def plain(optimizer: dict[str, Any], error: float = 0.0) -> list[float]:
    """Losses of a plain loop: autograd and the library's optimizer, nothing of the engine.

    Args:
        error: of rounding, relative, in every element of a gradient.
    """
    wanted = recipe(optimizer)
    blueprint, spec = blueprint_of(wanted), wanted.optimizer
    model = reference_model(blueprint, wanted.seed, torch.float64)
    factory, named = resolve(str(spec.factory), "optimizer.factory"), list(model.named_parameters())
    given = [p for _, p in named] if isinstance(factory, type) else named
    made = factory(given, lr=spec.learning_rate, **spec.arguments)
    optimizers, losses = made if isinstance(made, list) else [made], []
    peaks = [[group["lr"] for group in each.param_groups] for each in optimizers]
    chance = torch.Generator().manual_seed(0)
    for index in range(STEPS):
        seed(index)
        total, count = blueprint.loss(model, batch(index))
        (total / count).backward()
        for _, p in named if error else ():
            assert p.grad is not None
            p.grad *= 1 + error * torch.randn(p.shape, generator=chance, dtype=p.dtype)
        for each, rates in zip(optimizers, peaks, strict=True):
            for group, peak in zip(each.param_groups, rates, strict=True):
                group["lr"] = rate_at(peak, index)
            each.step()
            each.zero_grad()
        losses.append((total / count).item())
    return losses


def trained(optimizer: dict[str, Any], settings: dict[str, int]) -> list[float] | str:
    """Losses of a run with this layout, or why it is refused."""
    wanted = recipe(optimizer)
    strategy = strategy_from({"zero_stage": 0, "precision": "fp64", **settings})
    try:
        run = build(wanted, blueprint_of(wanted), strategy, torch.device("cpu"))
    except RecipeError as error:
        return error.line()
    losses = []
    for index in range(STEPS):
        seed(index)
        mine = {key: value[run.data_rank :: run.data_degree] for key, value in batch(index).items()}
        losses.append(float(step(run, [mine], learning_rate(wanted, index)).loss))
    return losses
