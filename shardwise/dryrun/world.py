"""A process group of any size in one process, for planning.

Uses PyTorch's fake backend, whose collectives return at once. ``DeviceMesh`` and FSDP2 run on it unchanged, as
any rank of a world of any size (16,384 ranks take 0.2 s).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` without any other process.

    Raises RuntimeError when a process group exists already: planning happens before the real one is made.
    """
    if dist.is_initialized():
        raise RuntimeError("cannot plan while a process group is initialised")
    with warnings.catch_warnings():
        # FSDP2's own use of names that newer releases of torch deprecate.
        warnings.simplefilter("ignore", FutureWarning)
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
            # DTensor caches results together with the mesh: another rank's shapes would be this one's.
            _clear_sharding_prop_cache()
