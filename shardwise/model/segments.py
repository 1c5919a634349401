"""Segments: consecutive blocks of which only the first one's input is kept, and which run again together.

(Chen et al. 2016, arXiv:1604.06174: about sqrt(n) segments of n blocks keep about sqrt(n) inputs, and one
segment's activations live at a time, for one more forward pass.) The loop over the blocks belongs to the model,
so each block is wrapped by itself and the wrappers of a segment know each other. A wrapper hands autograd an
empty holder for every tensor that its block would save, and notes what the block was called with - but for what
the block before has returned, which is only noted as such. The first holder that the backward pass opens makes
all blocks of the segment run again, in order and with the state that the generator had, and fills all holders.

So a block must be called with what the block before in its segment has returned, unchanged: as the native
decoder and the decoders of transformers do. A model that computes between its blocks is refused, in words, by its
plan. What else a block is called with (a mask, rotary angles) is kept by reference, may differ from block to
block, and is shared by them as a rule.

Every block stays a module of its own: it keeps its name, and FSDP2 gathers and reduces it alone. In the second run
FSDP2 gathers blocks as they come and leaves them gathered until their backward pass, so each is gathered once for
both; the price is that the weights of a segment are gathered together for that time.

Chosen: non-reentrant, on saved-tensor hooks, like ``torch.utils.checkpoint``. Refused: one module that runs a
whole segment in the place of its first block, which would have to know the arguments of blocks that have not been
called yet.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from shardwise.core.errors import RecipeError
from shardwise.model.kept import Kept, keep


def in_segments(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Wrappers of the blocks, in segments of the largest whole number that is no more than sqrt(n)."""
    length = math.isqrt(len(blocks))
    wrapped: list[nn.Module] = []
    for start in range(0, len(blocks), max(1, length)):
        wrapped += Segment(blocks[start : start + length]).members
    return wrapped


class Segment:
    """The wrappers of consecutive blocks, the pass that runs through them, and their second run."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.members = [_Member(block, self, index) for index, block in enumerate(blocks)]
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


class _Holder:
    """Stands for a saved tensor until the second run."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


@dataclass(frozen=True)
class _Returned:
    """Stands for an argument: what the block before has returned as its tensor number so and so."""

    position: int


@dataclass(frozen=True)
class _Given:
    """Stands for an argument: a tensor, kept where the block's other activations are."""

    kept: Kept
    requires_grad: bool

    def tensor(self) -> Tensor:
        tensor = self.kept.value()
        if tensor is None:
            raise RuntimeError("an argument of a block was written to before the block could be run again")
        return tensor.detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _Call:
    """What a block was called with, and the states of generators and of autocast then."""

    leaves: list[Any]
    spec: TreeSpec
    cpu_state: Tensor
    devices: Sequence[int]
    device_states: Sequence[Tensor]
    autocast: Sequence[dict[str, Any]]

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
    """One forward pass through a segment. Lives as long as the graph that saved tensors in it."""

    segment: Segment
    calls: list[_Call] = field(default_factory=list)
    holders: list[weakref.ref[_Holder]] = field(default_factory=list)
    shapes: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    returned: list[Tensor] = field(default_factory=list)

    def first(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block, keeping its call and nothing that it saves."""
        self.calls.append(self._call(type(block).__name__, args, kwargs))
        with saved_tensors_hooks(self._pack, self._unpack):
            result = block(*args, **kwargs)
        # Detached, so that what is noted here holds no graph; the last block's is of no use.
        last = len(self.calls) == len(self.segment.members)
        self.returned = [] if last else [tensor.detach() for tensor in _tensors(result)]
        return result

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        leaves, spec = tree_flatten((args, kwargs))
        kept = [self._kept(leaf) for leaf in leaves]
        if self.calls and not any(isinstance(leaf, _Returned) for leaf in kept):
            raise _refusal(f"{name} is not called with what the one before has returned")
        devices, states = get_device_states(*leaves)
        return _Call(kept, spec, torch.get_rng_state(), devices, states, _autocast(leaves))

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for position, tensor in enumerate(self.returned):
            if _place(leaf) == _place(tensor):
                return _Returned(position)
        return _Given(keep(leaf.detach()), leaf.requires_grad)

    def _pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder()
        self.holders.append(weakref.ref(holder))
        self.shapes.append((tensor.shape, tensor.dtype))
        return holder

    def _unpack(self, holder: _Holder) -> Tensor:
        if holder.tensor is None:
            self._run_again()
        assert holder.tensor is not None, "the second run has filled every holder"
        return holder.tensor

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
                    with call.under_autocast():
                        result = member(*args, **kwargs)
                    if second.filled == len(self.holders):
                        return
                    returned = list(_tensors(result))
        finally:
            self.segment.second = None
        raise RuntimeError(
            f"the second run of a block saved {second.filled} tensors, the first {len(self.holders)}"
        )


def _autocast(leaves: Sequence[Any]) -> list[dict[str, Any]]:
    """``torch.autocast``'s arguments as they are in force, for the devices of some tensors and the host's."""
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


class _Enough(Exception):
    """Every holder is filled: the rest of the last block need not run."""


class _SecondRun:
    """Fills the holders of a pass, in the order in which they were made."""

    def __init__(self, first: _Pass) -> None:
        self.filled = 0
        self._first = first

    def run(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                return block(*args, **kwargs)
        except _Enough:  # caught here, so that the hooks around this block see an ordinary return
            return None

    def _pack(self, tensor: Tensor) -> Tensor:
        index, first = self.filled, self._first
        self.filled += 1
        if index >= len(first.holders) or (tensor.shape, tensor.dtype) != first.shapes[index]:
            raise RuntimeError("the second run of a block does not save the tensors that the first did")
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if (holder := first.holders[index]()) is not None:  # else nobody will ask for it
            holder.tensor = tensor
        if self.filled == len(first.holders):
            raise _Enough
        return tensor


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's values lie. FSDP2 hands a block a view of what the one before has returned."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def _opened(leaf: Any, returned: Sequence[Tensor]) -> Any:
    """What an argument stands for."""
    if isinstance(leaf, _Returned):
        return returned[leaf.position]
    return leaf.tensor() if isinstance(leaf, _Given) else leaf


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def _refusal(why: str) -> RecipeError:
    return RecipeError(
        "this model's blocks cannot be recomputed in segments",
        where="strategy.activation_checkpointing: sqrt",
        why=why,
        fix="the nearest that works is activation_checkpointing: full",
    )
