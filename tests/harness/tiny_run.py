"""A tiny run on the CPU for tests: build it, train it, look at all of its tensors.

Nothing divides anything: the vocabulary is prime, a projection has 13 rows, some tensors have fewer rows than
there are ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.checkpoint import save_checkpoint
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.run_state import tensors_of
from shardwise.engine.step import step
from shardwise.engine.train_state import TrainState
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import strategy_from

VOCAB = 257
MODEL = {"layers": 1, "width": 12, "heads": 2, "kv_heads": 1, "ffn": 13, "vocab": VOCAB}


def make_run(
    stage: int = 3, replicate: int = 1, settings: Mapping[str, Any] | None = None, **overrides: Any
) -> Run:
    """A run of any strategy: ``settings`` in addition to the stage; ``overrides`` are sections of the recipe."""
    recipe = recipe_of({"model": MODEL, "steps": 10, "batch_size": 4} | overrides)
    strategy = strategy_from({"zero_stage": stage, "replicate": replicate, **(settings or {})})
    return build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))


def batch(index: int) -> dict[str, Tensor]:
    """The global batch of a step: 4 sequences of 8 tokens."""
    tokens = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def train(run: Run, steps: range) -> list[str]:
    """Losses, exactly."""
    losses = []
    for index in steps:
        mine = {key: value[run.data_rank :: run.data_degree] for key, value in batch(index).items()}
        losses.append(float(step(run, [mine], 1e-2).loss).hex())
    return losses


def whole(run: Run) -> dict[str, Tensor]:
    """All that a checkpoint would hold, unsharded, as copies."""
    return {name: full(tensor) for name, tensor in tensors_of(run).items()}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Same names, dtypes, shapes and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def saved(folder: Path, stage: int, replicate: int, steps: int, keep: int = 2) -> dict[str, Tensor]:
    """Train and save after every step; what the last checkpoint must hold."""
    run = make_run(stage, replicate)
    for index in range(steps):
        train(run, range(index, index + 1))
        save_checkpoint(run, TrainState(index + 1, 10 * (index + 1)), folder, keep, "data-1")
    return whole(run)


def saved_as(folder: Path, steps: list[int], keep: int) -> None:
    """Save an untrained run as these steps."""
    run = make_run()
    for number in steps:
        save_checkpoint(run, TrainState(number, 0), folder, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)


def unexpected(line: str) -> None:
    """A warning where there must be none."""
    raise AssertionError(line)
