"""The CTC loss (Graves et al. 2006) in a dry run.

It saves log α [batch, time, 2 · longest target + 1], whose size depends on the lengths in a batch, and its backward
pass makes log β of the same size. A dry run has no lengths: the longest target is as long as its row, which is a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def _ctc_loss(log_probs: Tensor, targets: Tensor, *lengths: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """log_probs [time, batch, classes]; targets [batch, longest], or all of them in one row."""
    time, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * targets.shape[-1] + 1)


def _loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    losses: Tensor,
    log_alpha: Tensor,
    *rest: Any,
    **named: Any,
) -> Tensor:
    # Both are alive at the same time, as in the kernel; the tracker sees the peak.
    log_beta = log_alpha.new_empty(log_alpha.shape)
    to_log_probs = log_probs.new_empty(log_probs.shape)
    del log_beta
    return to_log_probs


CTC: Mapping[str, Callable[..., Any]] = {
    **{f"aten::_ctc_loss{lengths}": _ctc_loss for lengths in ("", ".Tensor")},
    **{f"aten::_ctc_loss_backward{lengths}": _loss_backward for lengths in ("", ".Tensor")},
}
"""Lengths may be numbers or tensors."""
