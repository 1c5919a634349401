"""Ranks of one attempt find each other in a store that holds the keys of earlier attempts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from shardwise.launch.attempt import REQUESTS, attempt_store

SECONDS = timedelta(seconds=20)


def met(store: Store, world_size: int) -> list[Store]:
    """What each rank of one attempt gets, in the order of ranks."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: attempt_store(store, rank, world_size, SECONDS), range(world_size)))


def test_each_attempt_has_its_own_keys() -> None:
    store = HashStore()
    for attempt in ("first", "second", "third"):
        views = met(store, 4)
        assert not any(view.check(["address"]) for view in views)
        views[0].set("address", attempt)
        assert [view.get("address") for view in views] == [attempt.encode()] * 4


def test_requests_of_ranks_that_died_are_answered_or_left_out() -> None:
    store = HashStore()
    store.set(f"{REQUESTS}/{store.add(REQUESTS, 1)}", "shardwise/dead")
    store.add(REQUESTS, 1)  # counted, not written
    views = met(store, 3)
    views[2].set("address", "new")
    assert views[0].get("address") == b"new"


def test_one_rank_needs_no_other() -> None:
    assert len(met(HashStore(), 1)) == 1


def test_a_missing_rank_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 ranks did not ask"):
        attempt_store(HashStore(), 0, 2, timedelta(seconds=0.1))
