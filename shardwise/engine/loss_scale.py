"""Device state between updates: the loss scale, and statistics of the gradient norm.

Tensors decide both, from values that all ranks share. So ranks agree without communication, and there is no host sync.
The state is saved with the optimizer's.

Loss scaling (Micikevicius et al. 2018): the loss is multiplied before the backward pass, so that gradients below 2^-24
survive in fp16, and gradients are divided before clipping. A dynamic scale backs off when scaled gradients overflow,
and grows after a number of clean steps. With hysteresis it backs off only at the n-th overflow since it last grew, as
in Megatron-LM. Other precisions have a constant scale of one, so there is no second code path.

The adaptive limit (ZClip, Kumar et al. 2025) clips a norm that exceeds its exponential mean by more than z standard
deviations, to that limit. Its statistics use the clipped value, so one spike does not raise the limit for the next.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.recipe.sections import LossScaleSpec

NORM_DECAY = 0.97
NORM_WARMUP = 25
"""ZClip's decay of the mean and the steps it watches before it clips."""


class LossScale:
    """The factor on the loss. ``spec`` None: one, for good."""

    def __init__(self, spec: LossScaleSpec | None, device: torch.device) -> None:
        self.active = spec is not None
        self._spec = spec or LossScaleSpec(initial=1.0, dynamic=False)
        self.value = torch.full((), self._spec.initial, dtype=torch.float32, device=device)
        self._clean = torch.zeros((), dtype=torch.int32, device=device)
        self._left = torch.full((), self._spec.hysteresis, dtype=torch.int32, device=device)

    def update(self, skipped: Tensor) -> None:
        """Back off or grow after a step whose update was skipped (1) or not (0)."""
        if not self._spec.dynamic:
            return
        spec, bad = self._spec, skipped > 0
        left = self._left - bad.to(torch.int32)
        clean = torch.where(bad, 0, self._clean + 1)
        lower = (self.value * spec.backoff).clamp(min=spec.floor)
        grown = clean >= spec.growth_interval
        value = torch.where(bad & (left <= 0), lower, self.value)
        self.value.copy_(torch.where(grown, value * spec.growth, value))
        self._clean.copy_(torch.where(grown, 0, clean))
        self._left.copy_(torch.where(grown, spec.hysteresis, left.clamp(min=0)))

    def state(self) -> dict[str, Tensor]:
        return {"loss_scale": self.value, "clean_steps": self._clean, "overflows_left": self._left}


class NormLimit:
    """The norm to which gradients are clipped: a constant, a multiple of standard deviations, or neither."""

    def __init__(self, clip_norm: float | None, z: float | None, device: torch.device) -> None:
        self.active = clip_norm is not None or z is not None
        self._constant = math.inf if clip_norm is None else clip_norm
        self._z = z
        self._mean, self._square, self._seen = (
            torch.zeros((), dtype=torch.float32, device=device) for _ in range(3)
        )

    def value(self) -> Tensor:
        """The limit of the next norm, a scalar; infinite when there is none."""
        constant = torch.full_like(self._mean, self._constant)
        if self._z is None:
            return constant
        deviation = (self._square - self._mean.square()).clamp(min=0).sqrt()
        adaptive = self._mean + self._z * deviation
        return torch.where(self._seen < NORM_WARMUP, constant, constant.minimum(adaptive))

    def update(self, norm: Tensor, limit: Tensor, skipped: Tensor) -> None:
        """Learn a norm, clipped to the ``limit`` it met; nothing of a skipped step."""
        if self._z is None:
            return
        seen = norm.to(torch.float32).minimum(limit)
        # A plain mean at first, then the exponential one: no bias towards zero.
        weight = (1 / (self._seen + 1)).clamp(min=1 - NORM_DECAY)
        bad = skipped > 0
        self._mean.copy_(torch.where(bad, self._mean, self._mean.lerp(seen, weight)))
        self._square.copy_(torch.where(bad, self._square, self._square.lerp(seen.square(), weight)))
        self._seen.add_(1 - skipped)

    def state(self) -> dict[str, Tensor]:
        return {"norm_mean": self._mean, "norm_square": self._square, "norms_seen": self._seen}
