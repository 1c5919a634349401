"""The model with one number per token in the place of logits: a reward model (Stiennon et al. 2020, arXiv:2009.01325).

The output layer becomes ``score``, a linear layer [1, h] without bias on the states after the last norm, as in
transformers' ForSequenceClassification with ``num_labels`` 1. The reward of a text is the value at its last token. An
embedding that shared its weight with the output layer keeps it alone.

The first values of ``score`` are normal with variance 1 / (h + 1) (ibid., appendix B), by seed and name; those of a
folder that has the layer are read.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import Batch, Blueprint
from shardwise.model.decoder import Decoder
from shardwise.model.files.folder_layout import HFFolder
from shardwise.model.files.native_folder import scoring_folder
from shardwise.model.initial import fill_normal
from shardwise.model.native import NativeModel
from shardwise.model.stage import Stage
from shardwise.runtime.accumulation import at_least_fp32
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.runtime.parallel.tensor import Split, TensorPlan

SCORE = "score"
"""The layer's name, in transformers too."""


def no_head(base: Blueprint, why: str) -> RecipeError:
    return RecipeError(
        "this model cannot have a head for numbers",
        where=f"model: {base.name}",
        why=why,
        fix="give a causal language model, by model.hf or dimensions",
    )


def values(blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
    """The number at every token of a batch, [b, s] in fp32 (fp64 in fp64): of this rank's tokens."""
    numbers = blueprint.logits(model, batch["input_ids"], batch.get("positions"), batch.get("starts"))
    return at_least_fp32(numbers.squeeze(-1))


def score_layer(width: int) -> nn.Linear:
    return nn.Linear(width, 1, bias=False)


@torch.no_grad()
def fill_score(model: nn.Module, seed: int) -> None:
    """Write the first values of ``score``, where this model or stage has it."""
    for name, parameter in named_parameters(model):
        if name == f"{SCORE}.weight":
            fill_normal(parameter, 1 / math.sqrt(parameter.shape[1] + 1), seed, name)


def scoring_plan(plan: TensorPlan) -> TensorPlan:
    """A language model's plan, with ``score`` whole on every rank in the place of the output layer."""
    others = {path: how for path, how in plan.items() if how.how != "logits"}
    return {**others, SCORE: Split("values")}


class NativeScores(NativeModel):
    """A decoder with ``score``."""

    new_layers = (SCORE,)
    peft_task = "SEQ_CLS"

    def build(self, depth: int | None = None) -> Decoder:
        return self._scoring(super().build(depth))

    def stage(self, stage: Stage) -> Decoder:
        model = super().stage(stage)
        return self._scoring(model) if stage.last else model

    def _scoring(self, decoder: Decoder) -> Decoder:
        decoder.lm_head = None
        decoder.score = score_layer(self.dimensions.width)
        return decoder

    def head(self, model: nn.Module) -> list[nn.Module]:
        decoder = cast("Decoder", model)
        return [module for module in (decoder.norm, decoder.score) if module is not None]

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        return scoring_plan(super().tensor_plan(model))

    def fill(self, model: nn.Module, seed: int) -> None:
        super().fill(model, seed)
        fill_score(model, seed)

    def hf_folder(self) -> HFFolder:
        return scoring_folder(super().hf_folder())
