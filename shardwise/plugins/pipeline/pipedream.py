"""PipeDream: a pipeline that is never emptied (Harlap et al. 2018, arXiv:1806.03377).

A rank's forward passes are p - 1 - s micro-batches ahead of its backward passes, also across the end of a step. It
updates its weights when the backward passes of a step are done, without waiting for other ranks. Step j means the j-th
update everywhere, so ranks reach it at different times. The loss travels with the gradients from the last stage to the
first. Each pass uses the weights that its micro-batch began with on this stage, or with vertical sync those with which
it entered the first stage (weight_stash.py).

The last messages of a step are still on their way when it returns: the run must live until the other ranks have them.

A rank reads the batches of later steps from the source that ``begin`` names. A run that stops between two steps has
done the same updates on all ranks, so checkpoints are whole. A run that resumes fills its pipeline again, with newer
weights than an uninterrupted run would have used. Without ``begin`` it is 1f1b.

Rules in technique/pipeline/technique.py refuse what needs all ranks at one step (the norm of all gradients, one loss
scale, rewinding). A request to stop waits until the run pauses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.pipeline.schedule import Action
from shardwise.engine.phase import micro_batch, phase
from shardwise.engine.pipeline.executor import Pipelined, Step, hidden_shape
from shardwise.engine.pipeline.p2p import wait_for
from shardwise.engine.run import BatchSource, ListedBatches, LiveModel, OptimizerStep, SeesLoss
from shardwise.model.blueprint import Batch
from shardwise.plugins.pipeline.weight_stash import Stash
from shardwise.runtime.torch_private_fsdp import fsdp_gather_streams
from shardwise.technique.pipeline.place import Pipeline


def passes_of(live: LiveModel, update: OptimizerStep, pipeline: Pipeline) -> PipeDream:
    """The passes of a rank."""
    return PipeDream(live, update, pipeline, live.context.micro_batches)


class PipeDream(Pipelined):
    """The passes of one rank. ``per_step`` micro-batches make a step."""

    def __init__(self, live: LiveModel, update: OptimizerStep, pipeline: Pipeline, per_step: int) -> None:
        super().__init__(live, update, pipeline)
        # Micro-batches by which this rank's forward passes are ahead of its backward passes.
        self._ahead = pipeline.ranks - 1 - pipeline.rank
        self._lag = pipeline.ranks - 1 if pipeline.vertical_sync else self._ahead
        self._per_step = per_step
        self._parameters = [p for p in live.model.parameters() if p.requires_grad]
        self.stash = Stash(self._parameters, self._lag, per_step)
        self._begun = False
        self._stream: _Stream | None = None
        self._done = 0

    @property
    def weight_copies(self) -> list[Tensor]:
        return self.stash.buffers

    def begin(self, source: BatchSource, step: int) -> None:
        self._empty(source, step)
        self._begun = True

    def forward_backward(
        self, batches: Sequence[Batch], sees_loss: SeesLoss | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self._begun:
            self._empty(ListedBatches([batches]), 0)
        stream = self._stream
        assert stream is not None
        self.measures = None  # those of several steps pass at once
        first = self._done * self._per_step
        # The forward passes of this step reach into the next one, by ``_ahead`` micro-batches.
        stream.read(first + self._per_step + self._ahead)
        stream.sees_loss = sees_loss
        for number in range(first, first + self._per_step):
            # The first time this fills the pipeline; later it is one forward pass for each backward pass.
            while stream.forwarded <= number + self._ahead and stream.forwarded < stream.taken:
                with micro_batch(stream.forwarded - first):
                    stream.forward()
            with micro_batch(number - first):
                stream.backward(number, last=number == first + self._per_step - 1)
        self.most_in_flight = stream.most
        self._done += 1
        self.stash.before_update()
        tokens, total = stream.of_step(first, self._per_step)
        dist.all_reduce(total, group=self._live.context.token_group)
        return tokens, total / tokens.clamp(min=1)

    def _empty(self, source: BatchSource, step: int) -> None:
        """Begin with an empty pipeline, at a step of a source."""
        if self._stream is not None:
            # The old stream may have sends under way that other ranks still receive.
            self._stream.mail.close()
            self.stash = Stash(self._parameters, self._lag, self._per_step)
        self._done = 0
        self._stream = _Stream(self._live, self._pipeline, self.stash, source, step)

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        if self._stream is not None:
            self._stream.settle()
        return super().evaluate(batches)

    def representative_count(self, count: int, limit: int | None = None) -> int:
        """All: passes that read ahead of their step take whole steps."""
        return count


class _Stream(Step):
    """All passes of a run, numbered from its first micro-batch."""

    mail: _StreamMail

    def __init__(
        self, live: LiveModel, pipeline: Pipeline, stash: Stash, source: BatchSource, step: int
    ) -> None:
        super().__init__(live, pipeline, {}, {}, _StreamMail(live, pipeline))
        self._stash = stash
        self._source = source
        self._next = step
        self._counts: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self._shape: tuple[int, ...] = ()
        self.forwarded = self.taken = 0

    def read(self, until: int) -> None:
        """Take whole steps until there are ``until`` micro-batches, or no more steps."""
        while self.taken < until and (batches := self._source.micro_batches(self._next)):
            self._next += 1
            self._take([self.live.local_batch(batch) for batch in batches])

    def _take(self, batches: Sequence[Batch]) -> None:
        """The micro-batches of one more step."""
        with phase("forward"):
            tokens = self.live.count_targets(batches)
        for batch in batches:
            self.batches[self.taken] = batch
            self._counts[self.taken] = tokens
            self.divisors[self.taken] = tokens.clamp(min=1)
            self._shape = hidden_shape(self.live, batch)
            self.taken += 1

    def forward(self) -> None:
        number = self.forwarded
        self.forwarded += 1
        with self._stash.weights_of(number):
            self.do(Action("F", self.pipeline.rank, number), last=False)

    def backward(self, number: int, last: bool) -> None:
        with self._stash.weights_of(number):
            _gather_after_this(self.live)
            self.do(Action("B", self.pipeline.rank, number), last)
        # Each rank passes the loss on, so that all ranks report it for the same micro-batches as their gradients.
        if self.pipeline.rank + 1 < self.pipeline.ranks:
            self._losses[number] = self.mail.receive_loss()
        self.mail.send_loss(self._losses[number])
        del self.batches[number], self.divisors[number]

    def saw(self, action: Action, loss: Tensor) -> None:
        self._losses[action.micro_batch] = loss.detach().to(torch.float64)

    def of_step(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(valid targets of the global batch, sum of this rank's losses) of a step that is done."""
        numbers = range(first, first + count)
        # The micro-batches of a step share one count, that of its global batch; all entries are popped.
        tokens = [self._counts.pop(number) for number in numbers]
        return tokens[0], torch.stack([self._losses.pop(number) for number in numbers]).sum()

    def settle(self) -> None:
        """Receive what the rank before has sent ahead, so that other messages can use the same channel.

        That rank is one micro-batch further, if there is one more.
        """
        if self.pipeline.rank > 0:
            self.read(self.forwarded + 1)
            if self.forwarded < self.taken:
                self.mail.receive_early(Action("F", self.pipeline.rank, self.forwarded), self._shape)


def _gather_after_this(live: LiveModel) -> None:
    """Weights that have just been exchanged are what FSDP2's own streams gather, also in a backward pass."""
    now = torch.get_device_module(live.device).current_stream()
    for stream in fsdp_gather_streams(live.model):
        stream.wait_stream(now)


class _StreamMail:
    """Messages between neighbours across steps: hidden states forward, gradients and losses backward.

    A later message from the same neighbour confirms an earlier send: the gradient of a micro-batch's hidden states
    confirms the hidden states, and the neighbour's first forward pass after its backward pass confirms the gradient.
    """

    def __init__(self, live: LiveModel, pipeline: Pipeline) -> None:
        self._rank = pipeline.rank
        self._last = pipeline.ranks - 1
        self._dtype = live.options.dtypes.compute
        self._device = live.device
        self._forward = pipeline.channels[True, False]
        self._backward = pipeline.channels[False, False]
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
            # Under the action of the gradient, whose confirmation then frees both.
            action = self._leaving[-1][0]
            self._send(action, loss.reshape(1), self._rank - 1)

    def _receive(self, tensor: Tensor, forward: bool) -> None:
        group, sender = (self._forward, self._rank - 1) if forward else (self._backward, self._rank + 1)
        wait_for(dist.irecv(tensor, group=group, group_src=sender))

    def _send(self, action: Action | None, tensor: Tensor, to: int) -> None:
        group = self._forward if to > self._rank else self._backward
        self._leaving.append((action, tensor, dist.isend(tensor, group=group, group_dst=to)))

    def _let_go(self, received: Action) -> None:
        """Free the sends that the message ``received`` confirms."""
        if received.kind == "B":  # the gradient of hidden states that this rank has sent
            kind = "F"
            until = received.micro_batch
        else:
            kind = "B"
            # The rank before is ahead by p - rank micro-batches. Before forward pass m it has done the backward passes
            # up to m - (p - rank) - 1, for which it has received the gradients.
            until = received.micro_batch - (self._last - self._rank + 2)
        confirmed = [
            send
            for send in self._leaving
            if send[0] and send[0].kind == kind and send[0].micro_batch <= until
        ]
        for _, _, work in confirmed:
            wait_for(work)
        # By identity: comparing the tuples would compare tensors.
        confirmed_ids = {id(send) for send in confirmed}
        self._leaving = [send for send in self._leaving if id(send) not in confirmed_ids]

    def close(self) -> None:
        """Wait until all sends of a finished run are received: a dropped send never arrives."""
        for _, _, work in self._leaving:
            wait_for(work)
        self._leaving.clear()
