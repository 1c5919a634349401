"""A mixture of sources: exact shares, an order by seed alone, and the same samples at any world size."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.core.errors import RecipeError
from shardwise.data import open_data
from shardwise.data.batches import Data
from shardwise.data.dataset import Dataset, Sample
from shardwise.data.mixture import BLOCK_SIZE, Mixture, counts_of
from shardwise.recipe.load import dump_recipe, load_recipe, parse_recipe, recipe_of
from shardwise.recipe.sections import Recipe


class Numbered(Dataset):
    """Samples that hold their number."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def sample(self, index: int) -> Sample:
        return {"number": index}

    def padding(self) -> Sample:
        return {"number": -1}

    def text(self, index: int) -> str:
        return str(index)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1], [1024]),
        ([1, 1], [512, 512]),
        ([3, 1], [768, 256]),
        ([1, 1, 1], [342, 341, 341]),
        ([0.7, 0.2, 0.1], [717, 205, 102]),
    ],
)
def test_shares_of_a_block_are_the_largest_remainders(weights: list[float], counts: list[int]) -> None:
    assert counts_of(weights) == counts


def test_a_weight_without_a_sample_is_refused() -> None:
    with pytest.raises(RecipeError, match="the weight is too small") as caught:
        counts_of([10_000, 1])
    assert caught.value.where == "data.mixture[1].weight"


@pytest.mark.parametrize(("sizes", "weights"), [((700, 300), (3, 1)), ((5, 2000, 40), (1, 5, 2))])
def test_shares_are_exact_in_every_block_and_epochs_are_permutations(
    sizes: tuple[int, ...], weights: tuple[float, ...]
) -> None:
    mixture, counts = Mixture([Numbered(size) for size in sizes], weights), counts_of(weights)
    steps = range(5 * BLOCK_SIZE // 16)
    found = np.array([sample for step in steps for sample in mixture.samples(step, 16, seed=3)])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    sources = np.searchsorted(offsets[1:], found, side="right")
    for block in sources.reshape(5, BLOCK_SIZE):
        assert np.bincount(block, minlength=len(sizes)).tolist() == counts
    assert (
        len({tuple(block) for block in sources.reshape(5, BLOCK_SIZE)}) == 5
    )  # not one pattern again and again
    for source, size in enumerate(sizes):
        # A whole epoch of a source has every sample once, so draws differ only by the epochs that are cut.
        drawn = Counter(found[(found >= offsets[source]) & (found < offsets[source + 1])].tolist())
        times = 5 * counts[source] / size
        assert all(abs(drawn[offsets[source] + n] - times) < 2 for n in range(size)), source


def test_the_order_depends_on_seed_and_position_alone() -> None:
    mixture = Mixture([Numbered(700), Numbered(300)], (3, 1))
    whole = [sample for step in range(90) for sample in mixture.samples(step, 24, seed=3)]
    assert whole == [
        sample for step in range(360) for sample in mixture.samples(step, 6, seed=3)
    ]  # other steps, same sequence
    assert (
        mixture.samples(80, 24, seed=3) == whole[80 * 24 : 81 * 24]
    )  # resumed: nothing before has to be read
    assert mixture.samples(0, 24, seed=4) != whole[:24]


def mixed(folder: Path, **data: Any) -> Recipe:
    (folder / "a.txt").write_text("aaaaaaaa " * 400)
    (folder / "b.txt").write_text("bbbb " * 100)
    lines = [json.dumps({"prompt": f"q{n}", "completion": "c" * 9}) for n in range(30)]
    (folder / "c.jsonl").write_text("\n".join(lines))
    mixture = [
        {"source": str(folder / "a.txt"), "weight": 2},
        {"source": str(folder / "b.txt"), "weight": 1.0},
        {"source": str(folder / "c.jsonl"), "weight": 1, "format": "prompt"},
    ]
    spec = {"mixture": mixture, "sequence_length": 32, **data}
    return recipe_of({"model": {"preset": "tiny"}, "steps": 9, "batch_size": 16, "data": spec})


@pytest.mark.parametrize("packing", [False, True])
def test_ranks_together_read_the_mixture(packing: bool, tmp_path: Path) -> None:
    recipe = mixed(tmp_path, packing=packing)
    data = open_data(recipe, cache=tmp_path / "cache")

    def rows(data: Data, step: int, degree: int, size: int) -> list[torch.Tensor]:
        found = {}
        for rank in range(degree):
            for j, batch in enumerate(data.micro_batches(step, rank, degree, size)):
                for i in range(size):
                    found[(j * degree + rank) * size + i] = batch["input_ids"][i]
                if packing:
                    assert (
                        batch["positions"].shape == batch["input_ids"].shape and (batch["starts"] <= 32).all()
                    )
        return [found[slot] for slot in sorted(found)][:16]

    letters = Counter()
    for step in range(32):
        alone = rows(data, step, 1, 4)
        again = open_data(recipe, cache=tmp_path / "cache")
        assert all(torch.equal(a, b) for a, b in zip(alone, rows(again, step, 3, 2), strict=True))
        letters.update(
            "abc"[max(range(3), key=lambda at: (row == ord("abc"[at])).sum().item())] for row in alone
        )
    assert abs(letters["a"] - 256) < 30 and abs(letters["b"] - 128) < 30 and abs(letters["c"] - 128) < 30
    other = mixed(tmp_path, packing=packing)
    assert other.data.mixture is not None
    parts = tuple(part.model_copy(update={"weight": 1.0}) for part in other.data.mixture)
    changed = other.model_copy(update={"data": other.data.model_copy(update={"mixture": parts})})
    assert open_data(changed, cache=tmp_path / "cache").fingerprint != data.fingerprint  # a resume is refused


def test_a_mixture_survives_yaml_and_excludes_a_source(tmp_path: Path) -> None:
    recipe = mixed(tmp_path)
    assert parse_recipe(dump_recipe(recipe), ()) == recipe
    base = {"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1}
    for data, said in (
        ({"mixture": [{"source": "stdlib"}], "source": "x.txt"}, "the data is specified twice"),
        ({"mixture": []}, "the mixture is empty"),
        ({"mixture": [{"source": "stdlib", "wieght": 1}]}, "did you mean 'weight'"),
        ({"mixture": [{"weight": 1}]}, "source"),
        ({"mixture": [{"source": "stdlib", "weight": 0}]}, "weight"),
    ):
        with pytest.raises(RecipeError) as caught:
            recipe_of({**base, "data": data})
        assert said in caught.value.line(), caught.value.line()
    path = tmp_path / "r.yaml"
    path.write_text("model: {preset: tiny}\nsteps: 1\nbatch_size: 1\ndata: {mixture: [{source: stdlib}]}\n")
    assert load_recipe(path, ["data.source=x.txt"], ()).data.mixture is None
