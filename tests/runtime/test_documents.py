"""Packed documents by flash attention of variable length: as by a mask, with the kernel replaced by its definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.native import NativeModel
from shardwise.recipe.dimensions import Dimensions
from shardwise.runtime import documents
from shardwise.runtime.documents import Documents, documents_of, offsets
from shardwise.runtime.kernel_check import newly_replaced
from shardwise.runtime.parallel.attention_kernels import kernels_as
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.runtime.torch_private_kernels import scoped_kernels
from tests.harness.pool import Pool
from tests.harness.tiny_run import equal, full, make_run

ROWS = ((5, 9, 1, 4, 5), (24,), (20, 4))
"""Lengths of the documents of each row. Two rows have fewer than the first: their last documents are empty."""
TOTAL = 24


def positions_of(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def starts_of(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    most = max(map(len, rows))
    starts = [[sum(row[:place]) for place in range(most)] for row in rows]
    return torch.tensor(starts, dtype=torch.int32)


def spans(cumulative: Tensor) -> list[slice]:
    """Of the documents that are not empty."""
    ends = cumulative.tolist()
    return [slice(a, b) for a, b in pairwise(ends) if a < b]


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[heads, s, s] of one document; q [s, heads, d], k [s, k, d]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten._flash_attention_forward``. What no document covers is not written."""
    assert q.dim() == 3 and cu_q.dtype == cu_k.dtype == torch.int32 and causal and not dropout and not debug
    assert max_q == max_k >= max(span.stop - span.start for span in spans(cu_q))
    out, logarithms = (
        torch.full_like(q, torch.nan),
        torch.full((q.shape[1], len(q)), torch.nan, dtype=q.dtype),
    )
    for span in spans(cu_q):
        at = scores(q[span], k[span], scale)
        values = v[span].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[span] = torch.einsum("hqk,khd->qhd", at.softmax(-1), values)
        logarithms[:, span] = at.logsumexp(-1)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, logarithms, state, torch.zeros((), dtype=torch.uint64), torch.empty(0)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logarithms: Tensor, cu_q: Tensor,
    cu_k: Tensor, *others: Any, scale: float, **more: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten._flash_attention_backward`` (Dao et al. 2022, arXiv:2205.14135, appendix B.2)."""
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    for span in spans(cu_q):
        wide_k, wide_v = (x[span].repeat_interleave(groups, 1) for x in (k, v))
        shares = (scores(q[span], k[span], scale) - logarithms[:, span].unsqueeze(-1)).exp()
        row = (gradient[span] * out[span]).sum(-1).T.unsqueeze(-1)
        of_scores = shares * (torch.einsum("qhd,khd->hqk", gradient[span], wide_v) - row) * scale
        dq[span] = torch.einsum("hqk,khd->qhd", of_scores, wide_k)
        dk[span] = torch.einsum("hqk,qhd->khd", of_scores, q[span]).unflatten(1, (-1, groups)).sum(2)
        dv[span] = torch.einsum("hqk,qhd->khd", shares, gradient[span]).unflatten(1, (-1, groups)).sum(2)
    return dq, dk, dv


@contextmanager
def reference_kernel() -> Iterator[None]:
    """In this block the CPU has the kernel, in every dtype, with the accelerator's widths."""
    before = documents.has_varlen_kernel
    documents.has_varlen_kernel = lambda *_: True  # type: ignore[assignment]
    try:
        kernels = {"_flash_attention_forward": forward, "_flash_attention_backward": backward}
        with scoped_kernels(kernels, "CPU"), kernels_as("cuda"):
            yield
    finally:
        documents.has_varlen_kernel = before


def test_offsets_lay_rows_end_to_end() -> None:
    found = offsets(starts_of(ROWS), TOTAL)
    assert found.tolist() == [0, 5, 14, 15, 19, 24, 48, 48, 48, 48, 48, 68, 72, 72, 72, 72]
    assert found.dtype == torch.int32


def test_starts_and_positions_make_the_same_mask() -> None:
    model, positions = nn.Module(), positions_of(ROWS)
    by_starts = documents.same_document(model, positions, starts_of(ROWS))
    assert torch.equal(by_starts, documents.same_document(model, positions))


@pytest.mark.parametrize(("kv_heads", "width"), [(4, 16), (2, 12), (1, 8)])
def test_attention_by_offsets_is_attention_by_a_mask(kv_heads: int, width: int) -> None:
    """Outputs and gradients; heads in groups, and of a width that the kernel does not have."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, heads, TOTAL, width) for heads in (4, kv_heads, kv_heads, 4)]
    q, k, v, gradient = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found: list[tuple[Tensor, ...]] = []
    for starts in (None, starts_of(ROWS)):
        with reference_kernel():
            mask: Any = documents_of(nn.Module(), positions_of(ROWS), starts, q, width)
            assert (mask.offsets is None) == (starts is None)
            out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=kv_heads != 4)
            found.append((out, *torch.autograd.grad(out, leaves, gradient)))
    for by_mask, by_offsets in zip(*found, strict=True):
        torch.testing.assert_close(by_offsets, by_mask, rtol=1e-12, atol=1e-12)


def one_document(q: Tensor, *others: Any, **more: Any) -> tuple[Tensor, ...]:
    """A kernel that takes all documents of a row for one."""
    k, v, cu, *rest = others
    whole = torch.tensor([0, int(cu[-1])], dtype=torch.int32)
    return forward(q, k, v, whole, whole, len(q), len(q), *rest[3:], **more)


@pytest.mark.parametrize(("kernel", "runs"), [(forward, True), (one_document, False)])
def test_a_run_checks_the_kernel_and_masks_where_it_is_wrong(
    kernel: Any, runs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(documents, "has_varlen_kernel", lambda *_: True)
    documents._trusts_varlen.cache_clear()
    newly_replaced()
    with scoped_kernels({"_flash_attention_forward": kernel, "_flash_attention_backward": backward}, "CPU"):
        like = torch.empty(1, dtype=torch.float64)
        made = documents_of(nn.Module(), positions_of(ROWS), starts_of(ROWS), like, 16)
    documents._trusts_varlen.cache_clear()
    assert (made.offsets is not None) is runs
    named = [sentence.partition(" has an error")[0] for sentence in newly_replaced()]
    assert named == ([] if runs else ["flash attention"])


def test_other_functions_do_not_take_documents() -> None:
    with pytest.raises(TypeError):
        torch.add(torch.zeros(1), Documents(1))  # type: ignore[call-overload]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_has_the_same_gradients_by_offsets(family: str) -> None:
    dimensions = Dimensions(2, 48, 4, 2 if family == "llama" else 4, 40, vocab=51, context=64, family=family)
    blueprint = NativeModel(dimensions)
    model = blueprint.build().double()
    blueprint.fill(model, 0)
    ids = torch.randint(0, 51, (3, TOTAL), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "positions": positions_of(ROWS)}
    found = []
    for more in ({}, {"starts": starts_of(ROWS)}):
        with reference_kernel():
            loss, _ = blueprint.loss(model, {**batch, **more})
            found.append(torch.autograd.grad(loss, list(model.parameters())))
    for by_mask, by_offsets in zip(*found, strict=True):
        torch.testing.assert_close(by_offsets, by_mask, rtol=1e-10, atol=1e-12)


MODEL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 44, "vocab": 257, "context": 64}


def gradients(asked: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Of one batch for each strategy; the first by a mask, the others by offsets."""
    ids = torch.randint(0, 53, (3, TOTAL), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "positions": positions_of(ROWS)}
    data, found = {"source": "a.jsonl", "sequence_length": TOTAL, "packing": True}, []
    for index, settings in enumerate(asked):
        run = make_run(3, settings={"precision": "fp64", **settings}, model=MODEL, data=data)
        packed = [{**batch, "starts": starts_of(ROWS)}]
        if index == 0:
            run.passes.forward_backward(packed)
        else:
            with reference_kernel():
                run.passes.forward_backward(packed)
        found.append({name: full(p.grad) for name, p in named_parameters(run.model) if p.grad is not None})
    return found


def test_divided_rows_have_the_same_gradients_by_offsets(pool: Pool) -> None:
    """By Ulysses on two ranks. A recomputed block sees the same documents, so its gradients keep every bit."""
    ulysses = {"sequence_parallel": 2}
    kinds = ("none", "full", "selective")
    asked = [ulysses, *({**ulysses, "activation_checkpointing": kind} for kind in kinds)]
    by_mask, plain, *again = pool.run(2, gradients, asked)[0]
    for name, expected in by_mask.items():
        torch.testing.assert_close(plain[name], expected, rtol=1e-10, atol=1e-12)
    for found in again:
        assert equal(found, plain)
