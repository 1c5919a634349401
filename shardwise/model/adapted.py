"""A model with adapters as a blueprint: another blueprint's model, frozen, and few weights beside it.

Which weights are trained is a matter of the model and not of how it is divided. So adapters are put on where the model
is built: the reference of ``verify``, the stages of a pipeline and the samples of a trained run have them without
knowing of them, and techniques divide them as they divide any layer. What a strategy has to know of adapters is in
technique/adapter.py.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.sections import AdapterSpec
from shardwise.model.blueprint import Batch, Blueprint, LossSum, SampleShapes
from shardwise.model.filling import bare, fill_magnitudes, fill_packed
from shardwise.model.fingerprint import fingerprint_of, refuse_other_base
from shardwise.model.initial import fill_uniform
from shardwise.model.layout import Layout
from shardwise.model.lora import A, B, LoraLinear, adapt, is_adapter, linear_layers, require_targets
from shardwise.model.parts import Part
from shardwise.model.peft import TENSORS, AdapterFiles, config_of
from shardwise.model.slices import local_part, named_parameters
from shardwise.model.split import Split, TensorPlan


class AdaptedModel(Blueprint):
    """The model of ``base`` with the adapters that a recipe asks for.

    Raises RecipeError for targets that the model does not have, CheckpointError for an adapter to start from that is
    damaged or not of this model.
    """

    def __init__(self, base: Blueprint, spec: AdapterSpec) -> None:
        self.base, self.spec = base, spec
        self.name, self.vocab, self.width = base.name, base.vocab, base.width
        self.origin = base.origin
        self.trained_in, self.dataset = base.trained_in, base.dataset
        with torch.device("meta"):
            model = base.build()
        require_targets(model, self.targetable(model), spec)
        self.start = AdapterFiles(Path(spec.start_from)) if spec.start_from is not None else None
        if self.start is not None:
            self.start.require(spec, self.adapter_shapes)

    def targetable(self, model: nn.Module) -> list[nn.Module]:
        """The modules whose linear layers may be targets; [] for all of them."""
        return self.base.units(model)

    @cached_property
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the whole model's adapters by name."""
        with torch.device("meta"):
            named = named_parameters(self.build())
        return {name: tuple(parameter.shape) for name, parameter in named if is_adapter(name)}

    def config(self) -> dict[str, Any]:
        """As PEFT writes it, with the shortest names that mean these layers and no others."""
        with torch.device("meta"):
            model = self.base.build()
        linear = list(linear_layers(model, []))
        adapted = adapt(model, self.targetable(model), self.spec)
        last = {path.rpartition(".")[2] for path in adapted}
        meant = [path for path in linear if path.rpartition(".")[2] in last]
        transposed = any(layer.transposed for layer in model.modules() if isinstance(layer, LoraLinear))
        return config_of(self.spec, last if meant == adapted else adapted, transposed, self.origin)

    @cached_property
    def depth(self) -> int | None:  # type: ignore[override]
        """None too where the blocks' adapters are not alike."""
        if self.base.depth is None:
            return None
        with torch.device("meta"):
            units = self.units(self.build())
        alike = {tuple((name, p.shape) for name, p in unit.named_parameters()) for unit in units}
        return self.base.depth if len(alike) == 1 else None

    def build(self, depth: int | None = None) -> nn.Module:
        return self._adapted(self.base.build(depth))

    def part(self, part: Part) -> nn.Module:
        return self._adapted(self.base.part(part))

    def _adapted(self, model: nn.Module) -> nn.Module:
        adapt(model, self.targetable(model), self.spec)
        return model

    def tied(self) -> tuple[str, ...]:
        return self.base.tied()

    def units(self, model: nn.Module) -> list[nn.Module]:
        return self.base.units(model)

    def head(self, model: nn.Module) -> list[nn.Module]:
        return self.base.head(model)

    def output(self, model: nn.Module) -> nn.Linear | None:
        return self.base.output(model)

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        """Every split layer's adapter is split with it: its own side as the layer, the other is on every rank."""
        plan = dict(self.base.tensor_plan(model))
        for path, how in list(plan.items()):
            if how.how in ("column", "logits"):
                plan |= {f"{path}.{A}": Split("summed"), f"{path}.{B}": Split("rows")}
            elif how.how == "row":
                plan |= {f"{path}.{A}": Split("columns"), f"{path}.{B}": Split("summed")}
        return plan

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return self.base.loss(model, batch)

    def logits(self, model: nn.Module, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.base.logits(model, input_ids, positions)

    def restore(self, model: nn.Module) -> None:
        self.base.restore(model)

    def layout(self) -> Layout:
        """Of the model without adapters, which holds the merged one."""
        return self.base.layout()

    def count(self, batch: Batch) -> Tensor:
        return self.base.count(batch)

    def parameter_counts(self, depth: int | None = None) -> tuple[int, int]:
        with torch.device("meta"):
            trained = sum(p.numel() for p in self.build(depth).parameters() if p.requires_grad)
        return trained, self.base.parameter_count(depth)

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        return self.base.sample_shapes(sequence_length)

    def indivisible(self, model: nn.Module) -> str:
        return self.base.indivisible(model)

    def unpackable(self, model: nn.Module) -> str:
        return self.base.unpackable(model)

    def rate_ratio(self, name: str) -> float:
        return self.spec.learning_rate_ratio if f".{B}." in name else 1.0

    @torch.no_grad()
    def fill(self, model: nn.Module, seed: int) -> None:
        """Raises CheckpointError where the adapter to start from was trained beside other weights."""
        with bare(model):
            self.base.fill(model, seed)
        fill_packed(model, lambda part: self.base.fill(part, seed))
        for name, parameter in named_parameters(model):
            if self.start is not None and is_adapter(name):
                self.start.read_into(parameter, name)
            elif f".{A}." in name:
                fill_uniform(parameter, 1 / math.sqrt(parameter.shape[1]), seed, name)
            elif f".{B}." in name:
                local_part(parameter).zero_()
        if self.start is None:
            fill_magnitudes(model)
        elif self.start.fingerprint is not None:
            refuse_other_base(self.start.fingerprint, fingerprint_of(model), str(self.start.folder / TENSORS))
