"""Calls of blocks that run again: their arguments and random state, and slots for the tensors that autograd saves.

In the first run every tensor that autograd saves is replaced by an empty slot. A second run with the same arguments and
the same state of the random generators saves the same tensors in the same order, and fills the slots.

An argument that the block before returned is noted by its number only. So a block must be called with the unchanged
result of the block before it, as in the native decoder and in transformers. Other arguments (a mask, rotary angles) are
kept by reference and may differ from block to block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from shardwise.core.errors import RecipeError
from shardwise.runtime.offload.activations import SavedTensor, save_offloaded
from shardwise.runtime.torch_private import (
    TreeSpec,
    storage_key,
    tree_flatten,
    tree_iter,
    tree_unflatten,
    version_of,
)


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


@dataclass(frozen=True)
class _FromPrevious:
    """An argument that the block before has returned, by the number of the tensor in its result."""

    position: int


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that is kept for a second run, offloaded with the block's other activations."""

    kept: SavedTensor
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> KeptTensor:
        return cls(save_offloaded(tensor.detach()), tensor.requires_grad)

    def tensor(self) -> Tensor:
        tensor = self.kept.value()
        if tensor is None:
            raise RuntimeError("an argument of a block was written to before the block could be run again")
        return tensor.detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one call, and the state of the random generators and of autocast at that time."""

    leaves: list[Any]
    spec: TreeSpec
    cpu_state: Tensor
    devices: Sequence[int]
    device_states: Sequence[Tensor]
    autocast: Sequence[dict[str, Any]]
    saving: Saving

    @classmethod
    def noted(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Sequence[Tensor], saving: Saving
    ) -> BlockCall:
        """The call of a block. ``returned``: tensors in the result of the block before, as the first run gave them."""
        leaves, spec = tree_flatten((args, kwargs))
        kept = [_kept_argument(leaf, returned) for leaf in leaves]
        devices, states = get_device_states(*leaves)
        return cls(kept, spec, torch.get_rng_state(), devices, states, _autocast(leaves), saving)

    @property
    def continues(self) -> bool:
        """Whether an argument is the result of the block before."""
        return any(isinstance(leaf, _FromPrevious) for leaf in self.leaves)

    def arguments(self, returned: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [_original_argument(leaf, returned) for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def again(self, module: nn.Module, returned: Sequence[Tensor]) -> Any:
        """The result of the same call. Through the module's hooks: FSDP2 gathers the block's weights in them."""
        args, kwargs = self.arguments(returned)
        self.restore_generators()
        with self.under_autocast(), self.saving.second():
            return module(*args, **kwargs)

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


class Slot:
    """Takes the place of a saved tensor; the second run fills it."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class Slots:
    """Slots of a first run, in the order in which autograd saved."""

    def __init__(self) -> None:
        self.places: list[weakref.ref[Slot]] = []
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []

    def add(self, tensor: Tensor) -> Slot:
        slot = Slot()
        self.places.append(weakref.ref(slot))
        self.shapes.append((tensor.shape, tensor.dtype))
        return slot

    def __len__(self) -> int:
        return len(self.places)


class _AllFilled(Exception):
    """Every slot is filled: the rest of the last block is skipped."""


class SecondRun:
    """Fills slots in the order of the first run."""

    def __init__(self, slots: Slots) -> None:
        self.filled = 0
        self._slots = slots

    @property
    def complete(self) -> bool:
        return self.filled == len(self._slots)

    def run(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block; None where its last slots were filled on the way."""
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                return block(*args, **kwargs)
        except _AllFilled:  # caught here, so that the hooks around this block see an ordinary return
            return None

    def check(self) -> None:
        """Raises RuntimeError where slots are left."""
        if not self.complete:
            raise RuntimeError(
                f"the second run of a block saved {self.filled} tensors, the first {len(self._slots)}"
            )

    def _pack(self, tensor: Tensor) -> Tensor:
        index, slots = self.filled, self._slots
        self.filled += 1
        if index >= len(slots) or (tensor.shape, tensor.dtype) != slots.shapes[index]:
            raise RuntimeError("the second run of a block does not save the tensors that the first did")
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if (slot := slots.places[index]()) is not None:  # else the graph has dropped it
            slot.tensor = tensor
        if self.complete:
            raise _AllFilled
        return tensor


def result_tensors(tree: Any) -> list[Tensor]:
    """The tensors in a block's result, in order."""
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


def blocks_in_order_error(why: str) -> RecipeError:
    """For a model whose blocks are not called one after the other."""
    return RecipeError(
        "this model's blocks cannot be recomputed together",
        where="strategy.activation_checkpointing: sqrt, recursive",
        why=why,
        fix="the nearest that works is activation_checkpointing: full",
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


def _kept_argument(leaf: Any, returned: Sequence[Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    for position, tensor in enumerate(returned):
        if _memory_and_version(leaf) == _memory_and_version(tensor):
            return _FromPrevious(position)
    return KeptTensor.of(leaf)


def _original_argument(leaf: Any, returned: Sequence[Tensor]) -> Any:
    """The argument itself."""
    if isinstance(leaf, _FromPrevious):
        return returned[leaf.position]
    return leaf.tensor() if isinstance(leaf, KeptTensor) else leaf


def _memory_and_version(tensor: Tensor) -> tuple[Any, ...]:
    """Identifies a tensor's memory and version. FSDP2 gives a block a view of the result of the block before."""
    storage = storage_key(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor)
