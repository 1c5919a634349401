"""Masked language modelling: BERT's proportions, and the same hidden tokens whatever runs the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.errors import DataError
from shardwise.data import Batch, Data, open_data
from shardwise.data.opening import check_data
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.harness.corpora import SPECIAL, write_tokenizer, write_words

pytest.importorskip("tokenizers")

MASK, SEPARATOR = SPECIAL.index("[MASK]"), SPECIAL.index("[SEP]")
IDS = 33


def _recipe(folder: Path, batch_size: int = 6, **data: Any) -> Recipe:
    write_words(folder / "words.txt", count=3000)
    tokenizer = str(write_tokenizer(folder / "letters", "[SEP]"))
    values = {
        "model": {"hf": "no-folder", "objective": "masked"},
        "data": {"source": str(folder / "words.txt"), "tokenizer": tokenizer, "sequence_length": 32, **data},
        "steps": 10,
        "batch_size": batch_size,
    }
    return recipe_of(values, SETTINGS)


def _data(folder: Path, **how: Any) -> Data:
    return open_data(_recipe(folder, **how), cache=folder / "cache")


def _rows(batches: list[Batch]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    pairs = ((b["input_ids"].tolist(), b["labels"].tolist()) for b in batches)
    rows = ((tuple(i), tuple(t)) for ids, labels in pairs for i, t in zip(ids, labels, strict=True))
    return {row for row in rows if any(label != -100 for label in row[1])}


def test_the_proportions_are_berts(tmp_path: Path) -> None:
    data = _data(tmp_path, batch_size=400)
    (batch,) = data.micro_batches(0, 0, 1, 400)
    inputs, labels = batch["input_ids"], batch["labels"]
    target = labels != -100
    count = int(target.sum())
    assert count / target.numel() == pytest.approx(0.15, abs=0.01), "12,800 tokens: three standard deviations"
    shown = inputs[target]
    hidden = int((shown == MASK).sum())
    kept = int((shown == labels[target]).sum())
    assert hidden / count == pytest.approx(0.8, abs=0.03)
    # One in 33 random tokens is the token itself.
    assert kept / count == pytest.approx(0.1 + 0.1 / IDS, abs=0.03)
    assert int(shown.min()) >= 0 and int(shown.max()) < IDS
    assert not (inputs[~target] == MASK).any() and not (labels[target] == SEPARATOR).any()


def test_labels_are_the_hidden_text(tmp_path: Path) -> None:
    """Put back, they give the plain sequences, unshifted."""
    recipe = _recipe(tmp_path)
    causal = recipe.model_copy(update={"model": recipe.model.model_copy(update={"objective": "causal"})})
    plain = open_data(causal, cache=tmp_path / "cache").micro_batches(3, 0, 1, 6)[0]["input_ids"]
    (batch,) = open_data(recipe, cache=tmp_path / "cache").micro_batches(3, 0, 1, 6)
    assert torch.equal(torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"]), plain)


def test_any_world_and_any_micro_batch_hides_the_same_tokens(tmp_path: Path) -> None:
    data = _data(tmp_path)
    expected = _rows(data.micro_batches(7, 0, 1, 6))
    assert len(expected) == 6
    for degree, size in ((1, 1), (2, 2), (4, 1), (3, 4)):
        batches = [b for rank in range(degree) for b in data.micro_batches(7, rank, degree, size)]
        assert _rows(batches) == expected
    again = _data(tmp_path)
    assert _rows(again.micro_batches(7, 0, 1, 6)) == expected, "after a restart"


def test_epochs_and_seeds_differ_and_validations_do_not(tmp_path: Path) -> None:
    data = _data(tmp_path)
    steps = [_rows(data.micro_batches(step, 0, 1, 6)) for step in range(3)]
    assert not steps[0] & steps[1] and not steps[1] & steps[2]
    assert _rows(data.held_out(0, 0, 1, 4)) == _rows(data.held_out(0, 0, 2, 4) + data.held_out(0, 1, 2, 4))


def test_masking_needs_a_mask_token_and_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="tokenizer 'bytes' has no mask token"):
        check_data(_recipe(tmp_path, tokenizer="bytes"))
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(DataError, match="the masked objective needs plain text"):
        check_data(_recipe(tmp_path, source=str(tmp_path / "pairs.jsonl")))
