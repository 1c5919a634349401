"""Packed plain text: documents share a sequence, and train as each does alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import run
from shardwise.data import Data, open_data
from shardwise.model.native import NativeModel
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS

TEXTS = [
    "the first document",
    "b",
    "the third, which is longer than a sequence of tokens is",
    "dd",
    "the last",
]
LENGTH = 24


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def opened(source: Path, **data: Any) -> Data:
    values = {
        "model": {"layers": 2, "width": 16, "heads": 2, "ffn": 24, "vocab": 256},
        "data": {"source": str(source), "sequence_length": LENGTH, "held_out": 0.0, "packing": True, **data},
        "steps": 1,
        "batch_size": 3,
    }
    return open_data(recipe_of(values, SETTINGS), cache=source.parent / "cache")


def pieces(data: Data) -> list[list[int]]:
    """The parts of documents that its sequences hold, with the token that the last input predicts."""
    tokens = b"".join(text.encode() + b"\0" for text in TEXTS)
    ends = [at + 1 for at, token in enumerate(tokens) if token == 0]
    cuts = range(0, data.train_sequences * LENGTH, LENGTH)
    found = []
    for first in cuts:
        inside = [end for end in ends if first < end <= first + LENGTH]
        edges = [first, *inside, first + LENGTH + 1]
        found += [list(tokens[a:b]) for a, b in itertools.pairwise(edges) if b - a > 1]
    return found


def test_packed_documents_have_the_loss_and_the_gradients_of_separate_ones(source: Path) -> None:
    data = opened(source)
    [batch] = data.micro_batches(0, 0, 1, 3)
    model = NativeModel(Dimensions(2, 16, 2, 1, 24, vocab=256, context=LENGTH))
    torch.manual_seed(0)
    module = model.build().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.2)
    together, count = model.loss(module, batch)
    together.backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    alone, targets = torch.zeros((), dtype=torch.float64), 0
    for piece in pieces(data):
        tokens = torch.tensor([piece])
        loss, number = model.loss(module, {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
        loss.backward()
        alone, targets = alone + loss.detach(), targets + int(number)
    assert int(count) == targets and len(pieces(data)) > data.train_sequences
    assert abs(float(together.detach() - alone)) <= 1e-10 * float(alone)
    for packed, parameter in zip(gradients, module.parameters(), strict=True):
        assert parameter.grad is not None
        assert (packed - parameter.grad).norm() <= 1e-10 * parameter.grad.norm()


def test_unpacked_text_is_what_it_was_and_has_another_fingerprint(source: Path) -> None:
    packed, plain = opened(source), opened(source, packing=False)
    assert packed.fingerprint != plain.fingerprint and packed.train_sequences == plain.train_sequences
    [one], [other] = (data.micro_batches(0, 0, 1, 3) for data in (packed, plain))
    assert torch.equal(one["input_ids"], other["input_ids"]) and "positions" not in other
    assert (other["labels"] != -100).all()
    differ = one["labels"] != other["labels"]
    assert torch.equal(differ[:, :-1], one["positions"][:, 1:] == 0)
    assert (one["input_ids"][differ] == 0).all(), "the separator predicts nothing"


def test_held_out_documents_are_packed_too_and_runs_that_are_not_neighbours_stay_apart(
    tmp_path: Path,
) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(60)))
    data = opened(path, held_out=0.3)
    for batch in [*data.micro_batches(0, 0, 1, 3), *data.held_out(0, 0, 1, 2)]:
        for row, places in zip(batch["input_ids"].tolist(), batch["positions"].tolist(), strict=True):
            assert places[0] == 0
            if not any(row):
                continue  # padding
            for before, token, place in zip(places, row, places[1:], strict=False):
                assert place == (0 if token == 0 else before + 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_starts_are_the_zeros_of_positions(rows: int, source: Path) -> None:
    """A power of two of them, for the row with the most documents; the row's length stands for those that it lacks."""
    for batch in opened(source).micro_batches(0, 0, 1, rows):
        length = batch["positions"].shape[1]
        zeros = [[i for i, place in enumerate(row) if place == 0] for row in batch["positions"].tolist()]
        most = next(2**k for k in range(9) if 2**k >= max(map(len, zeros)))
        assert batch["starts"].dtype == torch.int32
        assert batch["starts"].tolist() == [row + [length] * (most - len(row)) for row in zeros]


def test_the_command_shows_documents_apart(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(source.parent / "cache"))
    recipe = source.parent / "recipe.yaml"
    recipe.write_text(
        "model: {layers: 1, width: 8, heads: 1, ffn: 8, vocab: 256}\n"
        f"data: {{source: {source}, sequence_length: {LENGTH}, held_out: 0.0, packing: true}}\n"
        "steps: 1\nbatch_size: 1\n"
    )
    assert run(["data", str(recipe), "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "no document sees another, and its first token is not trained on" in out
    assert "t[[he first document<end>]]\nb[[<end>]]\nt[[he " in out
