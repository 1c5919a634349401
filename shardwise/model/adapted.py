"""A blueprint that adds adapters (LoRA, DoRA) to another blueprint's frozen model.

Adapters are part of the built model, so stages, ``verify`` and sampling have them too, and techniques shard
them like any other layer. technique/adapter.py holds the rules for strategies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.paths import path_of
from shardwise.model.blueprint import Batch, Blueprint, LossSum, SampleShapes
from shardwise.model.expert_lora import AdaptedExperts, expert_adapter, expert_stacks
from shardwise.model.files.folder_layout import HFFolder
from shardwise.model.files.peft import TASKS, TENSORS, AdapterFiles, adapter_config
from shardwise.model.files.peft_experts import is_rewritten, with_patterns
from shardwise.model.filling import fill_magnitudes, fill_packed, rehearse_packed, without_adapters
from shardwise.model.initial import fill_uniform
from shardwise.model.lora import (
    A,
    B,
    LoraLinear,
    adapt,
    is_adapter,
    linear_layers,
    packings_in,
    side_of,
)
from shardwise.model.repetition import Repetition, repetition_of
from shardwise.model.stage import Stage
from shardwise.model.target_checks import require_targets
from shardwise.model.unreached import matrices, percent, reach_in_words, reached_shares
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.fingerprint import fingerprint_of, refuse_other_base
from shardwise.runtime.parallel.shard_slices import local_part, named_parameters
from shardwise.runtime.parallel.tensor import Split, TensorPlan
from shardwise.runtime.quantization.as_parameter import StoredPacking


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters by name; a shared one has all of its names."""
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def _shortened_paths(chosen: list[str], paths: list[str], parts: int) -> Collection[str]:
    """The last parts of the chosen paths, if they match no others; else the paths."""
    last = {".".join(path.split(".")[-parts:]) for path in chosen}
    matched = [path for path in paths if ".".join(path.split(".")[-parts:]) in last]
    return last if matched == chosen else chosen


def _parameter_signature(block: nn.Module) -> tuple[object, ...]:
    """What makes a block like another: names and shapes of its parameters, and which are trained."""
    return tuple((name, p.shape, p.requires_grad) for name, p in block.named_parameters())


def _with_new_layers(spec: AdapterSpec, base: Blueprint) -> AdapterSpec:
    """The adapters that also train the layers in full that no pretrained model has."""
    saved = dict.fromkeys((*spec.modules_to_save, *base.new_layers, *base.private_layers))
    return spec.model_copy(update={"modules_to_save": tuple(saved)})


def _is_in(name: str, layers: Collection[str]) -> bool:
    return any(name.startswith(f"{layer}.") for layer in layers)


class _AdapterReach(NamedTuple):
    """Which weights adapters and quantization reach, as shares of all.

    Attributes:
        beyond: of the blocks' matrices that cannot be targets, by module.
        packed: of the packed weights together.
        unpacked: of the matrices that are not packed, by module.
        packs_experts: whether experts are packed.
    """

    beyond: dict[str, float]
    packed: float
    unpacked: dict[str, float]
    packs_experts: bool


class AdaptedModel(Blueprint):
    """The model of ``base`` with the adapters of a recipe.

    Raises RecipeError if the model lacks the target layers, or the unquantized weights that LoftQ needs.
    Raises CheckpointError if the adapter to start from does not fit.
    """

    def __init__(self, base: Blueprint, spec: AdapterSpec) -> None:
        if spec.loftq_iterations and base.quantized:
            raise RecipeError(
                "LoftQ needs the unquantized weights",
                where="adapter.init",
                why=f"the weights of {base.name} are quantized, so what quantization took from them is not known",
                fix="give the unquantized model with adapter.quantize: nf4 or int8, or remove init",
            )
        self.base = base
        self.spec = _with_new_layers(spec, base)
        self.name = base.name
        self.vocab = base.vocab
        self.width = base.width
        self.context = base.context
        self.origin = base.origin
        self.objective = base.objective
        self.trained_in = base.trained_in
        self.dataset = base.dataset
        self.quantized = base.quantized
        self.casts_inputs = base.casts_inputs
        self.counts_in_loss = base.counts_in_loss
        self.new_layers = base.new_layers
        self.private_layers = base.private_layers
        self.config_text = base.config_text
        with torch.device("meta"):
            model = base.build()
        require_targets(model, self.targetable(model), self.spec)
        self.start = AdapterFiles(path_of(spec.start_from)) if spec.start_from is not None else None
        if self.start is not None:
            # Files of a language model's adapter lack a layer such as ``score``: it then starts as a new one does.
            known = {
                name: shape
                for name, shape in self.adapter_shapes.items()
                if name in self.start.shapes or not _is_in(name, self.new_layers)
            }
            self.start.require(spec, known, shapes_of(model))

    def packings(self) -> Mapping[str, StoredPacking]:
        """The base's, unless the recipe quantizes its weights anew."""
        return self.base.packings() if self.spec.quantize == "none" else {}

    def targetable(self, model: nn.Module) -> list[nn.Module]:
        """The modules whose linear layers can be targets; [] for all."""
        return self.base.blocks(model)

    @cached_property
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the adapter's files, by name: of adapters, and of modules to save."""
        return {n: shape for n, shape in self._trained.items() if not _is_in(n, self.private_layers)}

    @cached_property
    def _trained(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter that is not the base's. In a frozen copy of the model none requires a gradient."""
        with torch.device("meta"):
            named = named_parameters(self.build())
        return {name: tuple(parameter.shape) for name, parameter in named if parameter.requires_grad}

    def config(self) -> dict[str, Any]:
        """PEFT's config, with the shortest target names that match exactly these layers."""
        with torch.device("meta"):
            model = self.base.build()
        # The paths are of the plain model: adapted layers are no longer plain linear ones.
        linear = list(linear_layers(model, []))
        stacks = list(expert_stacks(model, []))
        adapted = adapt(model, self.targetable(model), self.spec)
        renamed = {path for path in adapted if stacks and is_rewritten(path, self.spec)}
        layers = [path for path in adapted if path not in stacks and path not in renamed]
        parameters = {
            *_shortened_paths([path for path in adapted if path in stacks], stacks, 2),
            *_shortened_paths(
                [f"{p}.weight" for p in linear if p in renamed], [f"{p}.weight" for p in linear], 3
            ),
        }
        transposed = any(layer.transposed for layer in model.modules() if isinstance(layer, LoraLinear))
        task = self.base.peft_task or TASKS.get(self.objective or "")
        written = tuple(name for name in self.spec.modules_to_save if name not in self.private_layers)
        spec = self.spec.model_copy(update={"modules_to_save": written})
        config = adapter_config(
            spec, _shortened_paths(layers, linear, 1), parameters, transposed, self.origin, task
        )
        return with_patterns(config, renamed)

    @property
    def depth(self) -> int | None:  # type: ignore[override]
        """None also if the blocks have different adapters."""
        blocks = self.repetition
        if blocks is None:
            return None
        return blocks.blocks if blocks.period == 1 and blocks.first == 0 else None

    @cached_property
    def block_kinds(self) -> tuple[object, ...] | None:  # type: ignore[override]
        kinds = self.base.block_kinds
        if kinds is None and self.base.depth is not None and self.base.width is not None:
            kinds = ((),) * self.base.depth
        if kinds is None:
            return None
        with torch.device("meta"):
            blocks = self.blocks(self.build())
        return tuple(zip(kinds, map(_parameter_signature, blocks), strict=True))

    @cached_property
    def repetition(self) -> Repetition | None:
        """That of the base, with the adapters of each block."""
        base = self.base.repetition
        if base is None:
            return None
        with torch.device("meta"):
            blocks = self.blocks(self.build())
        adapted = repetition_of(tuple(map(_parameter_signature, blocks)))
        if adapted is None or adapted.blocks != base.blocks:
            return None
        # Blocks are alike where both the base's kinds and the adapters repeat themselves.
        period = math.lcm(adapted.period, base.period)
        if 2 * period > base.blocks:
            return None
        return Repetition(base.blocks, period, max(adapted.first, base.first))

    def stage_obstacle(self) -> str:
        return self.base.stage_obstacle()

    def compile_obstacle(self) -> str:
        return self.base.compile_obstacle()

    def build(self, depth: int | None = None) -> nn.Module:
        return self._adapted(self.base.build(depth))

    def stage(self, stage: Stage) -> nn.Module:
        return self._adapted(self.base.stage(stage))

    def _adapted(self, model: nn.Module) -> nn.Module:
        adapt(model, self.targetable(model), self.spec, self.packings())
        return model

    def compute_in(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.base.compute_in(model, dtype)

    def tied(self) -> tuple[str, ...]:
        return self.base.tied()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return self.base.blocks(model)

    def head(self, model: nn.Module) -> list[nn.Module]:
        return self.base.head(model)

    def output(self, model: nn.Module) -> nn.Linear | None:
        """None for a layer with an adapter: its weight alone does not make the logits."""
        layer = self.base.output(model)
        return None if isinstance(layer, LoraLinear) else layer

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        """The base's plan plus the adapters: one side is sharded like its layer, the other is replicated.

        Raises RecipeError for a quantized base.
        """
        if self.packings():
            raise RecipeError(
                "a quantized base has no tensor parallelism",
                where="strategy.tensor_parallel",
                why="packed weights are rows of bytes in which a layer's own rows and columns cannot be told apart",
                fix="the nearest that works is tensor_parallel: 1",
            )
        plan = dict(self.base.tensor_plan(model))
        for path, how in list(plan.items()):
            if how.how in ("column", "logits", "gathered"):
                # W's rows are sharded, so are B's; A is whole, and its gradient is a sum over the ranks.
                plan |= {f"{path}.{A}": Split("summed"), f"{path}.{B}": Split("rows")}
            elif how.how in ("row", "split"):
                # W's columns are sharded, so are A's: A x is a partial sum, as W x is.
                plan |= {f"{path}.{A}": Split("columns"), f"{path}.{B}": Split("summed")}
        return plan

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return self.base.loss(model, batch)

    def router_loss(
        self, model: nn.Module, labels: Tensor
    ) -> AbstractContextManager[Callable[[], Tensor | None]]:
        return self.base.router_loss(model, labels)

    def logits(
        self,
        model: nn.Module,
        input_ids: Tensor,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        return self.base.logits(model, input_ids, positions, starts)

    def restore(self, model: nn.Module) -> None:
        self.base.restore(model)

    def hf_folder(self) -> HFFolder:
        """The base model's folder; a merged model is written in the same form."""
        return self.base.hf_folder()

    def count(self, batch: Batch) -> Tensor:
        return self.base.count(batch)

    def parameter_counts(self, depth: int | None = None) -> tuple[int, int]:
        with torch.device("meta"):
            named = list(named_parameters(self.build(depth)))
        trained = {name: parameter.numel() for name, parameter in named if parameter.requires_grad}
        of_base = sum(size for name, size in trained.items() if not is_adapter(name))
        return sum(trained.values()), self.base.parameter_count(depth) - of_base

    def departures(self, compute: str) -> tuple[str, ...]:
        reach = self._reach
        notes = list(self.base.departures(compute))
        if self.spec.name == "dora" and any(expert_adapter(name) for name in self.adapter_shapes):
            notes.append(
                "PEFT cannot load this adapter: it has no DoRA of experts; serve and merge read it here"
            )
        if reach.beyond:
            named = reach_in_words(reach.beyond, "the weights")
            notes.append(
                f"{named} stay frozen in {compute} without an adapter: adapters are on linear layers and experts"
            )
        if reach.packed and reach.unpacked:
            named = reach_in_words(reach.unpacked, "the weights")
            packs = "the model's folder" if self.spec.quantize == "none" else self.spec.quantize
            experts = " and experts" if reach.packs_experts else ""
            share = percent(reach.packed)
            notes.append(
                f"{named} stay in {compute}: {packs} packs the blocks' linear layers{experts}, {share}"
            )
        return tuple(notes)

    @cached_property
    def _reach(self) -> _AdapterReach:
        with torch.device("meta"):
            model = self.base.build()
        blocks = self.targetable(model)
        whole = sum(p.numel() for p in model.parameters())
        linear = list(linear_layers(model, blocks))
        stacks = list(expert_stacks(model, blocks))
        mixtures = list(dict.fromkeys(path.rpartition(".")[0] for path in stacks))
        packs = self.spec.quantize != "none"
        packed = linear if packs else [path for path in linear if path in self.packings()]
        packed_experts = mixtures if packs else []

        def shares_of(within: list[nn.Module], but: list[str]) -> dict[str, float]:
            return reached_shares(((m.owner, m.numel) for m in matrices(model, within, but)), whole)

        # Targets are in the blocks alone; a matrix that is not packed may be anywhere.
        beyond = shares_of(blocks, [*linear, *mixtures])
        unpacked = shares_of([], [*packed, *packed_experts])
        names = [f"{path}.weight" for path in packed] + (stacks if packs else [])
        weights = sum(model.get_parameter(name).numel() for name in names)
        return _AdapterReach(beyond, weights / whole, unpacked, bool(packed_experts))

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        return self.base.sample_shapes(sequence_length)

    def context_parallel_obstacle(self, model: nn.Module) -> str:
        return self.base.context_parallel_obstacle(model)

    def packing_obstacle(self, model: nn.Module) -> str:
        return self.base.packing_obstacle(model)

    def rate_ratio(self, name: str) -> float:
        return self.spec.learning_rate_ratio if side_of(name) == B else 1.0

    @torch.no_grad()
    def fill(self, model: nn.Module, seed: int) -> None:
        """Raises CheckpointError if the adapter to start from was trained on other base weights."""
        with without_adapters(model):
            self.base.fill(model, seed)
        for name, parameter in named_parameters(model):
            if self.start is not None and name in self._trained and name in self.start.shapes:
                self.start.read_into(parameter, name)
            elif (side := side_of(name)) == A:
                # The last dim is i, of a layer's A [r, i] and of the experts' [E, r, i].
                fill_uniform(parameter, 1 / math.sqrt(parameter.shape[-1]), seed, name)
            elif side == B:
                local_part(parameter).zero_()
        # LoftQ writes over A and B, so it follows their first values; magnitudes are norms of the packed weights.
        fill_packed(model, self.base, seed, self.spec.loftq_iterations)
        if self.start is None:
            fill_magnitudes(model, with_adapters=self.spec.loftq_iterations > 0)
            return
        self.start.require_copies(named_parameters(model))
        if any(f"{layer}.weight" not in self.start.shapes for layer in self.new_layers):
            return  # of the same base with its own output layer, which its fingerprint is of
        if self.start.fingerprint is not None:
            fingerprint = fingerprint_of(model, without=self._trained)
            refuse_other_base(self.start.fingerprint, fingerprint, str(self.start.folder / TENSORS))

    @torch.no_grad()
    def rehearse_fill(self, model: nn.Module) -> None:
        # A block of a mixture in fp32 is much; of another model it is less than a step takes.
        mixtures = [module for module in model.modules() if isinstance(module, AdaptedExperts)]
        if self.spec.loftq_iterations or any(module.packings for module in mixtures):
            rehearse_packed(model, self.spec.loftq_iterations)

    def base_fingerprint(self, model: nn.Module) -> str | None:
        """Of the frozen weights, for adapter files; collective. None if they are packed, unless LoftQ packed them.

        Then the base is no folder's, and the fingerprint is that of its dequantized weights, as ``export --base``
        writes them.
        """
        return fingerprint_of(model, packings_in(model) if self.spec.loftq_iterations else {})
