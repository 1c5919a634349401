"""Many adapters beside one base: which one is added is a number per request.

The base's layers stay what they are, plain or packed; behind each that some adapter is for stands a hook, which holds
A [n, r, i] and B [n, o, r] of all n adapters that have it. To switch is to write down which rows of a batch belong to
which adapter, so it moves 12 bytes per request and touches no weight. Where a whole batch has one adapter, its A and B
are views; otherwise those of every row are gathered, and the products are batched. A request without an adapter is
multiplied with scale zero: what is added to its row is zero, and the base's values come out to the bit.

DoRA's share, m / |W + scale B A|, does not depend on the input and so becomes one number per output when an adapter is
loaded: it is mixed like the rest. Adapters with values that are not finite are refused, as zero times infinity would
reach into others' rows. Of adapters of unequal rank the thinner are padded with zeros, which is memory, not error.

Chosen: hooks, for a layer of any kind keeps its class, names and weights. Refused: merging into the weights for each
switch, which moves a model's worth of bytes and serves one adapter at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.model.lora import FrozenLinear, row_norms
from shardwise.serve.adapters import Adapter

BASE = "base"
"""The name that asks for no adapter."""


class Bank:
    """Adapters by name, beside a model. Of a batch, ``select`` says who has which."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, adapters: Sequence[Adapter] = ()) -> None:
        """``dtype`` is that of compute, which packed weights do not say.

        Raises CheckpointError for an adapter that does not fit, RecipeError for two of one name.
        """
        self.names: list[str] = []
        self._model, self._dtype = model, dtype
        self._layers: dict[str, _Layer] = {}
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._selected: tuple[str, ...] = ()
        self._load(adapters)

    def _load(self, adapters: Sequence[Adapter]) -> None:
        """One layer after the other, so that beside the adapters one tensor is in memory."""
        for adapter in adapters:
            if adapter.name in (BASE, *self.names):
                why = f"{BASE} asks for none" if adapter.name == BASE else ""
                raise RecipeError(
                    f"two adapters are called {adapter.name!r}"
                    if not why
                    else "an adapter cannot be called base",
                    where=adapter.where,
                    why=why,
                    fix="name it: NAME=FOLDER",
                )
            self.names.append(adapter.name)
        modules = dict(self._model.named_modules())
        for adapter in adapters:
            _require_fit(adapter, modules)
        for path in sorted({path for adapter in adapters for path in adapter.ranks}):
            having = [adapter for adapter in adapters if path in adapter.ranks]
            names = tuple(adapter.name for adapter in having)
            scales = {adapter.name: adapter.scale for adapter in having}
            group = self._groups.setdefault(names, _Group(scales))
            layer = self._layers[path] = _Layer(path, modules[path], having, group, self._dtype)
            modules[path].register_forward_hook(layer)

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters as they are held."""
        return sum(layer.nbytes for layer in self._layers.values())

    def select(self, names: Sequence[str]) -> int:
        """Let the rows of the next batches have these adapters; returns the bytes that this took.

        Nothing is done where they have them already. Raises RecipeError for a name that is not there.
        """
        if tuple(names) == self._selected:
            return 0
        for name in names:
            self.require(name)
        self._selected = tuple(names)
        device = next(self._model.parameters()).device
        return sum(group.select(names, device) for group in self._groups.values())

    def require(self, name: str, where: str = "") -> None:
        """Raise RecipeError for a name that is not there."""
        if name not in (BASE, *self.names):
            raise RecipeError(
                f"no adapter is called {name!r}",
                where=where,
                why=f"there are {', '.join([*self.names, BASE])}",
                fix=f"give it: --adapter {name}=FOLDER",
            )


class _Group:
    """Adapters that are for the same layers. Of the current batch: who has which of them."""

    def __init__(self, scales: Mapping[str, float]) -> None:
        self._scales = scales
        self._places = {name: place for place, name in enumerate(scales)}
        self.idle = True
        self.one: int | None = None
        self.factor = 0.0
        self.index = torch.zeros(0, dtype=torch.int64)
        self.scale = torch.zeros(0)

    def select(self, names: Sequence[str], device: torch.device) -> int:
        self.idle = not any(name in self._places for name in names)
        self.one = self._places.get(names[0]) if len(set(names)) == 1 else None
        if self.idle:
            return 0
        if self.one is not None:
            self.factor = self._scales[names[0]]
            return 12
        self.index = torch.tensor([self._places.get(name, 0) for name in names], device=device)
        self.scale = torch.tensor([self._scales.get(name, 0.0) for name in names], device=device)
        return self.index.nbytes + self.scale.nbytes


class _Layer:
    """The adapters of one linear layer, and the hook that adds them to what it returns."""

    def __init__(
        self, path: str, layer: nn.Module, adapters: Sequence[Adapter], group: _Group, dtype: torch.dtype
    ) -> None:
        device = next(layer.parameters()).device
        rows, columns = _shape(layer)
        rank = max(adapter.ranks[path] for adapter in adapters)
        self.path, self.group = path, group
        self.a = torch.zeros(len(adapters), rank, columns, device=device, dtype=dtype)
        self.b = torch.zeros(len(adapters), rows, rank, device=device, dtype=dtype)
        self.turn: Tensor | None = None
        if any(adapter.turns for adapter in adapters):
            self.turn = torch.zeros(len(adapters), rows, device=device, dtype=dtype)
        for place, adapter in enumerate(adapters):
            self._fill(place, adapter, layer)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (0 if self.turn is None else self.turn.nbytes)

    @torch.no_grad()
    def _fill(self, place: int, adapter: Adapter, layer: nn.Module) -> None:
        a, b, magnitude = adapter.read(self.path)
        self.a[place, : a.shape[0]] = a
        self.b[place, :, : b.shape[1]] = b
        if magnitude is not None and self.turn is not None:
            weight = _plain_weight(layer, self.a.dtype)
            whole = torch.addmm(weight, b.to(weight), a.to(weight), alpha=adapter.scale)
            self.turn[place] = magnitude.to(weight) / row_norms(whole) - 1

    def __call__(self, layer: nn.Module, arguments: tuple[Tensor, ...], out: Tensor) -> Tensor:
        group = self.group
        if group.idle:
            return out
        x = arguments[0]
        if group.one is not None:
            out = out + F.linear(F.linear(x, self.a[group.one]) * group.factor, self.b[group.one])
            turn = None if self.turn is None else self.turn[group.one]
        else:
            if x.ndim != 3 or x.shape[0] != len(group.index):
                raise RecipeError(
                    "this model cannot mix adapters in a batch",
                    where=self.path,
                    why="it does not keep the tokens of each request together",
                    fix="give all requests of a batch one adapter, or take batches of one",
                )
            scale = group.scale.to(x.dtype)
            thin = torch.bmm(x, self.a[group.index].transpose(1, 2)) * scale.view(-1, 1, 1)
            out = out + torch.bmm(thin, self.b[group.index].transpose(1, 2))
            turn = None
            if self.turn is not None:
                turn = (self.turn[group.index] * (scale != 0).view(-1, 1)).unsqueeze(1)
        if turn is None:
            return out
        bias = layer.bias
        return out + turn * (out if bias is None else out - cast("Tensor", bias))


# ---- the layers of the base -------------------------------------------------------------------------------


def _require_fit(adapter: Adapter, modules: Mapping[str, nn.Module]) -> None:
    """Raise CheckpointError unless the model has every layer of an adapter, in its shape."""
    for path in adapter.ranks:
        layer = modules.get(path)
        if layer is None or not _is_linear(layer):
            raise CheckpointError(
                "the adapter is for another base",
                where=adapter.where,
                why=f"it has {path}, which is no linear layer of this model",
                fix="give the base it was trained on",
            )
        if adapter.shape(path) != _shape(layer):
            there, here = list(adapter.shape(path)), list(_shape(layer))
            raise CheckpointError(
                "the adapter is for another base",
                where=adapter.where,
                why=f"{path} is {there} for it and {here} in this model",
                fix="give the base it was trained on",
            )


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _shape(layer: nn.Module) -> tuple[int, int]:
    """[o, i], however the weight is stored."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    columns, rows = layer.get_parameter("weight").shape
    return rows, columns


def _plain_weight(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight [o, i]."""
    if isinstance(layer, FrozenLinear):
        return layer.plain_weight(dtype)
    weight = layer.get_parameter("weight")
    return weight if isinstance(layer, nn.Linear) else weight.t()
