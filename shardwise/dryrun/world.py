"""A fake process group of any size in one process, for planning.

It uses PyTorch's fake backend, whose collectives return at once. ``DeviceMesh`` and FSDP2 run on it unchanged, as any
rank of a world of any size. Two operations are patched because their cost grows with the
world size:

- FSDP2 splits every parameter into one tensor per rank and keeps one of them. At 16,384 ranks that takes a minute per
  hundred layers. The patch creates only the chunks that are read.
- Meshes and pipeline stages create the process groups of all ranks. The patches create only the groups of this rank.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh

from shardwise.runtime.torch_private import fake_store, forget_sharding, own_groups_of_meshes
from shardwise.runtime.torch_private_fsdp import fsdp_chunking


class _Chunks(Sequence[Tensor]):
    """A lazy version of FSDP2's chunks: ``torch.chunk``, padded with empty tensors."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._number = num_chunks
        self._dim = dim
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


_new_group = dist.new_group


def _own_group(rank: int) -> Callable[..., Any]:
    """``new_group`` that creates a group only if ``rank`` is a member: in a fake world no other rank waits for it."""

    def create(ranks: list[int] | None = None, **how: Any) -> Any:
        member = ranks is None or rank in ranks
        return _new_group(ranks, **how) if member else dist.GroupMember.NON_GROUP_MEMBER

    return create


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Act as ``rank`` of ``world_size`` without any other process.

    Raises:
        RuntimeError: a process group exists already. Planning happens before the real group is initialised.
    """
    if dist.is_initialized():
        raise RuntimeError("cannot plan while a process group is initialised")
    hook = sys.excepthook  # init_process_group wraps it to print the rank, which would be wrong here
    mesh: Any = device_mesh
    package: Any = dist
    with warnings.catch_warnings():
        # FSDP2 itself uses names that newer torch releases deprecate.
        warnings.simplefilter("ignore", FutureWarning)
        # Some blocks (T5, BERT) return views; nothing here writes into them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_store())
        sys.excepthook = hook
        # device_mesh has imported the name, so both are replaced.
        mesh.new_group = package.new_group = _own_group(rank)
        try:
            with fsdp_chunking(_Chunks), own_groups_of_meshes(rank):
                yield
        finally:
            mesh.new_group = package.new_group = _new_group
            dist.destroy_process_group()
            # DTensor caches results by mesh. Without this, the next fake rank would get this rank's shapes.
            forget_sharding()
