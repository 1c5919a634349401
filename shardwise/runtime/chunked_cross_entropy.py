"""Fused output projection and cross-entropy: the logits never exist as a whole.

Logits take tokens x vocabulary values, often more than all activations of the model. Here one chunk is projected, its
loss and gradients are computed, and the chunk is freed. The method depends on the dtype of the products:

    fp32, fp64   The forward pass computes the gradients, one chunk of tokens at a time. The backward pass multiplies
                 them by the gradient of the loss. No product is computed twice.
    16 bits      Both passes take one chunk of the vocabulary at a time. The forward pass saves one number per token.
                 The backward pass recomputes the logits, so each weight's gradient is one product with the loss scale
                 in it, rounded once. It costs a third more FLOPs in the head: 2 % of the total for Llama-3-8B.

In 16 bits the first method would sum rounded gradients, or need fp32 gradients of the size of the weights. Both
methods equal the plain loss up to rounding; exponentials and sums are fp32 (fp64 for fp64). Refused: torch's
``linear_cross_entropy`` (2.13), which has only the first method; filtering small probabilities (Wijmans et al. 2024,
"Cut Your Losses"), which is not exact.

``LossHead`` replaces the model's output layer. It returns the loss inside the model's own forward pass, so FSDP2
gathers and casts its weights as usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.runtime.accumulation import accumulation_dtype
from shardwise.runtime.cross_entropy import log_sum_exp, softmax_gradient
from shardwise.runtime.layer_replacement import take_over
from shardwise.runtime.parallel.vocabulary import IGNORED, WHOLE_VOCABULARY, Vocabulary

TOKEN_CHUNKS = 20
"""Chunks of tokens in fp32: with a few numbers per token, less than 1/16 of the logits."""

VOCABULARY_CHUNKS = 17
"""Chunks of the vocabulary: with a few numbers per token, less than 1/16 of the logits. See ``_vocabulary_chunks``."""


class LossHead(nn.Linear):
    """A linear output layer that can return the loss instead of logits. Takes over the layer's parameters."""

    def __init__(self, layer: nn.Linear) -> None:
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=False)
        take_over(self, layer)
        self._labels: Tensor | None = None
        self._vocabulary = WHOLE_VOCABULARY
        self._loss: Tensor | None = None
        self._per_token = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return super().forward(hidden)
        function = linear_cross_entropies if self._per_token else linear_cross_entropy_sum
        self._loss = function(hidden, self.weight, self.bias, self._labels, self._vocabulary)
        return self._loss

    @contextmanager
    def against(
        self, labels: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY, per_token: bool = False
    ) -> Iterator[None]:
        """Inside the context the layer returns the loss summed over ``labels``, a scalar, or that of every token."""
        self._labels, self._vocabulary, self._per_token = labels, vocabulary, per_token
        try:
            yield
        finally:
            self._labels = self._loss = None

    def confirm(self, returned: Tensor) -> Tensor:
        """Return the model's output, which must be this layer's loss unchanged.

        Raises RecipeError if the model changes its logits (caps or scales them) after the output layer.
        """
        if returned is not self._loss:
            raise RecipeError(
                "the loss cannot be computed in chunks for this model",
                where="strategy.loss",
                why="the model changes its logits after its output layer",
                fix="set it to logits",
            )
        return returned


def loss_head(model: nn.Module) -> LossHead | None:
    """The model's LossHead, if it has one."""
    return next((module for module in model.modules() if isinstance(module, LossHead)), None)


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocabulary: Vocabulary = WHOLE_VOCABULARY,
) -> Tensor:
    """Summed cross-entropy of ``hidden @ weight.T + bias`` against ``labels``; label -100 is ignored.

    Args:
        hidden: [..., h].
        weight: [v, h], of the dtype of ``hidden``.
        bias: [v] or None.
        labels: int64 [...].
        vocabulary: if sharded, weight and bias are this rank's.

    Returns a scalar in fp32 (fp64 for fp64 inputs).
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = labels.flatten()
    if not torch.is_grad_enabled():
        return _losses(rows, weight, bias, targets, vocabulary)[0].sum()
    if rows.dtype in (torch.float32, torch.float64):
        return _GradientsInForward.apply(rows, weight, bias, targets, vocabulary)
    return _RecomputedLogits.apply(rows, weight, bias, targets, vocabulary).sum()


def linear_cross_entropies(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocabulary: Vocabulary = WHOLE_VOCABULARY,
) -> Tensor:
    """The cross-entropy of every token [n]; 0 for label -100. Arguments as above.

    Every token may have another gradient, so all dtypes recompute the logits. The result is no view: FSDP2 puts a hook
    on what a module returns.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = labels.flatten()
    if torch.is_grad_enabled():
        losses: Tensor = _RecomputedLogits.apply(rows, weight, bias, targets, vocabulary)
        return losses
    return _losses(rows, weight, bias, targets, vocabulary)[0]


class _GradientsInForward(torch.autograd.Function):
    """The method for fp32 and fp64. hidden [n, h], weight [v, h], bias [v] or None, labels [n]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocabulary: Vocabulary
    ) -> Tensor:
        needed = ctx.needs_input_grad
        grads = [
            torch.empty_like(hidden) if needed[0] else None,
            torch.zeros_like(weight) if needed[1] else None,
            torch.zeros_like(bias) if bias is not None and needed[2] else None,
        ]
        total = hidden.new_zeros(())
        size = -(-hidden.shape[0] // TOKEN_CHUNKS)
        for start in range(0, hidden.shape[0], size):
            chunk = slice(start, start + size)
            index, here = vocabulary.local_index(labels[chunk])
            probability, losses = _softmax(hidden[chunk], weight, bias, labels[chunk], vocabulary)
            total += losses.sum()
            # In place: probabilities become the gradient of the logits.
            probability.scatter_add_(1, index.unsqueeze(1), -here.to(probability.dtype).unsqueeze(1))
            if grads[0] is not None:
                torch.mm(probability, weight, out=grads[0][chunk])
            if grads[1] is not None:
                grads[1].addmm_(probability.t(), hidden[chunk])
            if grads[2] is not None:
                grads[2] += probability.sum(0)
            del probability  # free it before the next chunk
        ctx.grads = grads
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(grad.mul_(grads[0]) if grad is not None else None for grad in _taken(ctx)), None, None)


def _taken(ctx: Any) -> list[Tensor | None]:
    """Return the gradients and forget them, so that the caller owns them."""
    grads: list[Tensor | None] = ctx.grads
    if grads is None:
        raise RuntimeError("this loss supports one backward pass, which has been run")
    ctx.grads = None
    return grads


class _RecomputedLogits(torch.autograd.Function):
    """The loss of every token [n], with logits once more in the backward pass: the method for 16 bits.

    hidden [n, h], weight [v, h], bias [v] or None, labels [n].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocabulary: Vocabulary
    ) -> Tensor:
        losses, log_sums = _losses(hidden, weight, bias, labels, vocabulary)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums)
        ctx.first = vocabulary.start
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        needed = ctx.needs_input_grad
        scale = grads[0] * (labels != IGNORED)
        to_hidden = torch.zeros_like(hidden, dtype=log_sums.dtype) if needed[0] else None
        to_weight = torch.empty_like(weight) if needed[1] else None
        to_bias = torch.empty_like(bias) if bias is not None and needed[2] else None
        for part in _vocabulary_chunks(weight.shape[0]):
            logits = nn.functional.linear(hidden, weight[part], None if bias is None else bias[part])
            index, inside = _position(labels, ctx.first + part.start, logits.shape[1])
            softmax_gradient(logits, log_sums, index.squeeze(1), scale, scale * inside, logits)
            if to_hidden is not None:
                to_hidden += logits @ weight[part]
            if to_weight is not None:
                torch.mm(logits.t(), hidden, out=to_weight[part])
            if to_bias is not None:
                to_bias[part] = logits.sum(0, dtype=log_sums.dtype)
            del logits  # free it before the next chunk
        return None if to_hidden is None else to_hidden.to(hidden.dtype), to_weight, to_bias, None, None


def _vocabulary_chunks(vocabulary: int) -> Iterator[slice]:
    """Chunks of the vocabulary. A tensor core needs rows of a multiple of 16 bytes, and fills tiles of 128 columns."""
    size = -(-vocabulary // VOCABULARY_CHUNKS)
    size -= size % next(unit for unit in (128, 8, 1) if unit <= size)
    for start in range(0, vocabulary, size):
        yield slice(start, min(start + size, vocabulary))


def _losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """(loss of every token [n], log-sum-exp [n]), both in fp32 (fp64 for fp64).

    The sum over the vocabulary is a running one.
    """
    wide = accumulation_dtype(hidden.dtype)
    log_sums = hidden.new_full((hidden.shape[0],), -math.inf, dtype=wide)
    # Zeros, but an error for a label that is no class: no chunk would have it.
    picked = log_sums.new_zeros(()).expand(weight.shape[0]).gather(0, vocabulary.local_index(labels)[0])
    for part in _vocabulary_chunks(weight.shape[0]):
        logits = nn.functional.linear(hidden, weight[part], None if bias is None else bias[part])
        index, inside = _position(labels, vocabulary.start + part.start, logits.shape[1])
        picked += logits.gather(1, index).squeeze(1) * inside
        log_sums = torch.logaddexp(log_sums, log_sum_exp(logits))
        del logits  # free it before the next chunk
    whole, picked = vocabulary.combined(log_sums, picked)
    return (whole - picked) * (labels != IGNORED), whole


def _position(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Of a chunk of classes: (the label's column [n, 1], 0 or the last one for others; whether it is inside [n])."""
    inside = (labels >= first) & (labels < first + columns)
    return (labels - first).clamp(0, columns - 1).unsqueeze(1), inside


def _softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """(probabilities [n, v] of valid tokens, else 0; loss of every token [n])."""
    logits = nn.functional.linear(hidden, weight, bias)
    index, here = vocabulary.local_index(labels)
    picked = logits.gather(1, index.unsqueeze(1)).squeeze(1)
    log_sum, sums = _exponentials(logits)
    counted = (labels != IGNORED).to(logits.dtype)
    if vocabulary.sharded:
        whole, picked = vocabulary.combined(log_sum, picked * here)
        sums = sums * (whole - log_sum).exp().unsqueeze(1)
        log_sum = whole
    return logits.mul_(counted.unsqueeze(1) / sums), (log_sum - picked) * counted


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Replace logits [n, v] by exp(logit - maximum) in place. Returns (log-sum-exp [n], sums [n, 1])."""
    largest = logits.amax(1, keepdim=True)
    sums = logits.sub_(largest).exp_().sum(1, keepdim=True)
    return (sums.log() + largest).squeeze(1), sums
