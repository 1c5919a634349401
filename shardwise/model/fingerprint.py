"""A fingerprint of frozen weights that does not depend on how they are divided.

An adapter file should know its base when it sees it. Hashing the bytes would need the whole of every tensor in one
place; so every tensor is rounded to bf16 (which fp32 and bf16 storage share), its bit patterns are summed as integers,
and the sums of all tensors, with their names, are hashed. Sums of integers do not depend on order, so ranks sum what
they hold and then each other's. The price: values that only change places within a tensor go unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.core.errors import CheckpointError
from shardwise.model.slices import local_part, local_slices, named_parameters

_CHUNK = 2**22
_ROUNDS_ALIKE = (torch.float64, torch.float32, torch.bfloat16)


@torch.no_grad()
def fingerprint_of(model: nn.Module) -> str | None:
    """Of all frozen parameters, on all ranks alike; None where they are stored otherwise than in bf16 or wider.

    Collective, where a default process group is there.
    """
    frozen = {name: p for name, p in named_parameters(model) if not p.requires_grad}
    plain = all(parameter.dtype in _ROUNDS_ALIKE for parameter in frozen.values())
    sums = {name: (_place(parameter), _sum_of_bits(parameter)) for name, parameter in frozen.items()}
    everyone = [(plain, sums)]
    if dist.is_initialized():
        everyone = everyone * dist.get_world_size()
        dist.all_gather_object(everyone, (plain, sums))
    if not all(each for each, _ in everyone):
        return None
    pieces: dict[str, dict[tuple[int, ...], int]] = {}
    for _, held in everyone:
        for name, (place, value) in held.items():
            pieces.setdefault(name, {})[place] = value  # of copies one counts
    return _digest({name: sum(found.values()) for name, found in pieces.items()})


def fingerprint_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same, of whole tensors by their names, one after the other."""
    return _digest({name: _sum_of_bits(tensor) for name, tensor in tensors})


def _digest(sums: Mapping[str, int]) -> str:
    text = "\n".join(f"{name} {value}" for name, value in sorted(sums.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _place(parameter: Tensor) -> tuple[int, ...]:
    """Where this rank's piece begins in the whole; the end where it is empty."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(number for span in local_slices(parameter) for number in (span.start, span.stop))


def _sum_of_bits(parameter: Tensor) -> int:
    total = 0
    for chunk in local_part(parameter).reshape(-1).split(_CHUNK):
        total += int(chunk.to(torch.bfloat16).view(torch.int16).sum(dtype=torch.int64))
    return total


def refuse_other_base(said: str | None, found: str | None, where: str) -> None:
    """Raise CheckpointError where an adapter was trained beside weights of another fingerprint than those found.

    None, of either, says nothing: adapters of others have none, and packed weights and those in fp16.
    """
    if said is not None and found is not None and said != found:
        raise CheckpointError(
            "the adapter is for another base",
            where=where,
            why=f"it was trained beside weights with the fingerprint {said}, and these have {found}",
            fix="give the base it was trained on",
        )
