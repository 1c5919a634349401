"""Checkpoints: what is saved comes back bitwise at any world size and stage, and damage is always found."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.core.errors import CheckpointError, DataError, ResourceError
from shardwise.core.recipe import recipe_of
from shardwise.engine.build import Run, build
from shardwise.engine.step import step
from shardwise.model.blueprint import blueprint_of
from shardwise.technique import strategy_from
from shardwise.train import checkpoint, commit
from shardwise.train.checkpoint import latest, load_weights, restore, save, tensors_of
from shardwise.train.state import TrainState

# Nothing divides anything: a prime vocabulary, 13 rows of a bias-free projection, fewer rows than ranks.
MODEL = {"layers": 1, "width": 12, "heads": 2, "kv_heads": 1, "ffn": 13, "vocab": 257}
WEIGHTS_0 = "weights-00000.safetensors"


def make_run(stage: int = 3, seed: int = 0, replicate: int = 1, **overrides: Any) -> Run:
    values = {"model": MODEL, "steps": 10, "batch_size": 4, "seed": seed} | overrides
    recipe = recipe_of(values)
    strategy = strategy_from({"zero_stage": stage, "replicate": replicate})
    return build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))


def train(run: Run, steps: range) -> list[str]:
    """Losses, exactly."""
    losses = []
    for index in steps:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(257, (4, 9), generator=generator)
        mine = tokens[run.data_rank :: run.data_degree]
        result = step(run, [{"input_ids": mine[:, :-1], "labels": mine[:, 1:]}], 1e-2)
        losses.append(result.loss.item().hex())
    return losses


def whole(run: Run) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in tensors_of(run).items()
    }


def saved(folder: Path, stage: int, replicate: int, steps: int, keep: int = 2) -> dict[str, Tensor]:
    run = make_run(stage, replicate=replicate)
    for index in range(steps):
        train(run, range(index, index + 1))
        save(run, TrainState(index + 1, 10 * (index + 1)), folder, keep, "data-1")
    return whole(run)


def restored(folder: Path, stage: int, replicate: int = 1) -> tuple[TrainState | None, dict[str, Tensor]]:
    run = make_run(stage, replicate=replicate)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(torch.nan)  # nothing of it may be left
    state = restore(run, folder, "data-1")
    return state, whole(run)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


# ---- what is saved comes back -----------------------------------------------------------------------------


Layout = tuple[int, int, int]
"""World size, ZeRO stage, copies."""

LAYOUTS: list[Layout] = [(1, 0, 1), (2, 3, 1), (3, 2, 1), (4, 3, 2)]


@pytest.fixture(scope="module")
def sources(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[str, Tensor]]:
    """A checkpoint of each layout after one step, and the whole tensors that it must hold."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        folder / str(world_size): pool.run(world_size, saved, folder / str(world_size), stage, replicate, 1)[0]
        for world_size, stage, replicate in LAYOUTS
    }


@pytest.mark.parametrize(("world_size", "stage", "replicate"), [*LAYOUTS, (4, 0, 1)])
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


def interrupted(folder: Path, stage: int) -> tuple[list[str], list[str]]:
    """Losses of an uninterrupted run, and of one that is saved and resumed by another in the middle."""
    through = train(make_run(stage), range(4))
    first = make_run(stage)
    losses = train(first, range(2))
    save(first, TrainState(2, 0), folder, 1)
    second = make_run(stage, seed=0)
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
        run.blueprint.loss(run.model, {"input_ids": torch.ones(1, 4, dtype=torch.int64),
                                       "labels": torch.ones(1, 4, dtype=torch.int64)})  # fmt: skip
    save(run, TrainState(1, 0), folder, 1)
    train(run, range(1, 2))
    restore(run, folder)
    return before, whole(run)


@pytest.mark.parametrize("stage", [2, 3])
def test_saving_after_an_evaluation(pool: Pool, tmp_path: Path, stage: int) -> None:
    for before, after in pool.run(2, evaluated_then_saved, tmp_path, stage):
        assert equal(before, after)


def optimizer_state_made() -> bool:
    run = make_run()
    weights = {name: p.full_tensor().clone() for name, p in run.model.named_parameters()}  # type: ignore[operator]
    tensors = whole(run)
    moments = [t for name, t in tensors.items() if name.startswith("optimizer/exp_avg")]
    unchanged = all(torch.equal(weights[name], tensors[name]) for name in weights)
    return bool(moments) and unchanged and all(not m.any() for m in moments) and run.optimizer.param_groups[0]["lr"] > 0


def test_making_optimizer_state_changes_nothing(pool: Pool) -> None:
    assert pool.run(2, optimizer_state_made) == [True, True]


def tied_round_trip(folder: Path) -> bool:
    run = make_run(model=MODEL | {"tied": True})
    train(run, range(1))
    before = whole(run)
    save(run, TrainState(1, 0), folder, 1)
    train(run, range(1, 2))
    restore(run, folder)
    shared = run.model.lm_head.weight is run.model.embed_tokens.weight
    return shared and equal(before, whole(run)) and "lm_head.weight" not in before


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
    (found,) = pool.run(1, read_by_dcp, folder / "step-1", {n: t.shape for n, t in expected.items()})
    assert equal(found, expected)


def read_by_dcp(folder: Path, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    return tensors


def test_a_replicated_piece_is_written_once_and_by_all(sources: dict[Path, dict[str, Tensor]]) -> None:
    folder, tensors = next(item for item in sources.items() if item[0].name == "4")  # two copies of two shards
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


def test_order_is_numerical(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved_as, tmp_path, [9, 10, 100], 3)
    assert latest(tmp_path) == tmp_path / "step-100"


def saved_as(folder: Path, steps: list[int], keep: int) -> None:
    run = make_run()
    for number in steps:
        save(run, TrainState(number, 0), folder, keep)


def test_a_step_saved_again_replaces_what_was_there(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved_as, tmp_path, [1, 2], 2)
    flip(tmp_path / "step-2" / WEIGHTS_0, 500)
    pool.run(1, saved_as, tmp_path, [2], 2)
    assert latest(tmp_path, warn=fail) == tmp_path / "step-2"
    assert names(tmp_path) == ["step-1", "step-2"]


def test_going_back_leaves_the_abandoned_branch(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, saved_as, tmp_path, [10, 20, 30], 3)
    pool.run(1, saved_as, tmp_path, [15], 2)
    assert names(tmp_path) == ["step-10", "step-15"]


# ---- damage -----------------------------------------------------------------------------------------------


def flip(path: Path, position: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)


def fail(line: str) -> None:
    raise AssertionError(line)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def pristine(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    pool.run(2, saved, folder, 3, 1, 2)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """Steps 1 and 2 of a run on two ranks, to be damaged."""
    for checkpoint in pristine.iterdir():
        (tmp_path / checkpoint.name).mkdir()
        for file in checkpoint.iterdir():
            (tmp_path / checkpoint.name / file.name).write_bytes(file.read_bytes())
    return tmp_path


def delete(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS_0).unlink()


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "optimizer-00001.safetensors", 100)


def extend(checkpoint: Path) -> None:
    with (checkpoint / WEIGHTS_0).open("ab") as file:
        file.write(b"\0")


def zero_a_page(checkpoint: Path) -> None:
    with (checkpoint / "optimizer-00000.safetensors").open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))


def swap_ranks(checkpoint: Path) -> None:
    one, two = checkpoint / WEIGHTS_0, checkpoint / "weights-00001.safetensors"
    one.rename(checkpoint / "x")
    two.rename(one)
    (checkpoint / "x").rename(two)


def take_from_another_step(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS_0).write_bytes((checkpoint.parent / "step-1" / WEIGHTS_0).read_bytes())


def pose_as_another_step(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes((checkpoint.parent / "step-1/manifest.json").read_bytes())


def make_a_pipe(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS_0).unlink()
    os.mkfifo(checkpoint / WEIGHTS_0)


def make_a_link(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS_0).rename(checkpoint.parent / "elsewhere")
    (checkpoint / WEIGHTS_0).symlink_to(checkpoint.parent / "elsewhere")


def garble_the_manifest(checkpoint: Path) -> None:
    flip(checkpoint / "manifest.json", 40)


DAMAGES = [delete, truncate, extend, zero_a_page, swap_ranks, take_from_another_step,
           pose_as_another_step, make_a_pipe, make_a_link, garble_the_manifest]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_falls_back_to_the_one_before_with_one_line(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder / "step-2")
    lines: list[str] = []
    assert latest(folder, warn=lines.append) == folder / "step-1"
    assert len(lines) == 1
    assert lines[0].startswith("checkpoint step-2/")
    assert lines[0].endswith("going back to step-1")


def test_every_bit_counts(folder: Path) -> None:
    """A bit of every file, header, data and manifest, at positions spread over all bytes."""
    generator = torch.Generator().manual_seed(0)
    for path in sorted((folder / "step-2").iterdir()):
        raw = path.read_bytes()
        for position in torch.randint(len(raw), (40,), generator=generator).tolist() + [0, 8, len(raw) - 1]:
            flip(path, position, position % 8)
            lines: list[str] = []
            assert latest(folder, warn=lines.append) == folder / "step-1", (path, position)
            path.write_bytes(raw)
    assert latest(folder, warn=fail) == folder / "step-2"


def test_ranks_agree_on_what_is_damaged(pool: Pool, folder: Path) -> None:
    flip(folder / "step-2" / "weights-00001.safetensors", 900)
    assert [state for state, _ in pool.run(2, restored, folder, 3)] == [TrainState(1, 10)] * 2


def test_when_all_are_damaged_nothing_reaches_the_model(pool: Pool, folder: Path) -> None:
    for checkpoint in (folder / "step-1", folder / "step-2"):
        flip(checkpoint / WEIGHTS_0, 900)
    with pytest.raises(CheckpointError, match="no checkpoint is whole .*step-2/weights-00000"):
        latest(folder, warn=lambda line: None)
    with pytest.raises(CheckpointError, match="does not match its hash"):
        pool.run(2, restored, folder, 3)
    assert pool.run(2, unchanged_after, folder, {}) == [True, True]


def test_load_weights_verifies(folder: Path) -> None:
    flip(folder / "step-2" / WEIGHTS_0, 900)
    with pytest.raises(CheckpointError, match="does not match its hash"):
        load_weights(folder / "step-2")


# ---- another run's checkpoint -----------------------------------------------------------------------------


def unchanged_after(folder: Path, overrides: dict[str, Any], fingerprint: str = "data-1") -> bool:
    """Whether a restore that fails leaves the weights alone."""
    run = make_run(**overrides)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    try:
        restore(run, folder, fingerprint)
    except (CheckpointError, DataError):
        return all(torch.equal(before[n].to_local(), p.to_local()) for n, p in run.model.named_parameters())  # type: ignore[operator]
    return False


def fail_to_restore(folder: Path, overrides: dict[str, Any], fingerprint: str) -> None:
    restore(make_run(**overrides), folder, fingerprint)


@pytest.mark.parametrize(
    ("overrides", "fingerprint", "error", "message"),
    [
        ({"model": MODEL | {"ffn": 14}}, "", CheckpointError, r"mlp.* F32\[\d+, 13\]|F32\[13, 12\]"),
        ({"model": MODEL | {"layers": 2}}, "", CheckpointError, r"layers\.1\..* is absent there"),
        ({"batch_size": 8}, "", CheckpointError, "batch_size was 4, now 8"),
        ({"seed": 1}, "", CheckpointError, "seed was 0, now 1"),
        ({}, "data-2", DataError, "fingerprint was data-1 and is now data-2"),
    ],
)
def test_another_run_is_refused_before_anything_changes(
    pool: Pool, folder: Path, overrides: dict[str, Any], fingerprint: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pool.run(1, fail_to_restore, folder, overrides, fingerprint)
    assert pool.run(2, unchanged_after, folder, overrides, fingerprint) == [True, True]


def test_another_version_is_named(folder: Path) -> None:
    path = folder / "step-2" / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["xxh3_128"]
    from shardwise.train import manifest

    path.write_bytes(manifest._sealed(body | {"format": 99}))
    with pytest.raises(CheckpointError, match="another version .*its format is 99, this version reads 1"):
        latest(folder, warn=fail)


# ---- disks ------------------------------------------------------------------------------------------------


def full_disk(folder: Path, rank: int) -> str:
    """Save while one rank may not write files of this size, then while it may."""
    run = make_run()
    train(run, range(1))
    save(run, TrainState(1, 0), folder, 1)
    before = whole(run)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        save(run, TrainState(2, 0), folder, 1)
    except ResourceError as error:
        line = error.line()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert equal(before, whole(run))
    assert dist.get_rank() != 0 or names(folder) == ["step-1"]
    assert latest(folder, fail) == folder / "step-1"
    dist.barrier()
    save(run, TrainState(2, 0), folder, 1)
    return line


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_an_error_on_every_rank_and_harms_nothing(
    pool: Pool, tmp_path: Path, rank: int
) -> None:
    for line in pool.run(2, full_disk, tmp_path, rank):
        assert line.startswith(f"error: cannot write the checkpoint ({tmp_path}): ")
        assert "KiB needed" in line
        assert "free" in line
    assert latest(tmp_path) == tmp_path / "step-2"


def test_too_little_space_is_seen_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"No space left on device, .* EiB needed, .* free"):
        commit.stage(tmp_path, 1, 1 << 62)
    assert names(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_seen_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(ResourceError, match="make the folder writable"):
        commit.prepare(tmp_path / "checkpoints")


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ResourceError, match="cannot write the checkpoint"):
        commit.prepare(tmp_path / "checkpoints")


# ---- the commit protocol ----------------------------------------------------------------------------------


def trace_a_save(folder: Path, log: Path) -> None:
    traced(make_run(), folder, [2], log)


def traced(run: Run, folder: Path, steps: list[int], log: Path, crash_at: int = 0) -> None:
    """Save, writing what is done to ``folder`` into ``log``; die just before file operation ``crash_at``.

    Python's audit events see every open, mkdir, rename, rmdir and unlink whoever makes it; fsync has none
    and is wrapped.
    """
    record = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    count = 0

    def note(what: str, path: str) -> None:
        nonlocal count
        if str(folder) in path:
            count += 1
            if count == crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(record, f"{what} {os.path.relpath(path, folder)}\n".encode())

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_CREAT | os.O_WRONLY):
            note("create", arguments[0])
        elif event in ("os.mkdir", "os.rename", "os.rmdir"):
            path = os.fsdecode(arguments[event == "os.rename"])
            note(event[3:], os.path.join(path_of(arguments[-1]), path))
        elif event == "os.remove":
            note("unlink", os.path.join(path_of(arguments[1]), os.fsdecode(arguments[0])))

    sync = os.fsync

    def fsync(descriptor: int) -> None:
        note("fsync", path_of(descriptor))
        sync(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(audit)
    for number in steps:
        save(run, TrainState(number, 0), folder, 1)


def path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}") if descriptor >= 0 else ""


def test_files_are_synced_before_the_manifest_and_the_manifest_before_the_commit(
    pool: Pool, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    pool.run(1, saved_as, folder, [1], 1)
    pool.run(1, trace_a_save, folder, tmp_path / "log")
    operations = (tmp_path / "log").read_text().splitlines()
    staged = next(name.split()[1] for name in operations if name.startswith("mkdir tmp-2-"))
    order = [line.replace(staged, "TMP") for line in operations]
    data = [f"{part}-00000.safetensors" for part in ("weights", "optimizer")]
    retired = order.index(next(line for line in order if line.startswith("rename tmp-retired-step-1")))
    assert [line for line in order[:retired] if line != "mkdir ."] == [
        "mkdir TMP",
        *(f"{what} TMP/{name}" for name in data for what in ("create", "fsync")),
        "create TMP/manifest.json",
        "fsync TMP/manifest.json",
        "fsync TMP",
        "rename step-2",
        "fsync .",
    ]
    assert [line.split()[0] for line in order[retired + 1 :]] == ["unlink"] * 3 + ["rmdir"]
    assert names(folder) == ["step-2"]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """Also when the step being saved exists already, and with a single checkpoint kept."""
    (moments,) = pool.run(1, killed_everywhere, tmp_path)
    assert moments > 25


def killed_everywhere(scratch: Path) -> int:
    """Save once, then again and again in forks that die ever later; how many died before one lived."""
    run = make_run()
    save(run, TrainState(1, 0), scratch / "first", 1)
    dist.destroy_process_group()  # its threads would not survive a fork
    folder, log = scratch / "checkpoints", scratch / "log"
    for crash_at in itertools.count(1):
        shutil.copytree(scratch / "first", folder)
        child = os.fork()
        if child == 0:
            traced(run, folder, [2, 2], log, crash_at)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        operations = log.read_text().splitlines()
        if code == 0:
            return len(operations)
        assert (code, len(operations)) == (-signal.SIGKILL, crash_at - 1)
        commit.prepare(folder)
        found = latest(folder, warn=fail)
        assert found is not None, operations
        assert found.name == "step-2" or "rename step-2" not in operations, operations
        assert set(names(folder)) <= {"step-1", "step-2"}, operations
        shutil.rmtree(folder)
    raise AssertionError("unreachable")


def test_a_start_sweeps_what_crashes_left_and_nothing_else(folder: Path) -> None:
    for name in ("tmp-3-abc", "tmp-retired-step-1-ff", "step-9", "notes"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    (folder / "tmp-file").write_text("x")
    commit.prepare(folder)
    assert names(folder) == ["notes", "step-1", "step-2", "step-9"]


def test_a_start_finishes_a_commit_that_lacked_only_the_rename(folder: Path) -> None:
    (folder / "step-2").rename(folder / "tmp-2-00ff")
    (folder / "step-1").rename(folder / "tmp-1-00ff")
    flip(folder / "tmp-1-00ff" / WEIGHTS_0, 900)
    commit.prepare(folder)
    assert names(folder) == ["step-2"]


def test_checkpoint_module_never_unpickles() -> None:
    source = Path(checkpoint.__file__).parent
    for name in ("checkpoint.py", "manifest.py", "commit.py", "shards.py"):
        text = (source / name).read_text()
        assert "torch.load" not in text
        assert "import pickle" not in text
