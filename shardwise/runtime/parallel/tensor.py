"""Tensor parallelism: Megatron's sharded layers, from a plan of module names (Shoeybi et al. 2019).

    column      shards the outputs of a linear layer: some rows of the weight, the whole input
    row         shards the inputs of a linear layer: some columns of the weight, outputs are partial sums
    vocabulary  shards the rows of an embedding: other ids give zero, outputs are partial sums
    logits      column for the output layer: the loss takes sharded logits, other callers get all logits
    positions   a replicated embedding that looks up this rank's part of the sequence
    summed      replicated weights applied to sharded activations: gradients are all-reduced
    rows        shards the rows of a layer inside a sharded layer (an adapter)
    columns     shards its columns

Between a column layer and the next row layer each rank computes with its heads or its part of the inner width. With
Megatron's sequence parallelism (Korthikanti et al. 2022), the other layers compute on a part of the sequence, and
unnamed layers count as ``summed``.

A sharded layer stays the same module. Its weights become DTensors, so FSDP2 and checkpoints know the shards. While it
runs, hooks replace them by plain local tensors and add the collectives (tp_collectives.py). Sibling layers with the
same input share one collective.

Refused: torch's ``parallelize_module``. Its layers compute on DTensors, which 8-bit products, chunked losses and
recording modes would have to support; q, k and v would all-reduce three gradients instead of one.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.core.errors import RecipeError
from shardwise.runtime.parallel.regathering import RegatheredInput, RegatheringLinear
from shardwise.runtime.parallel.tp_collectives import TPGroup, copied, gathered, scattered, summed
from shardwise.runtime.parallel.vocabulary import Vocabulary, set_vocabulary, vocabulary_of

HOW = ("column", "row", "vocabulary", "logits", "positions", "summed", "rows", "columns")
_CUT = {"column": 0, "row": 1, "vocabulary": 0, "logits": 0, "rows": 0, "columns": 1}
"""The sharded dim of the weight."""
_ENTERED = ("column", "logits")
"""Layers with a collective on their input."""


@dataclass(frozen=True)
class Split:
    """How a layer is sharded; ``pieces`` (named ``of``) is the number that the ranks must divide, such as heads."""

    how: str
    pieces: int = 0
    of: str = ""

    @classmethod
    def parsed(cls, text: str) -> Split:
        """Parse ``column`` or ``column:12``. Raises ValueError for anything else."""
        how, _, pieces = str(text).partition(":")
        if how not in HOW or not (pieces or "1").isdecimal():
            raise ValueError(f"{text!r} is not one of {', '.join(HOW)}, or one of them, a colon and a number")
        return cls(how, int(pieces or 0))


TensorPlan = Mapping[str, Split]
"""Splits by module name; ``*`` matches one part between dots."""


def shard_layers(
    model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, sequence_parallel: bool, regather: bool
) -> None:
    """Shard a model on the meta device over a 1-D mesh.

    Args:
        sequence_parallel: use Megatron's sequence parallelism for the layers that are not sharded.
        regather: all-gather the inputs of column layers again in the backward pass instead of saving them.

    Raises RecipeError if the ranks do not divide the pieces.
    """
    ranks = TPGroup.of(mesh.get_group())
    named = dict(model.named_modules())
    chosen = {path: how for path in named if (how := matching(path, plan)) is not None}
    _require_pieces(chosen.values(), ranks.size)
    cut: dict[nn.Parameter, nn.Parameter] = {}
    siblings = Counter(_parent(path) for path, how in chosen.items() if how.how in _ENTERED)
    column_inputs = {
        parent: _ColumnInput(ranks, count, sequence_parallel) for parent, count in siblings.items()
    }
    for path, how in chosen.items():
        layer = named[path]
        _shard_weights(path, layer, how.how, mesh, cut)
        if regather and how.how == "column" and type(layer) is nn.Linear:
            layer = RegatheringLinear(layer)
            model.set_submodule(path, layer)
        if how.how == "logits":
            set_vocabulary(model, Vocabulary(layer.weight.shape[0], ranks))
        _register_hooks(model, layer, how.how, ranks, sequence_parallel, column_inputs.get(_parent(path)))
    if sequence_parallel:
        for path, module in named.items():
            if path not in chosen and next(module.parameters(recurse=False), None) is not None:
                _register_hooks(model, module, "summed", ranks, sequence_parallel, None)


def matching(path: str, plan: TensorPlan) -> Split | None:
    """The plan's split for the module at a path, or None."""
    for pattern, how in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path):
            return how
    return None


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _require_pieces(chosen: Iterable[Split], size: int) -> None:
    limits = [how for how in chosen if how.pieces]
    broken = next((how for how in limits if how.pieces % size), None)
    if broken is not None:
        fitting = max(d for d in range(1, size) if all(how.pieces % d == 0 for how in limits))
        raise RecipeError(
            f"tensor_parallel cannot be {size}",
            where="strategy.tensor_parallel",
            why=f"it does not divide the {broken.pieces} {broken.of or 'pieces'} of the model",
            fix=f"the nearest that works is tensor_parallel: {fitting}",
        )


# ---- weights ----------------------------------------------------------------------------------------------


def _shard_weights(
    path: str, layer: nn.Module, how: str, mesh: DeviceMesh, cut: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Replace sharded weights by DTensors; a shared weight is sharded once."""
    if how not in _CUT:
        return
    expected = nn.Embedding if how == "vocabulary" else nn.Linear
    if not isinstance(layer, expected) or getattr(layer, "padding_idx", None) is not None:
        raise RecipeError(
            f"{path!r} cannot be sharded by {how}",
            where="strategy.tensor_parallel",
            why=f"it is a {type(layer).__name__}, not a plain {expected.__name__}",
        )
    for name, parameter in list(layer._parameters.items()):
        if parameter is None or (how == "row" and name == "bias"):
            continue
        if parameter not in cut:
            cut[parameter] = _shard_of(path, parameter, mesh, _CUT[how])
        setattr(layer, name, cut[parameter])


def _shard_of(path: str, parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's shard with undefined values, as a DTensor."""
    if isinstance(parameter, DTensor):
        return parameter
    shape, size = list(parameter.shape), parameter.shape[dim]
    if -(-size // mesh.size()) * (mesh.size() - 1) >= size:
        raise RecipeError(
            f"tensor_parallel cannot be {mesh.size()}",
            where="strategy.tensor_parallel",
            why=f"some ranks would have no part of {path!r}, which is {size} wide",
        )
    start, stop = TPGroup.of(mesh.get_group()).span(size)
    shape[dim] = stop - start
    piece = torch.empty(shape, dtype=parameter.dtype, device="meta")
    whole = DTensor.from_local(
        piece, mesh, [Shard(dim)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


class _Weights:
    """Replaces a layer's weights by plain local tensors while it runs.

    The parameter ``without`` is hidden, for a later hook. If ``summed``, gradients of replicated parameters are
    all-reduced. In a block that is traced, sharded parameters are local tensors already.
    """

    def __init__(self, layer: nn.Module, ranks: TPGroup, summed: bool, without: str = "") -> None:
        self._ranks = ranks
        self._without = without
        own = layer._parameters.items()
        self._summed = {name for name, value in own if summed and not isinstance(value, DTensor)}
        self._held: dict[str, nn.Parameter | None] | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        self.after(module)  # the previous forward pass may not have finished
        self._held = dict(module._parameters)
        for name, parameter in self._held.items():
            if parameter is not None:
                plain = None if name == self._without else self.plain(name, parameter)
                module._parameters[name] = plain  # type: ignore[assignment]

    def after(self, module: nn.Module, *_: object) -> None:
        held, self._held = self._held, None
        for name, parameter in (held or {}).items():
            module._parameters[name] = parameter

    def plain(self, name: str, parameter: nn.Parameter) -> Tensor:
        if isinstance(parameter, DTensor):
            part: Tensor = parameter.to_local()
            return part
        return copied(parameter, self._ranks) if name in self._summed else parameter


# ---- hooks of a layer -------------------------------------------------------------------------------------


def _register_hooks(
    model: nn.Module,
    layer: nn.Module,
    how: str,
    ranks: TPGroup,
    sequence_parallel: bool,
    column_input: _ColumnInput | None,
) -> None:
    """Register a layer's hooks: outermost first before the layer, innermost first after it."""
    summed_gradients = how == "summed" or sequence_parallel
    weights = _Weights(layer, ranks, summed_gradients, "bias" if how == "row" else "")
    embedding = _Embedding(ranks, sequence_parallel)
    if how in _ENTERED and column_input is not None:
        layer.register_forward_pre_hook(column_input.before)
    elif how == "row" and column_input is not None:
        layer.register_forward_pre_hook(column_input.release)
    elif how == "vocabulary":
        layer.register_forward_pre_hook(embedding.before)
    elif how == "positions" and sequence_parallel:
        layer.register_forward_pre_hook(_Positions(ranks).before)
    layer.register_forward_pre_hook(weights.before)
    layer.register_forward_hook(weights.after, always_call=True)
    if how == "row":
        layer.register_forward_hook(_Row(ranks, sequence_parallel, weights).after)
    elif how == "vocabulary":
        layer.register_forward_hook(embedding.after)
    elif how == "logits":
        layer.register_forward_hook(_Logits(model).after)


class _ColumnInput:
    """The input of sibling column layers, communicated once for all of them.

    The result is freed after the last of the ``layers``, or when their row layer begins.
    """

    def __init__(self, ranks: TPGroup, layers: int, sequence_parallel: bool) -> None:
        self._ranks = ranks
        self._layers = layers
        self._sequence_parallel = sequence_parallel
        self._source: weakref.ref[Tensor] | None = None
        self._entered: tuple[Tensor, RegatheredInput] | None = None
        self._left = 0

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        if self._source is None or self._source() is not x:
            entered = (gathered if self._sequence_parallel else copied)(x, self._ranks)
            self._source, self._left = weakref.ref(x), self._layers
            self._entered = entered, RegatheredInput(self._ranks)
        assert self._entered is not None
        entered, regathered = self._entered
        self._left -= 1
        if self._left == 0:
            self.release()
        return (entered, x, regathered) if isinstance(module, RegatheringLinear) else (entered, *rest)

    def release(self, *_: object) -> None:
        self._source = self._entered = None


class _Row:
    """All-reduces (or reduce-scatters) a row layer's output and adds the bias once."""

    def __init__(self, ranks: TPGroup, sequence_parallel: bool, weights: _Weights) -> None:
        self._ranks = ranks
        self._sequence_parallel = sequence_parallel
        self._weights = weights

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        out = (scattered if self._sequence_parallel else summed)(result, self._ranks)
        bias = module._parameters.get("bias")
        return out if bias is None else out + self._weights.plain("bias", bias)


class _Embedding:
    """Looks up the local rows, sets other ids to zero, and reduces."""

    def __init__(self, ranks: TPGroup, sequence_parallel: bool) -> None:
        self._ranks = ranks
        self._sequence_parallel = sequence_parallel
        self._elsewhere: Tensor | None = None

    def before(self, module: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *rest = args
        start, stop = self._ranks.span(module.num_embeddings)
        self._elsewhere = (ids < start) | (ids >= stop)
        return ((ids - start).masked_fill(self._elsewhere, 0), *rest)

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        elsewhere, self._elsewhere = self._elsewhere, None
        assert elsewhere is not None
        own = result.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return (scattered if self._sequence_parallel else summed)(own, self._ranks)


class _Positions:
    """Takes this rank's part of the positions [..., s]."""

    def __init__(self, ranks: TPGroup) -> None:
        self._ranks = ranks

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        positions, *rest = args
        start, stop = self._ranks.span(positions.shape[-1])
        return (positions[..., start:stop], *rest)


class _Logits:
    """All-gathers the logits, unless the loss takes sharded ones."""

    def __init__(self, model: nn.Module) -> None:
        self._vocabulary = vocabulary_of(model)

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return self._vocabulary.full_logits(result)
