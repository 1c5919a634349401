"""AdamW and SGD by torch's fused kernels, for weights and moments of one dtype.

The kernels read the skip verdict themselves (``found_inf``): if it is 1 they return without a change. They are called
on local shards. DTensor dispatch would do nothing for an elementwise update and cost host time for every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shardwise.engine.optim.chunk import Chunk
from shardwise.engine.optim.optimizer import Rate
from shardwise.runtime.torch_private import foreach_mul_

_ADAM_STATE = "exp_avg", "exp_avg_sq", "step"


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

    def update(self, chunks: Sequence[Chunk], rate: Rate, skip: Tensor) -> None:
        weights, gradients = [c.weight for c in chunks], [c.grad for c in chunks]
        means, squares, steps = ([c.state[name] for c in chunks] for name in _ADAM_STATE)
        # found_inf is for GradScaler: if it is 1, the kernel changes nothing, and the host need not know.
        varying = {"lr": rate.learning_rate, "weight_decay": rate.weight_decay, "found_inf": skip}
        self._kernel(weights, gradients, means, squares, [], steps, **varying)

    @cached_property
    def _kernel(self) -> Callable[..., None]:
        """torch's kernel with the arguments that are the same in all steps."""
        b1, b2 = self.betas
        return partial(adamw, fused=True, amsgrad=False, maximize=False, beta1=b1, beta2=b2, eps=self.epsilon)


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

    def update(self, chunks: Sequence[Chunk], rate: Rate, skip: Tensor) -> None:
        weights = [c.weight for c in chunks]
        if rate.weight_decay:
            # The decay is a kernel of its own, which knows nothing of ``found_inf``: in a skipped update it is by 1.
            applied = 1 - skip.to(weights[0].dtype)
            foreach_mul_(weights, 1 - rate.learning_rate * rate.weight_decay * applied)
        sgd(
            weights,
            [c.grad for c in chunks],
            [c.state.get("momentum") for c in chunks],
            fused=True,
            found_inf=skip,
            weight_decay=0.0,  # decayed above: SGD of torch adds the decay to the gradient, and so to the momentum
            momentum=self.momentum,
            lr=rate.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
