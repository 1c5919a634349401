"""Starting from another run's checkpoint: bitwise the uninterrupted run, and nothing there is touched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.checkpoint import restore, save_checkpoint, start
from shardwise.checkpoint.resume_checks import candidates, check_start, finished, left_to_write
from shardwise.checkpoint.run_folder import SAVED_AS
from shardwise.core.errors import CheckpointError, DataError, RecipeError, ShardwiseError
from shardwise.core.file_hash import hash_of
from shardwise.data import tokenizer as tokenizers
from shardwise.engine.train_state import TrainState
from shardwise.model.files.peft import write_adapter
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.recipe.sections import Recipe
from tests.harness.commands import Shell
from tests.harness.pool import Pool
from tests.harness.tiny_run import MODEL, equal, flip, full, make_run, names, saved, train, unexpected, whole

WEIGHTS_0 = "weights-00000.safetensors"
Tensors = dict[str, Tensor]


# ---- a branch is the run it left --------------------------------------------------------------------------


def through(stage: int) -> tuple[list[str], Tensors]:
    """Ten steps without a break: the last four losses, and everything at the end."""
    run = make_run(stage)
    train(run, range(6))
    return train(run, range(6, 10)), whole(run)


def stable(folder: Path, stage: int) -> None:
    run = make_run(stage)
    train(run, range(6))
    save_checkpoint(run, TrainState(6, 60), folder, 9, "data-1")


def branch(source: Path, stage: int) -> tuple[TrainState, list[str], Tensors]:
    run = make_run(stage)
    state = start(run, source, "data-1", unexpected)
    return state, train(run, range(state.step, 10)), whole(run)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_six_steps_and_a_branch_of_four_are_ten(
    pool: Pool, tmp_path: Path, world_size: int, stage: int
) -> None:
    pool.run(world_size, stable, tmp_path, stage)
    expected = pool.run(world_size, through, stage)
    found = pool.run(world_size, branch, tmp_path / "step-6", stage)
    for (losses, tensors), (state, branched, theirs) in zip(expected, found, strict=True):
        assert state == TrainState(6, 60)
        assert branched == losses and equal(theirs, tensors)
    assert names(tmp_path) == ["step-6"]


def started(source: Path, stage: int) -> Tensors:
    run = make_run(stage)
    start(run, source, "data-1", unexpected)
    return whole(run)


def test_under_any_world_size_and_stage_and_from_the_folder_of_all(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(2, saved, tmp_path, 3, 1, 3)[0]
    for world_size, stage in ((1, 0), (3, 2), (2, 1)):
        assert all(equal(found, expected) for found in pool.run(world_size, started, tmp_path, stage))
    assert names(tmp_path) == ["step-2", "step-3"]


# ---- what cannot be started from --------------------------------------------------------------------------


def refused(source: Path, overrides: dict[str, Any], fingerprint: str) -> tuple[str, list[str]]:
    """The error of a start that fails and leaves the weights alone, and the warnings before it."""
    run, told = make_run(**overrides), list[str]()
    before = {name: full(parameter) for name, parameter in run.model.named_parameters()}
    with pytest.raises(ShardwiseError) as caught:
        start(run, source, fingerprint, told.append)
    assert equal(before, {name: full(parameter) for name, parameter in run.model.named_parameters()})
    return f"{caught.type.__name__}: {caught.value}", told


@pytest.mark.parametrize(
    ("overrides", "fingerprint", "message"),
    [
        ({"model": MODEL | {"ffn": 14}}, "", r"CheckpointError: .* another model .*F32\[12, 14\]"),
        ({"seed": 1}, "", "CheckpointError: .* seed was 0, now 1"),
        ({"batch_size": 8}, "", "CheckpointError: .* batch_size was 4, now 8"),
        ({}, "data-2", "DataError: .* fingerprint was data-1 and is now data-2"),
        (
            {"steps": 3},
            "",
            r"RecipeError: nothing is left to train \(checkpoint\.start_from: .*step-3\): its step is 3, and"
            " steps is 3; raise steps",
        ),
    ],
)
def test_another_run_is_refused_before_anything_changes(
    pool: Pool, tmp_path: Path, overrides: dict[str, Any], fingerprint: str, message: str
) -> None:
    pool.run(1, saved, tmp_path, 3, 1, 3)
    for line, _ in pool.run(2, refused, tmp_path, overrides, fingerprint):
        assert re.match(message, line), line


def warned(source: Path) -> tuple[TrainState, list[str]]:
    told = list[str]()
    return start(make_run(), source, "data-1", told.append), told


def test_damage_costs_a_warning_and_is_left_as_it_is(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved, tmp_path, 3, 1, 3)
    (tmp_path / "tmp-4-abc").mkdir()  # perhaps that run is just saving
    flip(tmp_path / "step-3" / WEIGHTS_0, 700)
    before = names(tmp_path)
    [(state, told), (_, silent)] = pool.run(2, warned, tmp_path)
    assert state == TrainState(2, 20)
    assert re.match(rf"checkpoint step-3/{WEIGHTS_0} is damaged, .*; going back to step-2", told[0])
    assert silent == [] and names(tmp_path) == before
    for line, _ in pool.run(2, refused, tmp_path / "step-3", {}, ""):
        assert re.match(r"CheckpointError: the checkpoint is damaged .*start from another", line), line
    assert names(tmp_path) == before


def test_a_run_that_has_its_own_checkpoint_does_not_look(tmp_path: Path) -> None:
    """Resuming needs nothing of the folder it once started from."""
    mine = tmp_path / "checkpoints" / "step-1"
    mine.mkdir(parents=True)
    recipe = recipe_from(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="the folder does not exist"):
        check_start(recipe, tmp_path)
    (mine / "manifest.json").touch()
    check_start(recipe, tmp_path)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model": {**MODEL, "rope_theta": 500.0}}, "model.rope_theta"),
        ({"model": {**MODEL, "kv_heads": MODEL["heads"]}}, "model.kv_heads"),
        ({"adapter": {"rank": 4, "alpha": 64}}, "adapter.alpha"),
        ({"adapter": {"rank": 4, "alpha": 8, "rank_stabilized": True}}, "adapter.rank_stabilized"),
        ({"adapter": {"rank": 4, "alpha": 8, "quantize": "int8"}}, "adapter.quantize"),
        ({"adapter": None}, "adapter.alpha"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_goes_on_as_the_model_that_it_is(change: dict[str, Any], key: str, tmp_path: Path) -> None:
    """Of changes that no tensor's shape tells; the folder's recipe is not touched."""
    adapter = {"rank": 4, "alpha": 8}
    values = {**VALUES, "adapter": adapter}
    begin(tmp_path, values)
    check_start(recipe_of({**values, "steps": 20, "adapter": {**adapter, "dropout": 0.1}}), tmp_path)
    with pytest.raises(CheckpointError, match=rf"{key} was .*set {key} back") as caught:
        check_start(recipe_of(values | change), tmp_path)
    assert caught.value.exit_code == 4
    (tmp_path / "recipe.yaml").unlink()
    check_start(recipe_of(values | change), tmp_path)  # nothing is known of it


VALUES: dict[str, Any] = {"model": MODEL, "steps": 10, "batch_size": 4}


def begin(folder: Path, values: dict[str, Any]) -> None:
    """As a run leaves a folder that has saved; its one checkpoint is not read."""
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "manifest.json").touch()
    (folder / "recipe.yaml").write_text(dump_recipe(recipe_of(values)), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"seed": 1},
            CheckpointError,
            "seed was 0, now 1: samples would repeat or be skipped; set seed back",
        ),
        ({"batch_size": 8}, CheckpointError, "batch_size was 4, now 8: samples would repeat"),
        ({"optimizer": {"name": "sgd"}}, CheckpointError, "optimizer.name was adamw, now sgd; set"),
        ({"data": {"sequence_length": 8}}, DataError, "data.sequence_length was 256, now 8; set"),
        ({"data": {"held_out": 0.0}}, DataError, "data.held_out was 0.05, now 0.0; set"),
        ({"data": {"stream_window": 4096}}, DataError, "data.stream_window was None, now 4096; set"),
        (
            {"data": {"source": "pairs.jsonl", "packing": True}},
            DataError,
            "data.packing was False, now True; set",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_goes_on_with_the_samples_that_follow(
    change: dict[str, Any], kind: type[ShardwiseError], message: str, tmp_path: Path
) -> None:
    begin(tmp_path, VALUES)
    before = (tmp_path / "recipe.yaml").read_bytes()
    with pytest.raises(kind, match=re.escape(message)):
        check_start(recipe_of(VALUES | change), tmp_path)
    assert (tmp_path / "recipe.yaml").read_bytes() == before
    check_start(recipe_of({**VALUES, "data": {"source": "moved"}, "evaluation": {"sequences": 3}}), tmp_path)


def test_the_shares_of_a_mixture_stay(tmp_path: Path) -> None:
    def mixed(*weights: float) -> Recipe:
        parts = [{"source": f"{index}.txt", "weight": weight} for index, weight in enumerate(weights)]
        return recipe_of(VALUES | {"data": {"mixture": parts}})

    begin(tmp_path, VALUES | {"data": {"mixture": [{"source": "0.txt"}, {"source": "1.txt"}]}})
    check_start(mixed(2.0, 2.0), tmp_path)
    with pytest.raises(DataError, match=r"data\.mixture\.0\.weight was 0\.5 of all, now 0\.75 of all; set"):
        check_start(mixed(3.0, 1.0), tmp_path)


def test_a_tokenizer_may_move_and_must_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is no longer there cannot be compared: the tokens are, when the data is opened."""

    def opened(name: str) -> SimpleNamespace:
        if name == "gone":
            raise DataError("no tokenizer at 'gone'")
        return SimpleNamespace(fingerprint=name.rpartition("/")[2])

    def check(before: str, now: str) -> None:
        folder = tmp_path / f"{before}-{now}".replace("/", "-")
        begin(folder, {**VALUES, "data": {"tokenizer": before}})
        check_start(recipe_of({**VALUES, "data": {"tokenizer": now}}), folder)

    monkeypatch.setattr(tokenizers, "open_tokenizer", opened)
    check("here/words", "there/words")
    check("gone", "here/words")
    with pytest.raises(
        DataError, match=r"data\.tokenizer was bytes, now here/words; set data\.tokenizer back"
    ):
        check("bytes", "here/words")
    with pytest.raises(DataError, match="no tokenizer at 'gone'"):
        check("bytes", "gone")


def test_a_recipe_may_say_what_it_left_to_be_found(tmp_path: Path) -> None:
    records = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "3+3=", "completion": "6"}]
    pairs, text = tmp_path / "pairs.jsonl", tmp_path / "text.txt"
    pairs.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    text.write_text("one two three", encoding="utf-8")

    def check(source: Path, before: dict[str, Any], **now: Any) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        begin(folder, {**VALUES, "data": {"source": str(source), **before}})
        check_start(recipe_of({**VALUES, "data": {"source": str(source), **now}}), folder)

    check(pairs, {}, format="prompt")
    check(pairs, {"format": "prompt"}, train_on="completion")
    check(text, {}, format="text")
    check(text, {}, train_on="all")
    with pytest.raises(DataError, match=r"data\.train_on was completion, now all"):
        check(pairs, {}, train_on="all")
    with pytest.raises(DataError, match=r"data\.format was prompt, now text"):
        check(pairs, {}, format="text")


def test_a_run_is_finished_by_its_newest_whole_checkpoint(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved, tmp_path / "checkpoints", 3, 1, 3)  # the newest are of steps 2 and 3
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe_of(VALUES)), encoding="utf-8")

    (tmp_path / "report.json").write_text("{}", encoding="utf-8")

    def said(*steps: int) -> list[str]:
        return [finished(recipe_of({**VALUES, "steps": count}), tmp_path) for count in steps]

    assert said(2, 3, 4) == [
        "nothing to do: 3 of 2 steps are done",
        "nothing to do: 3 of 3 steps are done",
        "",
    ]
    before = names(tmp_path / "checkpoints")
    weights = tmp_path / "checkpoints" / "step-3" / WEIGHTS_0
    weights.write_bytes(weights.read_bytes()[:-1])
    assert said(2, 3) == ["nothing to do: 2 of 2 steps are done", ""]
    flip(tmp_path / "checkpoints" / "step-2" / "manifest.json", 50)
    assert said(2) == [""]
    assert names(tmp_path / "checkpoints") == before
    flip(tmp_path / "checkpoints" / "step-2" / "manifest.json", 50)
    (tmp_path / "recipe.yaml").unlink()
    assert said(2) == [""], "it is to have one"


def recipe_from(source: Path, **more: Any) -> Recipe:
    values = {"model": MODEL, "steps": 10, "batch_size": 4, "checkpoint": {"start_from": str(source)}}
    return recipe_of(values | more)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    for source in (tmp_path, tmp_path / "step-5"):
        with pytest.raises(
            CheckpointError, match=r"it has no manifest\.json, and no step-N below it has one"
        ):
            candidates(source)


def test_early_checks_read_the_manifest(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved, tmp_path / "theirs", 3, 1, 2)
    check_start(recipe_from(tmp_path / "theirs"), tmp_path)
    with pytest.raises(RecipeError, match="its step is 2, and steps is 2"):
        check_start(recipe_from(tmp_path / "theirs", steps=2), tmp_path)
    flip(tmp_path / "theirs" / "step-2" / "manifest.json", 50)
    check_start(recipe_from(tmp_path / "theirs", steps=2), tmp_path)  # the older one may do


def test_the_own_checkpoint_wins(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved, tmp_path, 3, 1, 3)
    assert pool.run(1, resumed, tmp_path) == [TrainState(3, 30)]


def resumed(folder: Path) -> TrainState | None:
    run = make_run(checkpoint={"start_from": "nowhere"})
    return restore(run, folder, "data-1")


# ---- the command ------------------------------------------------------------------------------------------

RECIPE = """
model: {layers: 1, width: 16, heads: 2, ffn: 32, vocab: 256, context: 16}
data: {source: CORPUS, sequence_length: 16}
steps: 9
batch_size: 4
optimizer: {learning_rate: 1.0e-2, scale_learning_rate: {from_batch: 2, rule: linear}}
schedule: {name: wsd, warmup: 2, decay: 3, floor: 0.0}
strategy: {zero_stage: 0, micro_batch_size: 2}
checkpoint: {every: 3, keep: 9}
evaluation: {sequences: 4}
"""


@pytest.mark.long
def test_the_command_branches_a_stable_run(shell: Shell, tmp_path: Path) -> None:
    """`train` with wsd, whole, and as a branch of a constant run: the same losses and rates from there on."""
    (tmp_path / "corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 3, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("CORPUS", str(tmp_path / "corpus.txt")))
    at_six = "checkpoint.start_from=stable/checkpoints/step-6"
    command(shell, tmp_path, "whole")
    told = command(shell, tmp_path, "stable", "schedule.name=constant", "schedule.decay=null", "steps=10")
    assert "learning rate 0.01 × 2 = 0.02 (linear, batch 4 from 2)\nadvice: " in told
    theirs = names(tmp_path / "stable" / "checkpoints")
    started = f"started from {tmp_path / 'stable' / 'checkpoints' / 'step-6'} after 6 of 9 steps"
    assert started in command(shell, tmp_path, "branch", at_six)
    assert curve(tmp_path / "branch") == curve(tmp_path / "whole")[6:]
    assert [rate for *_, rate in curve(tmp_path / "branch")][-1] == pytest.approx(0.02 * (1 - (2 / 3) ** 0.5))
    assert names(tmp_path / "stable" / "checkpoints") == theirs
    assert json.loads((tmp_path / "branch" / "report.json").read_text())["tokens"] == 9 * 4 * 16

    flip(tmp_path / "stable" / "checkpoints" / "step-6" / WEIGHTS_0, 900)
    for source, code, line in (
        ("stable/checkpoints/step-6", 4, r"the checkpoint is damaged \(.*/stable/checkpoints/step-6/weights"),
        ("stable/checkpoints/step-7", 4, r"no checkpoint to start from \(checkpoint\.start_from: "),
        ("stable/checkpoints", 2, r"nothing is left to train .*: its step is 10, and steps is 9; raise"),
    ):
        failed = command(shell, tmp_path, "fresh", f"checkpoint.start_from={source}", code=code)
        assert re.match(f"error: {line}", failed) and failed.count("\n") == 1, failed
    assert names(tmp_path / "stable" / "checkpoints") == theirs


def command(shell: Shell, folder: Path, out: str, *overrides: str, code: int = 0) -> str:
    """What `shardwise train` prints, or, when it is to fail, its standard error."""
    done = shell.run("train", "recipe.yaml", *overrides, "--out", out, folder=folder)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def curve(out: Path) -> list[tuple[int, str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["loss"].hex(), line["learning_rate"]) for line in lines]


@pytest.mark.parametrize("content", [b"", b"\xff", b"model: {}\n", b"steps: [\n"])
def test_a_recipe_that_cannot_be_read_does_not_switch_the_checks_off(tmp_path: Path, content: bytes) -> None:
    step = tmp_path / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(CheckpointError, match="the recipe of the run in this folder cannot be read"):
        check_start(recipe_of(VALUES), tmp_path)


def test_a_run_that_lacks_its_report_or_its_adapter_is_not_finished(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved, tmp_path / "checkpoints", 3, 1, 1)
    recipe = recipe_of({**VALUES, "steps": 1})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert finished(recipe, tmp_path) == ""
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")
    assert finished(recipe, tmp_path).startswith("nothing to do")
    adapted = recipe_of({**VALUES, "steps": 1, "adapter": {}})
    checkpoint, tensors = tmp_path / "checkpoints" / "step-1", {"x": torch.zeros(1)}
    assert left_to_write(adapted, tmp_path, checkpoint) == ["adapter"]
    for entries, left in (
        ({}, ["adapter"]),
        ({SAVED_AS: "0" * 32}, ["adapter"]),
        ({SAVED_AS: hash_of(checkpoint / "manifest.json")}, []),
    ):
        write_adapter(tmp_path / "adapter", tensors, {}, None, entries)
        assert left_to_write(adapted, tmp_path, checkpoint) == left
