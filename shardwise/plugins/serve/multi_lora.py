"""Multi-LoRA: many adapters on one base model, selected per request.

The layers of the base model do not change, plain or quantized. A forward hook on each adapted layer holds A [n, r, i]
and B [n, o, r] of the n adapters for that layer. Switching adapters writes one index per row of the batch: 12 bytes per
request, and no weight moves. If a whole batch has one adapter, its A and B are views. Otherwise A and B are gathered
per row and the products are batched. A request without an adapter has scale zero, so its rows equal the base model's
bitwise.

DoRA's factor m / |W + scale B A| does not depend on the input. It becomes one number per output when an adapter is
loaded, and is selected per row like A and B. Adapters with non-finite values are refused, because zero times infinity
would be NaN in other rows. Adapters of smaller rank are padded with zeros.

A module that an adapter has trained in full (``modules_to_save``) is copied. Its hook runs the copy on the rows of that
adapter. Experts: served_experts.py.

Hooks keep the class, names and weights of every layer. Merging an adapter into the weights at each switch would move as
many bytes as the model has, and serve one adapter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from threading import RLock
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.model.expert_lora import row_norms
from shardwise.model.lora import FrozenLinear
from shardwise.plugins.serve.adapters import ServedAdapter
from shardwise.plugins.serve.served_experts import ServedExperts, require_experts

BASE = "base"
"""The name for no adapter."""


class Bank:
    """Named adapters on a model. ``select`` assigns them to the rows of the next batch.

    A thread that selects and then calls the model holds ``lock`` over both.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, adapters: Sequence[ServedAdapter] = ()) -> None:
        """``dtype`` is the compute dtype, which quantized weights do not show.

        Raises:
            CheckpointError: an adapter does not fit the model.
            RecipeError: two adapters have the same name.
        """
        self.names: list[str] = []
        self.has_base = True
        self.lock = RLock()
        self._model, self._dtype = model, dtype
        self._layers: dict[str, _Layer] = {}
        self._groups: dict[tuple[str, ...], _AdapterGroup] = {}
        self._selected: tuple[str, ...] = ()
        self._modules: list[_Copies | ServedExperts] = []
        self._load(adapters)

    def _load(self, adapters: Sequence[ServedAdapter]) -> None:
        """Load one layer after the other, so only one extra tensor is in memory."""
        for adapter in adapters:
            if adapter.name in (BASE, *self.names):
                why = f"{BASE} asks for none" if adapter.name == BASE else ""
                raise RecipeError(
                    f"two adapters are named {adapter.name!r}"
                    if not why
                    else "an adapter cannot be named base",
                    where=adapter.where,
                    why=why,
                    fix="name it: NAME=FOLDER",
                )
            self.names.append(adapter.name)
        modules = dict(self._model.named_modules())
        for adapter in adapters:
            _require_layers(adapter, modules)
            require_experts(adapter, modules)
        for path in sorted({path for adapter in adapters for path in adapter.owners}):
            self._modules.append(_Copies(path, modules[path], adapters, lambda: self._selected))
        for path in sorted({path for adapter in adapters for path in adapter.mixtures}):
            experts = ServedExperts(path, modules[path], adapters, self._dtype, lambda: self._selected)
            self._modules.append(experts)
        for path in sorted({path for adapter in adapters for path in adapter.ranks}):
            having = [adapter for adapter in adapters if path in adapter.ranks]
            names = tuple(adapter.name for adapter in having)
            group = self._groups.setdefault(names, _AdapterGroup(names))
            layer = self._layers[path] = _Layer(path, modules[path], having, group, self._dtype)
            modules[path].register_forward_hook(layer)

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters in memory."""
        layers = sum(layer.nbytes for layer in self._layers.values())
        return layers + sum(copies.nbytes for copies in self._modules)

    @property
    def known(self) -> list[str]:
        """The names that can be asked for."""
        return [*self.names, *([BASE] if self.has_base else [])]

    def select(self, names: Sequence[str]) -> int:
        """Assign adapters to the rows of the next batches; return the bytes that this moved.

        Does nothing if the assignment is the same. Raises RecipeError for an unknown name.
        """
        with self.lock:
            if tuple(names) == self._selected:
                return 0
            for name in names:
                self.require(name)
            self._selected = tuple(names)
            device = next(self._model.parameters()).device
            return sum(group.select(names, device) for group in self._groups.values())

    def require(self, name: str, where: str = "") -> None:
        """Raise RecipeError for an unknown name."""
        if name == BASE and not self.has_base:
            raise RecipeError(
                "the model without its adapter is not here",
                where=where,
                why="the run has trained modules in full, and its checkpoint lacks the base's",
                fix="give the folder of the base model",
            )
        if name not in (BASE, *self.names):
            raise RecipeError(
                f"no adapter is named {name!r}",
                where=where,
                why=f"known are {', '.join(self.known)}",
                fix="" if name in ("", "own") else f"give it: --adapter {name}=FOLDER",
            )


class _AdapterGroup:
    """Adapters with the same layers, and the assignment of the current batch."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = {name: index for index, name in enumerate(names)}
        self.idle = True
        self.one: int | None = None
        self.index = torch.zeros(0, dtype=torch.int64)
        self.active = torch.zeros(0)  # 1 for rows with one of these adapters, else 0

    def select(self, names: Sequence[str], device: torch.device) -> int:
        self.idle = not any(name in self._places for name in names)
        self.one = self._places.get(names[0]) if len(set(names)) == 1 else None
        if self.idle:
            return 0
        if self.one is not None:
            return 12
        self.index = torch.tensor([self._places.get(name, 0) for name in names], device=device)
        self.active = torch.tensor([float(name in self._places) for name in names], device=device)
        return self.index.nbytes + self.active.nbytes


class _Layer:
    """The adapters of one linear layer, and the hook that adds them to its output."""

    def __init__(
        self,
        path: str,
        layer: nn.Module,
        adapters: Sequence[ServedAdapter],
        group: _AdapterGroup,
        dtype: torch.dtype,
    ) -> None:
        device = next(layer.parameters()).device
        rows, columns = _weight_shape(layer)
        rank = max(adapter.ranks[path] for adapter in adapters)
        self.path, self.group = path, group
        self.a = torch.zeros(len(adapters), rank, columns, device=device, dtype=dtype)
        self.b = torch.zeros(len(adapters), rows, rank, device=device, dtype=dtype)
        self.factors = [adapter.scales[path] for adapter in adapters]
        self.scales = torch.tensor(self.factors, device=device)
        self.bias: Tensor | None = None
        if any(adapter.biased for adapter in adapters):
            self.bias = torch.zeros(len(adapters), rows, device=device, dtype=dtype)
        self.turn: Tensor | None = None
        if any(adapter.turns for adapter in adapters):
            self.turn = torch.zeros(len(adapters), rows, device=device, dtype=dtype)
        for index, adapter in enumerate(adapters):
            self._fill(index, adapter, layer)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.a, self.b, self.turn, self.bias) if tensor is not None)

    @torch.no_grad()
    def _fill(self, index: int, adapter: ServedAdapter, layer: nn.Module) -> None:
        a, b, magnitude, bias = adapter.read(self.path)
        self.a[index, : a.shape[0]] = a
        self.b[index, :, : b.shape[1]] = b
        if magnitude is not None and self.turn is not None:
            weight = _plain_weight(layer, self.a.dtype)
            whole = torch.addmm(weight, b.to(weight), a.to(weight), alpha=self.factors[index])
            self.turn[index] = magnitude.to(weight) / row_norms(whole) - 1
        if bias is not None and self.bias is not None:
            self.bias[index] = bias * self.factors[index]

    def __call__(self, layer: nn.Module, arguments: tuple[Tensor, ...], out: Tensor) -> Tensor:
        group = self.group
        if group.idle:
            return out
        x = arguments[0]
        if group.one is not None:
            thin = F.linear(x, self.a[group.one]) * self.factors[group.one]
            out = out + F.linear(thin, self.b[group.one])
            if self.bias is not None:
                out = out + self.bias[group.one]
            turn = None if self.turn is None else self.turn[group.one]
        else:
            if x.ndim != 3 or x.shape[0] != len(group.index):
                raise RecipeError(
                    "this model cannot mix adapters in a batch",
                    where=self.path,
                    why="it does not keep the tokens of each request together",
                    fix="give all requests of a batch one adapter, or take batches of one",
                )
            scale = (self.scales[group.index] * group.active).to(x.dtype)
            thin = torch.bmm(x, self.a[group.index].transpose(1, 2)) * scale.view(-1, 1, 1)
            out = out + torch.bmm(thin, self.b[group.index].transpose(1, 2))
            if self.bias is not None:
                out = out + (self.bias[group.index] * (scale != 0).view(-1, 1)).unsqueeze(1)
            turn = None
            if self.turn is not None:
                turn = (self.turn[group.index] * (scale != 0).view(-1, 1)).unsqueeze(1)
        if turn is None:
            return out
        bias = layer.bias
        return out + turn * (out if bias is None else out - cast("Tensor", bias))


class _Copies:
    """Copies of one module of the base that adapters have trained in full, and the hook that runs them."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        adapters: Sequence[ServedAdapter],
        selected: Callable[[], tuple[str, ...]],
    ) -> None:
        self.path = path
        self._selected = selected
        self._copies = dict[str, nn.Module]()
        for adapter in adapters:
            if path in adapter.owners:
                copy = self._copies[adapter.name] = deepcopy(module)
                for key, parameter in copy.named_parameters(recurse=False):
                    parameter.data.copy_(adapter.values(f"{path}.{key}"))
        module.register_forward_hook(self, with_kwargs=True)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for copy in self._copies.values() for p in copy.parameters())

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        names = self._selected()
        if not self._copies.keys() & set(names):
            return out
        if len(set(names)) == 1:
            return self._copies[names[0]](*args, **kwargs)
        (given,) = args if len(args) == 1 and not kwargs else (None,)
        if not isinstance(given, Tensor) or not isinstance(out, Tensor) or len(out) != len(names):
            raise RecipeError(
                "this model cannot mix adapters in a batch",
                where=self.path,
                why="one of them has trained this module in full",
                fix="give all requests of a batch one adapter, or take batches of one",
            )
        out = out.clone()
        for name in self._copies.keys() & set(names):
            rows = torch.tensor([row for row, other in enumerate(names) if other == name], device=out.device)
            out[rows] = self._copies[name](given[rows])
        return out


# ---- the layers of the base -------------------------------------------------------------------------------


def _require_layers(adapter: ServedAdapter, modules: Mapping[str, nn.Module]) -> None:
    """Raise CheckpointError unless the model has every layer of an adapter, with the same shape."""
    for path in adapter.ranks:
        layer = modules.get(path)
        if layer is None or not _is_linear(layer):
            raise CheckpointError(
                "the adapter is for another base",
                where=adapter.where,
                why=f"its layer {path} is not a linear layer of this model",
                fix="give the base it was trained on",
            )
        if adapter.shape(path) != _weight_shape(layer):
            there, here = list(adapter.shape(path)), list(_weight_shape(layer))
            raise CheckpointError(
                "the adapter is for another base",
                where=adapter.where,
                why=f"{path} is {there} in the adapter and {here} in this model",
                fix="give the base it was trained on",
            )
    for path in sorted(adapter.owners):
        _require_module(adapter, path, modules.get(path, nn.Module()))


def _require_module(adapter: ServedAdapter, path: str, module: nn.Module) -> None:
    """Raise CheckpointError unless a module is the one that an adapter has trained in full, and can be copied alone."""
    if any(True for child in module.children() for _ in child.parameters()):
        raise CheckpointError(
            f"{path} cannot be served as trained in full",
            where=adapter.where,
            why="it has parts with weights of their own",
            fix="merge the adapter: shardwise merge",
        )
    here = {f"{path}.{key}": tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
    there = {name: shape for name, shape in adapter.modules.items() if name.rpartition(".")[0] == path}
    if here != there:
        raise CheckpointError(
            "the adapter is for another base",
            where=adapter.where,
            why=f"{path} has {there} in the adapter and {here} in this model",
            fix="give the base it was trained on",
        )


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _weight_shape(layer: nn.Module) -> tuple[int, int]:
    """[o, i], for any storage of the weight."""
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
