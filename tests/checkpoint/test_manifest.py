"""Damage is always found, before a tensor is read, and costs a step back and one line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.checkpoint import latest, restore
from shardwise.checkpoint.manifest import FileEntry, Manifest, TensorEntry, TensorPiece
from shardwise.checkpoint.saved_weights import load_weights
from shardwise.core.errors import CheckpointError
from shardwise.core.json_file import plain
from shardwise.engine.train_state import TrainState
from tests.harness.pool import Pool
from tests.harness.tiny_run import flip, full, make_run, saved, unexpected

WEIGHTS_0 = "weights-00000.safetensors"


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
    assert latest(folder, warn=unexpected) == folder / "step-2"


def restored_state(folder: Path) -> TrainState | None:
    return restore(make_run(), folder)


def test_ranks_agree_on_what_is_damaged(pool: Pool, folder: Path) -> None:
    flip(folder / "step-2" / "weights-00001.safetensors", 900)
    assert pool.run(2, restored_state, folder) == [TrainState(1, 10)] * 2


def unchanged(folder: Path) -> bool:
    run = make_run()
    before = {name: full(parameter) for name, parameter in run.model.named_parameters()}
    with pytest.raises(CheckpointError, match="does not match its hash"):
        restore(run, folder)
    return all(torch.equal(before[name], full(p)) for name, p in run.model.named_parameters())


def test_when_all_are_damaged_nothing_reaches_the_model(pool: Pool, folder: Path) -> None:
    for step in ("step-1", "step-2"):
        flip(folder / step / WEIGHTS_0, 900)
    with pytest.raises(CheckpointError, match=r"all checkpoints are damaged .*step-2/weights-00000"):
        latest(folder, warn=lambda line: None)
    assert pool.run(2, unchanged, folder) == [True, True]


def test_load_weights_verifies(folder: Path) -> None:
    flip(folder / "step-2" / WEIGHTS_0, 900)
    with pytest.raises(CheckpointError, match="does not match its hash"):
        load_weights(folder / "step-2")


# ---- the manifest in itself -------------------------------------------------------------------------------

MANIFEST = Manifest(
    state=TrainState(3, 40),
    world_size=2,
    files={
        "weights-00000.safetensors": FileEntry(16, "0" * 32),
        "weights-00001.safetensors": FileEntry(8, "f" * 32),
    },
    tensors={
        "a.weight": TensorEntry(
            "F32",
            (3, 2),
            (
                TensorPiece("weights-00000.safetensors", (0, 0), (2, 2)),
                TensorPiece("weights-00001.safetensors", (2, 0), (1, 2)),
            ),
        ),
        "scalar": TensorEntry("F32", (), (TensorPiece("weights-00000.safetensors", (), ()),)),
    },
    order={"seed": 0, "batch_size": 4},
    data="fingerprint \u00e9\n",
    recipe="abc",
    strategy={"zero_stage": 3, "precision": "fp32", "compile": False},
    versions={"torch": "2.13"},
)


def sealed(**changes: Any) -> bytes:
    body = json.loads(MANIFEST.to_bytes())
    del body["xxh3_128"]
    return manifests._with_digest(body | changes)


def test_a_manifest_reads_back_equal() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert sealed() == MANIFEST.to_bytes()


def test_a_manifest_of_the_first_version_is_read() -> None:
    raw = (Path(__file__).parent.parent / "core" / "golden" / "manifest.json").read_bytes()
    manifest = Manifest.from_bytes(raw)
    assert manifest.tensors["scalar"].pieces == (TensorPiece("weights-00000.safetensors", (), ()),)
    assert manifest.state.left_out == ((2, 4), (6, 7)) and manifest.state.guard.losses == (1.5,)
    assert json.loads(manifest.to_bytes()).keys() == json.loads(raw).keys()


def test_every_single_bit_of_a_manifest_counts() -> None:
    raw = MANIFEST.to_bytes()
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        with pytest.raises(ValueError, match=r"."):
            Manifest.from_bytes(bytes(changed))


PIECE = [0, [0], [4]]
HOLE = [[0, [0], [2]], [1, [1], [2]]]
"""As many elements as the tensor: one twice, and one missing."""
CROSSED = [[0, [0, 0], [2, 2]], [1, [0, 1], [1, 2]], [1, [1, 2], [1, 2]]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"files": {"../../etc/passwd": {"bytes": 1, "xxh3_128": ""}}},
            "is not the name of a checkpoint's file",
        ),
        ({"files": {"/weights-00000.safetensors": {"bytes": 1, "xxh3_128": ""}}}, "is not the name"),
        (
            {"files": {"weights-00000.safetensors": {"bytes": -1, "xxh3_128": ""}}},
            "files.weights-00000.safetensors.bytes: ",
        ),
        ({"files": []}, "malformed"),
        ({"state": plain(TrainState(3, 40)) | {"step": True}}, "state.step: "),
        ({"state": {"step": 1}}, "missing or unknown"),
        ({"world_size": "2"}, "world_size: "),
        ({"tensors": {"x": {"dtype": "F32", "shape": [8], "pieces": [PIECE]}}}, "do not make the tensor"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [3], "pieces": [PIECE]}}}, "not within the tensor"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [4], "pieces": [[7, [0], [4]]]}}}, "malformed"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [4], "pieces": [[0, [0, 0], [4]]]}}}, "not within"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [4], "pieces": []}}}, "do not make the tensor"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [4], "pieces": HOLE}}}, "do not make the tensor"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [2, 4], "pieces": CROSSED}}}, "do not make the tensor"),
        ({"tensors": {"x": {"dtype": "U128", "shape": [4], "pieces": [PIECE]}}}, "not a dtype"),
        ({"tensors": {"x": {"dtype": None, "shape": [4], "pieces": [PIECE]}}}, "dtype"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [10**18] * 2, "pieces": [PIECE]}}}, "too large"),
        ({"tensors": {"x": {"dtype": "F32", "shape": [1] * 99, "pieces": [PIECE]}}}, "too large"),
        ({"world_size": 0}, "world_size: "),
        ({"format": 1}, "its format is 1, this version reads 2"),
    ],
)
def test_a_well_sealed_lie_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Manifest.from_bytes(sealed(**changes))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000, b'{"xxh3_128":1}'])
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is not|does not match"):
        Manifest.from_bytes(raw)


def test_another_version_is_named_and_is_no_damage(folder: Path) -> None:
    path = folder / "step-2" / "manifest.json"
    path.write_bytes(sealed(format=99))
    with pytest.raises(CheckpointError, match=r"another version .*its format is 99, this version reads 2"):
        latest(folder, warn=unexpected)


def test_a_link_in_place_of_a_checkpoint_is_not_one(folder: Path) -> None:
    (folder / "step-3").symlink_to(folder / "step-2")
    assert latest(folder, warn=unexpected) == folder / "step-2"


def test_shards_without_a_manifest_are_a_damaged_checkpoint(pool: Pool, folder: Path) -> None:
    (folder / "step-2" / "manifest.json").unlink()
    told: list[str] = []
    assert latest(folder, told.append) == folder / "step-1"
    assert len(told) == 1 and told[0].startswith("checkpoint step-2/manifest.json is damaged"), told
    (folder / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="all checkpoints are damaged"):
        pool.run(1, restored_state, folder)


def test_no_file_of_ours_unpickles() -> None:
    for name in ("checkpoint.py", "manifest.py", "commit.py", "shards.py"):
        text = (Path(manifests.__file__).parent / name).read_text()
        assert "torch.load" not in text
        assert "import pickle" not in text


def covered(shape: tuple[int, ...], pieces: list[TensorPiece]) -> bool:
    """Whether boxes cover each element once, by counting."""
    counts = np.zeros(shape, int)
    for piece in pieces:
        counts[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))] += 1
    return bool((counts == 1).all())


@hypothesis.given(st.data())
def test_pieces_make_a_tensor_exactly_if_they_cover_each_element_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), label="shape"))
    pieces = [TensorPiece("f", (0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 4), label="cuts")):  # cut a piece in two, or move it
        piece = pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, piece.sizes[dim]))
        rest = piece.sizes[dim] - at
        first = piece._replace(sizes=(*piece.sizes[:dim], at, *piece.sizes[dim + 1 :]))
        start = (*piece.offsets[:dim], piece.offsets[dim] + at, *piece.offsets[dim + 1 :])
        second = TensorPiece("f", start, (*piece.sizes[:dim], rest, *piece.sizes[dim + 1 :]))
        if data.draw(st.booleans()) and first.offsets[dim] + 1 + at <= shape[dim]:
            moved = (*first.offsets[:dim], first.offsets[dim] + 1, *first.offsets[dim + 1 :])
            first = first._replace(offsets=moved)
        pieces += [first, second]
    assert manifests._tiles(shape, pieces) == covered(shape, pieces)


@pytest.mark.parametrize("changes", [{"files": {}, "tensors": {}}, {"strategy": {"precision": "fp7"}}])
def test_a_checkpoint_that_was_changed_and_sealed_again(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "step-2" / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["xxh3_128"]
    path.write_bytes(manifests._with_digest(body | changes))
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        load_weights(folder / "step-2")


def test_a_tensor_larger_than_its_file_is_never_allocated(folder: Path) -> None:
    path = folder / "step-2" / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["xxh3_128"]
    entry = next(iter(body["tensors"].values()))
    rank = len(entry["shape"])
    entry["shape"] = [2**50, *entry["shape"][1:]]
    entry["pieces"] = [[0, [0] * rank, entry["shape"]]]
    path.write_bytes(manifests._with_digest(body))
    with pytest.raises(CheckpointError, match="files are smaller than its tensors"):
        load_weights(folder / "step-2")
