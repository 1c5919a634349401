"""The passes of one rank by a pipeline schedule: receive, compute and send, action after action.

core/pipeline/schedule.py defines the actions and their order, as data. A forward pass keeps what its backward pass
needs: its input, and the end of its graph. On the last stage the end is the loss. Elsewhere it is a gradient edge of
the sent hidden states, whose values are freed when they have arrived.

Every rank knows the loss and the number of targets: the number before the first pass, from the labels, which all stages
read; the loss by an all-reduce over the pipeline at the end. Gradients of a table that two stages share are summed over
both after the last pass, before the norm is taken.

This is an executor over torch.distributed. Halved backward passes use functions of torch.distributed.pipelining
(``split_backward.py``). Refused: the runtime of that package. Its stages exchange shapes over the wire, keep every sent
activation until its backward pass, and take over FSDP2's switches: parameters stay gathered and gradients are reduced
once at the end, whatever the ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.core.pipeline.messages import posts
from shardwise.core.pipeline.schedule import Action, in_flight
from shardwise.engine.forward_backward import LEAST
from shardwise.engine.optim.norm import local
from shardwise.engine.pass_timing import computing
from shardwise.engine.phase import micro_batch, phase
from shardwise.engine.pipeline.p2p import Mail
from shardwise.engine.pipeline.split_backward import gradients_of_input, gradients_of_weights, without_updates
from shardwise.engine.run import ForwardBackward, LiveModel, OptimizerStep, SeesLoss
from shardwise.model.blueprint import Batch, loss_of
from shardwise.model.plain_passes import in_evaluation
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.technique.pipeline.place import Pipeline

OfLastStage = Callable[[nn.Module, Batch], Tensor]
"""A function of the last stage and a batch with its hidden states as ``input_ids``."""


class Pipelined(ForwardBackward):
    """The passes of one rank of a pipeline.

    Attributes:
        most_in_flight: how many forward passes' activations it has held at once in its last step.
    """

    def __init__(self, live: LiveModel, update: OptimizerStep, pipeline: Pipeline) -> None:
        super().__init__(live, update)
        self._pipeline = pipeline
        self.most_in_flight = 0

    def forward_backward(
        self, batches: Sequence[Batch], sees_loss: SeesLoss | None = None
    ) -> tuple[Tensor, Tensor]:
        live = self._live
        with phase("forward"):
            batches = list(live.local_batches(self, batches))
            tokens = live.count_targets(batches)
            total = torch.zeros((), dtype=torch.float64, device=live.device)
        order = self._pipeline.order(len(batches))
        mail = self._mail(len(batches))
        # The labels tell the number of targets before the first pass, so all micro-batches have one divisor.
        divisors = dict.fromkeys(range(len(batches)), tokens.clamp(min=1))
        step = Step(live, self._pipeline, dict(enumerate(batches)), divisors, mail)
        step.sees_loss = sees_loss
        # A dict keeps the last backward pass of every stage.
        ends = {action.stage: action for action in order if action.kind != "F"}.values()
        with self._measured():
            for action in order:
                with micro_batch(action.micro_batch):
                    # The last backward pass of a stage is the one in which its gradients are reduced.
                    step.do(action, action in ends)
        mail.close()
        self._sum_tied()
        self.most_in_flight = step.most
        # Only the last stage has computed a loss: the sum over the pipeline is what it has.
        total += step.total
        dist.all_reduce(total, group=live.context.token_group)
        dist.all_reduce(total, group=self._pipeline.group)
        return tokens, total / tokens.clamp(min=1)

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        live = self._live
        total = torch.zeros(2, dtype=torch.float64, device=live.device)
        with self._measured():
            for batch, loss in self._passed(live.local_batches(self, batches), partial(loss_sum, live)):
                if loss is not None:
                    total += torch.stack([loss.double(), live.count(batch).double()])
        return self.global_sum(total)

    def forward_only(
        self, batches: Sequence[Batch], function: Callable[[nn.Module, Batch], Tensor]
    ) -> list[Tensor | None]:
        results: list[Tensor | None] = []
        with in_evaluation(self._live.model):
            passed = self._passed(batches, function)
            for index in range(len(batches)):
                with micro_batch(index):
                    results.append(next(passed)[1])
            next(passed, None)  # closes the mail
        return results

    def _passed(
        self, batches: Iterable[Batch], function: OfLastStage
    ) -> Iterator[tuple[Batch, Tensor | None]]:
        """Each micro-batch after its forward pass, with the function's result; None without the last stage."""
        live = self._live
        mail_before: Mail | None = None
        for batch in batches:
            mail = self._mail(1, forward_only=True)
            last_result: Tensor | None = None
            for stage, part in self._pipeline.held.items():
                action = Action("F", stage, 0)
                stage_input = (
                    batch["input_ids"] if part.first else mail.receive(action, hidden_shape(live, batch))
                )
                result = stage_of(live, self._pipeline, stage, stage_input, batch, function)
                if part.last:
                    last_result = result
                else:
                    mail.send(action, result)
            # One micro-batch late: closing waits until the next rank has received, which would empty the pipeline.
            if mail_before is not None:
                mail_before.close()
            mail_before = mail
            yield batch, last_result
        if mail_before is not None:
            mail_before.close()

    def global_sum(self, values: Tensor) -> Tensor:
        total = super().global_sum(values)
        dist.all_reduce(total, group=self._pipeline.group)
        return total

    def representative_count(self, count: int, limit: int | None = None) -> int:
        """Enough to fill the pipeline plus one in steady state, rounded up to whole groups of interleaved ones."""
        if limit is not None:
            return min(count, limit)
        group = self._pipeline.ranks if self._pipeline.stages_per_rank > 1 else 1
        most = in_flight(self._pipeline.order(count))
        # The fewest micro-batches that fill the pipeline as all do, in whole groups; then one group more.
        fewest = group * -(-(LEAST - 1) // group)
        for filling in range(fewest, count - group, group):
            if in_flight(self._pipeline.order(filling)) == most:
                return filling + group
        return count

    @torch.no_grad()
    def _sum_tied(self) -> None:
        """Sum the gradients of parameters that the first and the last stage share."""
        if self._pipeline.tied_group is None:
            return
        for name, parameter in named_parameters(self._live.model):
            if name in self._pipeline.tied and parameter.grad is not None:
                shard = local(parameter.grad)
                total = shard.to(self._live.device)  # gradients of offloaded weights are in host memory
                dist.all_reduce(total, group=self._pipeline.tied_group)
                if total is not shard:
                    shard.copy_(total)

    def _mail(self, count: int, forward_only: bool = False) -> Mail:
        pipeline = self._pipeline
        post = posts(pipeline.schedule, pipeline.ranks, pipeline.stages_per_rank, count, forward_only)
        return Mail(
            post[pipeline.rank], pipeline.channels, self._live.options.dtypes.compute, self._live.device
        )


def hidden_shape(live: LiveModel, batch: Batch) -> tuple[int, ...]:
    """The shape of the hidden states between stages: [b, s, h], or this rank's share of that."""
    assert live.blueprint.width is not None
    sequences, length = batch["input_ids"].shape
    return sequences, length // live.options.sequence_shards, live.blueprint.width


def stage_of(
    live: LiveModel,
    pipeline: Pipeline,
    stage: int,
    stage_input: Tensor,
    batch: Batch,
    function: OfLastStage,
) -> Tensor:
    """The hidden states that one stage makes of ids or hidden states; of the last stage ``function``'s result."""
    live.begin_pass(batch)
    positions = batch.get("positions")
    if positions is None and live.options.sequence_shards > 1:
        # A later stage is given a share of the sequence, which does not tell the length.
        positions = torch.arange(batch["input_ids"].shape[1], device=live.device)
    extra = {} if positions is None else {"positions": positions}

    def compute(part: nn.Module, stage_input: Tensor) -> Tensor:
        if pipeline.held[stage].last:
            return function(part, {**batch, "input_ids": stage_input, **extra})
        return live.blueprint.logits(part, stage_input, positions, batch.get("starts"))

    # Through the root module, so that FSDP2's hooks on it run.
    return cast("Tensor", live.model(list(pipeline.held).index(stage), compute, stage_input))


def loss_sum(live: LiveModel, part: nn.Module, batch: Batch) -> Tensor:
    """The summed loss of the last stage."""
    return loss_of(live.objective, live.blueprint, part, {}, batch)[0]


@dataclass
class _SavedPass:
    """Of a forward pass, for its backward pass: its input, and its result or the place of that in the graph.

    After the first half of the backward pass: what the second needs.
    """

    stage_input: Tensor
    end: Tensor | GradientEdge
    gradient: Tensor | None = None
    rest: Any = None


class Exchange(Protocol):
    """Tensors received from and sent to the neighbouring ranks, by the action that needs or produces them."""

    def receive(self, action: Action, shape: tuple[int, ...]) -> Tensor: ...

    def send(self, action: Action, tensor: Tensor) -> None: ...


class Step:
    """Passes of micro-batches as they are done, and what they keep in between.

    ``batches`` and ``divisors`` (the number of valid targets of the step) are by number of the micro-batch.
    """

    def __init__(
        self,
        live: LiveModel,
        pipeline: Pipeline,
        batches: dict[int, Batch],
        divisors: dict[int, Tensor],
        mail: Exchange,
    ) -> None:
        self.live = live
        self.pipeline = pipeline
        self.batches = batches
        self.divisors = divisors
        self.mail = mail
        self.total = torch.zeros((), dtype=torch.float64, device=live.device)
        self.sees_loss: SeesLoss | None = None
        self._saved: dict[tuple[int, int], _SavedPass] = {}  # by stage and micro-batch
        self.most = 0  # forward passes that were kept at once

    def do(self, action: Action, last: bool) -> None:
        """``last``: whether no backward pass of its stage follows."""
        if action.kind == "F":
            with phase("forward"):
                self._forward(action)
            return
        with phase("backward"):
            for before_micro_batch in self.live.options.micro_batch_hooks:
                before_micro_batch(last, list(self.pipeline.held).index(action.stage))
            {"B": self._backward, "I": self._first_half, "W": self._second_half}[action.kind](action)

    def _forward(self, action: Action) -> None:
        live = self.live
        batch = self.batches[action.micro_batch]
        part = self.pipeline.held[action.stage]
        if part.first:
            stage_input = batch["input_ids"]
        else:
            # A leaf of this stage's graph: its gradient is what the stage before waits for.
            stage_input = self.mail.receive(action, hidden_shape(live, batch)).requires_grad_()
        with computing(action):
            result = stage_of(live, self.pipeline, action.stage, stage_input, batch, partial(loss_sum, live))
        if part.last:
            self.saw(action, result)
            if self.sees_loss is not None:
                self.sees_loss(result)
        else:
            self.mail.send(action, result)
        # Hidden states have been sent: the edge keeps their graph without their memory.
        whole = part.last or self.pipeline.splits_backward
        saved = _SavedPass(stage_input, result if whole else get_gradient_edge(result))
        self._saved[action.stage, action.micro_batch] = saved
        self.most = max(self.most, len(self._saved))

    def saw(self, action: Action, loss: Tensor) -> None:
        """The summed loss of a micro-batch, on the last stage."""
        self.total += loss.detach()

    def _gradient(self, action: Action) -> Tensor:
        """Of a stage's hidden states, from the stage after it."""
        with torch.no_grad():
            return self.mail.receive(action, hidden_shape(self.live, self.batches[action.micro_batch]))

    def _end(self, action: Action, saved: _SavedPass) -> tuple[Tensor | GradientEdge, Tensor | None]:
        """Where the backward pass begins, and with which gradient; None stands for one."""
        if self.pipeline.held[action.stage].last:
            assert isinstance(saved.end, Tensor)
            return saved.end / self.divisors[action.micro_batch] * self.live.loss_scale.value, None
        return saved.end, self._gradient(action)

    def _backward(self, action: Action) -> None:
        saved = self._saved.pop((action.stage, action.micro_batch))
        end, gradient = self._end(action, saved)
        del saved.end  # autograd frees the graph as it goes, unless something else holds on to it
        with computing(action):
            torch.autograd.backward(end, gradient)
        # Token ids of the first stage have none.
        if saved.stage_input.grad is not None:
            self.mail.send(action, saved.stage_input.grad)

    def _first_half(self, action: Action) -> None:
        """The gradient of the stage's input. The first stage has none, so its whole backward pass runs later."""
        saved = self._saved[action.stage, action.micro_batch]
        end, gradient = self._end(action, saved)
        assert isinstance(end, Tensor)
        if self.pipeline.held[action.stage].first:
            saved.end = end
            saved.gradient = gradient
            return
        with without_updates(self.live.model), computing(action):
            # Sent before the gradients of weights are made: the stage before waits for it.
            input_gradient, saved.rest = gradients_of_input(end, gradient, saved.stage_input, self.live.model)
        self.mail.send(action, input_gradient)
        del saved.end, saved.stage_input

    def _second_half(self, action: Action) -> None:
        saved = self._saved.pop((action.stage, action.micro_batch))
        with computing(action):
            if self.pipeline.held[action.stage].first:
                torch.autograd.backward(saved.end, saved.gradient)
            else:
                gradients_of_weights(self.live.model, saved.rest)
