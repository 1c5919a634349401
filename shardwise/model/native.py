"""The blueprint of the native decoder, with GPT-2's initial values.

Weights are normal with standard deviation 0.02. The projections that add to the residual stream (``o_proj``,
``down_proj``) are scaled by 1/sqrt(2 layers), so the variance does not grow with depth (Radford et al. 2019, section
2.3). Norms start at one, biases at zero. The papers of Llama and Qwen3 do not give initial values, so all families use
these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self, cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import (
    Batch,
    Blueprint,
    LossSum,
    SampleShapes,
    token_shapes,
)
from shardwise.model.decoder import Decoder
from shardwise.model.files.folder_layout import HFFolder
from shardwise.model.files.native_folder import native_hf_folder
from shardwise.model.initial import fill_normal
from shardwise.model.mixture import Router, filled_tokens, router_logits
from shardwise.model.repetition import Repetition, repetition_of
from shardwise.model.stage import Stage, renumbered
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.presets import dimensions_of
from shardwise.recipe.sections import ModelSpec
from shardwise.runtime.language_loss import language_loss, with_auxiliary
from shardwise.runtime.parallel.shard_slices import local_part, named_parameters, share, shared_names
from shardwise.runtime.parallel.tensor import Split, TensorPlan

STD = 0.02
_OF_WHOLE = "its routers' auxiliary losses are of whole sequences"
_RESIDUAL = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


def _auxiliary(noted: Sequence[tuple[Router, Tensor]], filled: Tensor) -> Tensor:
    """The auxiliary losses of the routers of a pass. Raises RecipeError where a rank has a part of the sequences."""
    # Under sequence parallelism a router sees a part of the tokens, and ``filled`` has all.
    if any(len(logits) != len(filled) for _, logits in noted):
        raise RecipeError(
            "sequences cannot be shared out",
            where="strategy.tensor_sequence_parallel",
            why=_OF_WHOLE,
            fix="the nearest that works is tensor_sequence_parallel: none",
        )
    return torch.stack([router.losses(logits, filled) for router, logits in noted]).sum()


class NativeModel(Blueprint):
    """A Decoder with given dimensions."""

    def __init__(self, dimensions: Dimensions, name: str = "") -> None:
        d = self.dimensions = dimensions
        self.name = name or f"{d.family}-{d.layers}x{d.width}"
        self.vocab = d.vocab
        self.context = d.context
        self.width = d.width
        # A mixture whose first blocks are dense has two kinds of blocks, so it has no depth to vary.
        self.depth = None if d.dense_layers else d.layers
        if d.dense_layers:
            self.block_kinds = ("dense",) * d.dense_layers + ("mixture",) * d.mixtures

    @classmethod
    def from_spec(cls, spec: ModelSpec, sequence_length: int) -> Self:
        """The model of a recipe. Raises RecipeError for invalid dimensions, or sequences longer than its context."""
        dimensions = dimensions_of(spec)
        if sequence_length > dimensions.context:
            raise RecipeError(
                "the sequences are longer than the model's context",
                where="data.sequence_length",
                why=f"{sequence_length} tokens exceed the context of {dimensions.context}",
                fix="shorten them, or raise model.context",
            )
        return cls(dimensions, spec.preset or "")

    @property
    def repetition(self) -> Repetition | None:
        return Repetition(self.dimensions.layers, 1) if self.depth else repetition_of(self.block_kinds or ())

    def build(self, depth: int | None = None) -> Decoder:
        return Decoder(self.dimensions, None if depth is None else range(depth))

    def stage(self, stage: Stage) -> Decoder:
        if self.dimensions.adds_router_loss:
            super().stage(stage)  # raises
        model = Decoder(self.dimensions, stage.blocks)
        model.keep(stage.first, stage.last)
        renumbered(model.layers, stage.blocks.start)
        return model

    def stage_obstacle(self) -> str:
        return "the last stage would need the routers' auxiliary losses of the others"

    def compile_obstacle(self) -> str:
        recorded = (
            "its routers' auxiliary losses read tensors from within the blocks, where a compiled one has none"
        )
        return recorded if self.dimensions.adds_router_loss else ""

    def context_parallel_obstacle(self, model: nn.Module) -> str:
        return _OF_WHOLE if self.dimensions.adds_router_loss else ""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(cast("Decoder", model).layers)

    def head(self, model: nn.Module) -> list[nn.Module]:
        decoder = cast("Decoder", model)
        after = [module for module in (decoder.norm, decoder.lm_head) if module is not None]
        return [] if self.dimensions.tied else after

    def output(self, model: nn.Module) -> nn.Linear | None:
        return cast("Decoder", model).lm_head

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        d = self.dimensions
        # Whole heads: attention reshapes its part of the channels into them.
        heads = Split("column", d.heads, "heads")
        kv_heads = Split("column", d.kv_heads, "key/value heads")
        return {
            "embed_tokens": Split("vocabulary"),
            "embed_positions": Split("positions"),
            "layers.*.self_attn.q_proj": heads,
            "layers.*.self_attn.k_proj": kv_heads,
            "layers.*.self_attn.v_proj": kv_heads,
            "layers.*.self_attn.q_b_proj": heads,
            "layers.*.self_attn.kv_a_proj_with_mqa": Split("tail", last=d.rotary_width),
            "layers.*.self_attn.kv_b_proj": heads,
            "layers.*.self_attn.o_proj": Split("row"),
            "layers.*.self_attn.q_norm": Split("summed"),
            "layers.*.self_attn.k_norm": Split("summed"),
            "layers.*.mlp.gate_proj": Split("column"),
            "layers.*.mlp.up_proj": Split("column"),
            "layers.*.mlp.down_proj": Split("row"),
            "layers.*.mlp.experts": Split("experts"),
            "layers.*.mlp.shared_experts.gate_proj": Split("column"),
            "layers.*.mlp.shared_experts.up_proj": Split("column"),
            "layers.*.mlp.shared_experts.down_proj": Split("row"),
            "lm_head": Split("logits"),
        }

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        with self.router_loss(model, batch["labels"]) as auxiliary:
            loss = language_loss(self.logits, model, batch)
        return with_auxiliary(loss, auxiliary())

    @contextmanager
    def router_loss(self, model: nn.Module, labels: Tensor) -> Iterator[Callable[[], Tensor | None]]:
        if not self.dimensions.adds_router_loss:
            yield lambda: None
            return
        with router_logits() as noted:
            yield lambda: _auxiliary(noted, filled_tokens(labels).flatten())

    def logits(
        self,
        model: nn.Module,
        input_ids: Tensor,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        return cast("Tensor", model(input_ids, positions, starts=starts))

    def packing_obstacle(self, model: nn.Module) -> str:
        return ""

    def hf_folder(self) -> HFFolder:
        with torch.device("meta"):
            model = self.build()
        tensors = (*named_parameters(model), *model.named_buffers())
        return native_hf_folder(self.dimensions, {name: tuple(tensor.shape) for name, tensor in tensors})

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        return token_shapes(sequence_length)

    @torch.no_grad()
    def fill(self, model: nn.Module, seed: int) -> None:
        with torch.device("meta"):
            aliases = shared_names(self.build(depth=0))  # no block shares a weight
        share(model, aliases)
        for name, parameter in named_parameters(model):
            self._fill_one(aliases.get(name, name), parameter, seed)
        for buffer in model.buffers():  # the biases of routers
            buffer.zero_()

    def _fill_one(self, name: str, parameter: Tensor, seed: int) -> None:
        if name.endswith("bias"):
            local_part(parameter).fill_(0.0)
        elif "norm." in name:  # input_layernorm., q_norm., kv_a_layernorm.
            local_part(parameter).fill_(1.0)
        elif name.endswith(_RESIDUAL):
            fill_normal(parameter, STD / math.sqrt(2 * self.dimensions.layers), seed, name)
        else:
            fill_normal(parameter, STD, seed, name)
