"""The commands and the Python API refuse the same things, before a process is started or a folder is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shardwise import api
from shardwise.checkpoint.run_folder import read_job
from shardwise.cli.main import run
from shardwise.core.errors import DataError, OutOfMemory, RecipeError, ResourceError, ShardwiseError
from shardwise.core.plan import Plan
from shardwise.core.units import GiB
from shardwise.jobs import planning, training, verifying
from shardwise.jobs.request import read_request
from shardwise.launch import launcher as launching
from shardwise.planner import oom_advice as nearest
from shardwise.recipe import load as recipes
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, strategy_from
from shardwise.trainer.faults.oom_record import OomRecord, write_record
from tests.harness.plans import small_plan

RECIPE = """
model: {layers: 1, width: 16, heads: 2, ffn: 32, vocab: 256, context: 16}
data: {source: CORPUS, sequence_length: 16}
steps: 2
batch_size: 4
strategy: {zero_stage: 0, micro_batch_size: 2}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """A recipe whose data is there."""
    (tmp_path / "corpus.txt").write_text("def f():\n    return 1\n" * 400, encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("CORPUS", str(tmp_path / "corpus.txt")), encoding="utf-8")
    return path


@pytest.fixture
def plan() -> Plan:
    """A plan of one CPU process that fits."""
    return small_plan()


@pytest.fixture(autouse=True)
def _no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any, **options: Any) -> NoReturn:
        raise AssertionError("worker processes were started")

    monkeypatch.setattr(api, "run_ranks", never)
    monkeypatch.setattr(launching, "run_ranks", never)


def by_api(verb: str, recipe_file: Path, plan: Plan, out: Path) -> ShardwiseError:
    recipe = api.load(recipe_file)
    with pytest.raises(ShardwiseError) as caught:
        api.train(recipe, plan, out) if verb == "train" else api.verify(recipe, plan, steps=2)
    return caught.value


def _without_data(recipe_file: Path, plan: Plan) -> Plan:
    (recipe_file.parent / "corpus.txt").unlink()
    return plan


def _too_large(recipe_file: Path, plan: Plan) -> Plan:
    return replace(plan, capacity_bytes=GiB)


@pytest.mark.parametrize("verb", ["train", "verify"])
@pytest.mark.parametrize(("fault", "kind"), [(_without_data, DataError), (_too_large, ResourceError)])
def test_api_and_command_refuse_alike(
    verb: str,
    fault: Callable[[Path, Plan], Plan],
    kind: type[ShardwiseError],
    recipe_file: Path,
    plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = fault(recipe_file, plan)
    error = by_api(verb, recipe_file, plan, tmp_path / "by-api")
    assert type(error) is kind
    assert not (tmp_path / "by-api" / "plan.json").exists()
    for module in (planning, verifying):
        monkeypatch.setattr(module, "make_plan", lambda *arguments, **options: plan)
    out = ["--out", str(tmp_path / "by-command")] if verb == "train" else []
    assert run([verb, str(recipe_file), *out]) == kind.exit_code
    assert capsys.readouterr().err == error.line() + "\n"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "strategy.offload=nvme:/nowhere/at/all",
            "(strategy.offload: nvme:/nowhere/at/all): there is no such folder",
        ),
        ("evaluation.noise_scale=true", "(evaluation.noise_scale): a step of "),
    ],
)
def test_what_ranks_would_refuse_is_refused_before_they_start(
    override: str, says: str, recipe_file: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "make_plan", lambda *arguments, **options: replace(plan, micro_batches=1))
    recipe, cluster = read_request(recipe_file, [override])
    with pytest.raises(RecipeError) as caught:
        training.prepare_training(recipe, cluster, tmp_path / "run", None, lambda line: None)
    assert says in caught.value.line()
    assert not (tmp_path / "run").exists()


def test_stages_have_no_noise_scale(recipe_file: Path) -> None:
    two = ["cluster={device: cpu, devices_per_node: 2}", "strategy.pipeline_parallel=2"]
    with pytest.raises(RecipeError, match=r"pipeline_parallel.*evaluation\.noise_scale compares"):
        read_request(recipe_file, [*two, "evaluation.noise_scale=true"])


def test_api_plan_refuses_a_broken_rule(recipe_file: Path) -> None:
    recipe = api.load(recipe_file, ["strategy.tensor_parallel=2"])
    with pytest.raises(RecipeError, match=r"strategy\.tensor_parallel"):
        api.plan(recipe)


def test_a_refused_recipe_is_read_once(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the broken key comes from the first read."""
    files: list[Path] = []
    document = recipes.read_document
    monkeypatch.setattr(recipes, "read_document", lambda path: files.append(path) or document(path))
    recipe_file.write_text(recipe_file.read_text().replace("zero_stage: 0", "tensor_parallel: 2"))
    with pytest.raises(RecipeError) as caught:
        read_request(recipe_file, [])
    assert caught.value.where == f"{recipe_file}:6: strategy.tensor_parallel"
    assert files == [recipe_file]
    with pytest.raises(RecipeError, match=r"command line: strategy\.tensor_parallel"):
        read_request(recipe_file, ["strategy.tensor_parallel=4"])


def test_a_device_that_is_plan_only_is_planned_and_not_trained(recipe_file: Path, tmp_path: Path) -> None:
    recipe, cluster = read_request(recipe_file, ["cluster.device=m3-max", "cluster.devices_per_node=1"])
    made = planning.make_plan(recipe, cluster)
    assert made.fits and not made.calibration_offer
    assert any(sentence.startswith("plan only: ") for sentence in made.assumptions)

    def ranks(processes: int, arguments: Sequence[str], logs: Path) -> None:
        raise AssertionError("a rank is started")

    said = r"M3-Max-128GB is plan only \(cluster\): torch.distributed has no backend for mps; train on a CUDA"
    with pytest.raises(RecipeError, match=said):
        training.train_in_folder(recipe, cluster, tmp_path / "run", ranks, plan=made)
    with pytest.raises(RecipeError, match=said):
        verifying.verify_plan(recipe, cluster, ranks, plan=made)
    with pytest.raises(RecipeError, match=said), api.session(recipe, made):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sizes", [[2], [2, 1]], ids=["halved", "final"])
def test_the_ranks_start_again_after_an_oom(
    sizes: list[int], recipe_file: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half the micro-batch, planned anew; at 1 the error names the nearest plan that fits. No rank is started."""
    out, said = tmp_path / "run", list[str]()
    started: list[int] = []

    def planned(recipe: Recipe, cluster: Any) -> Plan:
        return replace(plan, strategy=strategy_from(recipe.strategy), micro_batches=4)

    def ranks(processes: int, arguments: Sequence[str], logs: Path) -> None:
        trained = read_job(out)[1]
        started.append(trained.strategy[MICRO_BATCH_SIZE])
        if started[-1] in sizes:
            half = started[-1] // 2
            record = OomRecord(dict(trained.strategy.values), 1, half, 0, 2, GiB, 2 * GiB)
            write_record(out, record)
            raise OutOfMemory("out of memory")

    monkeypatch.setattr(planning, "make_plan", planned)
    monkeypatch.setattr(nearest, "nearest_in_words", lambda *arguments: f"use less than {arguments[-1]}")
    monkeypatch.setattr(training, "finish", lambda folder, progress: folder)
    recipe, cluster = read_request(recipe_file, [])
    if sizes == [2]:
        training.train_in_folder(recipe, cluster, out, ranks, plan=plan, say=said.append)
    else:
        with pytest.raises(ResourceError, match=f"with 1.00 GiB already allocated; use less than {GiB}"):
            training.train_in_folder(recipe, cluster, out, ranks, plan=plan, say=said.append)
    assert started == [2, 1]
    assert said[1:][:1] == [
        "out of memory on rank 0 in step 2: micro_batch_size is now 1, accumulated 4 times; going on from the start"
    ]
