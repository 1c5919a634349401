"""The tape: whatever a block does, its gradients are those of the block alone, to the bit, and nothing lives on."""

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

from shardwise.model.budget import Budgeted, within_budget

SHARES = (0.0, 0.3, 0.6, 0.9)


class Block(nn.Module):
    """Two linear layers, and between them what a test asks for."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 16), nn.Linear(16, 8), between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


def filled(x: Tensor) -> Tensor:
    """A result put together in place, piece by piece, each of which is read before the next is written."""
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
    """Rotary positions as Llama's first code has them, on complex numbers over the same memory."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones(8), torch.linspace(0, 3, 8))
    return torch.view_as_real(turned * turned.conj() * pairs).flatten(-2)


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.transpose(-1, -2) @ x).float()


class Cubed(torch.autograd.Function):
    """Saves an input, a result, and what is neither."""

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
    """As a kernel that no dispatcher sees: it fills what ``empty_like`` gave."""

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
    """Of some steps: the first is the one in which a block measures itself."""
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
def test_gradients_are_those_of_the_block_alone(name: str) -> None:
    torch.manual_seed(0)
    blocks = [Block(BETWEEN[name]) for _ in range(2)]
    plain = gradients(list(blocks))
    for share in SHARES:
        assert same(gradients(within_budget(blocks, share)), plain), share


def test_all_of_it_is_the_block_itself() -> None:
    block = Block(F.silu)
    assert within_budget([block], 1.0) == [block]


def test_no_gradients_other_lengths_and_graphs_that_are_kept() -> None:
    torch.manual_seed(0)
    block = Block(BETWEEN["norm"])
    (wrapped,) = within_budget([block], 0.3)
    x = torch.randn(2, 5, 8)
    for length in (5, 7, 5):
        assert same(gradients([wrapped], 1, length), gradients([block], 1, length))
    with torch.no_grad():
        assert torch.equal(wrapped(x), block(x))
    with torch.inference_mode():
        assert torch.equal(wrapped(x), block(x))
    wrapped(x)  # a graph that nobody goes through
    y = wrapped(x).sum()
    y.backward(retain_graph=True)
    once = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    y.backward()
    assert all(
        torch.equal(p.grad, 2 * g)
        for p, g in zip(block.parameters(), once, strict=True)
        if p.grad is not None
    )


def test_blocks_of_one_shape_that_do_other_things() -> None:
    """One call each keeps what it would with full, then each block knows what to keep of itself."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(BETWEEN[name]) for name in ("relu", "norm", "split", "relu")]
    plain, wrapped = gradients(blocks, 4), within_budget(blocks, 0.5)
    assert same(gradients(wrapped, 4), plain)
    kept = [
        next(iter(block._own.values())) for block in wrapped if isinstance(block, Budgeted) and block._own
    ]
    assert None not in kept and len(set(kept)) == 3


def test_a_block_that_changes_its_mind() -> None:
    """The fifth call is of other operations than the one that was measured."""
    calls = iter(range(100))
    between = lambda x: x.tanh().exp() if next(calls) % 5 == 4 else F.layer_norm(x, (16,)).sin()  # noqa: E731
    torch.manual_seed(0)
    block = Block(between)
    plain = gradients([block], 10)
    assert same(gradients(within_budget([block], 0.5), 10), plain)


def test_statistics_are_counted_once() -> None:
    norm = nn.BatchNorm1d(16)
    torch.manual_seed(0)
    block = Block(lambda x: norm(x.flatten(0, 1)).unflatten(0, (2, -1)))
    plain = gradients([block], 3)
    statistics = [b.clone() for b in norm.buffers()]
    norm.reset_running_stats()
    assert same(gradients(within_budget([block], 0.0), 3), plain)
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), statistics, strict=True))


@pytest.mark.parametrize("share", SHARES)
def test_what_is_computed_once_and_written_over_is_not_computed_again(share: float) -> None:
    """By blocks of one shape, of which the second one's choice is of the first one's operations."""
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
def test_a_result_that_the_caller_writes_to_is_an_error_or_changes_nothing(share: float) -> None:
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
def test_an_input_that_is_written_to_is_an_error(calls: int) -> None:
    (block,) = within_budget([Block(torch.tanh)], 0.0)
    for _ in range(calls):
        x = torch.randn(2, 5, 8, requires_grad=True) * 1
        y = block(x)
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="written to"):
        y.sum().backward()


@pytest.mark.parametrize("share", SHARES)
def test_nothing_lives_on(share: float) -> None:
    """Without the garbage collector: no cycles, neither in a graph that was used nor in one that was not."""
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


def test_a_choice_is_followed_past_what_is_computed_once() -> None:
    """Statistics of a batch norm, or a collective: kept whatever the choice, and a step of the run like others."""
    blocks = [
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Tanh()) for _ in "ab"
    ]
    first, second = within_budget(blocks, 0.5)
    second(first(torch.randn(8, 16, requires_grad=True))).sum().backward()
    assert isinstance(second, Budgeted) and isinstance(first, Budgeted)
    assert first._own and not second._own
