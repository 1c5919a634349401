"""Segments: consecutive blocks that keep only the first block's input, and run again together.

(Chen et al. 2016, arXiv:1604.06174: about sqrt(n) segments of n blocks keep about sqrt(n) inputs and the activations
of one segment at a time, for one more forward pass.) The model loops over its blocks, so each block has a wrapper, and
the wrappers of a segment share a ``Segment``. In the first run a wrapper replaces every tensor that autograd saves by
an empty slot, and notes the block's arguments. An argument that the block before returned is noted by its number only.
When the backward pass unpacks the first slot, all blocks of the segment run again in order, with the same state of the
random generators, and fill all slots.

So a block must be called with the unchanged result of the block before it, as in the native decoder and in
transformers. The plan refuses a model that computes between its blocks. Other arguments (a mask, rotary angles) are
kept by reference and may differ from block to block.

Every block stays its own module, so it keeps its name and FSDP2 gathers and reduces it separately. In the second run
FSDP2 gathers each block once and keeps it gathered until its backward pass. The price is that the weights of a whole
segment are gathered at the same time.

Non-reentrant, on saved-tensor hooks, like ``torch.utils.checkpoint``. A budget (budget.py) uses segments of one block.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from shardwise.core.errors import RecipeError
from shardwise.runtime.offload.activations import SavedTensor, save
from shardwise.runtime.torch_private import (
    ActivationWrapper,
    TreeSpec,
    storage_key,
    tree_flatten,
    tree_iter,
    tree_unflatten,
    version_of,
)


def in_segments(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Wrappers of the n blocks, in segments of floor(sqrt(n)) blocks."""
    length = math.isqrt(len(blocks))
    wrapped: list[nn.Module] = []
    for start in range(0, len(blocks), max(1, length)):
        wrapped += Segment(blocks[start : start + length]).members
    return wrapped


class Saving:
    """What one call of a block saves for its second run in addition to its arguments. The base class saves nothing."""

    def first(self) -> AbstractContextManager[Any]:
        """A context for the first run of the block."""
        return nullcontext()

    def second(self) -> AbstractContextManager[Any]:
        """A context for the second run."""
        return nullcontext()

    def saved(self, tensor: Tensor) -> None:
        """Called for each tensor that autograd saves in the first run."""

    def ended(self, result: Any) -> None:
        """Called with the result of the first run."""


class Segment:
    """Wrappers of consecutive blocks that run again together.

    Args:
        saving: (block, args, kwargs) -> what this call saves.
    """

    def __init__(self, blocks: Sequence[nn.Module], saving: Callable[..., Saving] | None = None) -> None:
        self.members = [_Member(block, self, index) for index, block in enumerate(blocks)]
        self.saving = saving or (lambda *_: Saving())
        self.current: _Pass | None = None
        self.second: _SecondRun | None = None


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
            raise _refusal(f"{type(block).__name__} is not called once and after the one before")
        result = run.first(block, args, kwargs)
        if self.index == len(segment.members) - 1:
            segment.current = None
        return result


class _Slot:
    """Takes the place of a saved tensor; the second run fills it."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


@dataclass(frozen=True)
class _FromPrevious:
    """An argument that the block before has returned, by the number of the tensor in its result."""

    position: int


@dataclass(frozen=True)
class _Input:
    """A tensor argument from outside the segment, offloaded with the block's other activations."""

    kept: SavedTensor
    requires_grad: bool

    def tensor(self) -> Tensor:
        tensor = self.kept.value()
        if tensor is None:
            raise RuntimeError("an argument of a block was written to before the block could be run again")
        return tensor.detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, and the state of the random generators and of autocast at that time."""

    leaves: list[Any]
    spec: TreeSpec
    cpu_state: Tensor
    devices: Sequence[int]
    device_states: Sequence[Tensor]
    autocast: Sequence[dict[str, Any]]
    saving: Saving

    def arguments(self, returned: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [_opened(leaf, returned) for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def restore_generators(self) -> None:
        torch.set_rng_state(self.cpu_state)
        if self.devices:
            set_device_states(self.devices, self.device_states)

    @contextmanager
    def under_autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            for settings in self.autocast:
                stack.enter_context(torch.autocast(**settings))
            yield


@dataclass
class _Pass:
    """One forward pass through a segment. The autograd graph holds it."""

    segment: Segment
    calls: list[_Call] = field(default_factory=list)
    slots: list[weakref.ref[_Slot]] = field(default_factory=list)
    shapes: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    returned: list[Tensor] = field(default_factory=list)

    def first(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block and note the call; saved tensors become slots."""
        call = self._call(block, args, kwargs)
        self.calls.append(call)
        with saved_tensors_hooks(self._pack, self._unpack), call.saving.first():
            result = block(*args, **kwargs)
        call.saving.ended(result)
        # Detached, so that no graph is held. The last block's result is not needed.
        last = len(self.calls) == len(self.segment.members)
        self.returned = [] if last else [tensor.detach() for tensor in _tensors(result)]
        return result

    def _call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        leaves, spec = tree_flatten((args, kwargs))
        kept = [self._kept(leaf) for leaf in leaves]
        if self.calls and not any(isinstance(leaf, _FromPrevious) for leaf in kept):
            raise _refusal(f"{type(block).__name__} is not called with the result of the block before")
        devices, states = get_device_states(*leaves)
        saving = self.segment.saving(block, args, kwargs)
        return _Call(kept, spec, torch.get_rng_state(), devices, states, _autocast(leaves), saving)

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for position, tensor in enumerate(self.returned):
            if _place(leaf) == _place(tensor):
                return _FromPrevious(position)
        return _Input(save(leaf.detach()), leaf.requires_grad)

    def _pack(self, tensor: Tensor) -> _Slot:
        self.calls[-1].saving.saved(tensor)
        slot = _Slot()
        self.slots.append(weakref.ref(slot))
        self.shapes.append((tensor.shape, tensor.dtype))
        return slot

    def _unpack(self, slot: _Slot) -> Tensor:
        if slot.tensor is None:
            self._run_again()
        assert slot.tensor is not None, "the second run has filled every slot"
        return slot.tensor

    def _run_again(self) -> None:
        second = self.segment.second = _SecondRun(self)
        devices = sorted({device for call in self.calls for device in call.devices})
        try:
            with torch.enable_grad(), torch.random.fork_rng(devices=devices):
                returned: list[Tensor] = []
                for member, call in zip(self.segment.members, self.calls, strict=True):
                    args, kwargs = call.arguments(returned)
                    call.restore_generators()
                    # Through the module's hooks: FSDP2 gathers the block's weights in them.
                    with call.under_autocast(), call.saving.second():
                        result = member(*args, **kwargs)
                    if second.filled == len(self.slots):
                        return
                    returned = list(_tensors(result))
        finally:
            self.segment.second = None
        raise RuntimeError(
            f"the second run of a block saved {second.filled} tensors, the first {len(self.slots)}"
        )


def _autocast(leaves: Sequence[Any]) -> list[dict[str, Any]]:
    """The arguments of ``torch.autocast`` that are in force, for the CPU and the devices of some tensors."""
    kinds = {"cpu", *(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))}
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    ]


class _AllFilled(Exception):
    """Every slot is filled: the rest of the last block is skipped."""


class _SecondRun:
    """Fills the slots of a pass in the order of the first run."""

    def __init__(self, first: _Pass) -> None:
        self.filled = 0
        self._first = first

    def run(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                return block(*args, **kwargs)
        except _AllFilled:  # caught here, so that the hooks around this block see an ordinary return
            return None

    def _pack(self, tensor: Tensor) -> Tensor:
        index, first = self.filled, self._first
        self.filled += 1
        if index >= len(first.slots) or (tensor.shape, tensor.dtype) != first.shapes[index]:
            raise RuntimeError("the second run of a block does not save the tensors that the first did")
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if (slot := first.slots[index]()) is not None:  # else the graph has dropped it
            slot.tensor = tensor
        if self.filled == len(first.slots):
            raise _AllFilled
        return tensor


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Identifies a tensor's memory and version. FSDP2 gives a block a view of the result of the block before."""
    storage = storage_key(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor)


def _opened(leaf: Any, returned: Sequence[Tensor]) -> Any:
    """The argument itself."""
    if isinstance(leaf, _FromPrevious):
        return returned[leaf.position]
    return leaf.tensor() if isinstance(leaf, _Input) else leaf


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def _refusal(why: str) -> RecipeError:
    return RecipeError(
        "this model's blocks cannot be recomputed in segments",
        where="strategy.activation_checkpointing: sqrt",
        why=why,
        fix="the nearest that works is activation_checkpointing: full",
    )
