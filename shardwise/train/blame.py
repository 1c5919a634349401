"""Which module went non-finite first? The batch is run again, with hooks that look at everything.

Looking costs a wait for the device at every module, so it is done once, when the run is about to give up. The
weights are those of the fault or nearly so, for its updates were skipped. Each rank watches its own share of the
batch; the earliest module in the order of execution, of any rank, is what all of them report.

In the forward pass the first module to end with an output that is not finite is named; inner modules end before
outer ones. In the backward pass it is the first leaf module with such a gradient at its output or inputs, and
where those are finite, the first parameter with one. What a recomputed forward pass sees is not looked at: it
saw the same before.

A fault that does not repeat (a bit that flipped, a race) is reported as that. Refused: watching every step, which
is a wait per module and step; the price is that such faults have no name.
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
from torch.utils._pytree import tree_iter

from shardwise.engine.build import Run
from shardwise.engine.optim.norm import local
from shardwise.engine.phase import current_micro_batch, current_phase
from shardwise.model.blueprint import Batch
from shardwise.model.slices import canonical_name

FORWARD, LOSS, BACKWARD, GRADIENT = range(4)
_WORDS = ("output of", "", "gradient within", "gradient of")


@dataclass(frozen=True, order=True)
class Finding:
    """Where something was not finite: micro-batch, stage of its pass, how manieth in it, rank, and the name.

    ``place`` puts the ranks of a pipeline in the order in which a pass goes through them.
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
    """Run a step's micro-batches without updating anything; the earliest fault of any rank, on all ranks."""
    watch = _Watch(run.model, 0 if run.pipeline is None else run.pipeline.rank)
    with watch.stack, warnings.catch_warnings(), suppress(RuntimeError):
        # Hooks for looking make views and come with warnings; a model that writes in place refuses them. What
        # was found until then is still true, and the run is at its end.
        warnings.simplefilter("ignore")
        with run.update.held_off():
            run.passes.forward_backward(run, [run.part_of(batch) for batch in batches], watch.loss)
    watch.look_at_gradients(len(batches) - 1)
    run.optimizer.zero_grad(set_to_none=True)
    every: list[Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, watch.found)
    return min((finding for finding in every if finding is not None), default=None)


@dataclass
class _Watch:
    """Hooks on all modules of a model, and the first thing they found."""

    model: nn.Module
    place: int
    found: Finding | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._at, self._order = (0, FORWARD), 0
        for name, module in self.model.named_modules():
            short = canonical_name(f"{name}.").removesuffix(".") or type(module).__name__
            handles = [module.register_forward_hook(self._forward_hook(short))]
            if not any(module.children()):
                handles.append(module.register_full_backward_hook(self._backward_hook(short)))
            for handle in handles:
                self.stack.callback(handle.remove)

    def loss(self, loss: Tensor) -> None:
        """A forward pass is over; it has yielded ``loss``."""
        self._note(LOSS, "", [loss])

    def look_at_gradients(self, micro_batch: int) -> None:
        """The last look: at what the backward passes have left in the parameters."""
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

    @torch.no_grad()  # else looking saves tensors, which a recomputation would then miss
    def _note(self, stage: int, name: str, values: Iterable[Any], micro_batch: int | None = None) -> None:
        """Remember the first of all places where a value is not finite: the first micro-batch's, not in time."""
        number = current_micro_batch() if micro_batch is None else micro_batch
        assert number is not None, "modules run for a micro-batch"
        self._order = self._order + 1 if self._at == (number, stage) else 1
        self._at = number, stage
        place = -self.place if stage == BACKWARD else self.place
        here = Finding(number, stage, place, self._order, dist.get_rank(), name)
        if self.found is not None and self.found < here:
            return
        if not all(value.isfinite().all() for value in values if _has_numbers(value)):
            self.found = here


def _has_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
