"""The native decoder as a blueprint: dimensions in, GPT-2's initial values.

Weights are normal with standard deviation 0.02; the projections that add to the residual stream (``o_proj``,
``down_proj``) are scaled by 1/sqrt(2 layers), so that the stream's variance at the last block does not grow
with depth (Radford et al. 2019, section 2.3). Norms start at one, biases at zero. Both families start so;
Llama's papers do not say how theirs did.
"""

from __future__ import annotations

import math
from typing import Self, cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.presets import Dimensions, dimensions_of
from shardwise.core.sections import ModelSpec
from shardwise.model.blueprint import Batch, Blueprint, LossSum, SampleShapes, language_loss, token_shapes
from shardwise.model.decoder import Decoder
from shardwise.model.initial import fill_normal
from shardwise.model.slices import local_part, named_parameters, share, shared_names

STD = 0.02
_RESIDUAL = ("o_proj.weight", "down_proj.weight")


class NativeModel(Blueprint):
    """A Decoder of given dimensions."""

    def __init__(self, dimensions: Dimensions, name: str = "") -> None:
        d = self.dimensions = dimensions
        self.name = name or f"{d.family}-{d.layers}x{d.width}"
        self.vocab = d.vocab
        self.depth = d.layers

    @classmethod
    def from_spec(cls, spec: ModelSpec, sequence_length: int) -> Self:
        """The model of a recipe. Raises RecipeError for wrong dimensions, or sequences beyond its context."""
        dimensions = dimensions_of(spec)
        if sequence_length > dimensions.context:
            raise RecipeError(
                "the sequences are longer than the model's context",
                where="data.sequence_length",
                why=f"{sequence_length} tokens against a context of {dimensions.context}",
                fix="shorten them, or raise model.context",
            )
        return cls(dimensions, spec.preset or "")

    def build(self, depth: int | None = None) -> Decoder:
        return Decoder(self.dimensions, depth)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(cast("Decoder", model).layers)

    def head(self, model: nn.Module) -> list[nn.Module]:
        decoder = cast("Decoder", model)
        return [] if self.dimensions.tied else [decoder.norm, decoder.lm_head]

    def output(self, model: nn.Module) -> nn.Linear | None:
        return cast("Decoder", model).lm_head

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return language_loss(self, model, batch)

    def logits(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        return cast("Tensor", model(input_ids))

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        return token_shapes(sequence_length)

    @torch.no_grad()
    def fill(self, model: nn.Module, seed: int) -> None:
        with torch.device("meta"):
            aliases = shared_names(self.build(depth=0))
        share(model, aliases)
        for name, parameter in named_parameters(model):
            self._fill_one(aliases.get(name, name), parameter, seed)

    def _fill_one(self, name: str, parameter: Tensor, seed: int) -> None:
        if name.endswith("bias"):
            local_part(parameter).fill_(0.0)
        elif "norm." in name:
            local_part(parameter).fill_(1.0)
        elif name.endswith(_RESIDUAL):
            fill_normal(parameter, STD / math.sqrt(2 * self.dimensions.layers), seed, name)
        else:
            fill_normal(parameter, STD, seed, name)
