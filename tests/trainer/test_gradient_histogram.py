"""Gradients by size in fp16: counted in one step of a run, drawn, and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.run_folder import read_outcome, write_job
from shardwise.core.run_files import GradientHistogram
from shardwise.recipe.load import recipe_of
from shardwise.report.gradients import gradient_picture, gradient_sentences
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.gradient_histogram import LOWEST, counted
from shardwise.trainer.loop import Job, Trainer
from tests.harness.plans import small_plan
from tests.harness.pool import Pool


def test_values_are_counted_by_exponent() -> None:
    values = [0.0, -0.0, 1.0, -1.99, 2.0, 2.0**-24, 1.5 * 2.0**-30, 2.0**-100, 2.0**60]
    odd = [float("inf"), float("-inf"), float("nan")]
    counts = counted([torch.tensor(values, dtype=torch.float64), torch.tensor([odd]).half()])
    *bins, zeros, non_finite = counts.tolist()
    found = {LOWEST + index: count for index, count in enumerate(bins) if count}
    assert found == {-64: 1, -30: 1, -24: 1, 0: 2, 1: 1, 31: 1}, "the edges count values beyond them"
    assert (zeros, non_finite) == (2, 3)


def test_words_and_picture_say_what_scaling_saves() -> None:
    counts = [0] * 96
    counts[-10 - LOWEST], counts[-2 - LOWEST], counts[8 - LOWEST] = 30, 50, 10
    histogram = GradientHistogram(4, 65536.0, LOWEST, tuple(counts), zeros=10, non_finite=0)
    [said] = gradient_sentences(histogram)
    # 2^-10 and 2^16: without the scale 2^-26, below 2^-24.
    assert (
        "without loss scaling 30 % of the gradients" in said and "with a scale of 65,536, 10 % are 0" in said
    )
    assert len(list(gradient_sentences(replace(histogram, non_finite=3)))) == 2
    figure = gradient_picture(histogram)
    before, after = (patch.get_data() for patch in figure.axes[0].patches if hasattr(patch, "get_data"))
    assert sum(after.values) == pytest.approx(100)
    assert [edge + 16 for edge in before.edges] == list(after.edges)


def train(precision: str, folder: Path, corpus: Path) -> tuple[GradientHistogram | None, int]:
    values = {
        "model": {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": 256, "context": 16},
        "data": {"source": str(corpus), "sequence_length": 16},
        "steps": 6,
        "batch_size": 2,
        "loss_scale": {"initial": 2.0**12},
        "strategy": {"zero_stage": 3, "micro_batch_size": 1, "precision": precision},
    }
    recipe = recipe_of(values, SETTINGS)
    plan = replace(small_plan(), strategy=strategy_from(recipe.strategy))
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
        write_job(folder, recipe, plan)
    torch.distributed.barrier()
    trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
    trainer.train()
    held = sum(p.to_local().numel() for p in trainer.run.model.parameters())  # type: ignore[attr-defined]
    outcome = read_outcome(folder)
    return (None if outcome is None else outcome.gradients), held


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.long)])
def test_a_run_in_fp16_counts_one_step(precision: str, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("all work and no play\n" * 200, encoding="utf-8")
    found, held = pool.run(2, train, precision, tmp_path / "run", tmp_path / "corpus.txt")[0]
    if precision == "bf16":
        assert found is None
        return
    assert found is not None and (found.step, found.loss_scale, found.non_finite) == (4, 4096.0, 0)
    assert sum(found.counts) + found.zeros == held, "every element of rank 0's shards once"
    assert found.zeros > 100, "embeddings of bytes that the text has not"
