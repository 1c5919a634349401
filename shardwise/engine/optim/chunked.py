"""Update rules that go through a parameter in chunks of rows: weights in 16 bits, moments in 8.

A chunk is read into fp32, updated by a formula, and written back in the form it is stored in, so what lives
beside the stored state is a few chunks, not copies of all parameters. Everything is written through the
verdict (``where``, never a product: 0 times NaN is NaN).

fp32 weights are written as they are, bf16 weights by stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.core.sections import OptimizerSpec
from shardwise.engine.optim.moments import Moments
from shardwise.engine.optim.norm import gradient
from shardwise.engine.optim.optimizer import Rate
from shardwise.engine.optim.piece import Piece, as_rows, chunks
from shardwise.engine.optim.rounding import random_bits, to_bf16
from shardwise.model.slices import local_slices

Formula = Callable[[Tensor, Tensor, list[Tensor], Tensor, Rate], tuple[Tensor, list[Tensor]]]
"""(weights, gradient, moments, step from 1, rate) to (new weights, new moments), all fp32, elementwise."""


def adamw_formula(spec: OptimizerSpec) -> Formula:
    """Adam with decoupled weight decay and bias correction (Loshchilov & Hutter 2019, algorithm 2)."""
    beta1, beta2 = spec.betas

    def update(
        weight: Tensor, grad: Tensor, moments: list[Tensor], step: Tensor, rate: Rate
    ) -> tuple[Tensor, list[Tensor]]:
        mean = torch.lerp(moments[0], grad, 1 - beta1)
        square = torch.lerp(moments[1], grad * grad, 1 - beta2)
        size = (square / (1 - beta2**step)).sqrt_().add_(spec.epsilon)
        change = (mean / (1 - beta1**step)).div_(size)
        kept = weight * (1 - rate.learning_rate * rate.weight_decay)
        return kept.sub_(change, alpha=rate.learning_rate), [mean, square]

    return update


def sgd_formula(spec: OptimizerSpec) -> Formula:
    """Heavy-ball momentum, decay in the gradient: as the fused rule."""

    def update(
        weight: Tensor, grad: Tensor, moments: list[Tensor], step: Tensor, rate: Rate
    ) -> tuple[Tensor, list[Tensor]]:
        velocity = moments[0] * spec.momentum + grad + rate.weight_decay * weight
        return weight - rate.learning_rate * velocity, [velocity]

    return update


@dataclass(frozen=True)
class ChunkedRule:
    """A formula over stored weights and ``names``d moments. ``seed`` is of stochastic rounding."""

    formula: Formula
    names: Sequence[str]
    moments: Moments
    seed: int

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for name in self.names:
            state.update(self.moments.state(parameter, name))
        return state

    def update(
        self,
        parameters: Sequence[nn.Parameter],
        states: Sequence[dict[str, Tensor]],
        rate: Rate,
        skip: Tensor,
    ) -> None:
        for parameter, state in zip(parameters, states, strict=True):
            state["step"] += 1 - skip
            weights, grads = as_rows(parameter), gradient(parameter).view_as(as_rows(parameter))
            kept = {name: as_rows(moment) for name, moment in state.items() if name != "step"}
            for rows in chunks(*weights.shape):
                moments = {name: moment[rows] for name, moment in kept.items()}
                piece = Piece(parameter, rows, weights[rows], grads[rows], moments, state["step"])
                self.update_piece(piece, rate, skip)

    def update_piece(self, piece: Piece, rate: Rate, skip: Tensor) -> None:
        untouched, old = skip > 0, piece.weight
        assert piece.step is not None, "in every state that is made here"
        wide = torch.promote_types(old.dtype, torch.float32)
        moments = [self.moments.read(piece.state, name, slice(None)).to(wide) for name in self.names]
        new, moments = self.formula(old.to(wide), piece.grad.to(wide), moments, piece.step.clamp(min=1), rate)
        for name, moment in zip(self.names, moments, strict=True):
            self.moments.write(piece.state, name, slice(None), moment, untouched)
        old.copy_(torch.where(untouched, old, self._stored(new, piece)))

    def _stored(self, value: Tensor, piece: Piece) -> Tensor:
        """fp32 values in the dtype of the weights."""
        if piece.weight.dtype != torch.bfloat16:
            return value.to(piece.weight.dtype)
        assert piece.step is not None
        seed = (piece.step.to(torch.int64) << 40) + self.seed * 1_000_003
        return to_bf16(value, random_bits(*_place(piece), seed))


def _place(piece: Piece) -> tuple[Tensor, Tensor]:
    """The rows and the columns of a piece's elements in the whole parameter seen as [rows, rest], int64."""
    parameter, rows = piece.parameter, piece.rows
    first, *rest = local_slices(parameter) or (slice(0, 1),)
    device = piece.weight.device
    row = torch.arange(first.start + rows.start, first.start + rows.stop, device=device)
    column = torch.zeros(1, dtype=torch.int64, device=device)
    for span, size in zip(rest, parameter.shape[1:], strict=True):
        column = (column[:, None] * size + torch.arange(span.start, span.stop, device=device)).flatten()
    return row, column
