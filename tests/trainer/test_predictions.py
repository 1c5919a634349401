"""Metrics of a user's module over all ranks, and the checkpoint that is the best by one of them."""

from __future__ import annotations

import json
import math
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.errors import CheckpointError, ShardwiseError
from shardwise.data import open_data
from shardwise.exporter.module_weights import load_into
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.report.record import read_run
from shardwise.technique import SETTINGS, layout_of, strategy_from
from shardwise.trainer.loop import Job, Trainer
from tests.harness import modules
from tests.harness.plans import small_plan
from tests.harness.pool import Pool

Batch = dict[str, Tensor]


def rates(predictions: Any, batch: Batch) -> dict[str, Any]:
    """No mean of means: a macro F1, a correlation of ranks, and a number that knows the order of the samples."""
    logits = predictions["logits"] if isinstance(predictions, dict) else predictions
    assert len(logits) == len(batch["labels"]) and not logits.requires_grad
    chosen, labels = logits.argmax(1), batch["labels"]
    scores = []
    for kind in range(5):
        hits = ((chosen == kind) & (labels == kind)).sum()
        scores.append(2 * hits / ((chosen == kind).sum() + (labels == kind).sum()).clamp(min=1))
    places = torch.arange(1.0, len(labels) + 1, dtype=torch.float64)
    return {
        "f1": torch.stack(scores).double().mean(),
        "spread": logits.double().flatten().median(),
        "order": float(places @ labels.double()),
        "items": len(labels),
    }


GRADES = (0.1, 0.2, 0.9, 0.5, 0.9, 0.3)
"""Of the evaluation before the first step, and after each of five steps: the second is the best."""
graded = 0


def grade(predictions: Any, batch: Batch) -> dict[str, float]:
    global graded
    graded += 1
    return {"grade": GRADES[(graded - 1) % len(GRADES)]}


def undefined(predictions: Any, batch: Batch) -> dict[str, float]:
    return {"grade": math.nan}


def failing(predictions: Any, batch: Batch) -> dict[str, float]:
    return {"x": [1.0][3]}


def wordy(predictions: Any, batch: Batch) -> dict[str, str]:
    return {"x": "high"}


def listed(predictions: Any, batch: Batch) -> list[float]:
    return [1.0]


def recipe(name: str, ranks: int = 2, metrics: str = "rates", **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": {"factory": f"tests.harness.modules:{name}"},
        "steps": 3,
        "batch_size": 6,
        "data": {"held_out": 0.25},
        "evaluation": {"every": 1, "metrics": f"{__name__}:{metrics}"},
        "cluster": {"device": "cpu", "devices_per_node": ranks},
        "optimizer": {"learning_rate": 1e-2},
        "strategy": {"precision": "fp32", "zero_stage": 3, "micro_batch_size": 2},
    }
    return recipe_of(values | sections, SETTINGS)


def train(pool: Pool, asked: Recipe, folder: Path) -> list[str]:
    """The error of each rank."""
    global graded
    graded = 0
    ranks = asked.cluster.devices_per_node
    strategy = strategy_from(asked.strategy)
    plan = replace(
        small_plan(), strategy=strategy, world_size=ranks, layout=layout_of(strategy, ranks), devices_per_node=ranks,
        allocated_bytes=dict.fromkeys(range(ranks), 1),
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    write_job(folder, asked, plan)
    return pool.run(ranks, trained, Job(asked, plan, folder, torch.device("cpu")))


def trained(job: Job) -> str:
    global graded
    graded = 0 if not (job.folder / "checkpoints").exists() else job.recipe.steps
    try:
        with (job.folder / "output.txt").open("a") as output, redirect_stdout(output):
            Trainer(job).train()
    except ShardwiseError as error:
        return error.line()
    return ""


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def of_one_process(asked: Recipe, folder: Path) -> dict[str, float]:
    """The metrics of the trained weights in the plain module, without this package's passes."""
    model = getattr(modules, (asked.model.factory or "").partition(":")[2])()[0]
    load_into(model, folder)
    data = open_data(asked, blueprint_of(asked).dataset)
    [batch] = data.held_out(0, 0, 1, data.held_out_sequences)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        made = model.eval()(inputs) if len(inputs) > 1 else model.eval()(*inputs.values())
    found = rates(made if isinstance(made, Tensor) else {"logits": made.logits}, batch)
    return {name: float(value) for name, value in found.items()}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("batch_norm", {"precision": "fp32", "zero_stage": 3, "micro_batch_size": 2}),
        ("batch_norm", {"precision": "fp32", "zero_stage": 0, "micro_batch_size": 5}),
        ("mixed", {"precision": "fp32", "zero_stage": 2, "micro_batch_size": 4}),
    ],
)
def test_metrics_are_those_of_one_process(
    name: str, settings: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    """12 samples on two ranks by 2, 5 or 4: ranks have parts of other sizes, and one may have none."""
    asked = recipe(name, strategy=settings)
    assert train(pool, asked, tmp_path / "run") == ["", ""]
    measured = metrics(tmp_path / "run")
    assert len(measured) == 3 and measured[-1]["items"] == 12
    assert measured[-1] == pytest.approx(of_one_process(asked, tmp_path / "run"), rel=1e-5)
    run = read_run(tmp_path / "run")
    assert run.outcome is not None and run.outcome.metrics == measured[-1]


def test_metrics_do_not_depend_on_ranks_and_precision_casts_results(pool: Pool, tmp_path: Path) -> None:
    orders = set()
    for ranks, precision in ((1, "bf16"), (2, "bf16"), (2, "fp32")):
        strategy = {"precision": precision, "zero_stage": 2, "micro_batch_size": 3}
        asked = recipe("vit", ranks, strategy=strategy)
        folder = tmp_path / f"{ranks}{precision}"
        assert train(pool, asked, folder) == [""] * ranks
        orders.add((metrics(folder)[-1]["order"], metrics(folder)[-1]["items"]))
    assert len(orders) == 1


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_best_checkpoint_is_kept_and_read(pool: Pool, tmp_path: Path) -> None:
    spec = {"best": "max:grade", "keep": 1, "every": 1}
    asked = recipe("regression", metrics="grade", steps=4, checkpoint=spec)
    assert train(pool, asked, tmp_path) == ["", ""]
    assert checkpoints(tmp_path) == ["step-2", "step-4"]
    model = modules.regression()[0]
    assert load_into(model, tmp_path, "best") == 2
    best = {key: value.clone() for key, value in model.state_dict().items()}
    assert load_into(model, tmp_path) == 4
    assert any(not torch.equal(value, best[key]) for key, value in model.state_dict().items())
    run = read_run(tmp_path)
    assert run.outcome is not None and run.outcome.best_step == 2
    # A resumed run remembers it: the same grade again is no improvement.
    later = recipe("regression", metrics="grade", steps=5, checkpoint=spec)
    assert train(pool, later, tmp_path) == ["", ""]
    assert [each["grade"] for each in metrics(tmp_path)] == [0.2, 0.9, 0.5, 0.9, 0.3]
    assert checkpoints(tmp_path) == ["step-2", "step-5"]
    assert load_into(model, tmp_path, "best") == 2


def test_a_loss_is_saved_when_it_is_least(pool: Pool, tmp_path: Path) -> None:
    """Without ``checkpoint.every``: the best and the last are saved."""
    asked = recipe(
        "regression",
        steps=6,
        evaluation={"every": 2},
        checkpoint={"best": "held_out_loss"},
        optimizer={"learning_rate": 0.3, "clip_norm": None},
    )
    assert train(pool, asked, tmp_path) == ["", ""]
    losses = {step.step: step.held_out_loss for step in read_run(tmp_path).steps if step.held_out_loss}
    assert list(losses) == [2, 4, 6]
    best = min(losses, key=lambda step: losses[step] or 0.0)
    assert best != 6, "the rate is so high that the loss rises"
    assert load_into(modules.regression()[0], tmp_path, "best") == best


def test_a_run_without_a_best_checkpoint_says_so(pool: Pool, tmp_path: Path) -> None:
    assert train(pool, recipe("regression", metrics="grade"), tmp_path) == ["", ""]
    with pytest.raises(CheckpointError, match="the run has no best checkpoint"):
        load_into(modules.regression()[0], tmp_path, "best")


def test_a_metric_that_is_never_finite_keeps_no_best_checkpoint_and_says_so(
    pool: Pool, tmp_path: Path
) -> None:
    spec = {"best": "max:grade"}
    assert train(pool, recipe("regression", metrics="undefined", checkpoint=spec), tmp_path) == ["", ""]
    assert (tmp_path / "output.txt").read_text().count("warning: no best checkpoint: max:grade") == 1
    with pytest.raises(CheckpointError, match="finite in no evaluation"):
        load_into(modules.regression()[0], tmp_path, "best")


def test_a_run_that_starts_from_another_begins_its_own_search(pool: Pool, tmp_path: Path) -> None:
    spec = {"best": "max:grade"}
    asked = recipe("regression", metrics="grade", steps=2, checkpoint=spec)
    assert train(pool, asked, tmp_path / "one") == ["", ""]
    start = {**spec, "start_from": str(tmp_path / "one" / "checkpoints")}
    later = recipe("regression", metrics="grade", steps=4, checkpoint=start)
    assert train(pool, later, tmp_path / "two") == ["", ""]
    assert load_into(modules.regression()[0], tmp_path / "two", "best") in (3, 4)


@pytest.mark.parametrize(
    ("metrics", "spec", "says"),
    [
        ("failing", {}, r"the metrics failed \(evaluation.metrics: .*failing\): IndexError: .* at .*test_predictions"),
        ("wordy", {}, "must be a dict of numbers"),
        ("listed", {}, "must be a dict of numbers"),
        ("nothing_here", {}, "cannot be imported"),
        ("grade", {"best": "max:f1"}, "there is no such metric .*checkpoint.best: f1.*held_out_loss, grade"),
    ],
)  # fmt: skip
def test_faults_are_one_line_before_the_first_step(
    metrics: str, spec: dict[str, Any], says: str, pool: Pool, tmp_path: Path
) -> None:
    errors = train(pool, recipe("regression", metrics=metrics, checkpoint=spec), tmp_path)
    for error in errors:
        assert re.search(says, error) and "\n" not in error, error
    assert not (tmp_path / "checkpoints").exists() or not checkpoints(tmp_path)


def test_nothing_held_out_is_refused(pool: Pool, tmp_path: Path) -> None:
    asked = recipe("regression", metrics="grade", data={"held_out": 0.0}, evaluation={})
    asked = asked.model_copy(update={"evaluation": recipe("regression").evaluation})
    for error in train(pool, asked, tmp_path):
        assert "there is nothing to evaluate (data.held_out)" in error
