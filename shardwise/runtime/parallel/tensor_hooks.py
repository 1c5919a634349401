"""Hooks of layers that are sharded for tensor parallelism: local weights, and the collectives around a layer.

They are dataclasses, so that blocks whose hooks have equal fields share a compilation (runtime/compiled.py). What a
hook keeps during a forward pass is no part of the comparison.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.runtime.parallel.regathering import RegatheredInput, RegatheringLinear
from shardwise.runtime.parallel.tp_collectives import (
    TPGroup,
    copied,
    gathered,
    gathered_last_dim,
    part_of_last_dim,
    scattered,
    summed,
)
from shardwise.runtime.parallel.vocabulary import vocabulary_of


@dataclass(eq=False)
class LocalWeights:
    """Replaces a layer's weights by plain local tensors while it runs.

    The parameter ``without`` is hidden, for a later hook. Gradients of the parameters ``summed`` are all-reduced. In a
    block that is traced, sharded parameters are local tensors already.
    """

    ranks: TPGroup
    summed: tuple[str, ...]
    without: str = ""
    _held: dict[str, nn.Parameter | None] | None = field(default=None, init=False, compare=False)

    def before(self, module: nn.Module, args: Any) -> None:
        self.after(module)  # the previous forward pass may not have finished
        self._held = dict(module._parameters)
        for name, parameter in self._held.items():
            if parameter is not None:
                plain = None if name == self.without else self.plain(name, parameter)
                module._parameters[name] = plain  # type: ignore[assignment]

    def after(self, module: nn.Module, *_: object) -> None:
        parameters = self._held
        self._held = None
        for name, parameter in (parameters or {}).items():
            module._parameters[name] = parameter

    def plain(self, name: str, parameter: nn.Parameter) -> Tensor:
        if isinstance(parameter, DTensor):
            part: Tensor = parameter.to_local()
            return part
        return copied(parameter, self.ranks) if name in self.summed else parameter


@dataclass(eq=False)
class ColumnInput:
    """The input of sibling column layers, communicated once for all of them.

    The result is freed after the last of the ``layers``, or when their row layer begins.
    """

    ranks: TPGroup
    layers: int
    sequence_parallel: bool
    _source: weakref.ref[Tensor] | None = field(default=None, init=False, compare=False)
    _entered: tuple[Tensor, RegatheredInput] | None = field(default=None, init=False, compare=False)
    _left: int = field(default=0, init=False, compare=False)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        if self._source is None or self._source() is not x:
            entered = (gathered if self.sequence_parallel else copied)(x, self.ranks)
            # Weak: the input is not kept for a next call.
            self._source = weakref.ref(x)
            self._left = self.layers
            self._entered = entered, RegatheredInput(self.ranks)
        assert self._entered is not None
        entered, regathered = self._entered
        self._left -= 1
        if self._left == 0:
            self.release()
        return (entered, x, regathered) if isinstance(module, RegatheringLinear) else (entered, *rest)

    def release(self, *_: object) -> None:
        self._source = self._entered = None


@dataclass(eq=False)
class RowOutput:
    """All-reduces (or reduce-scatters) a row layer's output and adds the bias once."""

    ranks: TPGroup
    sequence_parallel: bool
    weights: LocalWeights

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        out = (scattered if self.sequence_parallel else summed)(result, self.ranks)
        bias = module._parameters.get("bias")
        return out if bias is None else out + self.weights.plain("bias", bias)


@dataclass(eq=False)
class VocabularyRows:
    """Looks up the local rows, sets other ids to zero, and reduces."""

    ranks: TPGroup
    sequence_parallel: bool
    _elsewhere: Tensor | None = field(default=None, init=False, compare=False)

    def before(self, module: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *rest = args
        start, stop = self.ranks.span(module.num_embeddings)
        known = (ids >= 0) & (ids < module.num_embeddings)
        self._elsewhere = ((ids < start) | (ids >= stop)) & known
        # Others' ids look up row 0; ``after`` puts zeros in the place of the results. An id of no rank stays out of
        # range, and the lookup raises as in one process.
        return ((ids - start).masked_fill(self._elsewhere, 0), *rest)

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        elsewhere = self._elsewhere
        self._elsewhere = None
        assert elsewhere is not None
        own = result.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return (scattered if self.sequence_parallel else summed)(own, self.ranks)


@dataclass(eq=False)
class InputPart:
    """Takes this rank's part of the input's last dim."""

    ranks: TPGroup

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        return (part_of_last_dim(x, self.ranks), *rest)


@dataclass(eq=False)
class GatheredOutput:
    """All-gathers the outputs."""

    ranks: TPGroup
    size: int

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return gathered_last_dim(result, self.ranks, self.size)


@dataclass(eq=False)
class GatheredSequence:
    """All-gathers outputs [..., s / ranks, 1] along the sequence, for a computation that is equal on all ranks."""

    ranks: TPGroup

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        part = result.squeeze(-1)
        whole = gathered_last_dim(part, self.ranks, self.ranks.size * part.shape[-1])
        return whole.unsqueeze(-1).clone()  # FSDP2's hooks on a module's output need one that is no view


@dataclass(eq=False)
class PositionsPart:
    """Takes this rank's part of the positions [..., s]."""

    ranks: TPGroup

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        positions, *rest = args
        start, stop = self.ranks.span(positions.shape[-1])
        return (positions[..., start:stop], *rest)


class WholeLogits:
    """All-gathers the logits, unless the loss takes sharded ones."""

    def __init__(self, model: nn.Module) -> None:
        self._vocabulary = vocabulary_of(model)

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return self._vocabulary.full_logits(result)
