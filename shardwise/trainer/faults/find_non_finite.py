"""Finds the first module with a non-finite value: runs the batch again, with hooks that check every module.

Each check waits for the device, so this happens once, when the guard gives up. The weights are those of the fault or
nearly so, because its updates were skipped. Each rank checks its own share of the batch. All ranks report the earliest
module in the order of execution on any rank.

In the forward pass this is the first module that returns a non-finite output; inner modules return before outer ones.
In the backward pass it is the first leaf module with a non-finite gradient at its output or inputs, or else the first
parameter with one. A recomputed forward pass is not checked, because it repeats the first one.

A fault that does not repeat (a flipped bit, a race) is reported as such. Refused: checking every step, which waits for
the device once per module.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.optim.norm import local
from shardwise.engine.phase import current_micro_batch, current_phase
from shardwise.engine.run import Run
from shardwise.model.blueprint import Batch
from shardwise.runtime.parallel.shard_slices import canonical_name
from shardwise.runtime.torch_private import tree_iter

FORWARD, LOSS, BACKWARD, GRADIENT = range(4)
_WORDS = ("output of", "", "gradient within", "gradient of")


@dataclass(frozen=True, order=True)
class Finding:
    """A non-finite value. Findings sort in the order of execution.

    Attributes:
        micro_batch: its index in the step.
        stage: FORWARD, LOSS, BACKWARD or GRADIENT.
        place: position of the rank in the order of the pass; 0 where all ranks hold the same blocks.
        order: position among the checks of this stage.
        rank: the rank that found it.
        name: of the module or parameter.
    """

    micro_batch: int
    stage: int
    place: int
    order: int
    rank: int
    name: str

    def words(self) -> str:
        what = "the loss" if self.stage == LOSS else f"the {_WORDS[self.stage]} {self.name}"
        return f"{what} went non-finite first, on rank {self.rank}, micro-batch {self.micro_batch + 1}"


def first_non_finite(run: Run, batches: Sequence[Batch]) -> Finding | None:
    """Run a step's micro-batches without an update. Returns the earliest finding of any rank, on all ranks."""
    pipeline = run.options.place
    watch = _Watch(run.model, 0 if pipeline is None else pipeline.rank)
    with watch.stack, warnings.catch_warnings(), suppress(RuntimeError):
        # The hooks make views and cause warnings. A model that writes in place raises; earlier findings are still true.
        warnings.simplefilter("ignore")
        with run.update.suspended():
            run.passes.forward_backward(batches, watch.loss)
    # Gradients are summed over micro-batches: they count as those of the last one.
    watch.look_at_gradients(len(batches) - 1)
    run.optimizer.zero_grad(set_to_none=True)
    by_rank: list[Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, watch.earliest)
    return min((finding for finding in by_rank if finding is not None), default=None)


@dataclass
class _Watch:
    """Hooks on all modules of a model, and their earliest finding."""

    model: nn.Module
    place: int
    earliest: Finding | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._last_checked = (0, FORWARD)  # micro-batch and stage
        self._order = 0  # of the checks of these
        for name, module in self.model.named_modules():
            short = canonical_name(f"{name}.").removesuffix(".") or type(module).__name__
            handles = [module.register_forward_hook(self._forward_hook(short))]
            # Leaves only: the hook of an outer module fires after those of all modules in it.
            if not any(module.children()):
                handles.append(module.register_full_backward_hook(self._backward_hook(short)))
            for handle in handles:
                self.stack.callback(handle.remove)

    def loss(self, loss: Tensor) -> None:
        """Check the loss of a forward pass."""
        self._note(LOSS, "", [loss])

    def look_at_gradients(self, micro_batch: int) -> None:
        """Check the gradients of all parameters after the backward passes."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self._note(GRADIENT, canonical_name(name), [local(parameter.grad)], micro_batch)

    def _forward_hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if current_phase() == "forward":
                self._note(FORWARD, name, tree_iter(output))

        return look

    def _backward_hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._note(BACKWARD, name, tree_iter((inputs, outputs)))

        return look

    @torch.no_grad()  # with autograd, the checks would save tensors that a recomputation does not save
    def _note(self, stage: int, name: str, values: Iterable[Any], micro_batch: int | None = None) -> None:
        """Keep the finding if it is the earliest by micro-batch, stage and order, whenever it was found."""
        number = current_micro_batch() if micro_batch is None else micro_batch
        assert number is not None, "modules run for a micro-batch"
        self._order = self._order + 1 if self._last_checked == (number, stage) else 1
        self._last_checked = (number, stage)
        # A backward pass goes through the ranks of a pipeline from the last to the first.
        position = -self.place if stage == BACKWARD else self.place
        finding = Finding(number, stage, position, self._order, dist.get_rank(), name)
        if self.earliest is not None and self.earliest < finding:
            return  # saves the wait for the device
        if not all(value.isfinite().all() for value in values if _has_numbers(value)):
            self.earliest = finding


def _has_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
