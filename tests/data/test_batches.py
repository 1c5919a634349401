"""`Data`: steps are the same whatever the world, padding counts nothing, and datasets of one's own work."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from shardwise.core.errors import DataError
from shardwise.data import Batch, Data
from shardwise.data.batches import deal
from shardwise.model.blueprint import PADDING

Opener = Callable[..., Data]
WORLDS = [(1, 1), (1, 3), (1, 16), (2, 1), (2, 4), (3, 2), (4, 1), (4, 8), (7, 1)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sequences that can be told apart: a counter, spelt out."""
    (tmp_path / "a.txt").write_text("".join(f"{i:07d}\n" for i in range(500)))
    return tmp_path / "a.txt"


def rows(batches: list[Batch]) -> list[tuple[list[int], list[int]]]:
    return [
        (inputs, labels)
        for batch in batches
        for inputs, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        if labels[0] != -100
    ]


def test_batches_have_the_promised_shape_and_shift(source: Path, opened: Opener) -> None:
    data = opened(source)
    for batch in data.micro_batches(0, 0, 1, 4):
        assert set(batch) == {"input_ids", "labels"}
        for tensor in batch.values():
            assert tensor.shape == (4, 8) and tensor.dtype == torch.int64 and tensor.is_contiguous()
        assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert data.vocab == 256
    assert data.train_sequences + data.held_out_sequences == 500
    assert data.held_out_sequences == 25


@pytest.mark.parametrize("batch_size", [1, 5, 16])
def test_any_world_deals_the_same_samples(source: Path, opened: Opener, batch_size: int) -> None:
    data = opened(source, batch_size=batch_size)
    for step in (0, 1, 40):
        reference = rows(data.micro_batches(step, 0, 1, batch_size))
        assert len(reference) == batch_size
        for degree, size in WORLDS:
            ranks = [data.micro_batches(step, rank, degree, size) for rank in range(degree)]
            count = -(-batch_size // (degree * size))
            assert [len(batches) for batches in ranks] == [count] * degree
            assert all(batch["labels"].shape == (size, 8) for batches in ranks for batch in batches)
            dealt = [row for j in range(count) for batches in ranks for row in rows([batches[j]])]
            assert dealt == reference


def test_a_step_is_a_function_of_seed_and_step_alone(source: Path, opened: Opener) -> None:
    data, again, other = opened(source), opened(source), opened(source, seed=1)
    assert [again.samples(step) for step in (7, 3, 7)] == [data.samples(step) for step in (7, 3, 7)]
    assert other.samples(7) != data.samples(7)
    count = data.train_sequences
    epoch = [sample for step in range(count) for sample in data.samples(step)]
    assert len(epoch) == 4 * count
    assert sorted(epoch[:count]) == sorted(epoch[count : 2 * count]) == list(range(count))
    assert epoch[:count] != epoch[count : 2 * count]


def test_batch_size_does_not_change_the_order(source: Path, opened: Opener) -> None:
    small, large = opened(source, batch_size=3), opened(source, batch_size=6)
    assert small.samples(10) + small.samples(11) == large.samples(5)


def test_text_is_what_the_sample_holds(source: Path, opened: Opener) -> None:
    data = opened(source)
    sample = data.samples(3)[2]
    assert data.text(sample) == bytes(data.micro_batches(3, 0, 1, 4)[0]["input_ids"][2].tolist()).decode()
    assert data.text(sample) == f"{sample:07d}\n"


def test_held_out_is_fixed_disjoint_and_spread(source: Path, opened: Opener) -> None:
    data = opened(source, sequences=10)
    whole = rows(data.held_out(0, 0, 1, 10))
    assert len(whole) == 10
    assert (
        opened(source, sequences=10, seed=5)
        .held_out(0, 0, 1, 10)[0]["labels"]
        .equal(data.held_out(0, 0, 1, 10)[0]["labels"])
    )
    for degree, size in WORLDS:
        ranks = [data.held_out(0, rank, degree, size) for rank in range(degree)]
        assert len({len(batches) for batches in ranks}) == 1
        dealt = [row for batches in ranks for row in rows(batches)]
        assert sorted(dealt) == sorted(whole)
    trained = {data.text(sample) for sample in range(data.train_sequences)}
    texts = {bytes(inputs).decode() for inputs, _ in whole}
    assert not texts & trained
    assert texts != {f"{i:07d}\n" for i in range(475, 485)}, "only the first held-out text"
    assert rows(data.held_out(1, 0, 1, 10)) != whole


def test_fewer_held_out_than_asked_for_are_each_seen_once(source: Path, opened: Opener) -> None:
    data = opened(source, sequences=1000)
    seen = rows(data.held_out(0, 0, 1, 7))
    assert len(seen) == len({tuple(inputs) for inputs, _ in seen}) == 25
    nothing = opened(source, held_out=0.0)
    assert nothing.held_out_sequences == 0
    assert nothing.held_out(0, 0, 2, 4) == []


def test_the_fingerprint_follows_what_sample_numbers_mean(source: Path, opened: Opener) -> None:
    data = opened(source)
    moved = source.parent / "moved.txt"
    moved.write_bytes(source.read_bytes())
    assert opened(moved, seed=3, batch_size=9).fingerprint == data.fingerprint
    different = [opened(source, sequence_length=16), opened(source, held_out=0.1)]
    moved.write_bytes(source.read_bytes().replace(b"0000007", b"0000017"))
    assert len({data.fingerprint, opened(moved).fingerprint, *(d.fingerprint for d in different)}) == 4


@pytest.mark.parametrize(
    "arguments", [(0, 2, 2, 1), (0, -1, 2, 1), (0, 0, 1, 0), (0, 0, 0, 1), (-1, 0, 1, 1)]
)
def test_impossible_worlds_are_refused(source: Path, opened: Opener, arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        opened(source).micro_batches(*arguments)


def test_slots() -> None:
    assert deal(5, rank=0, degree=2, micro_batch_size=2) == [[0, 1], [4, None]]
    assert deal(5, rank=1, degree=2, micro_batch_size=2) == [[2, 3], [None, None]]


# -- a factory's own dataset


class Points(Dataset[Any]):
    """Points of a line: {"x": [3] float, "label": int64} by default."""

    def __init__(self, count: int, **more: Callable[[int], object]) -> None:
        self.count = count
        self.make: dict[str, Callable[[int], object]] = {
            "x": lambda i: torch.full((3,), float(i)),
            "label": lambda i: torch.tensor(i),
            **more,
        }

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {name: make(index) for name, make in self.make.items()}


def labels(batches: list[Batch], name: str = "label") -> list[int]:
    return [int(label) for batch in batches for label in batch[name] if label != -100]


def test_a_dataset_is_dealt_like_text(opened: Opener) -> None:
    data = opened(dataset=Points(40), batch_size=5, held_out=0.1)
    assert (data.train_sequences, data.held_out_sequences, data.vocab, data.tokenizer) == (36, 4, None, None)
    for degree, size in WORLDS:
        ranks = [data.micro_batches(3, rank, degree, size) for rank in range(degree)]
        assert len({len(batches) for batches in ranks}) == 1
        batches = [batch for each in ranks for batch in each if PADDING not in batch]
        assert all(batch["x"].shape[1:] == (3,) and len(batch["x"]) <= size for batch in batches)
        assert sorted(labels(batches)) == sorted(data.samples(3))
    assert sorted(labels(data.held_out(0, 0, 1, 3))) == [36, 37, 38, 39]
    assert data.text(7) == "dataset[7]: x=[3] label=7"


def test_a_micro_batch_without_enough_items_is_shorter(opened: Opener) -> None:
    """Whatever the names and dtypes of the tensors are: what the loss would ignore is not known."""
    dataset = Points(40, label=lambda i: i, found=lambda i: torch.tensor(True))
    data = opened(dataset=dataset, batch_size=3)
    first, second = (data.micro_batches(0, rank, 2, 2) for rank in (0, 1))
    assert [len(batch["x"]) for batch in (*first, *second)] == [2, 1]
    assert first[0]["label"].dtype == torch.int64
    assert [*first[0]["label"].tolist(), *second[0]["label"].tolist()] == data.samples(0)


def test_a_rank_without_items_repeats_item_0_and_says_so(opened: Opener) -> None:
    data = opened(dataset=Points(40), batch_size=2)
    (batch,) = data.micro_batches(0, 1, 2, 2)
    assert PADDING in batch and torch.equal(batch["x"], torch.zeros(2, 3))
    assert PADDING not in data.micro_batches(0, 0, 2, 2)[0]


def draws(_: int = 0) -> Tensor:
    """One number of each generator that an augmentation may draw from."""
    return torch.tensor([random.random(), np.random.random(), float(torch.rand(()))])


def test_augmentations_are_the_same_in_any_world_and_after_a_resume(opened: Opener) -> None:
    def of_step(step: int, degree: int = 1, size: int = 8) -> dict[int, tuple[float, ...]]:
        data = opened(dataset=Points(40, x=draws), batch_size=8)
        batches = [batch for rank in range(degree) for batch in data.micro_batches(step, rank, degree, size)]
        return {
            int(label): tuple(x.tolist())
            for batch in batches
            if PADDING not in batch
            for label, x in zip(batch["label"], batch["x"], strict=True)
        }

    first = of_step(0)
    assert len(set(first.values())) == 8 and len({value for x in first.values() for value in x}) == 24
    assert all(of_step(0, degree, size) == first for degree, size in [(2, 4), (4, 1), (2, 3)])
    later = of_step(5)  # the next epoch has the same items
    assert later.keys() & first.keys() and not set(later.values()) & set(first.values())


def test_reading_an_item_leaves_the_generators_of_the_model_alone(opened: Opener) -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    opened(dataset=Points(40, x=draws), batch_size=8).micro_batches(0, 0, 1, 8)
    assert torch.equal(draws(), expected)


def test_the_fingerprint_of_a_dataset(opened: Opener) -> None:
    def of(dataset: Points) -> str:
        return opened(dataset=dataset).fingerprint

    different = [
        Points(40),
        Points(41),
        Points(40, label=lambda i: i + 1),
        Points(40, y=lambda i: torch.tensor(True)),
    ]
    assert len({of(dataset) for dataset in different}) == 4
    assert of(Points(40)) == of(Points(40))
    assert of(Points(40, x=draws)) == of(Points(40, x=draws))
    shares = [opened(dataset=Points(40), held_out=share).fingerprint for share in (0.0, 0.1, 0.2)]
    assert len(set(shares)) == 3  # which items are trained on
    assert of(Points(40, x=lambda i: torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16()))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield {"x": torch.zeros(1)}


class Listed(Points):
    def __getitem__(self, index: int) -> Any:
        return [torch.zeros(1)]


def broken(i: int) -> Tensor:
    if i == 0:
        return torch.zeros(1)
    raise OSError(f"image {i} is damaged\nreally")


@pytest.mark.parametrize(
    ("dataset", "batch_size", "says"),
    [
        (Stream(), 4, "dataset has no length"),
        (Points(0), 4, "empty dataset"),
        (Listed(5), 4, r"not a dict of tensors \(dataset item 0\).*list"),
        (Points(5, name=lambda i: "a name"), 4, "'name' is not a tensor.*str"),
        (Points(5, x=broken), 4, r"dataset raised an error \(dataset item \d\).*OSError: image"),
        (Points(5, x=lambda i: torch.zeros(5 - i)), 4, "do not stack into a batch.*same names, shapes"),
        (
            Points(5, x=lambda i: torch.zeros(i + 1)),
            1,
            r"'x' is larger than planned \(dataset item [1-4]\): its shape is .*, that of item 0 is \[1\]",
        ),
    ],
    ids=["iterable", "empty", "list", "text", "raises", "ragged", "larger"],
)
def test_an_unfit_dataset_is_one_line(opened: Opener, dataset: Any, batch_size: int, says: str) -> None:
    with pytest.raises(DataError, match=says) as raised:
        opened(dataset=dataset, batch_size=batch_size).micro_batches(0, 0, 1, 4)
    assert raised.value.line().isprintable()
