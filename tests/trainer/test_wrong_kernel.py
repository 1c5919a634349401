"""A run whose device has a wrong attention kernel says so after its first step, and trains without it."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.plan import Plan
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer import loop
from tests.harness.plans import small_plan
from tests.harness.pool import Pool

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


def train(recipe: Recipe, plan: Plan, folder: Path, wrong: bool) -> list[str]:
    """The warnings of the run."""
    warned: list[str] = []
    kernel = torch.library.get_kernel(f"aten::{KERNEL}", "CPU")
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def one_key_late(q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> Any:
        return kernel.call_boxed(on_cpu, q, k.roll(1, 2), v.roll(1, 2), *rest, **more)

    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if wrong:
            library.impl(KERNEL, one_key_late, "CPU")
        with mock.patch.object(loop, "warn", warned.append):
            loop.Trainer(loop.Job(recipe, plan, folder, torch.device("cpu"))).train()
    return warned


def test_a_wrong_kernel_is_replaced_in_a_run(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 256},
        "steps": 3,
        "batch_size": 4,
        "data": {"sequence_length": 48},
        "strategy": {"zero_stage": 0, "micro_batch_size": 2},
    }
    recipe = recipe_of(values, SETTINGS)
    plan = replace(small_plan(), strategy=strategy_from(recipe.strategy))
    losses, warned = {}, {}
    for wrong in (False, True):
        folder = tmp_path / f"run-{wrong}"
        folder.mkdir()
        monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / f"cache-{wrong}"))
        write_job(folder, recipe, plan)
        (warned[wrong],) = pool.run(1, train, recipe, plan, folder, wrong)
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[wrong] = [step["loss"] for step in steps]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert not warned[False]
    assert {line.partition(" has an error")[0] for line in warned[True]} == {"fused attention"}
    assert any("48 x 48 tokens" in line for line in warned[True])
