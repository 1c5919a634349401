"""The dry run's fake mode finds what PyTorch's finds: calls that differ in one thing have results of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.dryrun.world import fake_world
from shardwise.runtime.torch_private import NEEDS_VALUES, FakeTensorMode, default_group
from shardwise.runtime.torch_private_fake import StaticFakeMode

Call = Callable[[], Tensor]
WEIGHTS = torch.empty(4, 3, device="meta"), torch.empty(3, 4, dtype=torch.bfloat16, device="meta").t()


def below(dtype: torch.dtype) -> Tensor:
    """A cast as an operator sees it: of the tensor itself to its own dtype, else a copy."""
    with torch._C._AutoDispatchBelowAutograd():  # type: ignore[attr-defined]
        return torch.ones(2, 3)[1:].to(dtype)


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
    "tensor for the result": (
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(2, 4)),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(4, 2).t()),
        lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(9)[1:].view(2, 4)),
    ),
    "real tensors on the meta device": (
        lambda: torch.empty_like(WEIGHTS[0], device="cpu"),
        lambda: torch.empty_like(WEIGHTS[1], device="cpu"),
        lambda: torch.empty_like(WEIGHTS[0]),
    ),
    "one of several views": (
        lambda: torch.ones(3, 2, 4).unbind(0)[1],
        lambda: torch.ones(3, 2, 4).unbind(1)[1],
        lambda: torch.ones(3, 2, 4)[1:].unbind(0)[1],
    ),
    "cast below autograd": (lambda: below(torch.float32), lambda: below(torch.bfloat16)),
    "in place": (lambda: torch.ones(4).mul_(2), lambda: torch.ones(2, 4)[1].mul_(2)),
}


def seen(call: Call) -> tuple[object, ...]:
    t = call()
    memory = (t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t.device)
    return *memory, t.dtype, t.requires_grad, t.is_conj(), type(t)


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_finds_what_pytorch_s_mode_finds(calls: tuple[Call, ...]) -> None:
    """Each call twice: the second time its result comes from the cache."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        expected = [seen(call) for call in calls]
    with StaticFakeMode(allow_non_fake_inputs=True):
        assert [[seen(call) for call in calls] for _ in "12"] == [expected, expected]


def test_a_call_again_is_found_in_the_cache() -> None:
    with StaticFakeMode() as mode:
        tensor = torch.ones(3, 5, 7)
        tensor.exp()
        assert mode.notes(torch.ops.aten.exp.default) is None
        tensor.exp()
        assert mode.notes(torch.ops.aten.exp.default) is not None


def test_a_constant_keeps_its_value_and_an_operation_with_others_is_known() -> None:
    exp, add = torch.ops.aten.exp.default, torch.ops.aten.add.Tensor
    with StaticFakeMode() as mode:
        constant, other = torch.tensor(2.0), torch.ones(3)
        for _ in "123":
            assert constant.exp().item() == pytest.approx(math.e**2)
            assert mode.notes(exp) is None
            other + constant
        assert mode.notes(add) is not None
        constant += torch.ones(())
        with pytest.raises(NEEDS_VALUES):
            constant.item()


def test_a_call_again_returns_the_tensor_that_it_is_given() -> None:
    a, b = torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")
    with StaticFakeMode(allow_non_fake_inputs=True):
        left, right = torch.empty_like(a, device="cpu"), torch.empty_like(b, device="cpu")
        for _ in "123":
            result = torch.empty(2, 4)
            assert torch.mm(left, right, out=result) is result


def test_a_call_that_resizes_the_tensor_that_it_is_given_resizes_it_again() -> None:
    with StaticFakeMode():
        for _ in "123":
            result = torch.empty(0)
            torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=result)
            assert result.shape == (2, 4)


def test_fsdp_s_operators_find_what_pytorch_s_mode_finds() -> None:
    """They write into a tensor that they are given, return nothing, or return a view."""
    import torch.distributed.fsdp

    def results() -> list[object]:
        flat, gathered = torch.empty(2, 12), torch.empty(24)
        shards = [torch.ones(2, 4), torch.ones(4)]
        concatenated = torch.ops.fsdp.chunk_cat(shards, dim=0, num_chunks=2, out=torch.empty(2, 6))
        split = torch.ops.fsdp.split_with_sizes_copy(flat, [8, 4], dim=1, out=[flat[:, :8], flat[:, 8:]])
        mine, whole = torch.ops.fsdp.all_gather_copy_in(shards, gathered, [8, 4], 12, 1)
        assert whole is gathered and mine.untyped_storage()._cdata == gathered.untyped_storage()._cdata
        return [concatenated, split, seen(lambda: mine), seen(lambda: whole)]

    with FakeTensorMode():
        expected = results()
    with StaticFakeMode():
        assert [results() for _ in "123"] == [expected] * 3


def test_functional_collectives_find_what_pytorch_s_mode_finds() -> None:
    def results(group: str) -> list[object]:
        ops, t = torch.ops._c10d_functional, torch.ones(8, 3)
        return [
            seen(lambda: ops.reduce_scatter_tensor(t, "sum", 4, group)),
            seen(lambda: ops.all_gather_into_tensor(t, 4, group)),
            seen(lambda: ops.all_reduce(t.t(), "sum", group)),
            seen(lambda: ops.all_to_all_single(t, [2, 2, 2, 2], [5, 1, 1, 1], group)),
            ops.all_reduce_(t, "sum", group) is t,
        ]

    with fake_world(1, 4):
        name = default_group().group_name
        with FakeTensorMode():
            expected = results(name)
        with StaticFakeMode():
            assert [results(name) for _ in "123"] == [expected] * 3
