"""Optimizers with state in host memory or on disk, updated by the CPU (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity,
Rajbhandari et al. 2021).

The rules are those of the device, with torch's CPU kernels. Offloaded parameters are updated chunk by chunk: while one
chunk is updated, the next is copied in and the last is copied out (host_staging.py, nvme_state.py). Parameters that
stay on the device are updated there at the same time. Gradients are clipped before they are copied, and the skip
verdict travels with them, so a skipped update changes nothing here either.

The host waits for the gradients, because the CPU computes with them. So the first kernels of the next step are issued
after the last chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.optim.chunk import STEP, Chunk, as_rows, copied_rows, stand_in
from shardwise.engine.optim.host_staging import SLOTS, Staging
from shardwise.engine.optim.norm import local
from shardwise.engine.optim.nvme_state import StateFile
from shardwise.engine.optim.optimizer import Optimizer, UpdateRule
from shardwise.runtime.offload.host import host_memory


class HostOptimizer(Optimizer):
    """Updates parameters in host memory, with their gradients and state there too."""

    def fresh_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        with host_memory():
            return super().fresh_state(parameter)

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter], skip: Tensor) -> None:
        with host_memory():
            super().update(parameters, skip.to("cpu"))


class OffloadedOptimizer(Optimizer):
    """Updates ``offloaded`` parameters by ``host_rule`` on the CPU, the others by ``rule`` on the device.

    Args:
        folder: folder of the state file; None keeps the state in host memory.
        staged: whether weights and gradients are in another memory than the CPU's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        host_rule: UpdateRule,
        offloaded: Sequence[nn.Parameter],
        folder: str | None,
        staged: bool,
    ) -> None:
        self._host_rule = host_rule
        self._offloaded = set(offloaded)
        self._turn = 0  # chunks updated so far; slots are used in turn
        with host_memory():
            self._file = StateFile(folder, host_rule, offloaded) if folder is not None else None
        self._staging = Staging(offloaded[0].device, _largest_chunk_bytes(offloaded)) if staged else None
        super().__init__(groups, rule)

    def fresh_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self._offloaded:
            return super().fresh_state(parameter)
        if self._file is not None:
            return self._file.counts[parameter]
        with host_memory():
            return self._host_rule.state(stand_in(parameter))

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = super().stored(parameter)
        if self._file is None or parameter not in self._offloaded:
            return state
        return {**state, **self._file.mapped(parameter)}

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter], skip: Tensor) -> None:
        parameters = list(parameters)
        on_host = [parameter for parameter in parameters if parameter in self._offloaded]
        if self._staging is not None:
            self._staging.begin()
        # The verdict waits for the gradients, not for the device's own updates, which are issued after it.
        verdict = skip.to("cpu") if on_host else skip
        if on_device := [parameter for parameter in parameters if parameter not in self._offloaded]:
            super().update(on_device, skip)
        if on_host:
            with host_memory():
                self._update_on_host(on_host, verdict)

    def _update_on_host(self, parameters: Sequence[nn.Parameter], skip: Tensor) -> None:
        # Once for each parameter. The rule counts up the scalar of each chunk, which ``_fetch`` makes one lower.
        for parameter in parameters:
            if (count := self.state[parameter].get(STEP)) is not None:
                count += 1 - skip
        order = [(p, rows) for p in parameters for rows in copied_rows(as_rows(p))]
        fetched = [self._fetch(self._turn, *first) for first in order[:1]]
        for following in range(1, len(order) + 1):
            chunk = fetched.pop()
            turn = self._turn
            self._turn += 1
            # Before the host waits for this chunk, the copy of the next one is under way.
            if following < len(order):
                fetched.append(self._fetch(self._turn, *order[following]))
            self._wait(turn)
            self._host_rule.update([chunk], self.rate_of(chunk.parameter), skip)
            self._send(turn, chunk)
        if self._staging is not None:
            self._staging.end()

    def _fetch(self, turn: int, parameter: nn.Parameter, rows: slice) -> Chunk:
        """The next chunk; its contents are valid after ``_wait``."""
        slot = turn % SLOTS
        parameter_state = self.state[parameter]
        assert parameter.grad is not None
        weights = as_rows(parameter)  # [rows, rest]
        weight = weights[rows]
        grad = local(parameter.grad).view_as(weights)[rows]
        if self._staging is not None:
            weight, grad = self._staging.fetch(slot, weight, grad)
        if self._file is not None:
            state = self._file.fetch(slot, parameter, rows)
        else:
            state = {name: as_rows(moment)[rows] for name, moment in parameter_state.items() if name != STEP}
        if STEP in parameter_state:
            state[STEP] = parameter_state[STEP] - 1  # a scalar of this chunk, which the rule counts up
        return Chunk(parameter, rows.start, weight, grad, state)

    def _wait(self, turn: int) -> None:
        if self._staging is not None:
            self._staging.wait(turn % SLOTS)
        if self._file is not None:
            self._file.wait(turn % SLOTS)

    def _send(self, turn: int, chunk: Chunk) -> None:
        slot = turn % SLOTS
        if self._staging is not None:
            self._staging.send(slot, chunk.weight, as_rows(chunk.parameter)[chunk.rows])
        if self._file is not None:
            self._file.send(slot, chunk.state, chunk.parameter, chunk.rows)


def share_of(parameters: Sequence[nn.Parameter], fraction: float) -> list[nn.Parameter]:
    """Whole parameters, spread evenly, with at least this fraction of all elements; equal on every rank."""
    seen = taken = 0  # elements
    chosen = []
    # Taken wherever the share so far is too small: then offloaded and other parameters alternate along the model.
    for parameter in parameters:
        seen += parameter.numel()
        if taken < fraction * seen:
            taken += parameter.numel()
            chosen.append(parameter)
    return chosen


def _largest_chunk_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the largest chunk's weights."""
    views = [as_rows(parameter) for parameter in parameters]
    return max((view[rows].nbytes for view in views for rows in copied_rows(view)), default=0)
