"""A fingerprint of frozen weights that does not depend on their sharding.

It lets an adapter file recognize its base. Each tensor is rounded to bf16 and its bit patterns are summed as integers,
over shards and ranks; the sums are hashed with the tensors' names. The price: a permutation of values within a tensor
goes unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.core.errors import CheckpointError
from shardwise.runtime.parallel.shard_slices import local_part, local_slices, named_parameters

# Values that are unpacked and summed at a time: 16 MiB in fp32, whatever the size of a parameter.
_HASHED_VALUES = 2**22
_ROUNDS_ALIKE = (torch.float64, torch.float32, torch.bfloat16)


@torch.no_grad()
def fingerprint_of(
    model: nn.Module,
    unpacked: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] | None = None,
    without: Collection[str] = (),
    trained: bool = False,
) -> str | None:
    """Fingerprint of all frozen parameters, equal on all ranks; None if some are stored in other formats than bf16,
    fp32 or fp64.

    Collective if the default process group exists.

    Args:
        unpacked: for packed parameters, the name of the plain one, and a function from packed rows to their values.
        without: names that are left out.
        trained: whether trained parameters count, too; then all formats do, by their bytes.
    """
    plain = True
    sums = dict[str, tuple[tuple[int, ...], int]]()
    for name, parameter in named_parameters(model):
        if (trained or not parameter.requires_grad) and name not in without:
            known, unpack = (unpacked or {}).get(name, (name, None))
            part = local_part(parameter) if unpack is None else unpack(local_part(parameter))
            plain &= trained or part.dtype in _ROUNDS_ALIKE
            sums[known] = (_shard_slices(parameter), _sum_of_bits(part))
    per_rank = [(plain, sums)]
    if dist.is_initialized():
        per_rank = per_rank * dist.get_world_size()
        dist.all_gather_object(per_rank, (plain, sums))
    if not all(is_plain for is_plain, _ in per_rank):
        return None
    shards: dict[str, dict[tuple[int, ...], int]] = {}
    for _, rank_sums in per_rank:
        for name, (slices, value) in rank_sums.items():
            shards.setdefault(name, {})[slices] = value  # replicas count once
    return _digest_of_sums({name: sum(values.values()) for name, values in shards.items()})


def fingerprint_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same fingerprint for whole tensors, read one after the other."""
    return _digest_of_sums({name: _sum_of_bits(local_part(tensor)) for name, tensor in tensors})


def _digest_of_sums(sums: Mapping[str, int]) -> str:
    text = "\n".join(f"{name} {value}" for name, value in sorted(sums.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _shard_slices(parameter: Tensor) -> tuple[int, ...]:
    """The slices of this rank's shard in the global tensor; () for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(number for span in local_slices(parameter) for number in (span.start, span.stop))


def _sum_of_bits(part: Tensor) -> int:
    total = 0
    if not part.is_floating_point():
        return sum(int(c.sum(dtype=torch.int64)) for c in part.reshape(-1).split(_HASHED_VALUES))
    for chunk in part.reshape(-1).split(_HASHED_VALUES):
        total += int(chunk.to(torch.bfloat16).view(torch.int16).sum(dtype=torch.int64))
    return total


def refuse_other_base(recorded: str | None, computed: str | None, where: str) -> None:
    """Raise CheckpointError if an adapter was trained on weights with another fingerprint.

    None means unknown: adapters from other tools, and packed or fp16 weights, have no fingerprint.
    """
    if recorded is not None and computed is not None and recorded != computed:
        raise CheckpointError(
            "the adapter is for another base",
            where=where,
            why=f"it was trained on weights with the fingerprint {recorded}, and these have {computed}",
            fix="give the base it was trained on",
        )
