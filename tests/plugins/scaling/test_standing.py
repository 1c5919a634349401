"""Where plans and runs stand by a scaling law, in the plan, its JSON and the page of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.core.errors import DataError, RecipeError
from shardwise.core.plan import Plan, StepEstimate
from shardwise.jobs.request import read_request
from shardwise.planner.answer import answer_of
from shardwise.plugins.scaling.budgeting import noise_of_run
from shardwise.plugins.scaling.report.standing import standing_of, standing_values
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.report.page import render_page
from shardwise.report.record import RunRecord, read_run
from shardwise.report.tables import plan_text
from shardwise.technique import SETTINGS
from tests.harness.tiers import quick
from tests.planner.test_origins import asked, numbers, origin_of, whole_plan
from tests.report.conftest import MakeRun

GPT_3 = {
    "preset": "gpt2-124m",
    "layers": 96,
    "width": 12288,
    "heads": 96,
    "kv_heads": 96,
    "ffn": 49152,
    "context": 2048,
}
BATCH, LENGTH = 1536, 2048


def recipe(**values: object) -> Recipe:
    """GPT-3 on its 300 billion tokens (Brown et al. 2020, table 2.1)."""
    steps = round(300e9 / (BATCH * LENGTH))
    data = {"source": "none.txt", "sequence_length": LENGTH}
    return recipe_of({"model": GPT_3, "data": data, "steps": steps, "batch_size": BATCH, **values}, SETTINGS)


@pytest.fixture
def gpt_3(plan: Plan) -> Plan:
    step = StepEstimate(
        seconds=1.0, tokens=BATCH * LENGTH, flops=0, traffic_bytes={}, mfu=0.5, split={}, model_flops=0
    )
    return replace(plan, step=step, parameters=175_000_000_000)


def test_gpt_3_is_undertrained_in_the_plan_and_on_the_page(gpt_3: Plan) -> None:
    found = standing_of(recipe(), gpt_3)
    assert found is not None
    values = standing_values(found)
    assert values["verdict"] == "undertrained"
    assert values["tokens_per_parameter"] == pytest.approx(1.7, abs=0.05)
    # A brute-force search of 100,000 sizes gives 1.99228 at 53 billion parameters (tests/plugins/scaling/test_law.py).
    assert values["best"]["loss"] == pytest.approx(1.99228, abs=1e-4)
    assert values["best"]["parameters"] == pytest.approx(53e9, rel=0.01)
    sentence, extrapolated = found.sentences()
    assert "2.0 orders of magnitude outside" in extrapolated
    assert "a smaller model" in sentence and "in the same hours" in sentence
    assert "By the scaling law" in plan_text(gpt_3, standing=found.sentences())
    page = render_page(RunRecord(Path("run"), dump_recipe(recipe()), gpt_3, (), None, planned_only=True))
    assert "By the scaling law" in page and "a smaller model" in page


def test_models_of_trained_weights_have_no_standing(gpt_3: Plan) -> None:
    assert standing_of(recipe(adapter={"rank": 4}), gpt_3) is None
    assert standing_of(recipe(model={"hf": "org/model"}), gpt_3) is None


def test_the_law_is_the_recipes(gpt_3: Plan, tmp_path: Path) -> None:
    """A fitted law of a larger exponent for data wants a larger model; a missing one is refused by name."""
    law = tmp_path / "own.toml"
    law.write_text(
        'kind = "parametric"\nsource = "own"\n[coefficients]\nE = 1.0\nA = 400.0\nB = 400.0\nalpha = 0.3\nbeta = 0.4\n',
        encoding="utf-8",
    )
    found = standing_of(recipe(law=str(law)), gpt_3)
    assert found is not None and found.law == str(law)
    assert found.best.parameters > 53e9
    with pytest.raises(RecipeError, match="unknown law 'none'"):
        standing_of(recipe(law="none"), gpt_3)


@pytest.mark.parametrize(
    ("name", "said"), [("none", "unknown law 'none'"), ("recipe.yaml", "is not a law file")]
)
def test_an_unreadable_law_is_refused_before_the_plan(name: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{preset: tiny}}\nsteps: 1\nbatch_size: 1\nlaw: {name}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=rf"{said} \(.*recipe\.yaml:4: law\)"):
        read_request(path, [])


def test_a_law_of_subwords_does_not_predict_bytes(gpt_3: Plan) -> None:
    found = standing_of(recipe(model={**GPT_3, "vocab": 256}), gpt_3)
    assert found is not None
    assert "is not that of bytes" in found.warnings[-1]


@pytest.mark.long
@pytest.mark.parametrize("share", quick([1.0, 0.25], 0.25), ids=["text", "answers to prompts"])
def test_the_noise_of_a_run_advises_the_batch_size(share: float, plan: Plan, make_run: MakeRun) -> None:
    """|G|^2 = 1 and S = 4 steps' targets. The batch of 8 sequences is a quarter of the noise scale."""
    tokens, folder = int(share * plan.step.tokens), make_run(plan, steps=4)
    with pytest.raises(DataError, match="no gradient noise scale"):
        noise_of_run(folder)
    squares = {"micro_batch_square": 1 + 4 * 2, "batch_square": 1 + 4}
    noise = {"micro_batch_tokens": tokens / 2, "batch_tokens": tokens, **squares}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    text = "".join(json.dumps(line | {"gradient_noise": noise}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    noise, targets = noise_of_run(folder)
    assert noise.tokens == pytest.approx(4 * tokens) and targets == share
    assert "Batch size" not in render_page(read_run(folder)), "its recipe has no batch size"
    (folder / "recipe.yaml").write_text("model: {preset: tiny}\nsteps: 30\nbatch_size: 8\n", encoding="utf-8")
    page = render_page(read_run(folder))
    assert "Batch size" in page and "32 sequences (mean of 2 measurements)" in page
    assert "batch_size=32 optimizer.scale_learning_rate.from_batch=8" in page


def test_every_number_of_a_standing_has_an_origin() -> None:
    asked_recipe, cluster = asked("8xH100-80GB")
    made = whole_plan()
    found = standing_of(asked_recipe, made)
    assert found is not None
    keys = set(numbers({"standing": standing_values(found)}))
    answer = answer_of(asked_recipe, cluster, made)
    assert keys and all(origin_of(key, answer) for key in keys)
