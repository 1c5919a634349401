"""Layers in parts over ranks: Megatron's splits of a model, from a plan of its module names (Shoeybi et al. 2019).

    column      the outputs of a linear layer: every rank has some of its rows, and the whole input
    row         the inputs of a linear layer: every rank has some of its columns, and outputs are partial sums
    vocabulary  the rows of an embedding: what a rank does not have is zero, and outputs are partial sums
    logits      column, of the output layer: logits stay in parts for the loss, and are joined for everybody else
    positions   an embedding that every rank has, of which it takes its share of the sequence
    summed      what every rank has, on a part of the activations: its gradients are summed over the ranks
    rows        the rows of a layer within a split one, whose input and output are as the split one's
    columns     its columns, likewise

Between them, from a column layer to the row layer after it, every rank computes with what it has: its heads, its
share of the inner width. With shares of the sequence (Korthikanti et al. 2022) everything else is computed on a share
of the sequence each, so exchanges gather and share out what they otherwise copy and sum, and whatever the plan does
not name counts as summed.

A split layer stays the module it was. Its weights become DTensors of the ranks' mesh, for FSDP2 and checkpoints
to know what is where; while it runs, hooks give it this rank's parts as plain tensors, and the exchanges
(exchange.py) before and after. Layers with one parent that are called with one tensor share one exchange of it.

Refused: torch's ``parallelize_module``, whose layers compute on DTensors: 8-bit products, chunked losses and the modes
that record a block would each have to know them, q, k and v would sum three gradients instead of one, and gathered
inputs could not be let go. The price is this file.
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
from shardwise.model.exchange import Ranks, copied, gathered, shared, summed
from shardwise.model.vocabulary import Vocabulary, divide, vocabulary_of

HOW = ("column", "row", "vocabulary", "logits", "positions", "summed", "rows", "columns")
_CUT = {"column": 0, "row": 1, "vocabulary": 0, "logits": 0, "rows": 0, "columns": 1}
"""The dim of a weight that is cut."""
_ENTERED = ("column", "logits")
"""Layers whose input is exchanged."""


@dataclass(frozen=True)
class Split:
    """How a layer is split, and into how many ``pieces`` (``of`` what) at most: heads stay whole."""

    how: str
    pieces: int = 0
    of: str = ""

    @classmethod
    def parsed(cls, text: str) -> Split:
        """Of ``column`` or ``column:12``. Raises ValueError for other words."""
        how, _, pieces = str(text).partition(":")
        if how not in HOW or not (pieces or "1").isdecimal():
            raise ValueError(f"{text!r} is not one of {', '.join(HOW)}, or one of them, a colon and a number")
        return cls(how, int(pieces or 0))


TensorPlan = Mapping[str, Split]
"""By names of modules, in which ``*`` stands for one part between dots."""


def split(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, shares: bool, again: bool) -> None:
    """Split a model on the meta device over the ranks of a mesh of one axis.

    Args:
        shares: whether what is not split is computed on shares of the sequence.
        again: whether the backward pass gathers inputs of column layers again, instead of keeping them.

    Raises RecipeError for pieces that cannot be divided.
    """
    ranks = Ranks.of(mesh.get_group())
    named = dict(model.named_modules())
    chosen = {path: how for path in named if (how := matching(path, plan)) is not None}
    _require_pieces(chosen.values(), ranks.size)
    cut: dict[nn.Parameter, nn.Parameter] = {}
    siblings = Counter(_parent(path) for path, how in chosen.items() if how.how in _ENTERED)
    entrances = {parent: _Entrance(ranks, count, shares) for parent, count in siblings.items()}
    for path, how in chosen.items():
        layer = named[path]
        _cut_weights(path, layer, how.how, mesh, cut)
        if again and how.how == "column" and type(layer) is nn.Linear:
            layer = ShareKeepingLinear(layer)
            model.set_submodule(path, layer)
        if how.how == "logits":
            divide(model, Vocabulary(layer.weight.shape[0], ranks))
        _join(model, layer, how.how, ranks, shares, entrances.get(_parent(path)))
    if shares:
        for path, module in named.items():
            if path not in chosen and next(module.parameters(recurse=False), None) is not None:
                _join(model, module, "summed", ranks, shares, None)


def take_over(new: nn.Linear, old: nn.Module) -> None:
    """Make ``new`` hold what ``old`` holds, and be called as it is: weights, and what hooks do around it."""
    new._parameters.update(weight=old._parameters["weight"], bias=old._parameters.get("bias"))
    for name in (
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    ):
        getattr(new, name).update(getattr(old, name))


def matching(path: str, plan: TensorPlan) -> Split | None:
    """How a plan splits the module at a path; None where it does not name it."""
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


def _cut_weights(
    path: str, layer: nn.Module, how: str, mesh: DeviceMesh, cut: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Put DTensors in the place of what is cut; a shared weight is cut once."""
    if how not in _CUT:
        return
    expected = nn.Embedding if how == "vocabulary" else nn.Linear
    if not isinstance(layer, expected) or getattr(layer, "padding_idx", None) is not None:
        raise RecipeError(
            f"{path!r} cannot be split by {how}",
            where="strategy.tensor_parallel",
            why=f"it is a {type(layer).__name__}, not a plain {expected.__name__}",
        )
    for name, parameter in list(layer._parameters.items()):
        if parameter is None or (how == "row" and name == "bias"):
            continue
        if parameter not in cut:
            cut[parameter] = _piece(path, parameter, mesh, _CUT[how])
        setattr(layer, name, cut[parameter])


def _piece(path: str, parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's part, undefined, as a DTensor of the whole."""
    if isinstance(parameter, DTensor):
        return parameter
    shape, size = list(parameter.shape), parameter.shape[dim]
    if -(-size // mesh.size()) * (mesh.size() - 1) >= size:
        raise RecipeError(
            f"tensor_parallel cannot be {mesh.size()}",
            where="strategy.tensor_parallel",
            why=f"some ranks would have nothing of {path!r}, which is {size} wide",
        )
    start, stop = Ranks.of(mesh.get_group()).span(size)
    shape[dim] = stop - start
    piece = torch.empty(shape, dtype=parameter.dtype, device="meta")
    whole = DTensor.from_local(
        piece, mesh, [Shard(dim)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


class _Weights:
    """Gives a layer this rank's parts of its weights, as plain tensors, while it runs.

    ``without`` are left out, for whoever comes after; of the plain ones, gradients are ``summed``.
    """

    def __init__(self, ranks: Ranks, summed: bool, without: str = "") -> None:
        self._ranks = ranks
        self._summed = summed
        self._without = without
        self._held: dict[str, nn.Parameter | None] | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        self.after(module)  # where it had not come to its end
        self._held = dict(module._parameters)
        for name, parameter in self._held.items():
            if parameter is not None:
                plain = None if name == self._without else self.plain(parameter)
                module._parameters[name] = plain  # type: ignore[assignment]

    def after(self, module: nn.Module, *_: object) -> None:
        held, self._held = self._held, None
        for name, parameter in (held or {}).items():
            module._parameters[name] = parameter

    def plain(self, parameter: nn.Parameter) -> Tensor:
        if isinstance(parameter, DTensor):
            part: Tensor = parameter.to_local()
            return part
        return copied(parameter, self._ranks) if self._summed else parameter


# ---- what happens around a layer --------------------------------------------------------------------------


def _join(
    model: nn.Module, layer: nn.Module, how: str, ranks: Ranks, shares: bool, entrance: _Entrance | None
) -> None:
    """Register what a layer needs before and after it; outermost first before, innermost first after."""
    weights = _Weights(ranks, how == "summed" or shares, "bias" if how == "row" else "")
    embedding = _Embedding(ranks, shares)
    if how in _ENTERED and entrance is not None:
        layer.register_forward_pre_hook(entrance.before)
    elif how == "row" and entrance is not None:
        layer.register_forward_pre_hook(entrance.over)
    elif how == "vocabulary":
        layer.register_forward_pre_hook(embedding.before)
    elif how == "positions" and shares:
        layer.register_forward_pre_hook(_Positions(ranks).before)
    layer.register_forward_pre_hook(weights.before)
    layer.register_forward_hook(weights.after, always_call=True)
    if how == "row":
        layer.register_forward_hook(_Row(ranks, shares, weights).after)
    elif how == "vocabulary":
        layer.register_forward_hook(embedding.after)
    elif how == "logits":
        layer.register_forward_hook(_Logits(model).after)


class _Entrance:
    """The input of some column layers, exchanged once for all of them.

    What has been exchanged is let go when all ``layers`` have had it, or when the row layer beside them begins.
    """

    def __init__(self, ranks: Ranks, layers: int, shares: bool) -> None:
        self._ranks = ranks
        self._layers = layers
        self._shares = shares
        self._source: weakref.ref[Tensor] | None = None
        self._entered: tuple[Tensor, _Again] | None = None
        self._left = 0

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        if self._source is None or self._source() is not x:
            entered = (gathered if self._shares else copied)(x, self._ranks)
            self._source, self._left = weakref.ref(x), self._layers
            self._entered = entered, _Again(self._ranks)
        assert self._entered is not None
        entered, again = self._entered
        self._left -= 1
        if self._left == 0:
            self.over()
        return (entered, x, again) if isinstance(module, ShareKeepingLinear) else (entered, *rest)

    def over(self, *_: object) -> None:
        self._source = self._entered = None


class _Row:
    """Sums what a row layer has returned, and adds the bias once."""

    def __init__(self, ranks: Ranks, shares: bool, weights: _Weights) -> None:
        self._ranks = ranks
        self._shares = shares
        self._weights = weights

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        out = (shared if self._shares else summed)(result, self._ranks)
        bias = module._parameters.get("bias")
        return out if bias is None else out + self._weights.plain(bias)


class _Embedding:
    """Looks up what this rank has, zeros for the rest, and sums."""

    def __init__(self, ranks: Ranks, shares: bool) -> None:
        self._ranks = ranks
        self._shares = shares
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
        return (shared if self._shares else summed)(own, self._ranks)


class _Positions:
    """Takes this rank's share of the positions [..., s]."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        positions, *rest = args
        start, stop = self._ranks.span(positions.shape[-1])
        return (positions[..., start:stop], *rest)


class _Logits:
    """Joins the logits for whoever does not take them apart."""

    def __init__(self, model: nn.Module) -> None:
        self._vocabulary = vocabulary_of(model)

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return self._vocabulary.joined(result)


# ---- gathering again --------------------------------------------------------------------------------------


class _Again:
    """The gathered input of some layers, gathered again in the backward pass, once for all of them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layers = 0
        self._left = 0
        self._sent: Tensor | None = None
        self._whole: Tensor | None = None

    def used(self) -> None:
        self._layers += 1

    def begin(self, share: Tensor) -> None:
        if self._sent is None and self._whole is None:
            self._sent, self._left = self._ranks.send_shares(share), self._layers

    def take(self) -> Tensor:
        if self._whole is None:
            assert self._sent is not None
            self._whole, self._sent = self._ranks.arrived(self._sent), None
        whole, self._left = self._whole, self._left - 1
        if self._left == 0:
            self._whole = None
        return whole


class _KeepingShare(torch.autograd.Function):
    """entered [..., s, h] times weight [o, h]; keeps the share [..., s / ranks, h] that it was gathered from."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, share: Tensor, weight: Tensor, again: _Again) -> Tensor:
        ctx.save_for_backward(share, weight)
        ctx.again = again
        if ctx.needs_input_grad[2]:
            again.used()
        return nn.functional.linear(entered, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        share, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return grads[0] @ weight, None, None, None
        ctx.again.begin(share)  # on its way while the other product is computed
        to_entered = grads[0] @ weight
        to_weight = grads[0].flatten(0, -2).t() @ ctx.again.take().flatten(0, -2)
        return to_entered, None, to_weight, None


class ShareKeepingLinear(nn.Linear):
    """A column layer that keeps its share of the input for the backward pass, and gathers it again there."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        take_over(self, layer)
        self.train(layer.training)

    def forward(self, entered: Tensor, share: Tensor, again: _Again) -> Tensor:  # type: ignore[override]
        out: Tensor = _KeepingShare.apply(entered, share, self.weight, again)
        return out if self.bias is None else out + self.bias
