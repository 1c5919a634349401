"""The next-token loss of a language model, as a sum and the number of targets.

The loss is computed from the logits, or inside the output layer if that layer is a LossHead
(chunked_cross_entropy.py). Under tensor parallelism each rank computes only the logits of its classes
(vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.runtime.chunked_cross_entropy import loss_head
from shardwise.runtime.cross_entropy import cross_entropies, cross_entropy_sum
from shardwise.runtime.parallel.vocabulary import IGNORED, WHOLE_VOCABULARY, Vocabulary, vocabulary_of

Logits = Callable[[nn.Module, Tensor, Tensor | None, Tensor | None], Tensor]
"""Runs a model on ids [b, s], positions and the starts of packed documents, and returns logits [b, s, vocab]."""


def valid_targets(labels: Tensor) -> Tensor:
    """Number of labels that are not IGNORED, for labels of any shape; an int64 scalar."""
    return (labels != IGNORED).sum()


def token_loss(
    logits: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE_VOCABULARY
) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy in nats, number of targets) for logits [..., classes] and int64 labels [...]."""
    return cross_entropy_sum(logits, labels, vocabulary), valid_targets(labels)


def language_loss(logits_of: Logits, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(summed next-token loss, number of targets) of a batch with ``input_ids`` and ``labels`` [b, s]."""
    labels = batch["labels"]
    given = (batch["input_ids"], batch.get("positions"), batch.get("starts"))
    head, vocabulary = loss_head(model), vocabulary_of(model)
    with vocabulary.local_logits():
        if head is None:
            return token_loss(logits_of(model, *given), labels, vocabulary)
        with head.against(labels, vocabulary):
            return head.confirm(logits_of(model, *given)), valid_targets(labels)


def log_probabilities(logits_of: Logits, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """log p of every label of a batch, 0 where the label is IGNORED: [b, s] in fp32 (fp64 in fp64).

    A chunked loss computes them without whole logits.
    """
    labels = batch["labels"]
    given = (batch["input_ids"], batch.get("positions"), batch.get("starts"))
    head, vocabulary = loss_head(model), vocabulary_of(model)
    with vocabulary.local_logits():
        if head is None:
            return -cross_entropies(logits_of(model, *given), labels, vocabulary)
        with head.against(labels, vocabulary, per_token=True):
            return -head.confirm(logits_of(model, *given)).view(labels.shape)


@contextmanager
def tempered(output: nn.Linear | None, temperature: float) -> Iterator[None]:
    """Within it the logits of a model are divided by the temperature, whatever reads them.

    The input of its output layer is divided, so that losses in chunks have it too. Raises RecipeError without such a
    layer.
    """
    if temperature == 1:
        yield
        return
    if output is None or output._parameters.get("bias") is not None:
        why = "the model has no output layer, or one with a bias"
        raise RecipeError("temperature must be 1", where="objective.temperature", why=why, fix="remove it")
    hook = output.register_forward_pre_hook(lambda _, given: (given[0] / temperature, *given[1:]))
    try:
        yield
    finally:
        hook.remove()


def with_auxiliary(loss: tuple[Tensor, Tensor], auxiliary: Tensor | None) -> tuple[Tensor, Tensor]:
    """A micro-batch's loss with the auxiliary loss of its pass, a mean, which counts by the targets."""
    total, count = loss
    return loss if auxiliary is None else (total + count * auxiliary.to(total.dtype), count)
