"""The shards that this rank saves and loads, for torch's distributed checkpoint (DCP).

DCP derives shards from the placements of a DTensor. If two axes shard a dim unevenly (a vocabulary of 50,257 over
tensor and data parallel ranks), the derived shards differ from the real ones: FSDP2 shards the tensor parallel shard,
and DCP computes a strided placement as if both axes sharded at once. So ``runtime/parallel/shard_slices.py`` describes
DTensors here. It follows the order of the shardings and checks the result against the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from shardwise.runtime.parallel.shard_slices import local_part, local_slices


def chunk_of(tensor: DTensor) -> ChunkStorageMetadata:
    """Offsets and sizes of this rank's shard in the whole tensor."""
    slices = local_slices(tensor)
    return ChunkStorageMetadata(
        torch.Size(s.start for s in slices), torch.Size(s.stop - s.start for s in slices)
    )


def _divided(state: dict[str, Any]) -> dict[str, DTensor]:
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}


class SavePlanner(DefaultSavePlanner):
    """Plans the writes of this rank's shards.

    Args:
        pieces: this rank's shards by name, to write instead of the present values.
    """

    def __init__(self, pieces: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        if self._pieces is None:
            return super().resolve_data(write_item)
        return self._pieces[write_item.index.fqn]

    def create_local_plan(self) -> SavePlan:
        divided = _divided(self.state_dict)
        plain = {name: value for name, value in self.state_dict.items() if name not in divided}
        items = create_default_local_save_plan(plain, self.is_coordinator).items
        self.plan = SavePlan([*items, *(_write_item(name, tensor) for name, tensor in divided.items())])
        return self.plan


def _write_item(name: str, tensor: DTensor) -> WriteItem:
    chunk = chunk_of(tensor)
    properties = TensorProperties.create_from_tensor(local_part(tensor))
    data = TensorWriteData(chunk, properties, tensor.size())
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reads of this rank's shards, from files with any sharding."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        divided = _divided(self.state_dict)
        plain = {name: value for name, value in self.state_dict.items() if name not in divided}
        items = list(create_default_local_load_plan(plain, self.metadata).items)
        for name, tensor in divided.items():
            stored = cast("TensorStorageMetadata", self.metadata.state_dict_metadata[name])
            items += create_read_items_for_chunk_list(name, stored, [chunk_of(tensor)])
        return LoadPlan(items)
