"""From gradients to an update: after the backward pass, or within it.

Both end in the same verdict: where the loss or a gradient is not finite on any rank, the update is skipped on
all of them. After the backward pass all of it is known in time: the global norm is one sum over the world, a
NaN anywhere makes it NaN everywhere, and nothing is updated. Within the backward pass parameters are updated
before the norm is complete, so only the loss can forbid all of it; a gradient that is not finite then forbids
its own piece, and the norm, which is not finite either, tells the trainer that the update was torn.

A step may break off on one rank (its memory runs out) when the host of another has issued all of it. What the
device of the other then finds in the place of a collective's result is garbage, so after the last collective the
verdict reads ``Run.void``, a flag in host memory that is raised before the collectives are broken off: updates that
come after that do nothing. On the device's own time, so nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.optim.norm import global_norm, scale_gradients, square_sum
from shardwise.engine.phase import phase

if TYPE_CHECKING:
    from shardwise.engine.build import Run


class Update(Protocol):
    """When gradients are turned into updates.

    Attributes:
        begun: whether this step may have changed weights or moments; cleared by whoever counts steps.
        voidable: whether ``Run.void`` holds off all of an update.
    """

    begun: bool
    voidable: bool

    def attach(self, run: Run) -> None:
        """Called once, when the run is built."""
        ...

    def before_backward(self, run: Run, total: Tensor, last: bool) -> None:
        """Called before every backward pass with the loss sum of this rank so far."""
        ...

    def held_off(self) -> AbstractContextManager[None]:
        """Within it backward passes leave gradients and update nothing."""
        ...

    def finish(self, run: Run, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Ends the step; (norm of the gradient, 1 if the update was skipped or else 0), equal on all ranks."""
        ...


class AfterBackward:
    """Clip by the global norm, then update all parameters."""

    begun = False
    voidable = True

    def attach(self, run: Run) -> None: ...

    def before_backward(self, run: Run, total: Tensor, last: bool) -> None: ...

    def held_off(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, run: Run, loss: Tensor) -> tuple[Tensor, Tensor]:
        with phase("clip"):
            norm, skip = self.clip(run, loss)
        with phase("optimizer"):
            run.optimizer.step(skip=skip)
            run.optimizer.zero_grad(set_to_none=True)
            run.loss_scale.update(skip)
        return norm, skip

    def clip(self, run: Run, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Unscale and clip all gradients in place; (their norm before clipping, the verdict)."""
        parameters, scale = list(run.model.parameters()), run.loss_scale
        norm = global_norm(run.own_parameters(), run.device, run.stage_ranks, run.verdict_group) / scale.value
        self.begun = True  # the last collective: from here on every rank may update
        skip = 1 - (norm.isfinite() & loss.isfinite()).to(torch.float32)
        skip = skip.maximum(run.void.to(run.device, non_blocking=True))
        limit = run.norm_limit.value()
        if scale.active or run.norm_limit.active:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0) / scale.value
            scale_gradients(parameters, factor)
        run.norm_limit.update(norm, limit, skip)
        return norm, skip


class WithinBackward:
    """Update a parameter as soon as its gradient is complete, and free the gradient.

    One layer's gradients live at a time: the single-device twin of ZeRO-2. There is no clipping, for the norm is
    known only when everything has been updated.
    """

    begun = False
    voidable = False

    def __init__(self) -> None:
        self._last = self._held = False
        self._skip = self._square = torch.zeros(())

    def attach(self, run: Run) -> None:
        def consume(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            if self._last:
                self._consume(run, parameter)

        for parameter in run.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(consume)

    @contextmanager
    def held_off(self) -> Iterator[None]:
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def before_backward(self, run: Run, total: Tensor, last: bool) -> None:
        self._last = last and not self._held
        if self._last:
            self._skip = 1 - total.isfinite().to(torch.float32)
            dist.all_reduce(self._skip, dist.ReduceOp.MAX)
            self.begun = True
            self._square = torch.zeros((), dtype=torch.float64, device=run.device)

    def _consume(self, run: Run, parameter: nn.Parameter) -> None:
        if parameter.device.type != run.device.type:  # its gradient may still be on its way to the host
            torch.accelerator.current_stream(run.device).synchronize()
        with torch.no_grad():
            square = square_sum([parameter], run.device, run.stage_ranks)
            self._square += square
            run.optimizer.update([parameter], self._skip.maximum(1 - square.isfinite().to(torch.float32)))
        parameter.grad = None

    def finish(self, run: Run, loss: Tensor) -> tuple[Tensor, Tensor]:
        with phase("clip"):
            dist.all_reduce(self._square)
        with phase("optimizer"):
            run.optimizer.zero_grad(set_to_none=True)
        return self._square.sqrt(), self._skip
