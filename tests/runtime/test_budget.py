"""Budgets of activation checkpointing: gradients are bit-identical to those of the plain block, and no memory leaks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.runtime.recompute.budget import within_budget
from tests.harness.tiers import quick

SHARES = (0.0, 0.3, 0.6, 0.9)


class Block(nn.Module):
    """Two linear layers with a given function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 16), nn.Linear(16, 8), between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


def filled(x: Tensor) -> Tensor:
    """A result that is assembled in place; each part is read before the next is written."""
    whole = torch.zeros_like(x)
    whole[..., :8] = x[..., 8:].exp()
    first = whole.sum(-1, keepdim=True)
    whole[..., 8:] = first * x[..., :8]
    return whole * whole.sin()


def twice_in_place(x: Tensor) -> Tensor:
    y = x * 2
    read_before = y + 1
    return y.mul_(2).add_(1).sigmoid() * read_before.cos()


def rotated(x: Tensor) -> Tensor:
    """Rotary positions by complex numbers over the same memory, as in Meta's Llama code."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones(8), torch.linspace(0, 3, 8))
    return torch.view_as_real(turned * turned.conj() * pairs).flatten(-2)


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.transpose(-1, -2) @ x).float()


class Cubed(torch.autograd.Function):
    """Saves an input, a result, and a tensor that is neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        result = square * x
        ctx.save_for_backward(x, square, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, square, result = ctx.saved_tensors
        return gradients[0] * (3 * square + 0 * (result + x))


class FilledByNumpy(torch.autograd.Function):
    """A kernel that no dispatch mode sees: it fills the memory of ``empty_like``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        result.detach().numpy()[...] = np.exp(x.detach().numpy())
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0]


GENERATOR = torch.Generator()


def by_its_own_generator(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=GENERATOR) + x * torch.empty_like(x).normal_(generator=GENERATOR)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x, inplace=True),
    "dropout in place": lambda x: F.dropout(x, 0.5, inplace=True).add_(x.detach().mean()).sin(),
    "added in place": lambda x: x.add_((x.detach() @ torch.ones(16, 16)).mul_(0.1)).sin(),
    "part in place": lambda x: torch.cat([x[..., :8].mul_(2), x[..., 8:]], -1).sin(),
    "dropout": lambda x: F.dropout(F.silu(F.dropout(x, 0.5)), 0.5),
    "random": lambda x: x * torch.rand_like(x) + torch.randn(16),
    "filled": filled,
    "in place": twice_in_place,
    "complex": rotated,
    "autocast": under_autocast,
    "function": Cubed.apply,
    "split": lambda x: torch.cat([part.tanh() for part in x.split(4, -1)], -1),
    "norm": lambda x: F.layer_norm(x, (16,)).softmax(-1),
    "sorted": lambda x: x.sort(-1).values.cumsum(-1).tanh(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True),
    "generator": by_its_own_generator,
    "by numpy": lambda x: FilledByNumpy.apply(x).sin() * FilledByNumpy.apply(x.cos()),
    "constant": lambda x: x * torch.tensor(2.0) + torch.full((16,), 0.5).exp(),
}


def gradients(blocks: list[nn.Module], steps: int = 2, length: int = 5) -> list[Tensor]:
    """Gradients of some steps. In the first, each block measures its operations."""
    torch.manual_seed(3)
    GENERATOR.manual_seed(4)
    found: list[Tensor] = []
    for _ in range(steps):
        x = torch.randn(2, length, 8, requires_grad=True)
        y = x
        for block in blocks:
            y = block(y)
        y.square().sum().backward()
        for parameter in (p for block in blocks for p in block.parameters()):
            found.append(torch.zeros(()) if parameter.grad is None else parameter.grad.clone())
            parameter.grad = None
        found += [y.detach(), x.grad if x.grad is not None else torch.zeros(())]
    return [*found, torch.get_rng_state(), GENERATOR.get_state()]


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", BETWEEN)
def test_gradients_are_bit_identical(name: str) -> None:
    torch.manual_seed(0)
    blocks = [Block(BETWEEN[name]) for _ in range(2)]
    plain = gradients(list(blocks))
    for share in SHARES:
        assert same(gradients(within_budget(blocks, share)), plain), share


def test_a_budget_of_one_leaves_the_block() -> None:
    block = Block(F.silu)
    assert within_budget([block], 1.0) == [block]


@pytest.mark.parametrize("name", ["norm", "relu"])
def test_no_grad_other_lengths_and_retained_graphs(name: str) -> None:
    torch.manual_seed(0)
    block = Block(BETWEEN[name])
    (wrapped,) = within_budget([block], 0.3)
    x = torch.randn(2, 5, 8)
    for length in (5, 7, 5):
        assert same(gradients([wrapped], 1, length), gradients([block], 1, length))
    with torch.no_grad():
        assert torch.equal(wrapped(x), block(x))
    with torch.inference_mode():
        assert torch.equal(wrapped(x), block(x))
    wrapped(x)  # a graph without a backward pass
    y = wrapped(x).sum()
    y.backward(retain_graph=True)
    once = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    y.backward()
    assert all(
        torch.equal(p.grad, 2 * g)
        for p, g in zip(block.parameters(), once, strict=True)
        if p.grad is not None
    )


def test_blocks_of_equal_shapes_with_other_operations() -> None:
    """Each block chooses for itself."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(BETWEEN[name]) for name in ("relu", "norm", "split", "relu")]
    plain, wrapped = gradients(blocks, 4), within_budget(blocks, 0.5)
    assert same(gradients(wrapped, 4), plain)


def test_a_block_that_changes_its_operations() -> None:
    """The fifth step runs other operations than the measured one."""
    step = 0
    between = lambda x: x.tanh().exp() if step % 5 == 4 else F.layer_norm(x, (16,)).sin()  # noqa: E731
    torch.manual_seed(0)
    block = Block(between)
    (wrapped,) = within_budget([block], 0.5)
    for step in range(10):
        assert same(gradients([wrapped], 1), gradients([block], 1)), step


def test_running_statistics_are_updated_once() -> None:
    norm = nn.BatchNorm1d(16)
    torch.manual_seed(0)
    block = Block(nn.Sequential(nn.Flatten(0, 1), norm, nn.Unflatten(0, (2, -1))))
    plain = gradients([block], 3)
    statistics = [b.clone() for b in norm.buffers()]
    norm.reset_running_stats()
    assert same(gradients(within_budget([block], 0.0), 3), plain)
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), statistics, strict=True))


@pytest.mark.parametrize("share", SHARES)
def test_a_batch_norm_that_is_overwritten_runs_once(share: float) -> None:
    """A batch norm whose result is overwritten in place."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(16), nn.BatchNorm1d(16)]
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), norms[0], nn.ReLU(inplace=True), nn.Linear(16, 8)),
        nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), norms[1], nn.ReLU(inplace=True), nn.Linear(16, 8)),
    ]

    def found(blocks: list[nn.Module]) -> list[Tensor]:
        x = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()
        for _ in range(2):
            y = x
            for block in blocks:
                y = block(y)
            y.square().sum().backward()
        assert x.grad is not None
        statistics = [b.clone() for norm in norms for b in norm.buffers()]
        for norm in norms:
            norm.reset_running_stats()
        return [x.grad, *statistics]

    assert same(found(within_budget(blocks, share)), found(blocks))


@pytest.mark.parametrize("share", SHARES)
def test_a_caller_that_writes_to_a_result_gets_an_error_or_right_gradients(share: float) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y, (y + 1).sin() * (y + 2).cos()

    def gradient(block: nn.Module) -> Tensor:
        x = torch.linspace(-1, 1, 80).view(2, 5, 8).requires_grad_()
        y, z = block(x)
        y.add_(z)
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    torch.manual_seed(0)
    block = Twice()
    (wrapped,) = within_budget([block], share)
    for _ in range(2):
        try:
            found = gradient(wrapped)
        except RuntimeError as error:
            assert "written to" in str(error)
        else:
            assert torch.equal(found, gradient(block))


@pytest.mark.parametrize("calls", [1, 2])
def test_an_overwritten_input_is_an_error(calls: int) -> None:
    (block,) = within_budget([Block(torch.tanh)], 0.0)
    for _ in range(calls):
        x = torch.randn(2, 5, 8, requires_grad=True) * 1
        y = block(x)
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="written to"):
        y.sum().backward()


@pytest.mark.parametrize("share", quick(SHARES, 0.3))
def test_no_memory_leaks(share: float) -> None:
    """Without the garbage collector: no cycles, with and without a backward pass."""
    (block,) = within_budget([Block(BETWEEN["norm"])], share)
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False, True, False):
            x = torch.randn(2, 5, 8, requires_grad=True)
            y = block(x * 1)
            alive = [weakref.ref(y.untyped_storage()), weakref.ref(x.untyped_storage())]
            if backward:
                y.sum().backward()
            del x, y
            assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()
