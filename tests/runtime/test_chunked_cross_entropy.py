"""The loss without the logits: its value, its gradients, and the memory it takes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.core.errors import RecipeError
from shardwise.dryrun.tracker import Tracker
from shardwise.runtime import cross_entropy
from shardwise.runtime.chunked_cross_entropy import LossHead, linear_cross_entropy_sum
from shardwise.runtime.cross_entropy import IGNORED, cross_entropy_sum, log_sum_exp, softmax_gradient
from shardwise.runtime.language_loss import language_loss, valid_targets
from shardwise.runtime.parallel.vocabulary import Vocabulary
from shardwise.runtime.torch_private import TorchDispatchMode

Loss = Any


def inputs(
    dtype: torch.dtype, *, rows: int = 77, width: int = 24, vocab: int = 523, bias: bool = False
) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, width, generator=generator),
        torch.randn(vocab, width, generator=generator),
    )
    offset = torch.randn(vocab, generator=generator).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[::7] = IGNORED
    return [hidden.to(dtype).requires_grad_(), (0.2 * weight).to(dtype).requires_grad_(), offset, labels]


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """The reference: whole logits, in the dtype of the inputs."""
    logits = nn.functional.linear(hidden, weight, bias)
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def loss_and_gradients(function: Loss, values: list[Any], factor: float = 0.37) -> list[Tensor]:
    leaves = [v for v in values if v is not None and v.requires_grad]
    loss = function(*values)
    return [loss.detach(), *torch.autograd.grad(loss * factor, leaves)]


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def of_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    return cross_entropy_sum(nn.functional.linear(hidden, weight, bias), labels)


@pytest.mark.parametrize("label", [-1, -101, 523])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [linear_cross_entropy_sum, of_logits])
def test_a_label_that_is_no_class_is_an_error(loss: Loss, dtype: torch.dtype, label: int) -> None:
    """As in PyTorch. Else it would count as class 0, or as one with the logit 0."""
    *values, labels = inputs(dtype)
    labels[3] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        loss(*values, labels)


def test_a_label_of_no_rank_has_no_index() -> None:
    ranks: Any = SimpleNamespace(span=lambda size: (size // 2, size))
    index, here = Vocabulary(10, ranks).local_index(torch.tensor([IGNORED, 0, 4, 5, 9, 10, -1]))
    assert index.tolist() == [0, 0, 0, 0, 4, -1, -1]
    assert here.tolist() == [False, False, False, True, True, False, False]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)],
)
def test_equals_the_plain_loss(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    """Loss and gradients within 1e-6 of the fp32 reference, relative in L2; within the dtype's spacing in 16 bits."""
    values = inputs(dtype, bias=bias)
    wide = [v.detach().to(torch.float64).requires_grad_() if v is not None else None for v in values[:3]]
    expected = loss_and_gradients(plain, [*wide, values[3]])
    for found, right in zip(loss_and_gradients(linear_cross_entropy_sum, values), expected, strict=True):
        assert relative(found, right) <= tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_round_no_more_than_the_plain_loss(dtype: torch.dtype) -> None:
    """Errors against fp64 are at most 1.5 times those of the loss on whole 16-bit logits.

    The hidden states' gradient is a sum of pieces that are each rounded once, and then rounded itself: sqrt(2).
    """
    values = inputs(dtype, rows=300)
    exact = [v.detach().double().requires_grad_() for v in values[:2]]
    expected = loss_and_gradients(plain, [*exact, None, values[3]])

    def whole(hidden: Tensor, weight: Tensor, bias: None, labels: Tensor) -> Tensor:
        return cross_entropy_sum(hidden @ weight.t(), labels)

    chunked, usual = loss_and_gradients(linear_cross_entropy_sum, values), loss_and_gradients(whole, values)
    for one, other, right in zip(chunked, usual, expected, strict=True):
        assert relative(one, right) <= 1.5 * relative(other, right) + 1e-6


def test_the_compiled_operators_compute_what_those_by_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same compiler as on CUDA, another back end; the gradient may replace the logits."""
    values = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    index, scale = torch.arange(40), torch.linspace(0, 1, 40)

    def results() -> list[Tensor]:
        log_sums, apart, replaced = log_sum_exp(values), torch.empty_like(values), values.clone()
        softmax_gradient(values, log_sums, index, scale, scale, apart)
        softmax_gradient(replaced, log_sums, index, scale, scale, replaced)
        return [log_sums, apart, replaced]

    by_rows = results()
    monkeypatch.setattr(cross_entropy, "seconds_compiling", lambda: 1.0)
    for compiled, expected in zip(results(), by_rows, strict=True):
        torch.testing.assert_close(compiled, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(dtype: torch.dtype, frozen: int) -> None:
    values = inputs(dtype)
    every = loss_and_gradients(linear_cross_entropy_sum, values)
    values[frozen].requires_grad_(False)
    loss, gradient = loss_and_gradients(linear_cross_entropy_sum, values)
    assert torch.equal(loss, every[0]) and torch.equal(gradient, every[2 - frozen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_counted_target_is_a_loss_of_zero(dtype: torch.dtype) -> None:
    values = inputs(dtype)
    values[3].fill_(IGNORED)
    for value in loss_and_gradients(linear_cross_entropy_sum, values):
        assert (value == 0).all()


def test_gradients_taken_ahead_are_used_once() -> None:
    loss = linear_cross_entropy_sum(*inputs(torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def peak_beside_gradients(dtype: torch.dtype, rows: int, width: int, vocab: int) -> tuple[int, int]:
    """(bytes at the peak of a forward and backward pass that are no gradient, bytes of the logits), on fakes."""
    tracker = Tracker({}, lambda kind, size: 0, lambda name, args, out: 0, lambda: "")
    with FakeTensorMode(), torch.device("cpu"):
        hidden = torch.empty(rows, width, dtype=dtype, requires_grad=True)
        weight = torch.empty(vocab, width, dtype=dtype, requires_grad=True)
        labels = torch.zeros(rows, dtype=torch.int64)
        with tracker.watching():
            tracker.tag([hidden, weight, labels], "parameters")
            linear_cross_entropy_sum(hidden, weight, None, labels).backward()
            gradients = {hidden.grad.untyped_storage().nbytes(), weight.grad.untyped_storage().nbytes()}  # type: ignore[union-attr]
    changes: Counter[int] = Counter()
    for allocation in tracker.allocations:
        if "parameters" not in allocation.origin.tags:
            changes[allocation.born] += allocation.size
            changes[allocation.died or tracker.now + 1] -= allocation.size
    level = peak = 0
    for time in sorted(changes):
        level += changes[time]
        peak = max(peak, level)
    return peak - sum(gradients), rows * vocab * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [32_000, 50_257, 128_256])
def test_memory_is_a_sixteenth_of_the_logits(dtype: torch.dtype, vocab: int) -> None:
    """At 8192 tokens of width 512. In bf16 the hidden states' gradient is also summed in fp32: 4 + 2 bytes each."""
    rows, width = 8192, 512
    peak, logits = peak_beside_gradients(dtype, rows, width, vocab)
    summed = 6 * rows * width if dtype == torch.bfloat16 else 0
    assert 0 < peak - summed <= logits / 16, (peak - summed) / logits


@pytest.mark.parametrize("vocab", [32_000, 50_257, 128_256])
def test_products_in_16_bits_fill_tiles_of_a_tensor_core(vocab: int) -> None:
    """Columns of products with the weights are multiples of 128, but for the rest at the end of the vocabulary."""
    columns = Counter[int]()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default and out.shape[0] == 4:
                columns[out.shape[1]] += 1
            return out

    hidden = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, 8, dtype=torch.bfloat16)
    with Seen():
        linear_cross_entropy_sum(hidden, weight, None, torch.arange(4)).backward()
    del columns[8]  # products that give the gradient of the hidden states
    ragged = [count for width, count in columns.items() if width % 128]
    assert columns.total() >= 2 * 17 and sum(ragged) <= 2


def test_a_model_that_changes_its_logits_is_refused() -> None:
    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.output = nn.Embedding(11, 4), LossHead(nn.Linear(4, 11))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.tanh(self.output(self.embed(ids)))

    model, ids = Capped(), torch.arange(6).view(1, 6)
    blueprint: Any = SimpleNamespace(logits=lambda model, ids, *_: model(ids))
    with pytest.raises(RecipeError, match="after its output layer"):
        language_loss(blueprint.logits, model, {"input_ids": ids, "labels": ids})
    model.forward = lambda ids: model.output(model.embed(ids))  # type: ignore[method-assign]
    loss, count = language_loss(blueprint.logits, model, {"input_ids": ids, "labels": ids})
    assert loss.ndim == 0 and torch.equal(count, valid_targets(ids))
    assert model(ids).shape == (1, 6, 11)  # logits again where no loss is asked for
