"""What blocks keep in host memory: copied once, brought back as it was, let go when it should be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from shardwise.runtime.offload import activations as kept
from shardwise.runtime.offload.activations import OffloadedBlocks
from shardwise.runtime.offload.copy_stream import CopyStream
from shardwise.runtime.offload.host import separate_host_memory


@pytest.fixture(autouse=True)
def a_device_with_its_own_memory() -> Iterator[None]:
    with separate_host_memory(True):
        yield


class Chain(nn.Module):
    """Blocks of one function each, called with the stream, a weight, and what they all share."""

    def __init__(self, block: Callable[..., Any], count: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(block) for _ in range(count))

    def forward(self, x: Tensor, *shared: Tensor) -> Any:
        for block in self.blocks:
            x = block(x, *shared)
        return x


class Block(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.03, 0.04, 64 * 64).view(64, 64))
        self.function = function

    def forward(self, x: Tensor, *shared: Tensor) -> Any:
        return self.function(x, self.weight, *shared)


class Watched(CopyStream):
    """Counts buffers in use and copies, by size."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []
        self.waits: list[bool] = []
        self.opening = False
        self.in_use = 0

    def take(self, size: int, device: torch.device) -> Tensor:
        self.taken.append(size)
        self.in_use += 1
        return super().take(size, device)

    def wait_for_copies(self, number: int | None = None) -> None:
        """Notes of every wait whether it is at the opening of a group."""
        before = self._covered
        super().wait_for_copies(number)
        if self._covered != before:
            self.waits.append(self.opening)

    def give_back(self, buffer: Tensor) -> None:
        self.in_use -= 1
        super().give_back(buffer)

    @property
    def buffers(self) -> int:
        return self.in_use + sum(len(free) for free in self._free.values())


def offloaded(model: Chain) -> Watched:
    copies = Watched()
    OffloadedBlocks(model, list(model.blocks), smallest=1024).stream = copies
    return copies


def stream() -> Tensor:
    return torch.linspace(-1, 1, 32 * 64).view(32, 64).requires_grad_()


SIZE = 32 * 64 * 4


def gradients(model: Chain, *shared: Tensor) -> list[Tensor]:
    x = stream()
    model(x, *shared).square().sum().backward()
    return [g for p in (x, *model.parameters()) if (g := p.grad) is not None]


def several_views(x: Tensor, weight: Tensor) -> Tensor:
    left, right = (x @ weight).chunk(2, dim=-1)
    return x + torch.cat((left.tanh() * right, right.t().contiguous().t().sin()), dim=-1)


def half_complex(x: Tensor, weight: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (32, 2)).contiguous())
    return x + torch.view_as_real(turned * turned.conj()).flatten(1) @ weight


@pytest.mark.parametrize("block", [several_views, half_complex, lambda x, w: F.silu(x @ w) * F.silu(x @ w)])
def test_gradients_are_the_same_to_the_bit(block: Callable[..., Any]) -> None:
    plain, moved = Chain(block), Chain(block)
    copies = offloaded(moved)
    for mine, theirs in zip(gradients(moved), gradients(plain), strict=True):
        assert torch.equal(mine, theirs)
    assert copies.taken and copies.in_use == 0


def test_what_is_saved_by_several_operations_is_copied_once() -> None:
    """Of the first three blocks the input, saved three times, and the product, saved twice; no weight."""
    model = Chain(lambda x, w: (y := x @ w) * y.sin() + x.cos() * x.square())
    copies = offloaded(model)
    gradients(model)
    # y, sin y, x, cos x and x squared
    assert copies.taken == [SIZE] * 5 * 3


def test_buffers_are_used_again() -> None:
    model = Chain(lambda x, w: (x @ w).tanh())
    copies = offloaded(model)
    gradients(model)
    once = copies.buffers
    for _ in range(3):
        gradients(model)
    assert copies.buffers == once == 2 * 3 - 2, "block i's result is block i + 1's input"


def test_a_block_does_not_wait_for_what_the_next_one_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward: only where a group is opened, though what it brought back is dropped while the next is on its way."""
    model = Chain(lambda x, w: (x @ w).tanh(), 6)
    copies, opened = offloaded(model), kept._BlockCall.open

    def noted(group: kept._BlockCall) -> None:
        copies.opening = True
        opened(group)
        copies.opening = False

    monkeypatch.setattr(kept._BlockCall, "open", noted)
    loss = model(stream()).square().sum()
    copies.waits.clear()
    loss.backward()
    assert len(copies.waits) == 4 and all(copies.waits), "four groups had left"


def test_what_all_blocks_are_called_with_stays() -> None:
    model = Chain(lambda x, w, mask: (x @ w) * mask)
    copies = offloaded(model)
    gradients(model, torch.linspace(0, 1, 32 * 64).view(32, 64))
    assert copies.taken == [SIZE] * 3, "the inputs of three blocks"


def test_what_all_blocks_share_otherwise_stays_after_one_copy() -> None:
    mask = torch.linspace(0, 1, 32 * 64).view(32, 64)
    model = Chain(lambda x, w: (x @ w) * mask)
    copies = offloaded(model)
    gradients(model)
    assert copies.taken == [SIZE] * (3 + 1)
    assert copies.in_use == 0


def test_what_a_later_block_saves_again_stays() -> None:
    """Saved by every third block: it has left by then, though a reference held it."""
    mask = torch.linspace(0, 1, 32 * 64).view(32, 64)

    def model() -> Chain:
        calls = iter(range(100))
        return Chain(lambda x, w: (x @ w) * mask if next(calls) % 3 == 0 else x @ w, count=9)

    moved = model()
    copies = offloaded(moved)
    mine = gradients(moved)
    assert copies.taken == [SIZE] * (7 + 1)
    assert copies.in_use == 0
    assert all(torch.equal(a, b) for a, b in zip(mine, gradients(model()), strict=True))


def test_weights_of_layers_that_are_replaced_afterwards_stay() -> None:
    """A later technique, such as fp8, replaces layers of a block, and sharding replaces the weights of those."""

    class Layer(Block):
        def forward(self, x: Tensor, *shared: Tensor) -> Any:
            return self.layer(x)

    model = Chain(torch.add)
    model.blocks = nn.ModuleList(Layer(torch.add) for _ in range(5))
    for block in model.blocks:
        block.layer = nn.Linear(64, 64, bias=False, device="meta")
    copies = offloaded(model)
    for block in model.blocks:
        block.layer = nn.Linear(64, 64, bias=False)
    model(x := stream()).sum().backward()
    assert set(copies.taken) == {x.untyped_storage().nbytes()}


def test_only_two_blocks_lie_on_the_device() -> None:
    """Counted within every block, in storages that are still alive: the block's own and the last one's."""
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    counted: list[int] = []

    def block(x: Tensor, weight: Tensor) -> Tensor:
        y = (x @ weight).exp()  # saved by its own node and by the next
        alive.append(weakref.ref(y.untyped_storage()))
        counted.append(sum(reference() is not None for reference in alive))
        return x + y.sin()

    model = Chain(block, count=7)
    offloaded(model)
    loss = model(stream()).sum()
    assert counted == [1, 2, 2, 2, 2, 2, 2]
    assert [reference() is not None for reference in alive] == [False] * 5 + [True] * 2
    loss.backward()


def test_nothing_is_moved_without_gradients() -> None:
    model = Chain(lambda x, w: (x @ w).tanh())
    copies = offloaded(model)
    with torch.no_grad():
        model(stream())
    assert copies.taken == []


def test_graphs_may_be_retained_thrown_away_and_interleaved() -> None:
    plain, moved = Chain(several_views), Chain(several_views)
    copies = offloaded(moved)

    def both(model: Chain) -> list[Tensor]:
        model(stream())
        first, second = model(stream()).sum(), model(stream() * 2).sum()
        first.backward(retain_graph=True)
        third = model(stream() * 3).sum()
        second.backward()
        third.backward()
        first.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    mine = both(moved)
    assert all(torch.equal(a, b) for a, b in zip(mine, both(plain), strict=True))
    gc.collect()
    assert copies.in_use == 0


def test_an_error_in_a_block_leaves_no_hooks_behind() -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        if failing:
            raise ValueError("in the block")
        return (x @ weight).tanh()

    model, failing = Chain(block), True
    copies = offloaded(model)
    with pytest.raises(ValueError, match="in the block"):
        model(stream())
    saved = (stream() * 2).exp()
    saved.sum().backward()
    assert copies.taken == []
    failing = False
    gradients(model)
    assert copies.taken


@pytest.mark.parametrize("index", [0, 2, 4])
def test_writing_to_what_is_kept_is_an_error(index: int) -> None:
    """As without offload; also of blocks that never leave, and of tensors written during the copy."""
    model = Chain(lambda x, w: (x @ w).exp())
    offloaded(model)
    x: Any = stream()
    for number, block in enumerate(model.blocks):
        result = block(x)
        x = result * 1.0
        if number == index:
            result.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


class Meshed(TwoTensor):
    """Made of tensors and of something that is none, as DTensors are from torch 2.13 on."""

    def __tensor_flatten__(self) -> Any:
        names, context = super().__tensor_flatten__()
        return [*names, "shape_of"], context

    @property
    def shape_of(self) -> str:
        return "a mesh"

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        assert inner.pop("shape_of") == "a mesh"
        return TwoTensor.__tensor_unflatten__(inner, context, size, stride)


@pytest.mark.parametrize("kind", [TwoTensor, Meshed])
def test_tensors_made_of_others(kind: type[TwoTensor]) -> None:
    """Such as DTensors: their parts are moved."""

    def run(count_buffers: bool) -> tuple[list[Tensor], Watched | None]:
        model = Chain(lambda x, w: (x * 2).sin() * x)
        copies = offloaded(model) if count_buffers else None
        x = kind(stream().detach(), stream().detach() * 3).requires_grad_()
        model(x).sum().backward()
        assert isinstance(x.grad, TwoTensor)
        return [x.grad.a, x.grad.b], copies

    (mine, copies), (theirs, _) = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert copies is not None and len(copies.taken) == 2 * 3 * 3
