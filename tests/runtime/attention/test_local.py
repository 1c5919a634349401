"""Sliding windows and sinks: as a softmax with one more column, by every kernel, and as the dry run counts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.dryrun.target import _Parts
from shardwise.runtime.attention import local
from shardwise.runtime.attention.local import LOCAL_PARTS, local_attention
from shardwise.runtime.flops import FlopCounter
from shardwise.runtime.parallel.attention_kernels import kernels_as
from shardwise.runtime.torch_private_kernels import scoped_kernels

HEADS, SHARED, LENGTH, WIDTH = 4, 2, 33, 16
SCALE = 0.3


def drawn(
    dtype: torch.dtype = torch.float64, value_width: int = WIDTH
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and sinks."""
    torch.manual_seed(0)
    heads = HEADS, HEADS // SHARED, HEADS // SHARED
    widths = WIDTH, WIDTH, value_width
    rows = [torch.randn(2, a, LENGTH, d, dtype=dtype) for a, d in zip(heads, widths, strict=True)]
    q, k, v, sinks = (x.requires_grad_() for x in (*rows, torch.randn(HEADS, dtype=dtype)))
    return q, k, v, sinks


def seen_by(window: int | None) -> Tensor:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return (distance >= 0) & (distance < (window or LENGTH))


def by_softmax(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seen: Tensor) -> Tensor:
    scores = q @ k.repeat_interleave(SHARED, 1).mT * SCALE
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    return scores.softmax(-1)[..., :LENGTH] @ v.repeat_interleave(SHARED, 1)


def off(out: Tensor, expected: Tensor, inputs: list[Tensor]) -> float:
    """The largest difference of outputs and gradients."""
    slope = torch.randn_like(expected)
    gradients = torch.autograd.grad(out, inputs, slope)
    references = torch.autograd.grad(expected, inputs, slope)
    pairs = zip((out, *gradients), (expected, *references), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 32, 33, 100])
def test_windows_and_sinks_are_those_of_a_softmax(window: int | None, with_sinks: bool) -> None:
    q, k, v, sinks = drawn()
    sink = sinks if with_sinks else None
    out = local_attention(q, k, v, SCALE, window, sink)
    inputs = [q, k, v, *([sinks] if with_sinks else [])]
    assert off(out, by_softmax(q, k, v, sink, seen_by(window)), inputs) < 1e-13


@pytest.mark.parametrize("value_width", [8, 24])
def test_values_may_be_narrower_or_wider_than_keys(value_width: int) -> None:
    q, k, v, sinks = drawn(value_width=value_width)
    out = local_attention(q, k, v, SCALE, 5, sinks)
    assert out.shape[-1] == value_width
    assert off(out, by_softmax(q, k, v, sinks, seen_by(5)), [q, k, v, sinks]) < 1e-13


def test_a_mask_and_a_window_both_apply() -> None:
    q, k, v, sinks = drawn()
    document = (torch.arange(LENGTH) > 11).int()
    mask = ((document[:, None] == document) & seen_by(None)).expand(2, 1, -1, -1)
    out = local_attention(q, k, v, SCALE, 5, sinks, mask)
    assert off(out, by_softmax(q, k, v, sinks, mask & seen_by(5)), [q, k, v, sinks]) < 1e-13


def test_the_last_query_alone_sees_what_it_sees_in_the_whole_row() -> None:
    q, k, v, sinks = drawn()
    mask = seen_by(7)[None, None, -1:]
    last = local_attention(q[:, :, -1:], k, v, SCALE, 7, sinks, mask)
    assert (last - local_attention(q, k, v, SCALE, 7, sinks)[:, :, -1:]).detach().abs().max() < 1e-14


def test_bf16_is_as_near_to_fp64_as_attention_without_sinks() -> None:
    errors = []
    for with_sinks in (False, True):
        operands = drawn(torch.bfloat16)
        exact = [x.detach().double().requires_grad_() for x in operands]
        q, k, v, sinks = operands
        out = local_attention(q, k, v, SCALE, None, sinks if with_sinks else None)
        expected = by_softmax(*exact[:3], exact[3] if with_sinks else None, seen_by(None))
        used = 4 if with_sinks else 3
        slope = torch.randn_like(out)
        gradients = torch.autograd.grad(out, operands[:used], slope)
        references = torch.autograd.grad(expected, exact[:used], slope.double())
        pairs = zip((out, *gradients), (expected, *references), strict=True)
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))
    assert errors[1] < 2 * errors[0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten._flash_attention_forward`` of [b, s, a, d]: a query sees ``window_size_left`` keys before its own."""
    assert cu_q is cu_k is None and max_q == max_k == q.shape[1] and causal and not dropout and not debug
    assert window_size_right == 0
    scores = _scores(q, k, scale, window_size_left)
    out = (scores.softmax(-1) @ v.transpose(1, 2).repeat_interleave(SHARED, 1)).transpose(1, 2)
    state = torch.zeros(2, dtype=torch.uint64)
    return out.contiguous(), scores.logsumexp(-1), state, torch.zeros((), dtype=torch.uint64), torch.empty(0)


def _scores(q: Tensor, k: Tensor, scale: float, before: int) -> Tensor:
    scores = q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(SHARED, 1).mT * scale
    return scores.masked_fill(~seen_by(before + 1), -torch.inf)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logarithms: Tensor, cu_q: Any, cu_k: Any,
    max_q: int, max_k: int, *others: Any, scale: float, window_size_left: int, **more: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten._flash_attention_backward`` (Dao et al. 2022, arXiv:2205.14135, appendix B.2)."""
    shares = (_scores(q, k, scale, window_size_left) - logarithms.unsqueeze(-1)).exp()
    wide_k, wide_v = (x.transpose(1, 2).repeat_interleave(SHARED, 1) for x in (k, v))
    slope = gradient.transpose(1, 2)
    row = (gradient * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    of_scores = shares * (slope @ wide_v.mT - row) * scale
    of_k, of_v = of_scores.mT @ q.transpose(1, 2), shares.mT @ slope
    dk, dv = (x.unflatten(1, (-1, SHARED)).sum(2).transpose(1, 2) for x in (of_k, of_v))
    return (of_scores @ wide_k).transpose(1, 2), dk, dv


@contextmanager
def windowed_flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this block the CPU has flash attention with windows, in every dtype."""
    monkeypatch.setattr(local, "has_varlen_kernel", lambda *_: True)
    kernels = {"_flash_attention_forward": _forward, "_flash_attention_backward": _backward}
    with scoped_kernels(kernels, "CPU"), kernels_as("cuda"):
        yield


def test_flash_attention_gets_the_window_and_the_whole_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, sinks = drawn()
    with windowed_flash(monkeypatch):
        out = local_attention(q, k, v, SCALE, 7, sinks)
        assert off(out, by_softmax(q, k, v, sinks, seen_by(7)), [q, k, v, sinks]) < 1e-13


def test_the_check_of_a_kernel_sees_a_window_that_is_one_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(*args: Any, window_size_left: int, **named: Any) -> tuple[Tensor, ...]:
        return _forward(*args, window_size_left=window_size_left + 1, **named)

    monkeypatch.setitem(globals(), "LENGTH", 320)
    with windowed_flash(monkeypatch):
        right = local._window_error(torch.float64, 16, torch.device("cpu"))
        with scoped_kernels({"_flash_attention_forward": longer}, "CPU"):
            wrong = local._window_error(torch.float64, 16, torch.device("cpu"))
    assert right < 1e-12 and wrong > 0.1


def test_flops_are_those_of_the_keys_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products per pair forward and five backward; the borders of windows count as in causal attention."""
    q, k, v, _ = drawn()
    window, pairs = 7, 0.0
    with windowed_flash(monkeypatch), FlopCounter() as whole:
        local_attention(q, k, v, SCALE, window)
    with windowed_flash(monkeypatch), FlopCounter() as counter, _Parts(LOCAL_PARTS):
        local_attention(q, k, v, SCALE, window).sum().backward()
    for query in range(LENGTH):
        pairs += min(query, window - 1) + 0.5 + (0.5 if query >= window else 0.0)
    product = 2 * 2 * HEADS * pairs * WIDTH
    assert counter.flops == pytest.approx(product * (2 + 5), rel=0.02)
    assert whole.flops == pytest.approx(product * 2, rel=0.02)
