"""A plain process in 16 or 8 bits: mixed precision as its papers and PyTorch define it, in a textbook training loop.

It shares with the engine the model, its loss, its initial values, the data and the schedule; of the strategy it reads
the dtypes (technique/digits.py). In a step

    weights     fp32 master weights are rounded to the dtype of compute, and so are floating-point inputs of the model
                and of its blocks (FSDP2's ``MixedPrecisionPolicy``); norms and losses are the model's
    own modules compute under ``torch.autocast``, by weights that are rounded and stay in fp32
    loss        divided by the targets of the global batch, and multiplied by the loss scale in fp16
    gradients   of every micro-batch in the dtype of compute, summed in fp32, divided by the loss scale, clipped
    update      left out where the loss or the norm is not finite; else torch's optimizer on the master weights
    bf16 alone  the updated weights are rounded to bf16 stochastically (Gupta et al. 2015), by bits of its own
    fp8         torchao's layers in the place of the linear layers that the strategy names
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.core.strategy import Strategy
from shardwise.hardware.kinds import kind_of
from shardwise.model.blueprint import Batch, Blueprint
from shardwise.recipe.lr_scaling import built
from shardwise.recipe.sections import Recipe
from shardwise.runtime.accumulation import accumulation_dtype
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.runtime.torch_private import tree_map_only
from shardwise.technique import Digits, digits_of
from shardwise.verifier.reference import (
    PlainOptimizer,
    PlainRank,
    ReferenceLoss,
    clip,
    norm_of,
    reference_model,
)
from shardwise.verifier.router_bias import PlainRouterBiases
from shardwise.verifier.textbook import PlainLossScale, PlainNormLimit
from shardwise.verifier.verdict import TrainedStep

COMPUTE_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class FirstGradients:
    """Gradients at one state of the weights, by name on the CPU, and their loss and norm.

    Attributes:
        targets: over which the loss is a mean.
        loss_scale: of the pass.
    """

    step: TrainedStep
    gradients: dict[str, Tensor]
    targets: int
    loss_scale: float


class _BackwardResult(NamedTuple):
    """The mean loss, the norm of its gradient, the targets of the mean, and the factor on the loss."""

    loss: float
    norm: Tensor
    targets: int
    loss_scale: float

    @property
    def finite(self) -> bool:
        return _finite(self.loss, self.norm)


class MixedPrecision:
    """A model that trains in one process.

    Attributes:
        compute: the dtype of compute.

    Args:
        moved: number of the run; from 1 on, every weight is first multiplied by 1 + u·r, with u half the spacing of
            numbers of the compute dtype and r uniform in [-1, 1].
    """

    def __init__(
        self, recipe: Recipe, blueprint: Blueprint, strategy: Strategy, device: torch.device, moved: int = 0
    ) -> None:
        self._blueprint, self._device = blueprint, device
        digits = digits_of(strategy)
        self.compute = COMPUTE_DTYPES[digits.compute]
        self._wide = accumulation_dtype(self.compute)
        self._model = reference_model(blueprint, recipe.seed, self._wide).to(device)
        self._loss = ReferenceLoss(blueprint, recipe.seed, self.compute, device)
        if moved:
            _move(self._model, torch.finfo(self.compute).eps / 2, moved)
        self._alone = not digits.master_weights
        self._bits = torch.Generator(device).manual_seed(moved)
        self._weights = {name: p for name, p in named_parameters(self._model) if p.requires_grad}
        rounded = self.compute if self._alone else self._wide
        self._masters = {
            n: nn.Parameter(p.detach().to(rounded).to(self._wide)) for n, p in self._weights.items()
        }
        self._narrow(digits)
        self._autocast = torch.autocast(device.type, self.compute, enabled=blueprint.casts_inputs)
        spec = built(recipe)
        self._optimizer = PlainOptimizer(recipe, blueprint, self._masters)
        self._biases = PlainRouterBiases(self._model)
        self._limit = PlainNormLimit(spec.clip_norm, spec.adaptive_clip)
        self._scale = PlainLossScale(recipe.loss_scale) if self.compute == torch.float16 else None

    def step(self, index: int, batches: Sequence[Batch], skip: bool | None = None) -> TrainedStep:
        """One optimizer step on the micro-batches of step ``index``.

        Args:
            skip: whether to leave the update out. None does so where the loss or the norm is not finite. An update
                that another run made, in spite of an overflow here, is made with a smaller loss scale.
        """
        compute = self._finite_gradients if skip is False else self._gradients
        result = compute(batches, self.loss_scale)
        skipped = not result.finite if skip is None else skip
        if not skipped:
            clip(self._masters.values(), result.norm, self._limit.next(float(result.norm)))
            self._optimizer.step(index)
            self._biases.step()
            self._store()
        self._forget()
        if self._scale is not None:
            self._scale.update(skipped)
        return TrainedStep(result.loss, float(result.norm), skipped)

    def rank(self, strategy: Strategy) -> PlainRank:
        """What its batches are made for."""
        return PlainRank(self._loss.passes(self._model), strategy, self._device)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the next step."""
        return 1.0 if self._scale is None else self._scale.value

    def gradients(self, batches: Sequence[Batch], scale: float) -> FirstGradients:
        """Gradients at the present weights by the largest loss scale, at most ``scale``, that does not overflow."""
        result = self._finite_gradients(batches, scale)
        gradients = {name: m.grad.cpu().clone() for name, m in self._masters.items() if m.grad is not None}
        self._forget()
        step = TrainedStep(result.loss, float(result.norm))
        return FirstGradients(step, gradients, result.targets, result.loss_scale)

    def _finite_gradients(self, batches: Sequence[Batch], scale: float) -> _BackwardResult:
        result = self._gradients(batches, scale)
        while not result.finite and result.loss_scale > 1:
            result = self._gradients(batches, max(1.0, result.loss_scale / 2))
        return result

    def _gradients(self, batches: Sequence[Batch], scale: float) -> _BackwardResult:
        """Put gradients of the mean loss into the master weights."""
        self._biases.forget()
        self._forget()
        batches = [{name: tensor.to(self._device) for name, tensor in batch.items()} for batch in batches]
        divisor = self._labelled(batches)
        total, count = 0.0, 0
        with self._autocast:
            batches = self._loss.prepared(self._model, batches)
        for batch in batches:
            with self._autocast, _own_kernels(self._model, self._device, self.compute):
                self._biases.begin(batch)
                loss, targets = self._loss(self._model, batch)
            total += loss.item()
            count += int(targets)
            # Without labels the targets of later micro-batches are not known yet. So the first stands for all, and
            # the factor below corrects it. Dividing only afterwards would overflow in 16 bits.
            divisor = divisor or max(1, count * len(batches))
            (loss / divisor * scale).backward()
            for name, weight in self._weights.items():
                if weight.grad is not None:
                    _add_gradient(self._masters[name], weight.grad.to(self._wide))
                    weight.grad = None
        count = max(1, count)
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        for grad in grads:
            grad *= divisor / (count * scale)
            if self._alone:
                grad.copy_(grad.to(self.compute))
        return _BackwardResult(total / count, norm_of(self._masters.values()), count, scale)

    def _labelled(self, batches: Sequence[Batch]) -> int:
        """The targets of a step by its labels; 0 where only the loss knows them, as it is called."""
        if self._blueprint.counts_in_loss:
            return 0
        return max(1, sum(int(self._blueprint.minimises.count(self._blueprint, batch)) for batch in batches))

    @torch.no_grad()
    def _store(self) -> None:
        """Round the updated master weights to the weights that the model computes with."""
        for name, weight in self._weights.items():
            master = self._masters[name]
            if self._alone:
                master.copy_(stochastically_rounded(master, self._bits))
            weight.copy_(master.to(self.compute))

    def _forget(self) -> None:
        for master in self._masters.values():
            master.grad = None

    def weights(self) -> dict[str, Tensor]:
        """A copy of the trained parameters on the CPU, in fp32 (fp64 for fp64)."""
        return {name: master.detach().cpu().clone() for name, master in self._masters.items()}

    def _narrow(self, digits: Digits) -> None:
        """Let the model compute in its dtype: weights, inputs, and what the strategy asks for."""
        autocast = self._blueprint.casts_inputs
        for parameter in self._model.parameters():
            if parameter.is_floating_point():
                # Autocast casts fp32 weights itself, so these only have to have the rounded values.
                rounded = parameter.data.to(self.compute)
                parameter.data = rounded.to(self._wide) if autocast else rounded
        if digits.narrow_buffers:
            for module in self._model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        setattr(module, name, buffer.to(self.compute))
        blocks = self._blueprint.blocks(self._model)
        if self.compute != self._wide and not autocast:
            for module in (self._model, *blocks):
                module.register_forward_pre_hook(self._cast, with_kwargs=True)
        if digits.fp8_scaling is not None:
            _use_torchao(blocks, digits, emulated=kind_of(self._device).is_host)

    def _cast(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(
            Tensor, lambda x: x.to(self.compute) if x.is_floating_point() else x, (args, kwargs)
        )


@contextmanager
def _own_kernels(model: nn.Module, device: torch.device, compute: torch.dtype) -> Iterator[None]:
    """PyTorch's kernels for an LSTM in 16 bits on a CPU: autocast chooses oneDNN's, which has none on many CPUs."""
    recurrent = any(isinstance(module, nn.LSTM) for module in model.modules())
    if not recurrent or not kind_of(device).is_host or compute not in {torch.float16, torch.bfloat16}:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _finite(loss: float, norm: Tensor) -> bool:
    return math.isfinite(loss) and bool(norm.isfinite())


def stochastically_rounded(value: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 values, each rounded to one of its neighbours in bf16 with probabilities that keep the mean."""
    # bf16 is the upper half of fp32. Random lower halves carry into it as often as the part that is cut off is large.
    bits = torch.randint(2**16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    return ((value.detach().view(torch.int32) + bits) & -(2**16)).view(torch.float32)


def _use_torchao(blocks: Sequence[nn.Module], digits: Digits, emulated: bool) -> None:
    """torchao's 8-bit layers in the place of the blocks' linear layers that the strategy runs in 8 bits."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    names = {"tensor": "tensorwise", "row": "rowwise"}
    config = Float8LinearConfig.from_recipe_name(names[str(digits.fp8_scaling)])
    config = replace(config, emulate=emulated, pad_inner_dim=not emulated)
    for parent, name, linear in list(_parents_of_linear(blocks)):
        if digits.in_fp8(*linear.weight.shape):
            setattr(parent, name, Float8Linear.from_float(linear, config))


def _parents_of_linear(blocks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for block in blocks:
        for parent in block.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear:
                    yield parent, name, child


def _move(model: nn.Module, unit: float, seed: int) -> None:
    for name, weight in named_parameters(model):
        if weight.is_floating_point():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            r = torch.rand(weight.shape, generator=generator) * 2 - 1
            weight.data.mul_(1 + unit * r.to(weight.device).double())


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
