"""A kind of data that the package does not know needs one class and one line: extra tensors, and a state of its own.

Its samples are made, as a rollout is: a block follows from the state after the block before it. They have tokens,
a tensor per token, one per sample, and one whose length varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.core.errors import DataError
from shardwise.data import Data, check_data, open_data, opening
from shardwise.data.dataset import OpenedSource, Sample, Splits, TokenDataset
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe

LENGTH, BLOCK, STEPS, BATCH = 6, 8, 10, 5


class Rollouts(TokenDataset):
    """Sample n is number n mod BLOCK of block n // BLOCK."""

    endless = True
    from_records = True
    fill: Mapping[str, int] = {"turns": -1}

    def __init__(self) -> None:
        self.length, self.states, self.made = LENGTH, {0: 1}, 0

    def __len__(self) -> int:
        return 1 << 20

    @property
    def epoch(self) -> int:
        return BLOCK

    def state(self, block: int) -> int:
        for earlier in range(max(known for known in self.states if known <= block), block):
            self.states[earlier + 1] = self.states[earlier] * 6364136223846793005 % (1 << 61)
            self.made += 1
        return self.states[block]

    def sample(self, index: int) -> Sample:
        draw = np.random.default_rng([self.state(index // BLOCK), index % BLOCK])
        tokens = draw.integers(0, 256, LENGTH + 1)
        return {
            "input_ids": tokens[:-1],
            "labels": tokens[1:],
            "advantages": draw.random(LENGTH, np.float32),
            "reward": np.float32(tokens.sum()),
            "turns": np.arange(draw.integers(1, 4)),
        }

    def padding(self) -> Sample:
        return {
            "input_ids": np.zeros(LENGTH, np.int64),
            "labels": np.full(LENGTH, -100),
            "advantages": np.zeros(LENGTH, np.float32),
            "reward": np.float32(0),
            "turns": np.zeros(1, np.int64),
        }

    def text(self, index: int) -> str:
        return str(self.sample(index)["input_ids"].tolist())

    def record(self, index: int) -> tuple[list[int], list[bool]]:
        return self.sample(index)["input_ids"].tolist(), [True] * LENGTH

    def documents(self, index: int) -> list[list[tuple[int, bool]]]:
        return [list(zip(*self.record(index), strict=True))]

    def release(self) -> None:
        pass

    def cursor(self, consumed: int) -> tuple[str, ...]:
        block = consumed // BLOCK
        return (f"{block} {self.state(block)}",)

    def begin_at(self, cursor: Sequence[str]) -> None:
        (text,) = cursor
        block, state = map(int, text.split())
        self.states = {block: state}


def open_rollouts(opened: OpenedSource) -> Splits[Rollouts]:
    assert opened.format == "prompt" and opened.tokenizer.vocab == 256
    return Splits(Rollouts(), Rollouts(), "rollouts", lambda: ["two kinds of rollouts"])


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setitem(opening.OPENERS, ("causal", "prompt"), open_rollouts)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    data = {"source": str(tmp_path / "prompts.jsonl"), "sequence_length": LENGTH}
    return recipe_of(
        {"model": {"preset": "tiny"}, "data": data, "steps": STEPS, "batch_size": BATCH, "seed": 3}
    )


def rows(data: Data, step: int, degree: int = 1, size: int = 2) -> list[tuple[object, ...]]:
    """The samples of a step, collected from all ranks in the order of the step, without padding rows."""
    ranks = [data.micro_batches(step, rank, degree, size) for rank in range(degree)]
    batches = [batches[number] for number in range(len(ranks[0])) for batches in ranks]
    return [
        tuple(tensor[row].tolist() for name, tensor in batch.items() if name != "turns")
        for batch in batches
        for row in range(size)
        if batch["labels"][row, 0] != -100
    ]


def test_tensors_of_any_name_are_stacked(recipe: Recipe) -> None:
    assert check_data(recipe) == ["two kinds of rollouts"]
    data = open_data(recipe)
    samples = [data._train.sample(index) for index in data.samples(0)[:4]]
    [batch, _] = data.micro_batches(0, 0, 1, 4)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()} == {
        "input_ids": ((4, LENGTH), torch.int64),
        "labels": ((4, LENGTH), torch.int64),
        "advantages": ((4, LENGTH), torch.float32),
        "reward": ((4,), torch.float32),
        "turns": ((4, max(len(sample["turns"]) for sample in samples)), torch.int64),
    }
    for name in ("advantages", "reward"):
        assert batch[name].tolist() == [sample[name].tolist() for sample in samples], name
    for row, sample in zip(batch["turns"].tolist(), samples, strict=True):
        assert row == [*sample["turns"], *[-1] * (len(row) - len(sample["turns"]))]


@pytest.mark.parametrize(("degree", "size"), [(2, 1), (3, 2), (4, 3)])
def test_ranks_share_the_samples_of_a_step(recipe: Recipe, degree: int, size: int) -> None:
    data = open_data(recipe)
    for step in range(STEPS):
        whole = rows(data, step)
        assert len(whole) == BATCH and rows(data, step, degree, size) == whole


def test_a_run_resumes_from_the_state_of_its_source(recipe: Recipe) -> None:
    data = open_data(recipe)
    expected = [rows(data, step) for step in range(STEPS)]
    resumed = open_data(recipe)
    resumed.begin_at(data.cursor(7))
    assert [rows(resumed, step, 2) for step in range(7, STEPS)] == expected[7:]
    assert resumed._train.made == 2, "blocks 5 and 6; 35 samples came before"
    assert rows(open_data(recipe), 9) == expected[9], "from the start it is the same, and takes all blocks"


def test_a_length_that_varies_needs_a_fill(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rollouts, "fill", {})
    with pytest.raises(DataError, match="samples do not stack into a batch"):
        for step in range(STEPS):
            open_data(recipe).micro_batches(step, 0, 1, BATCH)
