"""Checkpoints: a saved state is restored bitwise at any world size and stage; other runs' are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import Shard

from shardwise.checkpoint.checkpoint import latest, restore, save_checkpoint
from shardwise.checkpoint.saved_weights import load_weights
from shardwise.core.errors import CheckpointError, DataError
from shardwise.engine.guard import Burst, GuardState
from shardwise.engine.train_state import TrainState
from tests.harness.pool import Pool
from tests.harness.tiny_run import (
    MODEL,
    batch,
    equal,
    flip,
    full,
    make_run,
    names,
    saved,
    saved_as,
    train,
    unexpected,
    whole,
)

WEIGHTS_0 = "weights-00000.safetensors"


def restored(folder: Path, stage: int, replicate: int = 1) -> tuple[TrainState | None, dict[str, Tensor]]:
    run = make_run(stage, replicate)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(torch.nan)  # nothing of it may be left
    state = restore(run, folder, "data-1")
    return state, whole(run)


# ---- saved state is restored ------------------------------------------------------------------------------

Layout = tuple[int, int, int]
"""World size, ZeRO stage, copies."""

LAYOUTS: list[Layout] = [(1, 0, 1), (2, 3, 1), (3, 2, 1), (4, 3, 2)]


@pytest.fixture(scope="module")
def sources(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[str, Tensor]]:
    """A checkpoint of each layout after one step, and the whole tensors that it must hold."""
    folder = tmp_path_factory.mktemp("sources")
    made = {}
    for world_size, stage, replicate in LAYOUTS:
        path = folder / str(world_size)
        made[path] = pool.run(world_size, saved, path, stage, replicate, 1)[0]
    return made


@pytest.mark.parametrize(
    ("world_size", "stage", "replicate"),
    [
        *LAYOUTS[1:3],
        *(pytest.param(*some, marks=pytest.mark.long) for some in (LAYOUTS[0], LAYOUTS[3], (4, 0, 1))),
    ],
)
def test_every_layout_reads_every_other_bitwise(
    pool: Pool, sources: dict[Path, dict[str, Tensor]], world_size: int, stage: int, replicate: int
) -> None:
    assert all(pool.run(world_size, restored_each, sources, stage, replicate))


def restored_each(sources: dict[Path, dict[str, Tensor]], stage: int, replicate: int) -> bool:
    for folder, expected in sources.items():
        state, found = restored(folder, stage, replicate)
        assert any(name.startswith("optimizer/exp_avg_sq/") for name in expected)
        assert state == TrainState(1, 10)
        assert equal(found, expected), folder
    return True


def test_one_process_reads_the_whole_weights_of_any_layout(sources: dict[Path, dict[str, Tensor]]) -> None:
    for folder, expected in sources.items():
        weights = {name: tensor for name, tensor in expected.items() if not name.startswith("optimizer/")}
        assert equal(load_weights(folder / "step-1"), weights)


EXPERTS: dict[str, Any] = {**MODEL, "experts": 2, "expert_ffn": 128, "balance_loss": 0.0}


def saved_by_rows(folder: Path) -> dict[str, Tensor]:
    """A mixture on more ranks than it has experts: ZeRO divides the rows of each."""
    run = make_run(3, model=EXPERTS)
    assert any(p.dim() == 3 and p.placements == (Shard(1),) for p in run.model.parameters())  # type: ignore[attr-defined]
    train(run, range(1))
    save_checkpoint(run, TrainState(1, 0), folder, 1)
    return whole(run)


def read_by_experts(folder: Path, expected: dict[str, Tensor]) -> bool:
    run = make_run(3, model=EXPERTS)
    restore(run, folder)
    return equal(whole(run), expected)


def test_rows_of_experts_are_read_by_other_numbers_of_ranks(pool: Pool, tmp_path: Path) -> None:
    expected, *_ = pool.run(4, saved_by_rows, tmp_path)
    for world_size in (1, 2, 4):
        assert all(pool.run(world_size, read_by_experts, tmp_path, expected))


def interrupted(folder: Path, stage: int) -> tuple[list[str], list[str]]:
    """Losses of an uninterrupted run, and of one that is saved and resumed by another in the middle."""
    through = train(make_run(stage), range(4))
    first = make_run(stage)
    losses = train(first, range(2))
    save_checkpoint(first, TrainState(2, 0), folder, 1)
    second = make_run(stage)
    train(second, range(7, 8))  # state is not only missing but wrong
    restore(second, folder)
    return through, losses + train(second, range(2, 4))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(pool: Pool, tmp_path: Path, stage: int) -> None:
    for through, resumed in pool.run(2, interrupted, tmp_path, stage):
        assert through == resumed


def evaluated_then_saved(folder: Path, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """ZeRO 1 and 2 leave parameters gathered after a forward pass without a backward pass."""
    run = make_run(stage)
    train(run, range(1))
    before = whole(run)
    with torch.no_grad():
        run.blueprint.loss(run.model, batch(0))
    save_checkpoint(run, TrainState(1, 0), folder, 1)
    train(run, range(1, 2))
    restore(run, folder)
    return before, whole(run)


@pytest.mark.parametrize("stage", [2, 3])
def test_saving_after_an_evaluation(pool: Pool, tmp_path: Path, stage: int) -> None:
    for before, after in pool.run(2, evaluated_then_saved, tmp_path, stage):
        assert equal(before, after)


def optimizer_state_made() -> bool:
    run = make_run()
    weights = {name: full(parameter) for name, parameter in run.model.named_parameters()}
    tensors = whole(run)
    assert all(torch.equal(weights[name], tensors[name]) for name in weights)
    moments = [tensor for name, tensor in tensors.items() if name.startswith("optimizer/exp_avg")]
    assert not any(moment.any() for moment in moments)
    return len(moments) == 2 * len(weights)


def test_making_optimizer_state_changes_nothing(pool: Pool) -> None:
    assert pool.run(2, optimizer_state_made) == [True, True]


def tied_round_trip(folder: Path) -> bool:
    run = make_run(model=MODEL | {"tied": True})
    train(run, range(1))
    before = whole(run)
    save_checkpoint(run, TrainState(1, 0), folder, 1)
    train(run, range(1, 2))
    restore(run, folder)
    model: Any = run.model
    return model.lm_head.weight is model.embed_tokens.weight and equal(before, whole(run))


def test_a_shared_tensor_is_stored_once_and_stays_shared(pool: Pool, tmp_path: Path) -> None:
    assert all(pool.run(2, tied_round_trip, tmp_path))
    assert "lm_head.weight" not in load_weights(tmp_path / "step-1")


def test_the_files_are_plain_safetensors_that_dcp_reads(
    pool: Pool, sources: dict[Path, dict[str, Tensor]]
) -> None:
    folder, expected = next(item for item in sources.items() if item[0].name == "3")
    files = sorted((folder / "step-1").iterdir())
    assert {file.suffix for file in files} == {".safetensors", ".json"}
    with safe_open(folder / "step-1" / WEIGHTS_0, framework="pt") as file:
        assert torch.equal(file.get_tensor("norm.weight"), expected["norm.weight"][:4])
    (found,) = pool.run(
        1, read_by_dcp, folder / "step-1", {n: torch.zeros_like(t) for n, t in expected.items()}
    )
    assert equal(found, expected)


def read_by_dcp(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    return tensors


def test_a_replicated_piece_is_written_once_and_by_all(sources: dict[Path, dict[str, Tensor]]) -> None:
    folder, tensors = next(item for item in sources.items() if item[0].name == "4")  # two copies, two shards
    files = list((folder / "step-1").glob("*.safetensors"))
    written = sum(file.stat().st_size - header_size(file) for file in files)
    assert written == sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    assert len([file for file in files if file.name.startswith("weights-")]) == 4


def header_size(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


# ---- which checkpoint -------------------------------------------------------------------------------------


def test_nothing_saved_is_none_and_uncommitted_folders_do_not_count(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "tmp-8-abc").mkdir()
    for folder in (tmp_path / "absent", tmp_path):
        assert latest(folder) is None
        assert pool.run(1, restored, folder, 3)[0][0] is None


def test_the_newest_are_kept_and_foreign_folders_left_alone(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "step-0").mkdir()  # without a manifest: neither counted nor deleted
    (tmp_path / "notes").mkdir()
    pool.run(2, saved, tmp_path, 3, 1, 4, 2)
    assert names(tmp_path) == ["notes", "step-0", "step-3", "step-4"]
    assert latest(tmp_path) == tmp_path / "step-4"


def saved_in_a_burst(folder: Path) -> None:
    """Step 12 of a run that is asked to stop while its guard suspects a spike since step 11."""
    save_checkpoint(make_run(), TrainState(12, guard=GuardState(burst=Burst(11, 11, True))), folder, 1)


def test_what_a_suspected_spike_may_go_back_to_is_kept(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved_as, tmp_path, [10], 1)
    pool.run(1, saved_in_a_burst, tmp_path)
    assert names(tmp_path) == ["step-10", "step-12"]
    pool.run(1, saved_as, tmp_path, [20], 1)
    assert names(tmp_path) == ["step-20"]


def test_order_is_numerical(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved_as, tmp_path, [9, 10, 100], 3)
    assert latest(tmp_path) == tmp_path / "step-100"


def test_a_step_saved_again_replaces_what_was_there(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved_as, tmp_path, [1, 2], 2)
    flip(tmp_path / "step-2" / WEIGHTS_0, 500)
    pool.run(1, saved_as, tmp_path, [2], 2)
    assert latest(tmp_path, warn=unexpected) == tmp_path / "step-2"
    assert names(tmp_path) == ["step-1", "step-2"]


def test_going_back_leaves_the_abandoned_branch(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved_as, tmp_path, [10, 20, 30], 3)
    pool.run(1, saved_as, tmp_path, [15], 2)
    assert names(tmp_path) == ["step-10", "step-15"]


# ---- another run's checkpoint -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 of a run on two ranks."""
    folder = tmp_path_factory.mktemp("another")
    pool.run(2, saved, folder, 3, 1, 1)
    return folder


def refused(folder: Path, overrides: dict[str, Any], fingerprint: str) -> str:
    """The error's line, when a restore has failed and left the weights alone."""
    run = make_run(**overrides)
    before = {name: full(parameter) for name, parameter in run.model.named_parameters()}
    with pytest.raises((CheckpointError, DataError)) as caught:
        restore(run, folder, fingerprint)
    assert equal(before, {name: full(parameter) for name, parameter in run.model.named_parameters()})
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("overrides", "fingerprint", "message"),
    [
        (
            {"model": MODEL | {"ffn": 14}},
            "",
            r"CheckpointError: .*mlp.* is F32\[12, 13\] in it and F32\[12, 14\] in this run",
        ),
        ({"model": MODEL | {"layers": 2}}, "", r"CheckpointError: .*layers\.1\..* is absent in it and F32"),
        ({"batch_size": 8}, "", "CheckpointError: .* batch_size was 4, now 8"),
        ({"seed": 1}, "", "CheckpointError: .* seed was 0, now 1"),
        ({}, "data-2", "DataError: .* fingerprint was data-1 and is now data-2"),
    ],
)
def test_another_run_is_refused_before_anything_changes(
    pool: Pool, folder: Path, overrides: dict[str, Any], fingerprint: str, message: str
) -> None:
    for line in pool.run(2, refused, folder, overrides, fingerprint):
        assert re.match(message, line), line
