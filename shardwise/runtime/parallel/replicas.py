"""Data parallelism of whole replicas (DDP): gradients are summed over the replicas, one group of layers at a time.

The gradients of a group are copied into one buffer when the last of them is complete, in the last backward pass of a
step. The all-reduce of the buffer overlaps with the rest of the backward pass. Then the gradients are views of it.

All ranks reduce the groups in one order. A group with a parameter that gets no gradient is never complete: it and those
after it are reduced after the pass. As with FSDP2, the same parameters must get gradients on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Replicas:
    """Sums the gradients of the trained parameters of modules over a process group.

    Args:
        modules: in the order in which their gradients are expected to be complete; each makes a group of the parameters
            that none before it has. Parameters that several modules but the last one use are a group of their own,
            which is complete at the end of the pass.
        process_group: the ranks with replicas of the parameters.
    """

    def __init__(self, modules: Sequence[nn.Module], process_group: dist.ProcessGroup) -> None:
        self._modules, self._process_group = modules, process_group
        self._groups: list[list[nn.Parameter]] = []
        self._missing: list[int] = []
        self._sent: list[tuple[list[nn.Parameter], Tensor, dist.Work]] = []
        self._next = 0
        self._active = False

    def _watch(self) -> None:
        """Group the parameters. They are not those of the meta device, on which techniques are applied."""
        *inner, whole = ([p for p in m.parameters() if p.requires_grad] for m in self._modules)
        uses = Counter(parameter for group in inner for parameter in group)
        groups = [[p for p in group if uses[p] == 1] for group in inner]
        groups.append([p for p in whole if p not in uses])
        for number, group in enumerate(groups):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._complete(number))
        self._groups = [*groups, [parameter for parameter, count in uses.items() if count > 1]]

    def before_backward(self, last: bool) -> None:
        """``last``: this backward pass is the last one of the step, so that gradients are complete in it."""
        if not self._groups:
            self._watch()
        self._active = last
        self._next = 0
        self._missing = [len(group) for group in self._groups[:-1]]

    def finish(self) -> None:
        """Reduce the groups that are left, and wait for all. Gradients are then the sums over the replicas."""
        self._active = False
        for group in self._groups[self._next :]:
            self._send(group)
        for present, buffer, work in self._sent:
            work.wait()
            parts = buffer.split([parameter.numel() for parameter in present])
            for parameter, part in zip(present, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        self._sent.clear()

    def _complete(self, number: int) -> None:
        """A gradient of a group has been accumulated."""
        if not self._active:
            return
        self._missing[number] -= 1
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._send(self._groups[self._next])
            self._next += 1

    @torch.no_grad()
    def _send(self, group: Sequence[nn.Parameter]) -> None:
        """Start the all-reduce of a group."""
        present = [parameter for parameter in group if parameter.grad is not None]
        if not present:
            return
        buffer = torch.cat(
            [parameter.grad.reshape(-1) for parameter in present if parameter.grad is not None]
        )
        # The buffer has them.
        for parameter in present:
            parameter.grad = None
        work = dist.all_reduce(buffer, group=self._process_group, async_op=True)
        assert work is not None
        self._sent.append((present, buffer, work))
