"""A forward pass in parts: embedding, each block, head, each with its own weights in memory and no others.

The model's own ``forward`` runs every part, so masks, rotary angles and scaled embeddings are the model's. While one
part runs, the other blocks are replaced by functions that return what they get. A block is reached by an exception
that carries its arguments.

All batches have one shape and no padding. So the arguments of a block, except the hidden states, are equal for all of
them, and are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Blueprint
from shardwise.model.merging import ReadTensor
from shardwise.model.streaming import StreamedModel, StreamedTensors

HIDDEN_STATES = "hidden_states"
"""Name of the hidden states where a model passes them by name."""


class _Reached(Exception):
    """A block was called with these arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args
        self.named = kwargs


class Walk:
    """The parts of a model whose weights ``read`` returns by canonical name; computes in ``dtype``."""

    def __init__(self, blueprint: Blueprint, read: ReadTensor, dtype: torch.dtype) -> None:
        self.blueprint = blueprint
        self.dtype = dtype
        self._streamed = StreamedModel(blueprint, read, dtype)
        self._returns_tuple: dict[int, bool] = {}

    @property
    def depth(self) -> int:
        return len(self._streamed.blocks)

    def block(self, index: int) -> nn.Module:
        return self._streamed.blocks[index][0]

    def path(self, index: int) -> str:
        """The path of a block in the model."""
        return self._streamed.paths[self.block(index)]

    @property
    def model(self) -> nn.Module:
        return self._streamed.model

    def embedded(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Hidden states [b, s, h] that enter the first block, for each batch of ids [b, s]."""
        with self._outside():
            for ids in batches:
                yield self._hidden(self._reach(0, ids))

    @contextmanager
    def loaded(self, index: int, like: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
        """The function of one block, [b, s, h] -> [b, s, h], with its weights in memory.

        Args:
            like: hidden states of the shape of every batch.
        """
        with self._outside():
            reached = self._reach(index, like)
        block, tensors = self._streamed.blocks[index]

        def run(hidden: Tensor) -> Tensor:
            if HIDDEN_STATES in reached.named:
                result = block(*reached.arguments[1:], **{**reached.named, HIDDEN_STATES: hidden})
            else:
                result = block(hidden, *reached.arguments[1:], **reached.named)
            # Stand-ins for this block return the same form, which the model may unpack.
            self._returns_tuple[index] = isinstance(result, tuple)
            out: Tensor = result[0] if isinstance(result, tuple) else result
            return out

        tensors.load()
        try:
            yield run
        finally:
            tensors.free()

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """The function from the last block's hidden states [b, s, h] to logits [b, s, vocab]; any part of s is fine."""
        last_hidden: list[Tensor] = []

        def logits(hidden: Tensor) -> Tensor:
            last_hidden[:] = [hidden]
            output = self.blueprint.logits(self.model, hidden)
            last_hidden.clear()  # the list outlives the call, and would keep the tensor
            return output

        # A model may scale what takes the place of the embedding, so the last block returns the states as they are.
        stand_ins = dict.fromkeys(range(self.depth - 1), self._returning)
        last = {self.depth - 1: lambda index, _: self._returning(index, last_hidden[0])}
        with self._outside(), self._replaced({**stand_ins, **last}):
            yield logits

    def _reach(self, index: int, batch: Tensor) -> _Reached:
        """The arguments of a block for ids, or for hidden states in place of the embedding."""

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _Reached(args, kwargs)

        with self._replaced(dict.fromkeys(range(index), self._returning)):
            self.block(index).forward = stop
            try:
                self.blueprint.logits(self.model, batch)
            except _Reached as reached:
                reached.__traceback__ = None  # its frames would keep the activations of the model alive
                return reached
            finally:
                del self.block(index).forward
        raise AssertionError(f"the model does not call {self.path(index)}")

    def _returning(self, index: int, hidden: Tensor) -> Any:
        """What the block returns, with these hidden states."""
        # In a prediction one block runs for all; stand-ins for the others return its form.
        known = self._returns_tuple
        returns_tuple = known.get(index, next(iter(known.values())))
        return (hidden, None) if returns_tuple else hidden

    @contextmanager
    def _replaced(self, stand_ins: dict[int, Callable[[int, Tensor], Any]]) -> Iterator[None]:
        # A function, so that each lambda has its own index: a lambda in the loop would see the last one.
        def standing_in(index: int, stand_in: Callable[[int, Tensor], Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: stand_in(index, self._hidden(_Reached(args, kwargs)))

        # An attribute of the instance hides the method of its class until it is deleted.
        for index, stand_in in stand_ins.items():
            self.block(index).forward = standing_in(index, stand_in)
        try:
            yield
        finally:
            for index in stand_ins:
                del self.block(index).forward

    @staticmethod
    def _hidden(reached: _Reached) -> Tensor:
        hidden: Tensor = (
            reached.named[HIDDEN_STATES] if HIDDEN_STATES in reached.named else reached.arguments[0]
        )
        return hidden

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """In this block, a layer outside the blocks has its weights from its first call on."""
        loaded: list[StreamedTensors] = []

        def loading(tensors: StreamedTensors) -> Callable[..., None]:
            def load(*_: Any) -> None:
                if tensors not in loaded:
                    tensors.load()
                    loaded.append(tensors)

            return load

        hooks = [
            module.register_forward_pre_hook(loading(tensors)) for module, tensors in self._streamed.outside
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for tensors in loaded:
                tensors.free()
