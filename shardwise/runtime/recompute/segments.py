"""Segments: consecutive blocks that keep only the first block's input, and run again together.

(Chen et al. 2016, arXiv:1604.06174: about sqrt(n) segments of n blocks keep about sqrt(n) inputs and the activations
of one segment at a time, for one more forward pass.) The model loops over its blocks, so each block has a wrapper, and
the wrappers of a segment share a ``Segment``. When the backward pass unpacks the first slot (calls.py), all blocks of
the segment run again in order and fill all slots.

Every block stays its own module, so it keeps its name and FSDP2 gathers and reduces it separately. In the second run
FSDP2 gathers each block once and keeps it gathered until its backward pass. The price is that the weights of a whole
segment are gathered at the same time.

Non-reentrant, on saved-tensor hooks, like ``torch.utils.checkpoint``. A budget (budget.py) uses segments of one block;
The plugin checkpointing has segments of several blocks, and chains that run a block more than twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.runtime.recompute.calls import (
    BlockCall,
    Saving,
    SecondRun,
    Slot,
    Slots,
    blocks_in_order_error,
    result_tensors,
)
from shardwise.runtime.torch_private import ActivationWrapper


class Segment:
    """Wrappers of consecutive blocks that run again together.

    Args:
        saving: (block, args, kwargs) -> what this call saves.
    """

    def __init__(self, blocks: Sequence[nn.Module], saving: Callable[..., Saving] | None = None) -> None:
        self.members = [_Member(block, self, index) for index, block in enumerate(blocks)]
        self.saving = saving or (lambda *_: Saving())
        self.current: _Pass | None = None
        self.second: SecondRun | None = None


class _Member(ActivationWrapper):
    """One block of a segment."""

    def __init__(self, block: nn.Module, segment: Segment, index: int) -> None:
        super().__init__(block)
        self.segment = segment
        self.index = index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block, segment = self._checkpoint_wrapped_module, self.segment
        if segment.second is not None:
            return segment.second.run(block, args, kwargs)
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        if self.index == 0:
            segment.current = _Pass(segment)
        run = segment.current
        if run is None or len(run.calls) != self.index:
            raise blocks_in_order_error(f"{type(block).__name__} is not called once and after the one before")
        result = run.first(block, args, kwargs)
        if self.index == len(segment.members) - 1:
            segment.current = None
        return result


@dataclass
class _Pass:
    """One forward pass through a segment. The autograd graph holds it."""

    segment: Segment
    calls: list[BlockCall] = field(default_factory=list)
    slots: Slots = field(default_factory=Slots)
    returned: list[Tensor] = field(default_factory=list)

    def first(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block and note the call; saved tensors become slots."""
        call = BlockCall.noted(args, kwargs, self.returned, self.segment.saving(block, args, kwargs))
        if self.calls and not call.continues:
            raise blocks_in_order_error(
                f"{type(block).__name__} is not called with the result of the block before"
            )
        self.calls.append(call)
        with saved_tensors_hooks(self._pack, self._unpack), call.saving.first():
            result = block(*args, **kwargs)
        call.saving.ended(result)
        # Detached, so that no graph is held. The last block's result is not needed.
        last = len(self.calls) == len(self.segment.members)
        self.returned = [] if last else [tensor.detach() for tensor in result_tensors(result)]
        return result

    def _pack(self, tensor: Tensor) -> Slot:
        self.calls[-1].saving.saved(tensor)
        return self.slots.add(tensor)

    def _unpack(self, slot: Slot) -> Tensor:
        if slot.tensor is None:
            self._run_again()
        assert slot.tensor is not None, "the second run has filled every slot"
        return slot.tensor

    def _run_again(self) -> None:
        second = self.segment.second = SecondRun(self.slots)
        devices = sorted({device for call in self.calls for device in call.devices})
        try:
            with torch.enable_grad(), torch.random.fork_rng(devices=devices):
                returned: list[Tensor] = []
                for member, call in zip(self.segment.members, self.calls, strict=True):
                    result = call.again(member, returned)
                    if second.complete:
                        return
                    returned = result_tensors(result)
        finally:
            self.segment.second = None
        second.check()
