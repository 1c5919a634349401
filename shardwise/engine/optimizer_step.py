"""From gradients to an update: after the backward pass, or within it.

Both end in the same verdict: where the loss or a gradient is not finite on any rank, all ranks skip the update. After
the backward pass everything is known in time. The global norm is one sum over the world, so a NaN anywhere makes it
NaN everywhere, and nothing is updated. Within the backward pass parameters are updated before the norm is complete, so
only the loss can forbid the whole update. A gradient that is not finite then forbids its own piece, and the norm,
which is not finite either, tells the trainer that the update was torn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.optim.norm import scale_gradients, square_sum
from shardwise.engine.phase import phase
from shardwise.engine.run import LiveModel, OptimizerStep


class AfterBackward(OptimizerStep):
    """Clip by the global norm, then update all parameters."""

    def before_backward(self, total: Tensor, last: bool) -> None: ...

    def after_backward(self) -> None:
        if self.correction is not None:
            scale_gradients(self._live.model.parameters(), self.correction)

    def suspended(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        live = self._live
        with phase("clip"):
            if live.options.capacity is not None:
                self.see_capacity(loss.isfinite().logical_not())
            norm, faulty = self.clip(loss)
        skip = self.or_left_out(faulty)
        with phase("optimizer"):
            live.optimizer.step(skip)
            live.optimizer.zero_grad(set_to_none=True)
            live.loss_scale.update(faulty, self.void)
        return norm, skip

    def clip(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Unscale and clip all gradients in place; (their norm before clipping, the verdict).

        The verdict is made of all-reduced values, so it is equal on all ranks.
        """
        live, scale, limits = self._live, self._live.loss_scale, self._live.norm_limit
        square = square_sum(live.own_parameters(), live.device, live.ranks_of)
        dist.all_reduce(square, group=live.verdict_group)
        # Gradients are still scaled; the factor below unscales and clips them in one pass over memory.
        norm = square.sqrt() / scale.value
        skip = 1 - (norm.isfinite() & loss.isfinite()).to(torch.float32)
        if scale.active or limits.active:
            # 1e-6 as in torch.nn.utils.clip_grad_norm_.
            factor = (limits.value(norm) / (norm + 1e-6)).clamp(max=1.0) / scale.value
            scale_gradients(live.model.parameters(), factor)
        # A void step runs again on the same batch, so its norm is learned then.
        limits.update(norm, skip if self.void is None else skip.maximum(self.void))
        return norm, skip


class WithinBackward(OptimizerStep):
    """Update a parameter as soon as its gradient is complete, and free the gradient.

    One layer's gradients live at a time: the single-device twin of ZeRO-2. There is no clipping, because the norm is
    known only after the last update.
    """

    def __init__(self, live: LiveModel) -> None:
        super().__init__(live)
        self._last = self._suspended = False
        self._skip = self._square = torch.zeros(())  # replaced at each step's last backward pass
        for parameter in live.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._consume)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def before_backward(self, total: Tensor, last: bool) -> None:
        self._last = last and not self._suspended
        if self._last:
            # ``total`` is that of this rank alone, so the ranks agree here, before the first update.
            self._skip = 1 - total.isfinite().to(torch.float32)
            dist.all_reduce(self._skip, dist.ReduceOp.MAX)
            self.see_capacity(self._skip)
            # Now, before the last backward pass: its first updates cannot be taken back.
            self._skip = self.or_left_out(self._skip)
            self._square = torch.zeros((), dtype=torch.float64, device=self._live.device)

    def after_backward(self) -> None:
        if self._suspended:
            if self.correction is not None:
                scale_gradients(self._live.model.parameters(), self.correction)
            return
        for parameter in self._live.model.parameters():
            if parameter.grad is not None:  # of earlier micro-batches alone: the last one has not used it
                self._consume(parameter)

    def _consume(self, parameter: Tensor) -> None:
        """Update with a gradient that has just been accumulated, in the last backward pass of a step."""
        if not self._last:
            return
        assert isinstance(parameter, nn.Parameter)
        live = self._live
        # The CPU computes at once: it does not wait for a stream, as kernels do.
        if parameter.device.type != live.device.type:  # its gradient may still be on its way to the host
            torch.accelerator.current_stream(live.device).synchronize()
        with torch.no_grad():
            if self.correction is not None:
                scale_gradients([parameter], self.correction)
            # Of this rank's shard alone: another rank may update its shard of a gradient that is not finite here.
            square = square_sum([parameter], live.device, live.ranks_of)
            self._square += square
            # A gradient that is not finite leaves out its own parameter only: others have been updated already.
            live.optimizer.update([parameter], self._skip.maximum(1 - square.isfinite().to(torch.float32)))
        parameter.grad = None

    def finish(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        with phase("clip"):
            dist.all_reduce(self._square)
        with phase("optimizer"):
            self._live.optimizer.zero_grad(set_to_none=True)
        self.forget_capacity()
        return self._square.sqrt(), self._skip
