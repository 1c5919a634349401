"""A value that is not finite, anywhere, on one rank: one update is skipped on all of them, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from shardwise.engine.build import build
from shardwise.engine.optim.norm import local
from shardwise.engine.run import Run
from shardwise.engine.run_state import OPTIMIZER, tensors_of
from shardwise.engine.step import StepResult, step
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.runtime.parallel.shard_slices import local_part
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.covering import Row, covering_rows
from tests.harness.pool import Pool

MODEL = {"layers": 2, "width": 12, "heads": 2, "kv_heads": 1, "ffn": 13, "vocab": 257, "context": 8}
RANK = 1
FACTORS: dict[str, list[Any]] = {
    "zero_stage": [0, 1, 2, 3],
    "precision": ["bf16", "fp16"],
    "where": ["batch", "loss", "gradient", "element"],
    "value": [float("nan"), float("inf")],
    "first_step": [True, False],
    "micro_batch": [0, 1],
    "optimizer": ["adamw", "adamw_8bit"],
    "activation_checkpointing": ["none", "full"],
}


DIVIDED: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"tensor_parallel": 2, "tensor_sequence_parallel": "gathered"},
    {"sequence_parallel": 2, "sequence_method": "ulysses"},
    {"sequence_parallel": 2, "sequence_method": "ring"},
    {"pipeline_parallel": 2},
    {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"},
]
"""Two ranks that work on the same samples."""


def micro_batches(run: Run, index: int) -> list[Batch]:
    """Two of two sequences for this rank."""
    generator = torch.Generator().manual_seed(10 * index + run.data_rank)
    tokens = torch.randint(257, (2, 2, 9), generator=generator)
    return [{"input_ids": part[:, :-1], "labels": part[:, 1:]} for part in tokens]


def run_of(row: Row) -> Run:
    keys = ("zero_stage", "precision", "activation_checkpointing")
    divided = row.get("divided", {})
    values = {
        "model": MODEL | ({"kv_heads": 2} if divided else {}),
        "data": {"sequence_length": 8},
        "steps": 9,
        "batch_size": 4 if divided else 8,
        "optimizer": {"name": row["optimizer"]},
        "loss_scale": {"initial": 256.0},
    }
    recipe = recipe_of(values, SETTINGS)
    strategy = strategy_from({**{key: row[key] for key in keys}, **divided, "micro_batch_size": 2})
    return build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))


@contextmanager
def fault(run: Run, row: Row) -> Iterator[None]:
    """Inject the row's value on one rank within the block."""
    if dist.get_rank() != RANK:
        yield
        return
    seen, value = [-1], row["value"]

    def hit() -> bool:
        return seen[0] == row["micro_batch"]

    def count(last: bool, part: int) -> None:
        seen[0] += 1

    def in_batch(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return output.index_fill(0, torch.tensor([0]), value) if hit() else None

    def in_gradient(module: nn.Module, inputs: tuple[Tensor], outputs: Any) -> tuple[Tensor] | None:
        if not hit():
            return None
        gradient = inputs[0].clone()
        gradient[0, 0, 0] = value
        return (gradient,)

    model: Any = run.model
    handles: list[Any] = []
    loss, finish = run.blueprint.loss, run.update.finish
    if row["where"] == "batch":
        handles.append(model.embed_tokens.register_forward_hook(in_batch))
    elif row["where"] == "gradient":
        handles.append(model.lm_head.register_full_backward_hook(in_gradient))
    elif row["where"] == "loss":

        def poisoned(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            total, targets = loss(model, batch)
            return total * (value if hit() else 1.0), targets

        run.blueprint.loss = poisoned  # type: ignore[method-assign]
    else:

        def poison(*arguments: Any) -> Any:
            parameter = next(p for p in model.parameters() if p.grad is not None and local(p.grad).numel())
            local(parameter.grad).view(-1)[0] = value
            return finish(*arguments)

        run.update.finish = poison  # type: ignore[method-assign]
    run.options.micro_batch_hooks.append(count)
    yield
    run.options.micro_batch_hooks.remove(count)
    run.blueprint.loss, run.update.finish = loss, finish  # type: ignore[method-assign]
    for handle in handles:
        handle.remove()


def digest(run: Run) -> str:
    """Of this rank's parameters, moments and step counts."""
    control = {f"{OPTIMIZER}{name}" for name in (run.loss_scale.state() | run.norm_limit.state())}
    found = xxhash.xxh3_128()
    for name, tensor in sorted(tensors_of(run).items()):
        if name not in control:
            found.update(local_part(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def values(result: StepResult) -> list[str]:
    return [str(float(value)) for value in vars(result).values() if value is not None]


def injected(row: Row) -> dict[str, Any]:
    run = run_of(row)
    if not row["first_step"]:
        assert float(step(run, micro_batches(run, 0), 1e-2).skipped) == 0
    before = digest(run)
    with fault(run, row):
        bad = step(run, micro_batches(run, 1), 1e-2)
    after = digest(run)
    good = step(run, micro_batches(run, 2), 1e-2)
    return {
        "unchanged": before == after,
        "moves_on": digest(run) != after,
        "skipped": [float(bad.skipped), float(good.skipped)],
        "finite": bool(good.loss.isfinite() & good.grad_norm.isfinite()),
        "values": values(bad) + values(good),
    }


PLAIN = {"zero_stage": 1, "precision": "bf16", "optimizer": "adamw", "activation_checkpointing": "none"}
ELEMENT = {"where": "element", "value": float("nan"), "first_step": False, "micro_batch": 0}
ROWS: dict[str, Row] = {"-".join(map(str, row.values())): row for row in covering_rows(FACTORS)}
ROWS |= {"-".join(map(str, d.values())): {**PLAIN, **ELEMENT, "divided": d} for d in DIVIDED}
"""Those of a divided model have a gradient that only one rank has."""


def injected_each(rows: list[Row]) -> list[dict[str, Any]]:
    return [injected(row) for row in rows]


@pytest.fixture(scope="module")
def seen(pool: Pool) -> dict[str, list[dict[str, Any]]]:
    """Of each row, what the two ranks saw. A fork trains eight rows."""
    found: dict[str, list[dict[str, Any]]] = {}
    for names in batched(ROWS, 8):
        by_rank = pool.run(2, injected_each, [ROWS[name] for name in names], timeout=120.0)
        found |= {name: list(ranks) for name, ranks in zip(names, zip(*by_rank, strict=True), strict=True)}
    return found


def batched(names: Iterable[str], size: int) -> list[list[str]]:
    every = list(names)
    return [every[at : at + size] for at in range(0, len(every), size)]


@pytest.mark.parametrize("name", ROWS)
def test_one_update_is_skipped_everywhere(name: str, seen: dict[str, list[dict[str, Any]]]) -> None:
    first, second = seen[name]
    for rank in (first, second):
        assert rank["unchanged"] and rank["moves_on"] and rank["finite"]
        assert rank["skipped"] == [1.0, 0.0]
    assert first["values"] == second["values"] or "divided" in ROWS[name]
