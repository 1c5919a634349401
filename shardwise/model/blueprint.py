"""A model before it exists: how to build it, what its blocks are, its loss, and the values it starts from.

The order of a run is fixed and explains the interface: ``build`` under ``torch.device("meta")`` (no memory,
any size), techniques transform the meta model and may turn parameters into DTensors, ``to_empty`` allocates
this rank's part, ``fill`` writes the values. The dry run leaves out ``fill`` and everything else is the same,
so ``loss`` must run on fake tensors: it never waits for the device and never branches on a value.

The loss is a (sum, count) pair, never a mean. Only the engine knows how many targets the global batch has,
and one division by that number makes any split of the batch over micro-batches and ranks give the same
gradient.

Chosen: one class per origin of a model (native, Hugging Face, a user's factory) behind this interface.
Refused: a common model class with hooks, which would have to wrap what transformers and users already wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwise.core.errors import RecipeError
from shardwise.core.recipe import Recipe
from shardwise.model.head import loss_head
from shardwise.model.loss import IGNORED, cross_entropy_sum

Batch = dict[str, Tensor]
"""One micro-batch. Of language models: ``input_ids`` and ``labels``, int64 [b, s], labels already shifted."""

LossSum = tuple[Tensor, Tensor]
"""(sum over the valid targets, fp32 or fp64 scalar; how many there are, int64 scalar)."""

SampleShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape without the batch dimension, and dtype, of every tensor of a sample."""


class Blueprint(ABC):
    """A model before it exists.

    Attributes:
        name: what reports call it.
        vocab: number of token ids the model accepts; None when it does not read tokens.
        depth: number of identical blocks; None when it cannot be varied.
        trained_in: dtype in which the weights on disk were trained, where that is said.
        dataset: map-style, of dicts of tensors, when the model brings its own data; else None.
    """

    name: str
    vocab: int | None = None
    depth: int | None = None
    trained_in: torch.dtype | None = None
    dataset: Dataset[Any] | None = None

    @abstractmethod
    def build(self, depth: int | None = None) -> nn.Module:
        """The model in fp32, values undefined. Call it within ``torch.device("meta")``.

        Args:
            depth: number of blocks instead of the model's own; only where ``self.depth`` is not None.
        """

    @abstractmethod
    def units(self, model: nn.Module) -> list[nn.Module]:
        """The blocks in forward order, each called once per forward pass; [] wraps the model as a whole."""

    def head(self, model: nn.Module) -> list[nn.Module]:
        """What always runs right after the last unit, in forward order, and shares no parameter with what runs before.

        [] where that is not known: it is then gathered and reduced with the rest of the model.
        """
        return []

    def output(self, model: nn.Module) -> nn.Linear | None:
        """The linear layer that yields the logits; None where there is none or it is not known."""
        return None

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Run the model on a batch and sum the loss over its valid targets."""

    @abstractmethod
    def fill(self, model: nn.Module, seed: int) -> None:
        """Write initial values, or weights from disk, into every parameter and buffer, in place.

        The same global values for every sharding; each rank makes or reads about its own part. Tensors are
        plain or DTensors, of any float dtype, on any device, and not on ``meta``.
        """

    @abstractmethod
    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        """What one sample of a batch looks like."""

    def logits(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        """Scores of the next token [b, s, vocab] for ids [b, s]; raises RecipeError for other models."""
        raise RecipeError("this model does not write text", where=f"model: {self.name}")

    def count(self, batch: Batch) -> Tensor:
        """Number of valid targets of a batch, an int64 scalar on its device, without running the model."""
        return valid_targets(batch["labels"])

    def parameter_count(self, depth: int | None = None) -> int:
        """Parameters of the model; a shared one counts once."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build(depth).parameters())


def valid_targets(labels: Tensor) -> Tensor:
    """How many labels of any shape are not IGNORED, an int64 scalar."""
    return (labels != IGNORED).sum()


def token_loss(logits: Tensor, labels: Tensor) -> LossSum:
    """Cross entropy in nats and number of targets, for logits [..., classes] and int64 labels [...]."""
    return cross_entropy_sum(logits, labels), valid_targets(labels)


def language_loss(blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
    """The loss of the next tokens, from the logits, or from within the output layer where that is a LossHead."""
    labels = batch["labels"]
    head = loss_head(model)
    if head is None:
        return token_loss(blueprint.logits(model, batch["input_ids"]), labels)
    with head.against(labels):
        return head.confirm(blueprint.logits(model, batch["input_ids"])), valid_targets(labels)


def token_shapes(sequence_length: int) -> SampleShapes:
    """A sample of a language model: a sequence of token ids and the ids that follow them."""
    return {
        "input_ids": ((sequence_length,), torch.int64),
        "labels": ((sequence_length,), torch.int64),
    }


def blueprint_of(recipe: Recipe) -> Blueprint:
    """The blueprint a recipe's ``model:`` section names.

    Raises RecipeError when the model cannot be had or cannot read sequences this long, CheckpointError when
    its files are damaged.
    """
    # Each origin is imported when it is asked for: transformers takes seconds, a factory runs a user's code.
    spec, length = recipe.model, recipe.data.sequence_length
    if spec.hf is not None:
        from shardwise.model.hf import HuggingFaceModel

        return HuggingFaceModel(spec.hf, length)
    if spec.factory is not None:
        from shardwise.model.factory import FactoryModel

        return FactoryModel(spec.factory, spec.arguments)
    from shardwise.model.native import NativeModel

    return NativeModel.from_spec(spec, length)
