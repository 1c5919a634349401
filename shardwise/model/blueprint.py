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
from shardwise.core.sections import DataSpec
from shardwise.model.head import loss_head
from shardwise.model.layout import Layout
from shardwise.model.loss import cross_entropy_sum
from shardwise.model.parts import Part
from shardwise.model.slices import shared_names
from shardwise.model.split import TensorPlan
from shardwise.model.vocabulary import IGNORED, WHOLE, Vocabulary, vocabulary_of

Batch = dict[str, Tensor]
"""One micro-batch. Of language models: ``input_ids`` and ``labels``, int64 [b, s], labels already shifted.

Where these are a part of longer sequences, also ``positions``, int64 [s]: where the tokens stand in them. Of packed
documents ``positions`` are int64 [b, s], each token's within its document: a document begins at every 0.
"""

LossSum = tuple[Tensor, Tensor]
"""(sum over the valid targets, fp32 or fp64 scalar; how many there are, int64 scalar)."""

SampleShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape without the batch dimension, and dtype, of every tensor of a sample."""


class Blueprint(ABC):
    """A model before it exists.

    Attributes:
        name: what reports call it.
        origin: the folder or hub id of its weights, where they have one.
        vocab: number of token ids the model accepts; None when it does not read tokens.
        depth: number of identical blocks; None when it cannot be varied.
        width: channels of what one block hands to the next; None where the model cannot be cut between blocks.
        trained_in: dtype in which the weights on disk were trained, where that is said.
        dataset: map-style, of dicts of tensors, when the model brings its own data; else None.
    """

    name: str
    origin: str | None = None
    vocab: int | None = None
    depth: int | None = None
    width: int | None = None
    trained_in: torch.dtype | None = None
    dataset: Dataset[Any] | None = None

    @abstractmethod
    def build(self, depth: int | None = None) -> nn.Module:
        """The model in fp32, values undefined. Call it within ``torch.device("meta")``.

        Args:
            depth: number of blocks instead of the model's own; only where ``self.depth`` is not None.
        """

    def part(self, part: Part) -> nn.Module:
        """A part of the model, values undefined, with the names that its tensors have in the whole.

        It is called as the whole is, but is given hidden states [b, s, width] in the place of ids unless it is the
        first, and returns hidden states unless it is the last. Raises RecipeError where ``width`` is None.
        """
        raise RecipeError(
            "this model cannot be cut into stages",
            where="strategy.pipeline_parallel",
            why=f"{self.name} does not say what lies before, within and after its blocks",
            fix="set it to 1",
        )

    def tied(self) -> tuple[str, ...]:
        """Names of parameters that lie before the first block and are used again after the last one."""
        if self.width is None:
            return ()
        with torch.device("meta"):
            return tuple(dict.fromkeys(shared_names(self.build(depth=1)).values()))

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

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        """How tensor parallelism splits this model's layers.

        Raises RecipeError for a model that does not say how, with the reason.
        """
        raise RecipeError(
            "this model cannot be split over ranks",
            where="strategy.tensor_parallel",
            why="it does not say which of its layers are split, and how",
            fix="the nearest that works is tensor_parallel: 1",
        )

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Run the model on a batch and sum the loss over its valid targets."""

    @abstractmethod
    def fill(self, model: nn.Module, seed: int) -> None:
        """Write initial values, or weights from disk, into every parameter and buffer, in place.

        The same global values for every sharding; each rank makes or reads about its own part. Tensors are
        plain or DTensors, of any float dtype, on any device, and not on ``meta``.
        """

    def restore(self, model: nn.Module) -> None:  # noqa: B027 (most models have none)
        """Compute the buffers that are never saved, for whoever reads weights without ``fill``."""

    @abstractmethod
    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        """What one sample of a batch looks like."""

    def indivisible(self, model: nn.Module) -> str:
        """Why a rank cannot run the model on a part of each sequence, given its positions; "" where it can."""
        return ""

    def unpackable(self, model: nn.Module) -> str:
        """Why documents packed into one sequence would see each other, given their positions; "" where they do not."""
        return f"{self.name} does not say how its attention is kept within a document"

    def logits(self, model: nn.Module, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Scores of the next token [b, s, vocab] for ids [b, s]; raises RecipeError for other models.

        Of a part: from and to what it is given and returns. ``positions`` are those of the ids, where they are not
        the first s: [s] of a part of each sequence, [b, s] of packed documents.
        """
        raise RecipeError("this model does not write text", where=f"model: {self.name}")

    def layout(self) -> Layout:
        """How the model lies in a folder that transformers loads; raises RecipeError where it does not know it."""
        raise RecipeError(
            "this model cannot be written for transformers",
            where=f"model: {self.name}",
            why="it is code of your own, which no config.json describes",
            fix="save it yourself: its weights are in the run's checkpoints, as safetensors",
        )

    def rate_ratio(self, name: str) -> float:
        """The learning rate of a parameter, by canonical name, over that of the schedule."""
        return 1.0

    def count(self, batch: Batch) -> Tensor:
        """Number of valid targets of a batch, an int64 scalar on its device, without running the model."""
        return valid_targets(batch["labels"])

    def parameter_count(self, depth: int | None = None) -> int:
        """Parameters of the model; a shared one counts once."""
        return sum(self.parameter_counts(depth))

    def parameter_counts(self, depth: int | None = None) -> tuple[int, int]:
        """(parameters that are trained, parameters that are frozen)."""
        with torch.device("meta"):
            parameters = list(self.build(depth).parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return trained, sum(parameter.numel() for parameter in parameters) - trained


def valid_targets(labels: Tensor) -> Tensor:
    """How many labels of any shape are not IGNORED, an int64 scalar."""
    return (labels != IGNORED).sum()


def token_loss(logits: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE) -> LossSum:
    """Cross entropy in nats and number of targets, for logits [..., classes] and int64 labels [...]."""
    return cross_entropy_sum(logits, labels, vocabulary), valid_targets(labels)


def language_loss(blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
    """The loss of the next tokens, from the logits, or from within the output layer where that is a LossHead."""
    labels, given = batch["labels"], (batch["input_ids"], batch.get("positions"))
    head, vocabulary = loss_head(model), vocabulary_of(model)
    with vocabulary.apart():
        if head is None:
            return token_loss(blueprint.logits(model, *given), labels, vocabulary)
        with head.against(labels, vocabulary):
            return head.confirm(blueprint.logits(model, *given)), valid_targets(labels)


def token_shapes(sequence_length: int) -> SampleShapes:
    """A sample of a language model: a sequence of token ids and the ids that follow them."""
    return {
        "input_ids": ((sequence_length,), torch.int64),
        "labels": ((sequence_length,), torch.int64),
    }


def batch_shapes(blueprint: Blueprint, data: DataSpec) -> SampleShapes:
    """A sample of what the data makes: the model's own, and of packed documents their positions."""
    shapes = blueprint.sample_shapes(data.sequence_length)
    return {**shapes, "positions": ((data.sequence_length,), torch.int64)} if data.packing else shapes


def blueprint_of(recipe: Recipe) -> Blueprint:
    """The blueprint of the model that a recipe names, with the adapters that it asks for.

    Raises RecipeError when the model cannot be had, cannot read sequences this long or has no such layers,
    CheckpointError when its files are damaged.
    """
    base = _base_of(recipe)
    if recipe.adapter is None:
        return base
    from shardwise.model.adapted import AdaptedModel

    return AdaptedModel(base, recipe.adapter)


def _base_of(recipe: Recipe) -> Blueprint:
    """What the recipe's ``model:`` section names."""
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
