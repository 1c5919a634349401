"""A chain of blocks that keeps the inputs of only a few of them, and runs the others again more than once.

``recursive:S`` keeps at most S inputs at a time, that of the first block among them. The backward pass needs the blocks
in reverse order: it goes forward from the nearest kept input, keeps the inputs that it has room for on the way, and
runs the block itself once more for the tensors that autograd saves. Which inputs are kept is the binomial schedule
(Griewank & Walther 2000, "Algorithm 799: revolve", ACM TOMS 26(1)), with the fewest runs for S inputs. The activations
of one block live at a time. The input of the last block, where the schedule's first forward sweep ends, waits for the
backward pass in addition.

    S = 1        keeps the input of the chain alone: O(1) memory, O(n^2) runs ("memory-poor")
    S ~ log2 n   O(log n) memory, O(n log n) runs
    S >= n       full: one more run per block

In a backward pass FSDP2 keeps gathered what it has gathered. A block that is only passed is resharded again here, so
that under ZeRO 3 the weights of two blocks are gathered at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.runtime.recompute.calls import (
    BlockCall,
    KeptTensor,
    Saving,
    SecondRun,
    Slot,
    Slots,
    blocks_in_order_error,
    result_tensors,
)
from shardwise.runtime.torch_private import ActivationWrapper
from shardwise.runtime.torch_private_fsdp import fsdp_reshard


def wrapped(blocks: Sequence[nn.Module], number: int | None) -> list[nn.Module]:
    """Wrappers of the blocks, which keep at most ``number`` of their inputs at a time."""
    assert number is not None, "the form recursive:S has a number"
    return list(Chain(blocks, number).members)


def passes(blocks: int, inputs: int) -> int:
    """Runs of blocks that only pass through, t(l, s) = r l - C(s + r, s + 1), for l blocks and s kept inputs.

    r is the smallest number with l <= C(s + r, s) (Griewank & Walther 2000, section 2). The run of each block whose
    saved tensors the backward pass reads is not counted.
    """
    repeats = 0
    while math.comb(inputs + repeats, inputs) < blocks:
        repeats += 1
    return repeats * blocks - math.comb(inputs + repeats, inputs + 1)


def kept_inputs(blocks: int, inputs: int) -> list[int]:
    """Numbers of the blocks whose inputs are kept on the way to the last of ``blocks`` blocks; the first is 0."""
    kept = [0]
    while blocks > 1 and inputs > 1:
        # Keeping the input of block k costs the k runs on the way to it. The blocks from k on then have one input
        # less to keep; afterwards the k blocks before it have all inputs again.
        step = min(range(1, blocks), key=lambda k: k + passes(blocks - k, inputs - 1) + passes(k, inputs))
        kept.append(kept[-1] + step)
        blocks -= step
        inputs -= 1
    return kept


class Chain:
    """Wrappers of all blocks of a pipeline stage."""

    def __init__(self, blocks: Sequence[nn.Module], inputs: int) -> None:
        self.inputs = inputs
        self.members = [_Link(block, self, index) for index, block in enumerate(blocks)]
        self.on_the_way = {*kept_inputs(len(blocks), inputs), len(blocks) - 1}
        self.current: _ChainPass | None = None
        self.second: SecondRun | None = None


class _Link(ActivationWrapper):
    """One block of a chain."""

    def __init__(self, block: nn.Module, chain: Chain, index: int) -> None:
        super().__init__(block)
        self.chain = chain
        self.index = index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        chain = self.chain
        if not torch.is_grad_enabled():  # evaluation, or a run that only passes through
            return block(*args, **kwargs)
        if chain.second is not None:  # the backward pass runs this block again
            return chain.second.run(block, args, kwargs)
        if self.index == 0:
            chain.current = _ChainPass(chain)
        run = chain.current
        if run is None or len(run.calls) != self.index:
            raise blocks_in_order_error(f"{type(block).__name__} is not called once and after the one before")
        result = run.first(block, args, kwargs)
        if self.index == len(chain.members) - 1:
            chain.current = None  # the autograd graph alone holds the pass from here on
        return result


class _ChainPass:
    """One forward pass through a chain. The autograd graph holds it.

    Attributes:
        kept: (number of a block, tensors that the block before returned), from first to last: the kept inputs.
        required: by block, which of the tensors that it returns require a gradient.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.calls: list[BlockCall] = []
        self.slots: list[Slots] = []
        self.returned: list[Tensor] = []
        self.required: list[list[bool]] = []
        self.kept: list[tuple[int, list[KeptTensor]]] = []

    def first(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block and note the call; saved tensors become slots."""
        index = len(self.calls)
        call = BlockCall.noted(args, kwargs, self.returned, Saving())
        if self.calls and not call.continues:
            raise blocks_in_order_error(
                f"{type(block).__name__} is not called with the result of the block before"
            )
        if index in self.chain.on_the_way:
            self.kept.append((index, [KeptTensor.of(tensor) for tensor in self.returned]))
        self.calls.append(call)
        slots = Slots()
        self.slots.append(slots)
        with saved_tensors_hooks(slots.add, partial(self._unpack, index)):
            result = block(*args, **kwargs)
        # Detached, so that no graph is held. The last block's result is not needed.
        last = len(self.calls) == len(self.chain.members)
        tensors = [] if last else result_tensors(result)
        self.required.append([tensor.requires_grad for tensor in tensors])
        self.returned = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        return result

    def _unpack(self, index: int, slot: Slot) -> Tensor:
        if slot.tensor is None:
            self._run_again(index)
        assert slot.tensor is not None, "the second run has filled every slot"
        return slot.tensor

    def _run_again(self, index: int) -> None:
        """Fill the slots of one block."""
        second = SecondRun(self.slots[index])
        devices = sorted({device for call in self.calls for device in call.devices})
        # ``again`` sets the generators to the states of the first run, so that dropout masks are the same.
        with torch.random.fork_rng(devices=devices):
            # Without ``second`` yet: the blocks on the way run without a graph, and fill no slots.
            returned = self._returned_before(index)
            self.chain.second = second
            try:
                with torch.enable_grad():
                    self.calls[index].again(self.chain.members[index], returned)
            finally:
                self.chain.second = None
        second.check()

    def _returned_before(self, index: int) -> list[Tensor]:
        """What the block before has returned; the way there starts at the nearest kept input."""
        # The backward pass goes through the blocks in reverse, so later inputs are not needed again.
        while self.kept[-1][0] > index:
            self.kept.pop()
        start, kept_tensors = self.kept[-1]
        outputs = [kept.tensor() for kept in kept_tensors]
        # This block's own input is used for the last time. That of the chain stays: an empty list has no start.
        if start == index and start > 0:
            self.kept.pop()
        # The input of ``start`` is among those that ``kept_inputs`` counts, hence + 1.
        free = self.chain.inputs - len(self.kept) + 1
        keep = {start + step for step in kept_inputs(index - start + 1, free)}
        for passed in range(start, index):
            outputs = self._passed(passed, outputs)
            if passed < index - 1:  # the backward pass needs the weights of the block before next
                fsdp_reshard(self.chain.members[passed])
            if passed + 1 in keep and passed + 1 < index:
                self.kept.append((passed + 1, [KeptTensor.of(tensor) for tensor in outputs]))
        return outputs

    def _passed(self, index: int, returned: list[Tensor]) -> list[Tensor]:
        """What a block returns, without a graph, in tensors that require a gradient where the first run's did."""
        with torch.no_grad():
            tensors = result_tensors(self.calls[index].again(self.chain.members[index], returned))
        return [
            tensor.requires_grad_(required)
            for tensor, required in zip(tensors, self.required[index], strict=True)
        ]
