"""Which pieces of a checkpoint's tensors this rank holds, for torch's distributed checkpoint (DCP).

DCP asks the placements of a DTensor. Of a dim that two axes have cut unevenly (a vocabulary of 50,257 over tensor
and data parallel ranks) they tell it other pieces than the ranks hold: FSDP2 cuts what tensor parallelism left, and
a strided placement is computed as if all cuts were made at once. So DTensors are described here by
``model/slices.py``, which follows the cuts in their order and checks itself against the tensor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
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

from shardwise.model.slices import local_part, local_slices


def chunk_of(tensor: DTensor) -> ChunkStorageMetadata:
    """Where this rank's piece lies in the whole."""
    slices = local_slices(tensor)
    return ChunkStorageMetadata(
        torch.Size(s.start for s in slices), torch.Size(s.stop - s.start for s in slices)
    )


def _divided(state: dict[str, Any]) -> dict[str, DTensor]:
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}


class SavePlanner(DefaultSavePlanner):
    """Plans to write this rank's pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        divided = _divided(self.state_dict)
        plain = {name: value for name, value in self.state_dict.items() if name not in divided}
        items = create_default_local_save_plan(plain, self.is_coordinator).items
        self.plan = SavePlan([*items, *(_written(name, tensor) for name, tensor in divided.items())])
        return self.plan


def _written(name: str, tensor: DTensor) -> WriteItem:
    chunk = chunk_of(tensor)
    properties = TensorProperties.create_from_tensor(local_part(tensor))
    data = TensorWriteData(chunk, properties, tensor.size())
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class LoadPlanner(DefaultLoadPlanner):
    """Plans to read this rank's pieces, whatever pieces they were written in."""

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
