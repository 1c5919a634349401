"""The order of samples: a bijection for every size, random enough, and frozen."""

import itertools
from collections import Counter

import numpy as np
import pytest

from shardwise.data.shuffle import Permutation, samples_of_step


def whole(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return [int(x) for x in Permutation(size, seed, epoch)(np.arange(size, dtype=np.uint64))]


@pytest.mark.parametrize("size", [*range(1, 20), 255, 256, 257, 258, 511, 512, 513, 1000, 4095, 4097, 65537])
def test_every_size_is_a_bijection(size: int) -> None:
    assert sorted(whole(size, seed=size)) == list(range(size))


def test_any_position_alone_agrees_with_the_whole() -> None:
    size = 12_345
    order, permutation = whole(size, 7, 3), Permutation(size, 7, 3)
    for position in (0, 1, 4_095, 4_096, size - 1):
        assert int(permutation(np.array([position], dtype=np.uint64))[0]) == order[position]


def test_huge_sizes_are_as_cheap_as_small_ones() -> None:
    size = 3 * 10**12
    samples = Permutation(size, 0, 0)(np.arange(size - 1000, size, dtype=np.uint64))
    assert len(set(samples.tolist())) == 1000
    assert int(samples.max()) < size
    assert abs(float(samples.astype(np.float64).mean()) / size - 0.5) < 0.05


def test_seed_and_epoch_each_change_the_order() -> None:
    orders = {tuple(whole(100, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_every_order_of_a_few_samples_is_about_equally_likely() -> None:
    counts = Counter(tuple(whole(4, 0, epoch)) for epoch in range(2400))
    assert set(counts) == set(itertools.permutations(range(4)))
    # Chi-square with 23 degrees of freedom: beyond 49.7 once in a thousand.
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 49.7


def test_where_a_sample_lands_is_uniform_and_unrelated_to_its_neighbour() -> None:
    size, epochs = 1000, 300
    orders = np.array([whole(size, 1, epoch) for epoch in range(epochs)], dtype=np.float64)
    first = np.histogram(orders[:, :10], bins=20, range=(0, size))[0]
    expected = epochs * 10 / 20
    assert float(((first - expected) ** 2 / expected).sum()) < 43.8  # 19 degrees of freedom, 1 in 1000
    left, right = orders[:, :-1].ravel(), orders[:, 1:].ravel()
    assert abs(float(np.corrcoef(left, right)[0, 1])) < 0.01
    assert float(np.mean(orders == np.arange(size))) == pytest.approx(1 / size, rel=0.3)


def test_the_order_is_frozen() -> None:
    """A resumed run must see what the interrupted one would have: these values never change."""
    assert whole(10, 0, 0) == [3, 6, 8, 9, 7, 0, 1, 5, 2, 4]
    assert samples_of_step(1000, 4, 100_000, 42) == [97115, 76355, 16216, 39018]


def test_steps_tile_the_epochs_without_gap_or_repeat() -> None:
    size, batch = 23, 5
    stream = [s for step in range(23) for s in samples_of_step(step, batch, size, seed=9)]
    epochs = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert len(epochs) == batch
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == batch


def test_a_batch_larger_than_the_data_spans_epochs() -> None:
    assert Counter(samples_of_step(2, 10, 3, seed=0)).keys() == {0, 1, 2}
    assert len(samples_of_step(2, 10, 3, seed=0)) == 10


@pytest.mark.parametrize(("size", "epoch"), [(0, 0), (-1, 0), (1 << 63, 0), (5, -1)])
def test_impossible_orders_are_refused(size: int, epoch: int) -> None:
    with pytest.raises(ValueError):
        Permutation(size, 0, epoch)
    with pytest.raises(ValueError):
        samples_of_step(-1, 4, 10, 0)
