"""The reference for every strategy: one process, one plain module, a textbook training loop.

It is independent of the engine: no mesh, no FSDP, no fused optimizer, torch's own clipping. It divides the gradients
once at the end, where the engine divides the loss. It shares only the model, its loss, its initial values and the data.
It runs in fp32, or in fp64 if the strategy does. mixed_precision.py is its like in fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwise.core.strategy import Strategy
from shardwise.engine.loss_scale import norm_limit_of
from shardwise.engine.optim.library import made_by
from shardwise.engine.schedule import learning_rate
from shardwise.model.blueprint import Batch, Blueprint, LossSum, TrainingObjective, loss_of
from shardwise.model.plain_passes import PlainPasses
from shardwise.recipe.lr_scaling import built
from shardwise.recipe.sections import OptimizerSpec, Recipe
from shardwise.runtime.parallel.shard_slices import named_parameters, share, shared_names
from shardwise.runtime.torch_private import TorchDispatchMode, cast_floats, tree_iter
from shardwise.verifier.dropout import drop_nothing
from shardwise.verifier.router_bias import PlainRouterBiases
from shardwise.verifier.textbook import SGDW, AdamW8bit


@dataclass(frozen=True)
class ReferenceStep:
    """Loss and gradient norm of one optimizer step."""

    loss: float
    grad_norm: float


def reference_model(blueprint: Blueprint, seed: int, dtype: torch.dtype) -> nn.Module:
    """The unsharded model on the CPU with its initial values, without dropout."""
    with torch.device("meta"):
        model = blueprint.build()
    aliases = shared_names(model)
    cast_floats(model, dtype)
    model.to_empty(device="cpu")
    blueprint.compute_in(model, dtype)
    share(model, aliases)
    with torch.no_grad():
        blueprint.fill(model, seed)
    drop_nothing(model)
    return model.train()


class ReferenceLoss:
    """The objective as a function of the trained model and a batch; the models that it reads are in this process."""

    def __init__(
        self, blueprint: Blueprint, seed: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._blueprint = blueprint
        self._frozen = {
            role: reference_model(other, seed, dtype).to(device).eval().requires_grad_(False)
            for role, other in blueprint.minimises.frozen_models().items()
        }

    def passes(self, model: nn.Module) -> PlainPasses:
        """Passes of these models without gradients."""
        return PlainPasses(self._blueprint, model, self._frozen)

    def prepared(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of a step with what the loss needs of all of them."""
        return self.passes(model).prepared(batches)

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        return loss_of(self._blueprint.minimises, self._blueprint, model, self._frozen, batch)


@dataclass(frozen=True)
class PlainRank:
    """One plain process in the place of a rank: what its batches are made for (engine/sampling.py, ``Sampler``)."""

    passes: PlainPasses
    strategy: Strategy
    device: torch.device

    data_rank: ClassVar[int] = 0
    data_degree: ClassVar[int] = 1
    leads: ClassVar[bool] = True

    @property
    def blueprint(self) -> Blueprint:
        return self.passes.blueprint

    @property
    def objective(self) -> TrainingObjective:
        return self.blueprint.minimises

    @property
    def model(self) -> nn.Module:
        return self.passes.model

    def local_batch(self, batch: Batch) -> Batch:
        return self.objective.rows(batch)

    def exceeded(self) -> bool:
        return False

    def sampling(self) -> AbstractContextManager[None]:
        return nullcontext()


def train_reference(
    recipe: Recipe,
    blueprint: Blueprint,
    model: nn.Module,
    loss_function: ReferenceLoss,
    batches_of: Iterator[list[Batch]],
    scale: GradientScale,
) -> Iterator[ReferenceStep]:
    """Train ``model`` in place on one list of micro-batches per optimizer step; yield the result of each step."""
    spec = built(recipe)
    parameters = {name: p for name, p in named_parameters(model) if p.requires_grad}
    optimizer = PlainOptimizer(recipe, blueprint, parameters)
    limit = norm_limit_of(spec.clip_norm, spec.adaptive_clip, torch.device("cpu"))
    biases = PlainRouterBiases(model)
    for index, batches in enumerate(batches_of):
        total, count = 0.0, 0
        for batch in loss_function.prepared(model, batches):
            biases.begin(batch)
            loss, targets = loss_function(model, batch)
            loss.backward()
            total += loss.item()
            count += int(targets)
        for p in parameters.values():
            if p.grad is not None:
                p.grad /= max(1, count)
        scale.watch(model)
        norm = norm_of(parameters.values())
        clip(parameters.values(), norm, float(limit.value(norm)))
        limit.update(norm, torch.zeros(()))
        optimizer.step(index)
        biases.step()
        yield ReferenceStep(total / max(1, count), float(norm))


def norm_of(parameters: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=False)


def clip(parameters: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Clip gradients of this norm to a limit."""
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=False)


def rounds_to_fp32(loss: ReferenceLoss, model: nn.Module, batch: Batch) -> bool:
    """Whether the code of a model in fp64 rounds to fp32, as the norms of transformers' Llama do."""
    with torch.no_grad(), _Narrowing() as seen:
        loss(model, batch)
    return seen.found


class _Narrowing(TorchDispatchMode):
    """Looks for operations that take fp64 and return fp32."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken, given = (
            {leaf.dtype for leaf in tree_iter(values) if isinstance(leaf, Tensor)}
            for values in ((args, kwargs), out)
        )
        self.found |= torch.float64 in taken and torch.float32 in given
        return out


class PlainOptimizer:
    """torch's plain version of the recipe's optimizer, or what its factory makes, at the rates of the schedule.

    Moments are in the dtype of the parameters. Weight decay applies to matrices, not to vectors.
    """

    def __init__(self, recipe: Recipe, blueprint: Blueprint, parameters: Mapping[str, nn.Parameter]) -> None:
        self._recipe = recipe
        spec = built(recipe)
        self._optimizers = (
            [_plain_optimizer(_parameter_groups(blueprint, parameters, spec), spec)]
            if spec.factory is None
            else made_by(parameters, spec)
        )
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._groups = [(group, group.get("lr", spec.learning_rate) / spec.learning_rate) for group in groups]

    def step(self, index: int) -> None:
        """Update the parameters by their gradients in step ``index``, and drop the gradients."""
        for group, ratio in self._groups:
            group["lr"] = ratio * learning_rate(self._recipe, index)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _parameter_groups(
    blueprint: Blueprint, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec
) -> list[dict[str, Any]]:
    """One group per trained parameter."""
    return [
        {
            "params": [parameter],
            "weight_decay": spec.weight_decay if parameter.ndim >= 2 else 0.0,
            "lr": spec.learning_rate * blueprint.rate_ratio(name),
        }
        for name, parameter in parameters.items()
    ]


def _plain_optimizer(groups: list[dict[str, Any]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    if spec.name == "sgd":
        return SGDW(groups, momentum=spec.momentum, foreach=False, fused=False)
    kind = AdamW8bit if spec.name == "adamw_8bit" else torch.optim.AdamW
    return kind(groups, betas=spec.betas, eps=spec.epsilon, foreach=False, fused=False)


class GradientScale:
    """Finds parameters that the loss does not determine: their gradient never rises above rounding error.

    The exact gradient of an attention key's bias is zero, because softmax ignores a shift common to all keys. Adam
    turns its rounding error into full-size steps. Such parameters differ from run to run without effect, so they cannot
    be compared. In ``nn.MultiheadAttention`` that bias is a part of a vector.
    """

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._vectors: dict[str, Tensor] = {}
        self._whole = 0.0

    def watch(self, model: nn.Module) -> None:
        """Record the gradients of one step."""
        squares = {
            n: float(p.grad.double().square().mean())
            for n, p in named_parameters(model)
            if p.grad is not None
        }
        sizes = {n: p.numel() for n, p in named_parameters(model)}
        whole = sum(square * sizes[n] for n, square in squares.items()) / sum(sizes[n] for n in squares)
        self._whole = max(self._whole, whole)
        for name, square in squares.items():
            self._largest[name] = max(self._largest.get(name, 0.0), square)
        for name, p in named_parameters(model):
            if p.grad is not None and p.ndim == 1:
                size = p.grad.abs().double()
                self._vectors[name] = self._vectors.get(name, size).maximum(size)

    def undetermined(self, dtype: torch.dtype) -> list[str]:
        """Parameters whose gradient stayed below 100 rounding units of the model's root mean square gradient."""
        limit = (100 * torch.finfo(dtype).eps) ** 2 * self._whole
        return [name for name, square in self._largest.items() if square <= limit]

    def compared(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters, with NaN in the place of elements of vectors that the loss does not determine."""
        limit = 100 * torch.finfo(dtype).eps * self._whole**0.5
        known = {name: largest > limit for name, largest in self._vectors.items()}
        trained = {name: parameters[name] for name in self._largest if name in parameters}
        whole = {
            name: p.where(~p.isnan(), torch.inf) for name, p in trained.items()
        }  # NaN of training is a fault
        return {
            **parameters,
            **{name: p.where(known[name], torch.nan) if name in known else p for name, p in whole.items()},
        }


def detached_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Detached parameters by canonical name."""
    return {name: p.detach().contiguous() for name, p in named_parameters(model)}
