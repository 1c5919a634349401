"""A store without the keys of earlier attempts, for ranks that torchrun restarts.

torchrun keeps one store for all attempts of a job (pytorch/pytorch#135712), so a restarted rank may read the address of
a process that has ended. TORCHELASTIC_RESTART_COUNT does not tell attempts apart, because each node counts its own
restarts. Here rank 0 draws a name for the attempt. Every other rank asks for it, and gets the answer under a name that
it drew itself. A request of an earlier attempt is answered, too: nothing reads that answer.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

REQUESTS = "shardwise/requests"
POLL_SECONDS = 0.01


def attempt_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A view of ``store`` that the ranks of one attempt share.

    Raises RuntimeError if a rank is missing after ``timeout``, which is also the store's.
    """
    name = _new_name(store, world_size - 1, timeout) if rank == 0 else _asked_for(store)
    return PrefixStore(f"shardwise/{name}", store)


def _new_name(store: Store, others: int, timeout: timedelta) -> str:
    """A new name, once all other ranks have it."""
    name = uuid4().hex
    seen = 0
    pending: list[str] = []
    end = time.monotonic() + timeout.total_seconds()
    while (joined := store.add(f"shardwise/{name}/joined", 0)) < others:
        if time.monotonic() > end:
            raise RuntimeError(f"{others - joined} of {others + 1} ranks did not ask for the attempt's name")
        asked = store.add(REQUESTS, 0)
        pending += [f"{REQUESTS}/{number}" for number in range(seen + 1, asked + 1)]
        seen = asked
        written = [key for key in pending if store.check([key])]  # a rank may die between count and write
        for key in written:
            store.set(store.get(key).decode(), name)
        pending = [key for key in pending if key not in written]
        time.sleep(POLL_SECONDS)
    return name


def _asked_for(store: Store) -> str:
    own = f"shardwise/{uuid4().hex}"
    store.set(f"{REQUESTS}/{store.add(REQUESTS, 1)}", own)
    name = store.get(own).decode()
    store.add(f"shardwise/{name}/joined", 1)
    return name
