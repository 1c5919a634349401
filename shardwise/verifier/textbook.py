"""Parts of a training step as their papers and PyTorch define them, for the plain processes of ``verify``.

Nothing here is the engine's: a fault of its loss scale, clipping or update rules is not on both sides of a comparison.
"""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.recipe.sections import AdaptiveClipSpec, LossScaleSpec

_WATCHED, _DECAY, _SCALE_BLOCK = 25, 0.97, 128
"""Norms before ZClip clips, the decay of its statistics, and values that share a scale in 8 bits."""


class PlainLossScale:
    """The loss scale of Megatron-LM's ``DynamicGradScaler``; with a hysteresis of 1 that of ``torch.amp.GradScaler``.

    Attributes:
        value: the factor on the loss of the next step.
    """

    def __init__(self, spec: LossScaleSpec) -> None:
        self._spec = spec
        self.value = spec.initial
        self._clean = 0
        self._overflows_left = spec.hysteresis

    def update(self, overflowed: bool) -> None:
        """Learn whether the gradients of a step were finite."""
        if not self._spec.dynamic:
            return
        if overflowed:
            self._clean = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.value = max(self.value * self._spec.backoff, self._spec.floor)
        else:
            self._clean += 1
            if self._clean == self._spec.growth_interval:
                self.value *= self._spec.growth
                self._clean = 0
                self._overflows_left = self._spec.hysteresis


class PlainNormLimit:
    """The norm to clip to: a constant, and ZClip's (Kumar et al. 2025, arXiv 2504.02507, algorithm 1)."""

    def __init__(self, constant: float | None, spec: AdaptiveClipSpec | None) -> None:
        # A run holds its limits in fp32.
        self._constant = float(torch.tensor(float("inf") if constant is None else constant))
        self._spec = spec
        self._norms: list[float] = []
        self._mean = self._variance = 0.0

    def next(self, norm: float) -> float:
        """The limit for a gradient of this norm, which is learned from."""
        return min(self._adaptive(norm), self._constant)

    def _adaptive(self, norm: float) -> float:
        if self._spec is None:
            return float("inf")
        if len(self._norms) < _WATCHED:
            self._norms.append(norm)
            self._mean = statistics.fmean(self._norms)
            self._variance = statistics.pvariance(self._norms)
            return float("inf")
        z = self._spec.z
        deviation = self._variance**0.5
        # 1e-6: norms that do not vary have no deviation.
        score = (norm - self._mean) / (deviation + 1e-6)
        limit = float("inf")
        if self._spec.mode == "cap":
            limit = self._mean + z * deviation
        elif score > z:
            limit = self._mean + z * deviation * z / score
        learned = min(norm, limit)
        self._mean = _DECAY * self._mean + (1 - _DECAY) * learned
        self._variance = _DECAY * self._variance + (1 - _DECAY) * (learned - self._mean) ** 2
        return limit


class SGDW(torch.optim.SGD):
    """torch's SGD with weight decay outside of the momentum (Loshchilov & Hutter 2019), as in its AdamW."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            for parameter in group["params"]:
                if (
                    parameter.grad is not None
                ):  # as torch's optimizers leave out weights that the loss does not use
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay


class AdamW8bit(torch.optim.AdamW):
    """torch's AdamW whose moments are rounded to 8 bits after every step (Dettmers et al. 2022).

    Of matrices, and of the second moment its square root.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter, state in self.state.items():
            if parameter.ndim >= 2:
                state["exp_avg"].copy_(in_8_bits(state["exp_avg"], signed=True))
                state["exp_avg_sq"].copy_(in_8_bits(state["exp_avg_sq"].sqrt(), signed=False).square())


def in_8_bits(value: Tensor, signed: bool) -> Tensor:
    """Values of a matrix, each rounded to the nearest code times the largest magnitude of its block of 128 in a row.

    Without a sign, only zero becomes zero.
    """
    rows = value.flatten(1).float()
    blocks = F.pad(rows, (0, -rows.shape[1] % _SCALE_BLOCK)).unflatten(1, (-1, _SCALE_BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True)
    unit = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)
    codes = _codes(signed).to(value.device)
    above = torch.searchsorted(codes, unit).clamp(1, len(codes) - 1)
    nearer = unit - codes[above - 1] > codes[above] - unit
    index = torch.where(nearer, above, above - 1)
    if not signed:
        index = torch.where(unit > 0, index.clamp(min=1), 0)
    return (codes[index] * scale).flatten(1)[:, : rows.shape[1]].view_as(value).to(value.dtype)


def _codes(signed: bool) -> Tensor:
    """The dynamic tree code: a power of ten, and as many linear steps as the bits that are left (section 1.3)."""
    positive = [
        10.0 ** (power - 6) * middle
        for power in range(7)
        for borders in [torch.linspace(0.1, 1, 2 ** (power + (not signed)) + 1, dtype=torch.float64)]
        for middle in ((borders[:-1] + borders[1:]) / 2).tolist()
    ]
    negative = [-value for value in positive] if signed else []
    return torch.tensor([*negative, 0.0, *positive, 1.0], dtype=torch.float64).sort().values.float()
