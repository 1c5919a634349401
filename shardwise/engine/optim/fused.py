"""AdamW and SGD by torch's fused kernels, for weights and moments of one dtype.

The kernels read the skip verdict themselves (``found_inf``): if it is 1 they return without a change. They are called
on local shards. DTensor dispatch would do nothing for an elementwise update and cost host time for every parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shardwise.engine.optim.chunk import Chunk
from shardwise.engine.optim.norm import gradient, local
from shardwise.engine.optim.optimizer import Rate
from shardwise.runtime.torch_private import foreach_mul_


@dataclass(frozen=True)
class FusedAdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    betas: tuple[float, float]
    epsilon: float

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }

    def update(
        self,
        parameters: Sequence[nn.Parameter],
        states: Sequence[dict[str, Tensor]],
        rate: Rate,
        skip: Tensor,
    ) -> None:
        self._kernel(
            [local(p.detach()) for p in parameters],
            [gradient(p) for p in parameters],
            [local(s["exp_avg"]) for s in states],
            [local(s["exp_avg_sq"]) for s in states],
            [s["step"] for s in states],
            rate,
            skip,
        )

    def update_piece(self, piece: Chunk, rate: Rate, skip: Tensor) -> None:
        assert piece.step is not None, "in every state that is made here"
        moments = piece.state["exp_avg"], piece.state["exp_avg_sq"]
        # The kernel counts the step itself.
        self._kernel([piece.weight], [piece.grad], [moments[0]], [moments[1]], [piece.step - 1], rate, skip)

    def _kernel(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
        rate: Rate,
        skip: Tensor,
    ) -> None:
        adamw(
            weights,
            grads,
            means,
            squares,
            [],
            steps,
            fused=True,
            found_inf=skip,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=rate.learning_rate,
            weight_decay=rate.weight_decay,
            eps=self.epsilon,
            maximize=False,
        )


@dataclass(frozen=True)
class FusedSGD:
    """Heavy-ball momentum with decoupled weight decay: v = momentum·v + g; w = (1 - rate·decay)·w - rate·v.

    SGDW of Loshchilov & Hutter 2019 (algorithm 1), with the decay scaled by the learning rate as in torch's AdamW.
    """

    momentum: float

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if self.momentum == 0:
            return {}
        return {"momentum": torch.zeros_like(parameter, requires_grad=False)}

    def update(
        self,
        parameters: Sequence[nn.Parameter],
        states: Sequence[dict[str, Tensor]],
        rate: Rate,
        skip: Tensor,
    ) -> None:
        self._kernel(
            [local(p.detach()) for p in parameters],
            [gradient(p) for p in parameters],
            [local(s["momentum"]) if s else None for s in states],
            rate,
            skip,
        )

    def update_piece(self, piece: Chunk, rate: Rate, skip: Tensor) -> None:
        self._kernel([piece.weight], [piece.grad], [piece.state.get("momentum")], rate, skip)

    def _kernel(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        momenta: list[Tensor | None],
        rate: Rate,
        skip: Tensor,
    ) -> None:
        if rate.weight_decay:
            applied = 1 - skip.to(weights[0].dtype)
            foreach_mul_(weights, 1 - rate.learning_rate * rate.weight_decay * applied)
        sgd(
            weights,
            grads,
            momenta,
            fused=True,
            found_inf=skip,
            weight_decay=0.0,
            momentum=self.momentum,
            lr=rate.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
