"""The sizes of gradients of one step in fp16, from which the report shows what underflows without loss scaling.

The step is the first one after the steps whose memory is measured whose gradients are finite. Gradients are counted
before they are unscaled and clipped, by exponent. The counts stay on the device until the run has ended or the next
step has begun, so no step waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.core.run_files import GradientHistogram
from shardwise.engine.optim.norm import local
from shardwise.engine.phase import listening
from shardwise.engine.run import Run
from shardwise.trainer.meter import EXACT_STEPS

LOWEST, HIGHEST = -64, 31
"""Exponents of the first and the last bin, which also count smaller and larger values."""

_BINS = HIGHEST - LOWEST + 1
_ZERO = _BINS
_NON_FINITE = _BINS + 1
"""Indices of the counts of zeros and of values that are not finite, after the bins."""
_CHUNK = 1 << 20
"""Elements that are widened to fp32 at once, which bounds the memory of counting."""
_TRIES = 20
"""Steps after which no finite gradients are waited for."""


class GradientWatch:
    """Counts this rank's gradients in one step. The run starts, or resumes, after ``first`` steps."""

    def __init__(self, run: Run, first: int) -> None:
        self._run = run
        last = run.recipe.steps - 1
        self._steps = range(min(first + EXACT_STEPS, last), min(first + EXACT_STEPS + _TRIES, last + 1))
        self._counted: tuple[int, Tensor, Tensor] | None = None  # index of the step, counts, loss scale
        self._done = not run.loss_scale.active

    @contextmanager
    def over(self, index: int) -> Iterator[None]:
        """Enclose the step ``index``, counted from 0."""
        if self._done or index not in self._steps or self._finite():
            yield
            return
        with listening(lambda phase: self._begun(phase, index)):
            yield

    def _finite(self) -> bool:
        """Whether the last counted gradients were finite; waits for them, which a step has passed since."""
        if self._counted is not None:
            self._done = int(self._counted[1][_NON_FINITE]) == 0
        return self._done

    def _begun(self, phase: str, index: int) -> None:
        if phase == "clip":  # all gradients are there, and still scaled
            gradients = [p.grad for p in self._run.model.parameters() if p.grad is not None]
            if gradients:
                # The scale is cloned, because the step updates it in place.
                self._counted = (index, counted(gradients), self._run.loss_scale.value.clone())

    def collect(self) -> GradientHistogram | None:
        """The counts of this rank's shards; None without fp16, and where gradients are freed in the backward pass."""
        if self._counted is None:
            return None
        index, counts, scale = self._counted
        *bins, zeros, non_finite = counts.tolist()
        return GradientHistogram(index + 1, float(scale), LOWEST, tuple(bins), zeros, non_finite)


@torch.no_grad()
def counted(gradients: Iterable[Tensor]) -> Tensor:
    """Counts by exponent, of zeros, and of values that are not finite, [bins + 2], on the device of the gradients."""
    pieces = [local(gradient).detach().flatten() for gradient in gradients]
    counts = torch.zeros(_BINS + 2, dtype=torch.int64, device=pieces[0].device)
    for piece in (chunk for gradient in pieces for chunk in gradient.split(_CHUNK)):
        values = piece.float().abs()
        # The logarithm of 0 is -inf, and casting that or NaN to an integer is undefined: both get bins of their own.
        bins = values.log2().floor().nan_to_num(0.0, 0.0, 0.0).clamp(LOWEST, HIGHEST).to(torch.int64) - LOWEST
        bins = torch.where(values == 0, _ZERO, torch.where(values.isfinite(), bins, _NON_FINITE))
        counts.scatter_add_(0, bins, torch.ones_like(bins))
    return counts
