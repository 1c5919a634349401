"""The interface of a model: how to build it, its blocks, its loss and its initial weights.

A run calls ``build`` on the meta device, applies techniques, allocates shards by ``to_empty``, and writes values by
``fill``. The dry run skips only ``fill``, so ``loss`` runs on fake tensors: it never waits for the device and never
branches on a value.

The loss is a (sum, count) pair, never a mean. The engine divides once by the number of targets in the global batch, so
the gradient does not depend on the split over micro-batches and ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwise.core.errors import RecipeError
from shardwise.model.files.folder_layout import HFFolder
from shardwise.model.repetition import Repetition
from shardwise.model.stage import Stage
from shardwise.recipe.sections import DataSpec
from shardwise.runtime.language_loss import log_probabilities, valid_targets
from shardwise.runtime.parallel.shard_slices import shared_names
from shardwise.runtime.parallel.tensor import TensorPlan
from shardwise.runtime.quantization.as_parameter import StoredPacking
from shardwise.runtime.quantization.weights import QuantizedWeight

Batch = dict[str, Tensor]
"""One micro-batch. Language models: ``input_ids`` and ``labels``, int64 [b, s], with labels already shifted.

``positions`` are int64 [s] under context parallelism (this rank's tokens), and [b, s] for packed documents, where
every 0 begins a document. ``starts`` tells where the documents of whole rows begin, int32 [b, n]: ascending from 0, the
row's length for the documents that a row lacks.
"""

PADDING = "shardwise.padding"
"""The key of a batch without samples: a rank runs it because the others have one, and its loss counts as zero."""

LossSum = tuple[Tensor, Tensor]
"""(loss summed over the valid targets, fp32 or fp64 scalar; number of valid targets, int64 scalar)."""

_TYPICAL = 128
"""Tokens of a packed document, for the number of starts in a plan."""

SampleShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name of each tensor of a sample: (shape without the batch dimension, dtype)."""


class ForwardOnly(Protocol):
    """Runs the trained model without gradients, in any layout."""

    def forward_only(
        self, batches: Sequence[Batch], function: Callable[[nn.Module, Batch], Tensor]
    ) -> list[Tensor | None]:
        """``function`` of the model in evaluation mode and each micro-batch; None on ranks without the model's end."""

    def as_before_training(self) -> AbstractContextManager[None]:
        """Within it the model computes as before the first step (``strategy.reference: adapter_off``)."""

    def global_sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks that see other tokens, equal on all ranks; in pipelines of the last stage's values."""

    @property
    def blueprint(self) -> Blueprint:
        """Of the trained model."""

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """The models that are not trained, by role."""


class TrainingObjective(ABC):
    """What a run makes small. It may read models other than the trained one.

    A model has a role. The *trained* one is the recipe's. The others, such as a teacher or a reference, are *frozen*:
    they are built, divided over the ranks and filled as the trained one is, in the dtype of compute. They have no
    gradients and no optimizer state, and checkpoints do not store them.

    Attributes:
        counted: what ``count`` counts, in a word: the loss of a run is the mean over them.
        measures: names of the measures that ``loss`` notes (``runtime/measures.py``).
        per_token, per_sample: names of further tensors of its batches: [b, s], one value for each token, and others.
        whole_step: whether ``before_step`` is to be called.
        cancels: whether terms of its loss cancel each other, so that the rest may be rounding error alone.
        plan_notes: sentences for the plan.
    """

    counted: str = "targets"
    measures: tuple[str, ...] = ()
    per_token: frozenset[str] = frozenset()
    per_sample: frozenset[str] = frozenset()
    whole_step: bool = False
    cancels: bool = False
    plan_notes: tuple[str, ...] = ()

    def sample_shapes(self, shapes: SampleShapes, data: DataSpec) -> SampleShapes:
        """Shapes and dtypes of one of its samples, from those of the model's own."""
        return shapes

    def rows(self, batch: Batch) -> Batch:
        """A micro-batch of samples as rows of tokens, where a sample has several rows. It changes rows in no way."""
        return batch

    def with_reference(self, how: str | None) -> TrainingObjective:
        """The objective under ``strategy.reference``; None is as the objective says."""
        return self

    def precomputed(self) -> Mapping[str, Callable[[Batch], Batch]]:
        """By name what samples carry of the model before training: ``of_reference`` of a part of their batch."""
        return {}

    def of_reference(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        """What the loss reads of the model before training, [m, units, ...]."""
        raise NotImplementedError("it has no reference")

    def before_step(self, passes: ForwardOnly, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of a step with what the loss needs of all of them; called before the first pass."""
        return batches

    def frozen_models(self) -> Mapping[str, Blueprint]:
        """The models that it reads and that are not trained, by role, such as ``reference``."""
        return {}

    def annotated(self, batch: Batch, frozen: Mapping[str, nn.Module]) -> Batch:
        """A micro-batch with what the loss needs of the frozen models. Without gradients, on fake tensors too."""
        return batch

    def count(self, blueprint: Blueprint, batch: Batch) -> Tensor:
        """Number of valid targets that ``loss`` returns for a batch, an int64 scalar. It runs no model."""
        return blueprint.count(batch)

    @abstractmethod
    def loss(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
        """The loss of an annotated micro-batch, summed over its valid targets, and their number."""


class OwnLoss(TrainingObjective):
    """The loss that the model's blueprint computes."""

    counted = "tokens"

    def loss(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
        return blueprint.loss(model, batch)


def loss_of(
    objective: TrainingObjective,
    blueprint: Blueprint,
    model: nn.Module,
    frozen: Mapping[str, nn.Module],
    batch: Batch,
) -> LossSum:
    """Run the frozen models and the trained one on a micro-batch."""
    if frozen:
        with torch.no_grad():
            batch = objective.annotated(batch, frozen)
    return objective.loss(blueprint, model, batch)


class Blueprint(ABC):
    """A model before it is built.

    Attributes:
        name: the name in reports.
        origin: the folder or hub id of its weights, if any.
        vocab: number of token ids; None if the model does not read tokens.
        context: the longest sequence that the model reads, in tokens; None for no limit.
        depth: number of identical blocks; None if it cannot be varied.
        width: channels between two blocks; None if the model cannot be cut into pipeline stages.
        block_kinds: of each block, what makes it like another or not; None if there is no depth and they are not known.
        trained_in: training dtype of the weights on disk, if known.
        dataset: map-style dataset of dicts of tensors, if the model brings its own data.
        objective: causal, masked or seq2seq (hf/objective.py); None if the model brings its own loss.
        quantized: whether the weights on disk are quantized. Those that train are dequantized.
        casts_inputs: whether its layers cast floating-point inputs themselves (``compute_in``).
        counts_in_loss: whether only ``loss`` knows the number of targets, and there is no ``count``.
        new_layers: names of layers that are not the pretrained model's. Adapters train them in full.
        private_layers: further ones, which neither exports nor files of adapters have.
        peft_task: PEFT's task type of its adapters, if it is not that of ``objective``.
        config_text: what its results depend on, other than its weights and the recipe, to know them again.
        minimises: what a run makes small; ``loss`` unless the recipe names an objective.
    """

    name: str
    origin: str | None = None
    vocab: int | None = None
    context: int | None = None
    depth: int | None = None
    width: int | None = None
    block_kinds: tuple[object, ...] | None = None
    trained_in: torch.dtype | None = None
    dataset: Dataset[Any] | None = None
    objective: str | None = "causal"
    quantized: bool = False
    casts_inputs: bool = False
    counts_in_loss: bool = False
    new_layers: tuple[str, ...] = ()
    private_layers: tuple[str, ...] = ()
    peft_task: str | None = None
    config_text: str = ""
    minimises: TrainingObjective = OwnLoss()

    @abstractmethod
    def build(self, depth: int | None = None) -> nn.Module:
        """Build the model in fp32 with undefined values. Call it under ``torch.device("meta")``.

        Args:
            depth: number of blocks, if not the model's own. Requires ``self.repetition``.
        """

    @property
    def repetition(self) -> Repetition | None:
        """How blocks repeat themselves, so that shallower models predict this one; None where they do not.

        A shallower model has whole periods less, and all the first blocks.
        """
        return None if self.depth is None else Repetition(self.depth, 1)

    def stage(self, stage: Stage) -> nn.Module:
        """Build one pipeline stage with undefined values, under the whole model's tensor names.

        All stages but the first take hidden states [b, s, width] instead of ids; all but the last return hidden
        states. Raises RecipeError if ``width`` is None.
        """
        raise RecipeError(
            "this model cannot be cut into stages",
            where="strategy.pipeline_parallel",
            why=self.stage_obstacle(),
            fix="set it to 1",
        )

    def stage_obstacle(self) -> str:
        """Why the model cannot be cut into stages, where ``stage`` raises."""
        return f"{self.name} does not name its embedding, its blocks and its head"

    def compile_obstacle(self) -> str:
        """Why blocks cannot be compiled one by one; "" where they can."""
        return ""

    def tied(self) -> tuple[str, ...]:
        """Names of parameters that the embedding shares with the output layer."""
        if self.width is None:
            return ()
        with torch.device("meta"):
            return tuple(dict.fromkeys(shared_names(self.build(depth=1)).values()))

    def compute_in(self, model: nn.Module, dtype: torch.dtype) -> None:  # noqa: B027 (models of ours cast themselves)
        """Tell a built model the dtype of its computation, which need not be that of its inputs."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks in forward order, each called once per forward pass; [] wraps the model as a whole."""

    def head(self, model: nn.Module) -> list[nn.Module]:
        """The modules after the last block, in forward order, if they share no parameter with earlier ones; [] if
        unknown.
        """
        return []

    def output(self, model: nn.Module) -> nn.Linear | None:
        """The linear layer that returns the logits; None if there is none or it is unknown."""
        return None

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        """How tensor parallelism shards the layers. Raises RecipeError if the model does not say."""
        raise RecipeError(
            "this model has no tensor parallelism",
            where="strategy.tensor_parallel",
            why="it does not say how its layers are sharded",
            fix="the nearest that works is tensor_parallel: 1",
        )

    def log_probabilities(self, model: nn.Module, batch: Batch) -> Tensor:
        """log p of every label, 0 where it is ignored, [b, s] in fp32 (fp64 in fp64). For language models."""
        return log_probabilities(self.logits, model, batch)

    def router_loss(
        self, model: nn.Module, labels: Tensor
    ) -> AbstractContextManager[Callable[[], Tensor | None]]:
        """Within it one forward pass runs, on rows with these labels [b, s]. After it the function returns the weighted
        auxiliary losses of its routers, a scalar (``with_auxiliary``), or None.
        """
        return nullcontext(lambda: None)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Run the model on a batch and sum the loss over its valid targets."""

    @abstractmethod
    def fill(self, model: nn.Module, seed: int) -> None:
        """Write initial values, or weights from disk, into every parameter and buffer, in place.

        The global values do not depend on the sharding, and each rank makes or reads little more than its own shards.
        """

    def rehearse_fill(self, model: nn.Module) -> None:  # noqa: B027 (most models need little)
        """Allocate on fake tensors what ``fill`` allocates at its peak, if it may exceed that of a step."""

    def packings(self) -> Mapping[str, StoredPacking]:
        """How linear layers with quantized weights on disk are kept as they are stored, by path."""
        return {}

    def stored_weights(self) -> Callable[[str], QuantizedWeight]:
        """Opens the files; the function reads the quantized weight of a layer of ``packings``."""
        raise NotImplementedError("no quantized weights")

    def restore(self, model: nn.Module) -> None:  # noqa: B027 (most models have none)
        """Compute the buffers that are never saved, when weights are read without ``fill``."""

    @abstractmethod
    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        """Shapes and dtypes of one sample."""

    def context_parallel_obstacle(self, model: nn.Module) -> str:
        """Why the model cannot run on a part of each sequence with its positions; "" if it can."""
        return ""

    def packing_obstacle(self, model: nn.Module) -> str:
        """Why attention would cross the borders of packed documents; "" if it does not."""
        return f"{self.name} does not say how to keep attention within a document"

    def logits(
        self,
        model: nn.Module,
        input_ids: Tensor,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Logits [b, s, vocab] for ids [b, s], or a pipeline stage's result. Raises RecipeError if it is no language
        model.

        ``positions`` default to 0..s-1; see ``Batch`` for them and ``starts``.
        """
        raise RecipeError("this model does not write text", where=f"model: {self.name}")

    def hf_folder(self) -> HFFolder:
        """The model as a folder that transformers loads. Raises RecipeError if the model has no such form."""
        raise RecipeError(
            "this model cannot be written for transformers",
            where=f"model: {self.name}",
            why="it is user code, which no config.json describes",
            fix="save it yourself: the run's checkpoints hold its weights as safetensors",
        )

    def rate_ratio(self, name: str) -> float:
        """Learning rate of a parameter, by canonical name, divided by the schedule's."""
        return 1.0

    def departures(self, compute: str) -> tuple[str, ...]:
        """Sentences on what its files ask for and training leaves out, and on the weights that adapters do not reach.

        Args:
            compute: the dtype of compute: fp64, fp32, bf16 or fp16.
        """
        return ()

    def count(self, batch: Batch) -> Tensor:
        """Number of valid targets of a batch, an int64 scalar on its device; does not run the model."""
        return valid_targets(batch["labels"])

    def parameter_count(self, depth: int | None = None) -> int:
        """Number of parameters; a shared one counts once."""
        return sum(self.parameter_counts(depth))

    def parameter_counts(self, depth: int | None = None) -> tuple[int, int]:
        """(trained parameters, frozen parameters)."""
        with torch.device("meta"):
            parameters = list(self.build(depth).parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return trained, sum(parameter.numel() for parameter in parameters) - trained


def token_shapes(sequence_length: int) -> SampleShapes:
    """A language model's sample."""
    ids = ((sequence_length,), torch.int64)
    return {"input_ids": ids, "labels": ids}


def batch_shapes(
    blueprint: Blueprint, data: DataSpec, objective: TrainingObjective | None = None
) -> SampleShapes:
    """A sample as the data delivers it: the model's tensors, and positions and starts if documents are packed.

    How many documents share a row depends on the data; their starts are the least of a sample's bytes.

    Args:
        objective: None is the blueprint's.
    """
    length = data.sequence_length
    shapes = blueprint.sample_shapes(length)
    if data.packing:
        documents = 1 << (-(-length // _TYPICAL) - 1).bit_length()  # a power of two, as in a batch
        shapes = {**shapes, "positions": ((length,), torch.int64), "starts": ((documents,), torch.int32)}
    return (objective or blueprint.minimises).sample_shapes(shapes, data)
