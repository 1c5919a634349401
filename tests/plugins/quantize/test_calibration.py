"""Calibration text: padding is no input of a layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.model.hf import HuggingFaceModel
from shardwise.plugins.quantize.calibration import Texts, open_batches
from shardwise.plugins.quantize.ranks import Ranks
from shardwise.plugins.quantize.source import open_source_model
from shardwise.plugins.quantize.statistics import InputSums, input_sums
from shardwise.plugins.quantize.walk import Walk
from tests.plugins.quantize.stubs import saved_model

pytest.importorskip("transformers")
torch.set_num_threads(1)

LENGTH = 24
FILLED = (9, 24, 17, 14)


@torch.no_grad()
def sums_of(folder: Path, batches: list[Tensor], counted: list[Tensor | None]) -> list[InputSums]:
    """Those of the first block."""
    blueprint = HuggingFaceModel(str(folder), LENGTH, objective=None)
    walk = Walk(blueprint, blueprint.weights().read, torch.float32)
    hidden = list(walk.embedded(batches))
    layers = {path: m for path, m in walk.block(0).named_modules() if isinstance(m, nn.Linear)}
    with walk.loaded(0, hidden[0]) as run:
        return input_sums(layers, run, hidden, counted)


def test_padded_and_unpadded_sequences_have_equal_statistics(tmp_path: Path) -> None:
    """Padded batches, as the pass has them, against one sequence after the other, each as long as it is."""
    folder = saved_model(tmp_path / "model")
    ids = torch.randint(1, 64, (len(FILLED), LENGTH), generator=torch.Generator().manual_seed(0))
    counted = torch.arange(LENGTH) < torch.tensor(FILLED).unsqueeze(1)
    padded = torch.where(counted, ids, 0)
    found = sums_of(folder, list(padded.split(2)), list(counted.split(2)))
    alone = [sums_of(folder, [row[None, :n]], [None]) for row, n in zip(ids, FILLED, strict=True)]
    plain = sums_of(folder, list(padded.split(2)), [None, None])
    assert [each.layers for each in found] == [each.layers for each in alone[0]] and len(found) == 4
    for index, sums in enumerate(found):
        parts = [each[index].mean() for each in alone]
        assert sums.tokens == sum(FILLED) == sum(part.tokens for part in parts)
        mean = sums.mean()
        for name in ("hessian", "magnitude"):
            expected = sum(getattr(part, name) * part.tokens for part in parts) / sum(FILLED)
            torch.testing.assert_close(getattr(mean, name), expected)
    assert plain[0].tokens == padded.numel()
    assert not torch.allclose(plain[0].mean().hessian, sums_of(folder, [ids], [counted])[0].mean().hessian)


def test_chats_are_counted_without_their_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and completion count, on the rank that has the sequence; plain text has no padding."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    folder = saved_model(tmp_path / "model", vocab_size=256)
    records = [{"prompt": "a" * (3 + n), "completion": "b" * (1 + n % 4)} for n in range(12)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "text.txt").write_text("words and words " * 60)
    source = open_source_model(str(folder), LENGTH)
    texts = [
        Texts(str(tmp_path / name), str(tmp_path / "text.txt"), "bytes", 4)
        for name in ("chats.jsonl", "text.txt")
    ]
    chats, plain = (open_batches(source, str(folder), each, 2) for each in texts)
    assert set(plain.batches.counted) == {None}
    for rank in range(2):
        batches = chats.of(Ranks(rank, 2))
        assert len(batches.counted) == len(batches.calibration) > 0
        for ids, counted in zip(batches.calibration, batches.counted, strict=True):
            assert counted is not None
            real = (ids == ord("a")) | (ids == ord("b"))
            # The last token of a record is a target only.
            assert torch.equal(counted & real, real) and int((counted & ~real).sum()) <= ids.shape[0]
