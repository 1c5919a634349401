"""PipeDream: a pipeline that is never emptied (Harlap et al. 2018, arXiv:1806.03377).

A rank does forward passes p - 1 - s micro-batches ahead of its backward passes, also across the end of a step, and
updates its weights when the backward passes of a step are done, whatever other ranks are doing: nobody waits at the
end of a step. Step j means everywhere the j-th update, so ranks reach it at different times, and so is its loss known:
it travels with the gradients from the last stage to the first. Each pass uses the weights that its micro-batch began
with on this stage, or, with vertical sync, those with which it entered the first (stash.py).

Samples are read ahead: ``reads`` says of which steps. A run that stops between two steps has done the same updates on
all ranks, so checkpoints are whole; a run that resumes fills its pipeline again, with newer weights than the one that
went on would have used. Given one step's samples and no more, it is 1f1b.

What needs all ranks at one step is refused by rules of technique/pipeline.py (the norm of all gradients, one loss
scale, rewinding), or put off to where the run pauses (stopping on request).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.core.pipeline_schedule import Action
from shardwise.engine.passes import SeesLoss, counted
from shardwise.engine.phase import micro_batch
from shardwise.engine.pipeline.executor import Pipelined, Step, hidden_shape
from shardwise.engine.pipeline.mail import wait
from shardwise.engine.pipeline.stash import Stash
from shardwise.model.blueprint import Batch
from shardwise.technique.base import Pipeline

if TYPE_CHECKING:
    from shardwise.engine.build import Run


class PipeDream(Pipelined):
    """The passes of one rank. ``per_step`` micro-batches make a step."""

    in_step = False

    def __init__(self, pipeline: Pipeline, parameters: Sequence[nn.Parameter], per_step: int) -> None:
        super().__init__(pipeline)
        self._ahead = pipeline.ranks - 1 - pipeline.rank
        self._lag = pipeline.ranks - 1 if pipeline.vertical_sync else self._ahead
        self._per_step = per_step
        self._parameters = parameters
        self.stash = Stash(parameters, self._lag, per_step)
        self._stream: _Stream | None = None
        self._base = self._next = self._read = 0
        self._asked = range(0)
        self._limit = 0

    @property
    def kept(self) -> list[Tensor]:
        return self.stash.buffers

    def reads(self, index: int, steps: int) -> range:
        if index != self._next:
            self._begin(index)
        needed = (index + 1 - self._base) * self._per_step + self._ahead
        until = min(steps, self._base + -(-needed // self._per_step))
        self._asked = range(self._read, max(self._read, until))
        self._limit = (steps - self._base) * self._per_step
        return self._asked

    def _begin(self, index: int) -> None:
        """The run starts at a step, or goes back to one."""
        self._base = self._next = self._read = index
        self._stream = None
        self.stash = Stash(self._parameters, self._lag, self._per_step)

    def forward_backward(
        self, run: Run, batches: Sequence[Batch], sees_loss: SeesLoss | None = None
    ) -> tuple[Tensor, Tensor]:
        steps = self._asked or self.reads(self._next, self._next + 1)
        if self._stream is None:
            self._stream = _Stream(run, self._pipeline, self.stash)
        stream = self._stream
        for number in range(len(steps)):
            stream.take(batches[number * self._per_step : (number + 1) * self._per_step])
        self._read, self._asked = steps.stop if steps else self._read, range(0)
        first = (self._next - self._base) * self._per_step
        stream.sees_loss = sees_loss
        for number in range(first, first + self._per_step):
            while stream.forwarded <= number + self._ahead and stream.forwarded < stream.taken:
                with micro_batch(stream.forwarded - first):
                    stream.forward()
            with micro_batch(number - first):
                stream.backward(number, last=number == first + self._per_step - 1)
        self.most_in_flight = stream.most
        self._next += 1
        self.stash.before_update()
        tokens, total = stream.of_step(first, self._per_step)
        dist.all_reduce(total, group=run.token_group)
        return tokens, total / tokens.clamp(min=1)

    def evaluate(self, run: Run, batches: Sequence[Batch]) -> Tensor:
        if self._stream is not None:
            self._stream.settle(self._limit)
        return super().evaluate(run, batches)

    def enough(self, count: int) -> int:
        return count


class _Stream(Step):
    """All passes of a run, numbered from its first micro-batch."""

    mail: _StreamMail

    def __init__(self, run: Run, pipeline: Pipeline, stash: Stash) -> None:
        super().__init__(run, pipeline, {}, {}, _StreamMail(run, pipeline))
        self._stash = stash
        self._counts: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self._shape: tuple[int, ...] = ()
        self.forwarded = self.taken = 0

    def take(self, batches: Sequence[Batch]) -> None:
        """The micro-batches of one more step."""
        tokens, _ = counted(self.run, batches)
        for batch in batches:
            self.batches[self.taken], self._counts[self.taken] = batch, tokens
            self.divisors[self.taken] = tokens.clamp(min=1)
            self._shape = hidden_shape(self.run, batch)
            self.taken += 1

    def forward(self) -> None:
        number, self.forwarded = self.forwarded, self.forwarded + 1
        with self._stash.weights_of(number):
            self.do(Action("F", self.pipeline.rank, number), last=False)

    def backward(self, number: int, last: bool) -> None:
        with self._stash.weights_of(number):
            _gather_after_this(self.run)
            self.do(Action("B", self.pipeline.rank, number), last)
        if self.pipeline.rank + 1 < self.pipeline.ranks:
            self._losses[number] = self.mail.receive_loss()
        self.mail.send_loss(self._losses[number])
        del self.batches[number], self.divisors[number]

    def saw(self, action: Action, loss: Tensor) -> None:
        self._losses[action.micro_batch] = loss.detach().to(torch.float64)

    def of_step(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(valid targets of the global batch, sum of this rank's losses) of a step that is done."""
        numbers = range(first, first + count)
        tokens = [self._counts.pop(number) for number in numbers]
        return tokens[0], torch.stack([self._losses.pop(number) for number in numbers]).sum()

    def settle(self, limit: int) -> None:
        """Receive what the rank before has sent ahead, so that other messages can use the same channel.

        It is one micro-batch further, of the ``limit`` that there will ever be.
        """
        if self.pipeline.rank > 0 and self.forwarded < limit:
            self.mail.receive_early(Action("F", self.pipeline.rank, self.forwarded), self._shape)


def _gather_after_this(run: Run) -> None:
    """Weights that have just been exchanged are what FSDP2's own streams gather, also in a backward pass."""
    context = cast("FSDPModule", run.model)._get_fsdp_state()._comm_ctx
    now = torch.get_device_module(run.device).current_stream()
    for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
        stream.wait_stream(now)


class _StreamMail:
    """Messages between neighbours without an end: hidden states forward, gradients and then losses backward.

    Of what was sent, a later message from the same neighbour says that it has arrived: the gradient of a micro-batch's
    hidden states, or the first forward pass that the rank before does after its backward pass.
    """

    def __init__(self, run: Run, pipeline: Pipeline) -> None:
        self._rank, self._last = pipeline.rank, pipeline.ranks - 1
        self._dtype, self._device = run.dtypes.compute, run.device
        self._forward, self._backward = pipeline.channels[True, False], pipeline.channels[False, False]
        self._early: dict[Action, Tensor] = {}
        self._leaving: list[tuple[Action | None, Tensor, Any]] = []

    def receive(self, action: Action, shape: tuple[int, ...]) -> Tensor:
        tensor = self._early.pop(action, None)
        if tensor is None:
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._receive(tensor, action.kind == "F")
        self._let_go(action)
        return tensor

    def receive_early(self, action: Action, shape: tuple[int, ...]) -> None:
        """What ``action`` will need; it must be what comes next on its channel."""
        if action not in self._early:
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._receive(tensor, action.kind == "F")
            self._early[action] = tensor

    def send(self, action: Action, tensor: Tensor) -> None:
        to = self._rank + (1 if action.kind == "F" else -1)
        if 0 <= to <= self._last:
            self._send(action, tensor.detach().contiguous(), to)

    def receive_loss(self) -> Tensor:
        """Of the micro-batch whose gradient was received last."""
        loss = torch.empty(1, dtype=torch.float64, device=self._device)
        self._receive(loss, forward=False)
        return loss.squeeze(0)

    def send_loss(self, loss: Tensor) -> None:
        """Of the micro-batch whose gradient was sent last."""
        if self._rank > 0:
            action = self._leaving[-1][0]
            self._send(action, loss.reshape(1), self._rank - 1)

    def _receive(self, tensor: Tensor, forward: bool) -> None:
        group, sender = (self._forward, self._rank - 1) if forward else (self._backward, self._rank + 1)
        wait(dist.irecv(tensor, group=group, group_src=sender))

    def _send(self, action: Action | None, tensor: Tensor, to: int) -> None:
        group = self._forward if to > self._rank else self._backward
        self._leaving.append((action, tensor, dist.isend(tensor, group=group, group_dst=to)))

    def _let_go(self, received: Action) -> None:
        """Drop what has arrived, now that ``received`` has what it needs."""
        kind = "B" if received.kind == "F" else "F"
        # The rank before is ahead by one more, and its forward pass comes before the backward pass.
        until = received.micro_batch - (self._last - self._rank + 2 if kind == "B" else 0)
        here = [
            each
            for each in self._leaving
            if each[0] and each[0].kind == kind and each[0].micro_batch <= until
        ]
        for _, _, work in here:
            wait(work)
        gone = {id(each) for each in here}
        self._leaving = [each for each in self._leaving if id(each) not in gone]
