"""Dry runs with the loss and the recomputation of another stack (stacks.py), so that its memory is counted, too.

``practised`` replaces functions of Shardwise by functions that hold what the other software holds. What they hold is
read from its source; the arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from stacks import ALL_HEADS, NORM_IN_PARTS, Practice
from torch import Tensor

from shardwise.dryrun import target
from shardwise.model import attention
from shardwise.runtime import language_loss
from shardwise.runtime.parallel import tensor
from shardwise.runtime.parallel.tp_collectives import TPGroup, exchanged
from shardwise.runtime.parallel.vocabulary import WHOLE_VOCABULARY, Vocabulary
from shardwise.runtime.recompute import selective

Loss = Callable[[Tensor, Tensor, Vocabulary], Tensor]
"""Summed cross-entropy of logits [..., v] against labels [...]."""


class _LogSoftmax(torch.autograd.Function):
    """PyTorch's loss of logits that are sharded over classes (torch/distributed/tensor/parallel/loss.py).

    It saves fp32 log probabilities. The backward pass makes a gradient of zeros, adds the softmax and scales the sum.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Tensor:
        index, here = vocabulary.local_index(labels)
        shifted = logits - logits.amax(1, keepdim=True)
        sums = torch.sum(shifted.exp(), 1)
        log_probabilities = shifted - sums.log().unsqueeze(1)
        picked = shifted.gather(1, index.unsqueeze(1)).squeeze(1) * here
        log_sums, picked = vocabulary.combined(sums.log(), picked)
        ctx.save_for_backward(log_probabilities, index)
        return (log_sums - picked).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        log_probabilities, index = ctx.saved_tensors
        gradient = torch.zeros_like(log_probabilities)
        gradient.scatter_(1, index.unsqueeze(1), -1.0)
        return (gradient + log_probabilities.exp()) * grads[0], None, None


class _Softmax(torch.autograd.Function):
    """nanotron's loss (src/nanotron/parallel/tensor_parallel/functional.py): saves the fp32 softmax.

    The softmax becomes the gradient in place.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Tensor:
        index, here = vocabulary.local_index(labels)
        softmax = logits - logits.amax(1, keepdim=True)
        picked = softmax.gather(1, index.unsqueeze(1)).squeeze(1) * here
        softmax.exp_()
        sums = softmax.sum(1)
        softmax.div_(sums.unsqueeze(1))
        log_sums, picked = vocabulary.combined(sums.log(), picked)
        ctx.save_for_backward(softmax, index)
        return (log_sums - picked).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        softmax, index = ctx.saved_tensors
        softmax.scatter_add_(1, index.unsqueeze(1), -torch.ones_like(index, dtype=softmax.dtype).unsqueeze(1))
        return softmax.mul_(grads[0]), None, None


def _fp32(logits: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> Tensor:
    """``F.cross_entropy(logits.float(), labels)``."""
    wide, flat = logits.flatten(0, -2).float(), labels.flatten()
    if vocabulary.sharded:
        loss: Tensor = _LogSoftmax.apply(wide, flat, vocabulary)
        return loss
    return F.cross_entropy(wide, flat, reduction="sum")


def _fp32_in_chunks(logits: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> Tensor:
    """The same of eight chunks of the sequence, one after the other."""
    parts = zip(logits.chunk(8, dim=1), labels.chunk(8, dim=1), strict=True)
    return torch.stack([_fp32(part, label, vocabulary) for part, label in parts]).sum()


def _softmax(logits: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> Tensor:
    loss: Tensor = _Softmax.apply(logits.flatten(0, -2).float(), labels.flatten(), vocabulary)
    return loss


LOSSES: dict[str, Loss] = {"fp32": _fp32, "fp32 in chunks": _fp32_in_chunks, "softmax": _softmax}
"""By the name in stacks.py."""


def keeps_every_second(call: selective.OperationCall, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether torchtitan's selective recomputation keeps a result: that of attention, and every second product.

    Products of 8 bits are among them: its mode sees ``aten.mm`` of two Float8Tensors before these take it apart.
    """
    operation, number = call
    if not selective.is_kept(operation, args, kwargs, result):
        return False
    return selective.is_attention(operation) or number % 2 == 0


@contextmanager
def set_apart(settings: Mapping[str, object]) -> Iterator[None]:
    """Dry runs in this block have the settings of a practice that are not Shardwise's."""
    with ExitStack() as patches:
        if settings.get(NORM_IN_PARTS):
            patches.enter_context(mock.patch.object(target, "is_traced", lambda: True))
        if settings.get(ALL_HEADS):
            patches.enter_context(_all_heads())
        yield


@contextmanager
def _all_heads() -> Iterator[None]:
    """Every rank rotates queries and keys of all heads, and takes its own; gradients are gathered, too."""
    groups: list[TPGroup] = []
    shard, rotate = tensor.shard_layers, attention.rotate_positions

    def sharding(model: Any, plan: Any, mesh: Any, *shares: bool) -> None:
        groups.append(TPGroup.of(mesh.get_group()))
        shard(model, plan, mesh, *shares)

    def gathered(part: Tensor) -> Tensor:  # [b, s, heads, d]
        return groups[-1].all_gather(part)

    def own(whole: Tensor) -> Tensor:
        return whole.chunk(groups[-1].size, dim=-2)[groups[-1].rank].clone()

    def rotating(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return exchanged(rotate(exchanged(x, gathered, own), cos, sin), own, gathered)

    with (
        mock.patch.object(tensor, "shard_layers", sharding),
        mock.patch.object(attention, "rotate_positions", rotating),
    ):
        yield


@contextmanager
def practised(practice: Practice) -> Iterator[None]:
    """Dry runs in this block hold what the software of ``practice`` holds."""

    def contexts() -> tuple[selective.Keeping, selective.Returning]:
        results = selective.Results()
        return selective.Keeping(results, keeps_every_second), selective.Returning(results)

    with ExitStack() as patches:
        patches.enter_context(set_apart(practice.settings))
        if practice.repeats:
            patches.enter_context(mock.patch.object(selective, "selective_contexts", contexts))
        if practice.loss:
            patches.enter_context(
                mock.patch.object(language_loss, "cross_entropy_sum", LOSSES[practice.loss])
            )
        yield
