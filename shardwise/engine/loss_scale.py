"""Device state between updates: the loss scale, and statistics of the gradient norm.

Tensors decide both, from values that all ranks share. So ranks agree without communication, and there is no host sync.
The state is saved with the optimizer's.

Loss scaling (Micikevicius et al. 2018): the loss is multiplied before the backward pass, so that gradients below 2^-24
survive in fp16, and gradients are divided before clipping. A dynamic scale backs off when scaled gradients overflow,
and grows after a number of clean steps. With hysteresis it backs off only at the n-th overflow since it last grew, as
in Megatron-LM. Other precisions have a constant scale of one, so there is no second code path.

The adaptive limit is ZClip's (Kumar et al. 2025, arXiv 2504.02507). It clips a norm x that exceeds the exponential mean
m by more than z standard deviations s, to m + z s (z / h) with h = (x - m) / s: the higher the spike, the closer to the
mean. Mode ``cap`` clips to m + z s, the mode "percentile" of the reference code. The statistics learn the norm that the
adaptive limit left, so one spike does not raise the limit for the next.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.recipe.sections import AdaptiveClipSpec, LossScaleSpec

NORM_DECAY = 0.97
NORM_WARMUP = 25
NORM_EPSILON = 1e-6
"""ZClip's decay of mean and variance, the steps it watches before it clips, and its addition to the deviation."""


def loss_scale_of(spec: LossScaleSpec | None, device: torch.device) -> LossScale:
    """The recipe's loss scale. ``spec`` None: one, for good."""
    if spec is not None and spec.dynamic:
        return DynamicLossScale(spec, device)
    return LossScale(spec, device)


class LossScale:
    """A constant factor on the loss. ``spec`` None: one."""

    def __init__(self, spec: LossScaleSpec | None, device: torch.device) -> None:
        self.active = spec is not None
        self._spec = spec or LossScaleSpec(initial=1.0, dynamic=False)
        self.value = torch.full((), self._spec.initial, dtype=torch.float32, device=device)
        self._clean = torch.zeros((), dtype=torch.int32, device=device)
        self._left = torch.full((), self._spec.hysteresis, dtype=torch.int32, device=device)

    def update(self, skipped: Tensor, void: Tensor | None = None) -> None:
        """Learn whether a step's update was skipped (1) or not (0). A constant learns nothing.

        Args:
            void: 1 if the step is run again, and nothing is learnt of it.
        """

    def state(self) -> dict[str, Tensor]:
        return {"loss_scale": self.value, "clean_steps": self._clean, "overflows_left": self._left}


class DynamicLossScale(LossScale):
    """Backs off when gradients overflow, and grows after a number of clean steps."""

    def update(self, skipped: Tensor, void: Tensor | None = None) -> None:
        spec = self._spec
        bad = skipped > 0
        left = self._left - bad.to(torch.int32)
        clean = torch.where(bad, 0, self._clean + 1)
        # All branches are computed and chosen by ``where``: a Python ``if`` on the verdict would wait for the
        # device.
        lower = (self.value * spec.backoff).clamp(min=spec.floor)
        grown = clean >= spec.growth_interval
        value = torch.where(bad & (left <= 0), lower, self.value)
        for state, new in (
            (self.value, torch.where(grown, value * spec.growth, value)),
            (self._clean, torch.where(grown, 0, clean)),
            (self._left, torch.where(grown, spec.hysteresis, left.clamp(min=0))),
        ):
            state.copy_(new if void is None else torch.where(void > 0, state, new))


def norm_limit_of(
    clip_norm: float | None, adaptive: AdaptiveClipSpec | None, device: torch.device
) -> NormLimit:
    """The recipe's limit: a constant, an adaptive limit, the lower of both, or neither."""
    if adaptive is None:
        return NormLimit(clip_norm, device)
    return AdaptiveNormLimit(clip_norm, device, adaptive)


class NormLimit:
    """The norm to which gradients are clipped: a constant. ``clip_norm`` None: they are not clipped."""

    def __init__(self, clip_norm: float | None, device: torch.device) -> None:
        self.active = clip_norm is not None
        self._constant = math.inf if clip_norm is None else clip_norm
        self._mean, self._variance, self._seen = (
            torch.zeros((), dtype=torch.float32, device=device) for _ in range(3)
        )

    def value(self, norm: Tensor) -> Tensor:
        """The limit for a gradient of this norm, a scalar; infinite when there is none."""
        return torch.full_like(self._mean, self._constant)

    def update(self, norm: Tensor, skipped: Tensor) -> None:
        """Learn the norm of a step whose update was skipped (1) or not (0). A constant learns nothing."""

    def state(self) -> dict[str, Tensor]:
        return {"norm_mean": self._mean, "norm_variance": self._variance, "norms_seen": self._seen}


class AdaptiveNormLimit(NormLimit):
    """The lower of ZClip's limit and a constant one."""

    def __init__(self, clip_norm: float | None, device: torch.device, spec: AdaptiveClipSpec) -> None:
        super().__init__(clip_norm, device)
        self.active = True
        self._spec = spec

    def value(self, norm: Tensor) -> Tensor:
        return self._adaptive(norm.to(torch.float32)).clamp(max=self._constant)

    def _adaptive(self, norm: Tensor) -> Tensor:
        """ZClip's limit; infinite in the warmup, and in mode ``zclip`` for a norm that is no outlier."""
        none = torch.full_like(self._mean, math.inf)
        z = self._spec.z
        deviation = self._variance.sqrt()
        if self._spec.mode == "cap":
            limit = self._mean + z * deviation
        else:
            height = (norm - self._mean) / (deviation + NORM_EPSILON)
            limit = torch.where(height > z, self._mean + z * deviation * (z / height), none)
        return torch.where(self._seen < NORM_WARMUP, none, limit)

    def update(self, norm: Tensor, skipped: Tensor) -> None:
        """Learn a norm, clipped to its adaptive limit; nothing of a skipped step."""
        norm = norm.to(torch.float32)
        norm = norm.minimum(self._adaptive(norm))
        warming = self._seen < NORM_WARMUP
        bad = skipped > 0
        # Mean and variance of all norms so far (Welford 1962), then exponential averages.
        weight = torch.where(warming, 1 / (self._seen + 1), 1 - NORM_DECAY)
        mean = self._mean.lerp(norm, weight)
        square = torch.where(warming, (norm - mean) * (norm - self._mean), (norm - mean).square())
        # ``where``, not a product with 0: the norm of a skipped step may be NaN, and 0 times NaN is NaN.
        self._variance.copy_(torch.where(bad, self._variance, self._variance.lerp(square, weight)))
        self._mean.copy_(torch.where(bad, self._mean, mean))
        self._seen.add_(1 - skipped)  # a skipped norm counts neither for the warmup nor for the mean
