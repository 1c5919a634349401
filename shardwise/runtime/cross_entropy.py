"""Cross-entropy of a large vocabulary without fp32 copies of the logits.

``F.cross_entropy(logits.float(), ...)`` needs 12 bytes per token and vocabulary entry at its peak: bf16 logits, their
fp32 copy, the log-softmax and its gradient. Here the backward pass saves the logits and one number per token. The
arithmetic is unchanged, and the gradient is rounded to the logits' dtype once.

Two operators read the logits: ``log_sum_exp`` and ``softmax_gradient``. Each reads them once. The planner counts each
as one kernel. ``torch.compile`` fuses each to one kernel on CUDA. On other devices it does so if the process has
compiled its blocks, which shows that a compiler is there. Without it they take a few rows at a time, whose fp32 copy
stays in the processor's cache (benchmarks/loss.py compares losses).

With a sharded vocabulary, each rank has the logits of its classes (vocabulary.py). chunked_cross_entropy.py avoids the
logits altogether, with the same operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.accumulation import accumulation_dtype, at_least_fp32
from shardwise.runtime.compiled import compiled_on_call, seconds_compiling
from shardwise.runtime.parallel.vocabulary import IGNORED, WHOLE_VOCABULARY, Vocabulary

__all__ = ["IGNORED", "cross_entropies", "cross_entropy_sum"]

_ELEMENTS = 2**17
"""Elements whose fp32 copy fits into the cache: half a MiB."""


# -- the operators ------------------------------------------------------------------------------------


def _log_sum_exp(logits: Tensor) -> Tensor:
    return at_least_fp32(logits).logsumexp(1)


def _softmax_gradient(logits: Tensor, log_sums: Tensor, index: Tensor, scale: Tensor, own: Tensor) -> Tensor:
    """As PyTorch's compiler fuses it: the label's column is known by comparison."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    probability = (at_least_fp32(logits) - log_sums.unsqueeze(1)).exp() * scale.unsqueeze(1)
    pulled = torch.where(columns == index.unsqueeze(1), probability - own.unsqueeze(1), probability)
    return pulled.to(logits.dtype)


def _log_sum_exp_by_rows(logits: Tensor) -> Tensor:
    return torch.cat([_log_sum_exp(rows) for rows in logits.split(_rows_at_once(logits))])


def _softmax_gradient_by_rows(
    logits: Tensor, log_sums: Tensor, index: Tensor, scale: Tensor, own: Tensor, out: Tensor
) -> None:
    per_row = (log_sums.unsqueeze(1), index.unsqueeze(1), scale.unsqueeze(1), own.unsqueeze(1))
    pieces = (tensor.split(_rows_at_once(logits)) for tensor in (logits, *per_row, out))
    for rows, log_sum, label, weight, pull, target in zip(*pieces, strict=True):
        probability = (rows - log_sum).exp_().mul_(weight)
        target.copy_(probability.scatter_add_(1, label, -pull))


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _ELEMENTS // logits.shape[1])


def _write_softmax_gradient(logits: Tensor, *per_row_and_out: Tensor) -> None:
    *per_row, out = per_row_and_out
    out.copy_(_softmax_gradient(logits, *per_row))


def _replace_by_softmax_gradient(logits: Tensor, *per_row: Tensor) -> None:
    logits.copy_(_softmax_gradient(logits, *per_row))


_compiled_log_sum_exp = compiled_on_call(_log_sum_exp)
_compiled_write = compiled_on_call(_write_softmax_gradient)
_compiled_replacement = compiled_on_call(_replace_by_softmax_gradient)


def _compiled_softmax_gradient(logits: Tensor, *per_row_and_out: Tensor) -> None:
    *per_row, out = per_row_and_out
    if out is logits:  # torch.compile fails for two inputs that are one tensor and are written
        _compiled_replacement(logits, *per_row)
    else:
        _compiled_write(logits, *per_row, out)


def _log_sum_exp_on_host(logits: Tensor) -> Tensor:
    return (_compiled_log_sum_exp if seconds_compiling() else _log_sum_exp_by_rows)(logits)


def _softmax_gradient_on_host(*arguments: Tensor) -> None:
    (_compiled_softmax_gradient if seconds_compiling() else _softmax_gradient_by_rows)(*arguments)


_LOSS_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")  # lives as long as the process
_LOSS_LIBRARY.define("log_sum_exp(Tensor logits) -> Tensor")
_LOSS_LIBRARY.define(
    "softmax_gradient(Tensor logits, Tensor log_sums, Tensor index, Tensor scale, Tensor own, Tensor(a!) out) -> ()"
)
_LOSS_LIBRARY.impl("log_sum_exp", _log_sum_exp_on_host, "CompositeExplicitAutograd")
_LOSS_LIBRARY.impl("softmax_gradient", _softmax_gradient_on_host, "CompositeExplicitAutograd")
_LOSS_LIBRARY.impl("log_sum_exp", _compiled_log_sum_exp, "CUDA")
_LOSS_LIBRARY.impl("softmax_gradient", _compiled_softmax_gradient, "CUDA")
torch.library.register_fake(
    "shardwise::log_sum_exp",
    lambda logits: logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype)),
    lib=_LOSS_LIBRARY,
)
torch.library.register_fake("shardwise::softmax_gradient", lambda *_: None, lib=_LOSS_LIBRARY)

log_sum_exp = torch.ops.shardwise.log_sum_exp
"""log sum exp of each row of logits [n, v]: fp32 [n] (fp64 of fp64)."""
softmax_gradient = torch.ops.shardwise.softmax_gradient
"""Write scale exp(logit - log_sum), less ``own`` in column ``index`` of each row, to ``out`` [n, v] (or the logits)."""


# -- the loss -----------------------------------------------------------------------------------------


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[label] of every row, 0 where the label is ignored. logits [n, v], labels [n]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Tensor:
        index, here = vocabulary.local_index(labels)
        counted = labels != IGNORED if vocabulary.sharded else here
        log_sums = log_sum_exp(logits)
        picked = logits.gather(1, index.unsqueeze(1)).squeeze(1).to(log_sums.dtype)
        if vocabulary.sharded:
            log_sums, picked = vocabulary.combined(log_sums, picked * here)
        ctx.save_for_backward(logits, index, counted, here, log_sums)
        return (log_sums - picked) * counted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, index, counted, here, log_sums = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        softmax_gradient(logits, log_sums, index, grads[0] * counted, grads[0] * here, gradient)
        return gradient, None, None


def cross_entropy_sum(logits: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> Tensor:
    """Summed cross-entropy of ``logits`` [..., v] against ``labels`` [...]; label -100 is ignored.

    With a sharded ``vocabulary``, the logits are those of this rank's classes and the sum is over all classes. Returns
    a scalar in fp32 (fp64 for fp64 logits).
    """
    return cross_entropies(logits, labels, vocabulary).sum()


def cross_entropies(logits: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> Tensor:
    """The cross-entropy of every token, of the shape of ``labels``; 0 for label -100. Arguments as above."""
    rows: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocabulary)
    return rows.view(labels.shape)
