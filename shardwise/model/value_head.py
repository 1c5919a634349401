"""A language model whose forward pass also returns a value per token: PPO's critic on a shared trunk.

The layer ``v_head`` [1, h] with a bias reads what the output layer reads, the states after the last norm (Ziegler et
al. 2019, arXiv:1909.08593). It starts at zero. It runs in every forward pass, just before the output layer, so both are
gathered together and the output layer may be chunked, sharded or adapted.

Exports and files of adapters leave it out: the policy is a plain language model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Batch, Blueprint
from shardwise.model.decoder import Decoder
from shardwise.model.files.folder_layout import HFFolder
from shardwise.model.native import NativeModel
from shardwise.model.stage import Stage
from shardwise.runtime.accumulation import at_least_fp32
from shardwise.runtime.parallel.shard_slices import local_part, named_parameters
from shardwise.runtime.parallel.tensor import Split, TensorPlan

VALUE_HEAD = "v_head"
"""The layer's name, in TRL too."""

_noted_values: ContextVar[list[Tensor] | None] = ContextVar("token_values", default=None)


@contextmanager
def token_values() -> Iterator[list[Tensor]]:
    """The values of the forward passes within the block, each [b, s] in fp32 (fp64 in fp64)."""
    noted: list[Tensor] = []
    token = _noted_values.set(noted)
    try:
        yield noted
    finally:
        _noted_values.reset(token)


def log_probabilities_and_values(
    blueprint: Blueprint, model: nn.Module, batch: Batch
) -> tuple[Tensor, Tensor]:
    """(log p of every label, 0 for ignored ones; value of every token), [b, s] each, from one forward pass.

    A loss has to depend on both: the output layer's gradient gathers the weights of the two layers.
    """
    with token_values() as noted:
        log_probabilities = blueprint.log_probabilities(model, batch)
    return log_probabilities, noted[0]


@dataclass(eq=False)
class _ReadsToo:
    """A hook of the output layer: the value head reads its input."""

    layer: nn.Linear

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # It runs when its result is not asked for, too: ranks gather its weights in every forward pass.
        numbers = self.layer(args[0])  # [b, s, 1]
        if (noted := _noted_values.get()) is not None:
            noted.append(at_least_fp32(numbers.squeeze(-1)))


def add_value_head(model: nn.Module, output: nn.Linear) -> None:
    """Add the value head to a model with this output layer."""
    layer = nn.Linear(output.in_features, 1)
    model.add_module(VALUE_HEAD, layer)
    output.register_forward_pre_hook(_ReadsToo(layer).before)


@torch.no_grad()
def fill_zeros(model: nn.Module) -> None:
    """Write the value head's first values, where this model or stage has it."""
    for name, parameter in named_parameters(model):
        if name.startswith(f"{VALUE_HEAD}."):
            local_part(parameter).zero_()


def valuing_plan(plan: TensorPlan) -> TensorPlan:
    """A language model's plan, with the value head whole on every rank."""
    return {**plan, VALUE_HEAD: Split("values")}


class NativeValues(NativeModel):
    """A decoder with a value head."""

    private_layers = (VALUE_HEAD,)

    def build(self, depth: int | None = None) -> Decoder:
        return _valuing(super().build(depth))

    def stage(self, stage: Stage) -> Decoder:
        return _valuing(super().stage(stage))

    def head(self, model: nn.Module) -> list[nn.Module]:
        after = super().head(model)
        return [*after, model.get_submodule(VALUE_HEAD)] if after else []

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        return valuing_plan(super().tensor_plan(model))

    def fill(self, model: nn.Module, seed: int) -> None:
        super().fill(model, seed)
        fill_zeros(model)

    def hf_folder(self) -> HFFolder:
        return NativeModel(self.dimensions, self.name).hf_folder()


def _valuing(decoder: Decoder) -> Decoder:
    if decoder.lm_head is not None:  # of the last stage
        add_value_head(decoder, decoder.lm_head)
    return decoder
