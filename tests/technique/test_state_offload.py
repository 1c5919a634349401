"""Offloaded state: the run without it, bit for bit; bytes as planned; a failing disk; checkpoints with and without."""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.checkpoint import restore, save_checkpoint
from shardwise.core.errors import RecipeError, ResourceError, ShardwiseError
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.optim import chunk as piece
from shardwise.engine.optim.norm import local
from shardwise.engine.optim.offloaded import OffloadedOptimizer, share_of
from shardwise.engine.run import Run
from shardwise.engine.run_state import OPTIMIZER, parameters_of, tensors_of
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.explain import offload_in_words
from shardwise.planner.predict import Prediction, predict
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import ClusterSpec
from shardwise.runtime.offload import disk
from shardwise.runtime.offload.host import separate_host_memory
from shardwise.technique import broken_rules, strategy_from
from tests.harness.covering import Row, covering_rows, few_of
from tests.harness.pool import Pool
from tests.harness.tiny_run import MODEL, VOCAB, equal, make_run, train, whole

FIRST_SCALE = 2.0**24
"""A loss scale that the first fp16 gradients overflow."""

# Offloaded state, its fraction, and whether the two memories are told apart.
OFFLOADS: dict[str, tuple[dict[str, Any], bool]] = {
    "optimizer": ({"offload": "optimizer"}, True),
    "half": ({"offload": "optimizer", "offload_fraction": 0.5}, True),
    "parameters": ({"offload": "optimizer+parameters"}, True),
    "files": ({"offload": "nvme:FOLDER"}, True),
    "files of a CPU": ({"offload": "nvme:FOLDER"}, False),
    "half in files": ({"offload": "nvme:FOLDER", "offload_fraction": 0.5}, False),
    "parameters and files": ({"offload": "parameters+nvme:FOLDER"}, True),
    "of a CPU": ({"offload": "optimizer+parameters"}, False),
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "alone": {"precision": "bf16", "master_weights": False},
    "fp16": {"precision": "fp16"},
}
FACTORS: dict[str, list[Any]] = {
    "offload": list(OFFLOADS),
    "stage": [3, 0, 1, 2],
    "optimizer": ["adamw", "sgd", "adamw_8bit"],
    "weights": list(WEIGHTS),
    "optimizer_in_backward": [False, True],
    "world_size": [2, 1],
}


def settings_of(row: Row, folder: Path | str) -> dict[str, Any]:
    """The strategy's settings of a row, but for its stage."""
    settings = {**WEIGHTS[row["weights"]], "optimizer_in_backward": row["optimizer_in_backward"]}
    offload = OFFLOADS[row["offload"]][0] if row["offload"] else {}
    return settings | {
        k: v.replace("FOLDER", str(folder)) if k == "offload" else v for k, v in offload.items()
    }


def sections_of(row: Row) -> dict[str, Any]:
    clip = None if row["optimizer_in_backward"] else 0.5
    optimizer = {"name": row["optimizer"], "clip_norm": clip, "weight_decay": 0.1}
    return {"optimizer": optimizer, "loss_scale": {"initial": FIRST_SCALE}}


def apart_of(row: Row) -> AbstractContextManager[None]:
    told = bool(row["offload"]) and OFFLOADS[row["offload"]][1]
    return separate_host_memory(True) if told else nullcontext()


def valid(row: Row) -> bool:
    recipe = recipe_of({"model": MODEL, "steps": 1, "batch_size": 1} | sections_of(row))
    strategy = strategy_from({**settings_of(row, "/"), "zero_stage": row["stage"]})
    return not any(broken_rules(strategy, row["world_size"], recipe))


ROWS = covering_rows(FACTORS, valid)
# tests/test_agreement.py trains the same offloads with every ZeRO stage, in `make test-all`.
FEW = few_of(ROWS, cost=lambda row: row["world_size"])


def built(row: Row, folder: Path) -> Run:
    """A run of a row whose parameters are cut into many pieces."""
    # Of this process alone: the embedding and the output are four pieces each.
    piece.CHUNK = piece.HOST_CHUNK = 800
    return make_run(row["stage"], settings=settings_of(row, folder), **sections_of(row))


def differences(rows: list[Row], steps: int, folder: Path) -> list[str]:
    """Rows whose run with offload is not, bit for bit, the run without."""
    wrong = []
    for row in rows:
        plain = built(row | {"offload": ""}, folder)
        losses = train(plain, range(steps))
        with apart_of(row):
            offloaded = built(row, folder)
            if train(offloaded, range(steps)) != losses:
                wrong.append(f"losses of {row}")
            if not equal(whole(offloaded), whole(plain)):
                wrong.append(f"tensors of {row}")
        scale = float(plain.loss_scale.value)
        if row["weights"] == "fp16" and not 0 < scale < FIRST_SCALE:
            wrong.append(f"nothing was skipped by {row}")
        first, last = whole(built(row | {"offload": ""}, folder)), whole(plain)
        if all(torch.equal(first[name], last[name]) for name in parameters_of(plain)):
            wrong.append(f"nothing was updated by {row}")
    return wrong


@pytest.mark.parametrize(
    "every", [pytest.param(True, marks=pytest.mark.long, id="pairs"), pytest.param(False, id="values")]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_as_without_offload(world_size: int, every: bool, pool: Pool, tmp_path: Path) -> None:
    """Weights, moments, step counts and loss scale after some steps, pairwise over all that an update depends on."""
    rows = [row for row in (ROWS if every else FEW) if row["world_size"] == world_size]
    assert not every or len({row["offload"] for row in rows}) == len(OFFLOADS)
    steps = 20 if every else 8
    assert pool.run(world_size, differences, rows, steps, tmp_path, timeout=240) == [[]] * world_size


# ---- memory ----------------------------------------------------------------------------------------------


def plain_row(name: str, stage: int) -> dict[str, Any]:
    """AdamW on bf16 weights after the backward pass."""
    plain = {"weights": "bf16", "optimizer": "adamw", "optimizer_in_backward": False}
    return {"offload": name, "stage": stage, **plain}


def held(name: str, stage: int, folder: Path) -> dict[str, int]:
    """Bytes of a real run after a step: state and weights in memory, the file as the system sees it."""
    row = plain_row(name, stage)
    with apart_of(row):
        run = make_run(stage, settings=settings_of(row, folder), **sections_of(row))
        train(run, range(1))
        states = [t for state in run.optimizer.state.values() for t in state.values()]
        storages = {
            p.untyped_storage().data_ptr(): p.untyped_storage() for p in map(local, run.model.parameters())
        }
    optimizer = run.optimizer
    size = blocks = 0
    if isinstance(optimizer, OffloadedOptimizer) and optimizer._file is not None:
        opened = disk.opened(optimizer._file._name)
        assert opened is not None
        found = os.fstat(opened._descriptor)
        size, blocks = found.st_size, found.st_blocks * 512
    return {
        "state": sum(local(t).untyped_storage().nbytes() for t in states),
        "weights": sum(storage.nbytes() for storage in storages.values()),
        "pinned": sum(pinned(storage.nbytes()) for storage in storages.values()),
        "file": size,
        "blocks": blocks,
        "names": len(list(folder.iterdir())),
    }


def pinned(size: int) -> int:
    """What PyTorch's pinned allocator takes."""
    return 1 << (size - 1).bit_length()


def planned(name: str, stage: int, device: str = "h100") -> DryRun:
    row = plain_row(name, stage)
    values = {"model": MODEL, "data": {"sequence_length": 8}, "steps": 10, "batch_size": 4} | sections_of(row)
    recipe = recipe_of(values)
    strategy = strategy_from({**settings_of(row, "/not/here"), "zero_stage": stage, "micro_batch_size": 2})
    cluster = cluster_of(ClusterSpec(device=device, devices_per_node=2))
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster)


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        pytest.param(3, ("optimizer", "half", "parameters"), marks=pytest.mark.long),
        (3, ("files",)),
        (0, ("parameters and files",)),
    ],
)
def test_the_plan_is_of_what_is_held(stage: int, names: tuple[str, ...], pool: Pool, tmp_path: Path) -> None:
    """To the byte: state and weights in host memory, the file on the disk."""
    for name in names:
        run, real = planned(name, stage), pool.run(2, held, name, stage, tmp_path)[0]
        ledger, host = run.peak.ledger, run.host
        assert ledger.optimizer_state + host.optimizer_state == real["state"]
        assert host.master_weights == (real["pinned"] if name.startswith("parameters") else 0)
        assert ledger.master_weights == (0 if name.startswith("parameters") else real["weights"])
        assert run.disk_bytes == real["file"] <= real["blocks"] + disk.ALIGNMENT
        assert (run.disk_bytes > 0) == ("files" in name)
        assert real["names"] == 0, "the file has a name"


def test_transfers_are_gradients_and_weights_down_and_weights_up() -> None:
    """In fp32; of half the state no more than a parameter above half; a CPU copies nothing."""
    every, half = planned("optimizer", 0), planned("half", 0)
    weights = 4 * every.parameters
    assert every.cost.transferred_bytes() == {"to_host": 2 * weights, "to_device": weights}
    largest = 4 * VOCAB * 12
    assert 0.5 * weights <= half.cost.transferred_bytes()["to_device"] < 0.5 * weights + largest
    files = planned("files", 0).cost.transferred_bytes()
    assert files["disk_read"] == files["disk_write"] == 2 * weights
    assert planned("optimizer", 0, "cpu").cost.transferred_bytes() == {}


def test_parameters_come_once_a_gathering_and_gradients_go_once_a_reduction() -> None:
    run = planned("parameters", 0)
    weights = 4 * run.parameters
    assert run.cost.transferred_bytes() == {"to_device": 2 * weights, "to_host": weights}
    assert run.peak.ledger.master_weights == run.peak.ledger.optimizer_state == 0
    assert any(k.on_host and "adamw" in k.operation for k in run.cost.kernels)


def test_a_share_is_at_least_the_fraction_and_spread() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in [10, 1, 10, 1] * 10]
    for fraction in (0.01, 0.3, 0.5, 1.0):
        taken = sum(p.numel() for p in share_of(parameters, fraction))
        assert fraction * 220 <= taken < fraction * 220 + 10 or taken == 220


def test_a_model_that_does_not_fit_fits_with_its_state_on_the_host() -> None:
    values = {
        "model": {"layers": 6, "width": 512, "heads": 8, "vocab": 512},
        "data": {"sequence_length": 64},
        "steps": 10,
        "batch_size": 1,
        "cluster": {"device": "h100", "memory_gib": 0.95},
    }
    recipe = recipe_of(values)
    cluster = cluster_of(recipe.cluster)

    def predicted(offload: str) -> Prediction:
        strategy = strategy_from({"precision": "bf16", "zero_stage": 1, "offload": offload})
        return predict(recipe, blueprint_of(recipe), strategy, cluster)

    without, state, everything = predicted("none"), predicted("optimizer"), predicted("optimizer+parameters")
    assert without.sum_bytes > cluster.capacity_bytes > state.peak.bytes > everything.peak.bytes
    moments = 8 * state.parameters
    assert state.host.optimizer_state == pytest.approx(moments, rel=1e-4)
    assert without.peak.ledger.optimizer_state - state.peak.ledger.optimizer_state >= moments
    with torch.device("meta"):
        sizes = [4 * parameter.numel() for parameter in blueprint_of(recipe).build().parameters()]
    assert everything.host.master_weights == everything.host.gradients == sum(map(pinned, sizes))
    assert sum(sizes) == 4 * state.parameters
    assert any("optimizer step on the CPU" in words for words in offload_in_words(state, cluster))


# ---- a disk that fails ------------------------------------------------------------------------------------


FILES = {
    "offload": "files of a CPU",
    "stage": 1,
    "weights": "fp32",
    "optimizer": "adamw",
    "optimizer_in_backward": False,
}


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def descriptors(folder: Path) -> int:
    """Files of a folder that this process has open, of those without a name too."""
    paths = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return sum(path.is_symlink() and str(path.readlink()).startswith(str(folder)) for path in paths)


def reserved_on_a_small_disk(folder: Path) -> tuple[str, int]:
    limit_files(4096)
    with pytest.raises(ResourceError) as raised:
        built(FILES, folder)
    return raised.value.line(), descriptors(folder)


def saved_with_few_descriptors(folder: Path) -> tuple[int, int]:
    """All moments at once, as a checkpoint asks for them: how many, and how many files are open for them."""
    run = built(FILES, folder)
    moments = [tensor for name, tensor in tensors_of(run).items() if name.startswith(OPTIMIZER)]
    return len(moments), descriptors(folder)


def test_a_checkpoint_takes_one_descriptor_for_all_moments(pool: Pool, tmp_path: Path) -> None:
    """A large model has more of them than a process may have files."""
    [(moments, files)] = pool.run(1, saved_with_few_descriptors, tmp_path)
    assert moments > 20 and files == 2, "the file's, and its map's"


def test_a_disk_that_is_too_small_says_so_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    [(line, left_open)] = pool.run(1, reserved_on_a_small_disk, tmp_path)
    assert left_open == 0
    assert "cannot reserve the file of offloaded state" in line and str(tmp_path) in line
    assert "KiB needed" in line and "free" in line and list(tmp_path.iterdir()) == []


def filled_on_the_way(folder: Path) -> list[str]:
    """Train and save, then let writes fail; the differences of the checkpoint afterwards."""
    run = built(FILES, folder)
    train(run, range(2))
    save_checkpoint(run, TrainState(2, 0), folder / "checkpoints", keep=1)
    expected = whole(run)
    limit_files(4096)
    with pytest.raises(ResourceError, match="read or write the file of offloaded state"):
        train(run, range(2, 4))
    limit_files(resource.RLIM_INFINITY)
    again = built(FILES | {"offload": ""}, folder)
    state = restore(again, folder / "checkpoints")
    assert state is not None
    return [] if state.step == 2 and equal(whole(again), expected) else ["another state"]


def test_a_write_that_fails_ends_the_run_and_leaves_the_checkpoint(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, filled_on_the_way, tmp_path) == [[]]


def refused(folder: Path) -> tuple[int, str]:
    with pytest.raises(ShardwiseError) as raised:
        built(FILES, folder)
    return raised.value.exit_code, raised.value.line()


def test_a_folder_that_cannot_be_used_is_refused(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, code, why in (
        (tmp_path / "missing", RecipeError.exit_code, "there is no such folder"),
        (tmp_path / "file", RecipeError.exit_code, "it is not a folder"),
        (Path("/proc"), ResourceError.exit_code, "needed"),
    ):
        [(exit_code, line)] = pool.run(1, refused, path)
        assert exit_code == code and why in line and f"nvme:{path}" in line


# ---- checkpoints ------------------------------------------------------------------------------------------


def saved_with(name: str, folder: Path) -> list[str]:
    """Two steps, saved; the losses of two more."""
    row = FILES | {"offload": name, "stage": 3}
    with apart_of(row):
        run = built(row, folder)
        train(run, range(2))
        save_checkpoint(run, TrainState(2, 0), folder / "checkpoints", keep=1)
        return train(run, range(2, 4))


def resumed_with(name: str, stage: int, folder: Path) -> list[str]:
    row = FILES | {"offload": name, "stage": stage}
    with apart_of(row):
        run = built(row, folder)
        assert restore(run, folder / "checkpoints") is not None
        return train(run, range(2, 4))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("", "files", marks=pytest.mark.long),
        pytest.param("files", "", marks=pytest.mark.long),
        ("files of a CPU", "parameters"),
        pytest.param("parameters", "half", marks=pytest.mark.long),
        pytest.param("half", "files", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_is_resumed_whatever_was_offloaded(
    before: str, after: str, pool: Pool, tmp_path: Path
) -> None:
    """By two ranks exactly; by one, whose sums are ordered otherwise, nearly."""
    expected = pool.run(2, saved_with, before, tmp_path)
    assert pool.run(2, resumed_with, after, 3, tmp_path) == expected
    [alone] = pool.run(1, resumed_with, after, 0, tmp_path)
    assert [float.fromhex(x) for x in alone] == pytest.approx(
        [float.fromhex(x) for x in expected[0]], rel=1e-5
    )


# ---- rules ------------------------------------------------------------------------------------------------


def test_snapshots_of_files_are_refused() -> None:
    recipe = recipe_of({"model": MODEL, "steps": 1, "batch_size": 1, "guard": {"snapshot_every": 2}})
    strategy = strategy_from({"offload": "nvme:/tmp"})
    assert [v.rule.key for v in broken_rules(strategy, 1, recipe)] == ["offload"]


def test_a_fraction_is_of_the_optimizer_alone() -> None:
    recipe = recipe_of({"model": MODEL, "steps": 1, "batch_size": 1})
    for offload, broken in (
        ("none", True),
        ("optimizer+parameters", True),
        ("optimizer", False),
        ("nvme:/a+b:c", False),
    ):
        strategy = strategy_from({"offload": offload, "offload_fraction": 0.5})
        assert [v.rule.key for v in broken_rules(strategy, 1, recipe)] == ["offload_fraction"] * broken
