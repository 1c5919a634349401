"""A process group of any size in one process, for planning.

Uses PyTorch's fake backend, whose collectives return at once. ``DeviceMesh`` and FSDP2 run on it unchanged, as
any rank of a world of any size (16,384 ranks take 0.2 s), but for two things that all ranks do together. FSDP2 cuts
every parameter into as many tensors as there are ranks and keeps one of them, which at 16,384 ranks takes a minute per
hundred layers: here the cut makes only the pieces that are asked for. And a mesh makes the groups of all ranks, of
which this rank is in one per axis: here only that one is made.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


class _Chunks(Sequence[Tensor]):
    """What FSDP2's ``_chunk_with_empty`` lists, made one by one: like ``torch.chunk``, then empty tensors."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, num_chunks, dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._number))]
        start = index * self._size
        length = min(self._size, self._tensor.size(self._dim) - start)
        if length <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, length)


def _own_group(ranks: list[int], **how: Any) -> Any:
    """A new group if this rank is in it: nobody waits for this one to take part in the making of theirs."""
    return dist.new_group(ranks, **how) if dist.get_rank() in ranks else dist.GroupMember.NON_GROUP_MEMBER


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` without any other process.

    Raises RuntimeError when a process group exists already: planning happens before the real one is made.
    """
    if dist.is_initialized():
        raise RuntimeError("cannot plan while a process group is initialised")
    hook = sys.excepthook  # a process group wraps it, to name its rank; this process is none
    module: Any = _fsdp_param
    mesh: Any = device_mesh
    chunk, new_group = module._chunk_with_empty, mesh.new_group
    with warnings.catch_warnings():
        # FSDP2's own use of names that newer releases of torch deprecate.
        warnings.simplefilter("ignore", FutureWarning)
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        sys.excepthook = hook
        module._chunk_with_empty, mesh.new_group = _Chunks, _own_group
        try:
            yield
        finally:
            module._chunk_with_empty, mesh.new_group = chunk, new_group
            dist.destroy_process_group()
            # DTensor caches results together with the mesh: another rank's shapes would be this one's.
            _clear_sharding_prop_cache()
