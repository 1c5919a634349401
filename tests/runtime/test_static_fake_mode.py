"""The dry run's fake mode finds what PyTorch's finds: calls that differ in one thing have results of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.runtime.torch_private import FakeTensorMode
from shardwise.runtime.torch_private_fake import StaticFakeMode

Call = Callable[[], Tensor]
CALLS: dict[str, tuple[Call, ...]] = {
    "shape": (lambda: torch.ones(2, 6) * 2, lambda: torch.ones(3, 4) * 2, lambda: torch.ones(12) * 2),
    "stride": (lambda: torch.ones(4, 4) * 2, lambda: torch.ones(4, 4).t() * 2),
    "offset": (lambda: torch.ones(8)[:4].view(2, 2), lambda: torch.ones(8)[4:].view(2, 2)),
    "dtype": (lambda: torch.ones(4) + 1, lambda: torch.ones(4, dtype=torch.int32) + 1),
    "type of a number": (
        lambda: torch.ones(4, dtype=torch.int32) + 1,
        lambda: torch.ones(4, dtype=torch.int32) + 1.0,
        lambda: torch.ones(4, dtype=torch.bool) + True,
    ),
    "gradient": (lambda: torch.ones(4).exp(), lambda: torch.ones(4, requires_grad=True).exp()),
    "conjugate": (
        lambda: torch.ones(4, dtype=torch.complex64) * 2,
        lambda: torch.ones(4, dtype=torch.complex64).conj() * 2,
        lambda: torch.ones(4, dtype=torch.complex64).conj(),
    ),
    "device": (lambda: torch.ones(4).exp(), lambda: torch.ones(4, device="meta").exp()),
    "sizes": (lambda: torch.ones(4, 3).expand(2, 4, 3), lambda: torch.ones(4, 3).expand(5, 4, 3)),
    "argument": (lambda: torch.ones(4, 4).sum(0), lambda: torch.ones(4, 4).sum(0, keepdim=True)),
    "name of an argument": (
        lambda: torch.zeros_like(torch.ones(4), dtype=torch.float64),
        lambda: torch.zeros_like(torch.ones(4), device="meta"),
    ),
    "tensors in a list": (
        lambda: torch.cat([torch.ones(2, 3), torch.ones(4, 3)]),
        lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)]),
    ),
    "in place": (lambda: torch.ones(4).mul_(2), lambda: torch.ones(2, 4)[1].mul_(2)),
}


def seen(call: Call) -> tuple[object, ...]:
    t = call()
    memory = (t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t.device)
    return *memory, t.dtype, t.requires_grad, t.is_conj(), type(t)


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_finds_what_pytorch_s_mode_finds(calls: tuple[Call, ...]) -> None:
    """Each call twice: the second time its result comes from the cache."""
    with FakeTensorMode():
        expected = [seen(call) for call in calls]
    with StaticFakeMode():
        assert [[seen(call) for call in calls] for _ in "12"] == [expected, expected]


def test_a_call_again_is_found_in_the_cache() -> None:
    with StaticFakeMode() as mode:
        tensor = torch.ones(3, 5, 7)
        tensor.exp()
        found = mode.cache_hits
        tensor.exp()
        assert mode.cache_hits == found + 1
