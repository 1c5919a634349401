"""Compiled blocks: the forward method of a block, and its backward pass, as kernels that inductor generates.

A block is traced at its first call with arguments of each kind; its weights are inputs of the graph, so blocks of one
structure share one compilation. AOTAutograd traces both passes into a joint graph, the min-cut partitioner chooses the
tensors to save, and inductor fuses the operations between matrix products.

The method is replaced, not the module: names stay, and hooks of the block itself (FSDP2 gathers weights in them) run
outside of the graph. Hooks of layers within it are traced, and so are torch function modes around it. Weights that are
DTensors enter as their local tensors.

A dry run compiles the same graphs down to the generated Python code, and runs that on fake tensors: its allocations,
reuses and frees are those of the real code, and ``shardwise::fused`` stands for each generated kernel. Without
gradients the block runs as it is, so evaluation compiles nothing.

Refused: ``torch.compile``. Dynamo does not take the dry run's fake tensors, and its guards would run in every call.
The price is that a block must not branch on a tensor's value, nor change its own attributes while it runs, except for
tensors (stored_tensors.py).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.core.errors import RecipeError
from shardwise.runtime.parallel.attention_kernels import planned_kernels
from shardwise.runtime.same_code import Number, code_of, code_of_module, numbers_of, numbers_read
from shardwise.runtime.stored_tensors import AttributePath, put, storing
from shardwise.runtime.torch_private import FakeTensor, TreeSpec, function_modes, tree_flatten, tree_unflatten
from shardwise.runtime.torch_private_compiler import Function, compiled

MOST_KEPT = 64
"""Kinds of blocks and arguments whose compilations a process keeps, and compilations of one block for other numbers."""
MANY_VALUES = 8
"""After so many compilations of a block for new values of its attributes, a warning says so."""


@dataclasses.dataclass(frozen=True)
class _Compilation:
    """Both passes of a block, for arguments of one kind.

    Attributes:
        result: the structure of the block's result.
        stored: attributes that get the results after those.
        numbers: attributes of modules that were read, with their values.
        maker: what compiled it.
    """

    run: Function
    result: TreeSpec
    stored: Sequence[AttributePath]
    numbers: Mapping[Number, int]
    maker: CompiledForward


_SCHEDULED_TYPES = (bool, int, float, str)
"""Types of attributes that a schedule may change between calls."""

_compilations: OrderedDict[Any, list[_Compilation]] = OrderedDict()
_compile_seconds = 0.0
_warnings: list[str] = []
_warned: set[str] = set()
_tracing = False


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Replace the forward methods of blocks, or of parts of them, by compiled ones."""
    for block in blocks:
        block.forward = CompiledForward(block)


def limit_saved(block: nn.Module, budget: float | None) -> bool:
    """Limit what a block's compiled code saves (``CompiledForward.budget``). Whether anything of it is compiled."""
    forwards = [module.forward for module in block.modules()]
    compiled_parts = [forward for forward in forwards if isinstance(forward, CompiledForward)]
    for forward in compiled_parts:
        forward.budget = budget
    return bool(compiled_parts)


def parts_without(block: nn.Module, apart: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules within ``block`` that contain none of ``apart``, and those of ``apart`` in it."""
    if block in apart or not any(module in apart for module in block.modules()):
        yield block
        return
    for child in block.children():
        yield from parts_without(child, apart)


def compiled_as(block: nn.Module) -> object:
    """Equal for compiled blocks that share their compilations; the block itself if nothing of it is compiled.

    It is known after the block's first call.
    """
    forwards = (module.forward for module in block.modules())
    shares = [forward.shares for forward in forwards if isinstance(forward, CompiledForward)]
    return tuple(shares) if shares else block


def seconds_compiling() -> float:
    """Seconds that this process has spent compiling."""
    return _compile_seconds


def new_warnings() -> list[str]:
    """What the user should know about the compilations since the last call; a kind of block is named once."""
    new = list(_warnings)
    _warnings.clear()
    return new


def compiled_on_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that ``torch.compile`` compiles at its first call, for all shapes at once."""

    @functools.cache
    def compiled_function() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)

    # Detached, so that a trainable weight and an input share one compilation.
    return lambda first, *rest: compiled_function()(first.detach(), *rest)


def is_traced() -> bool:
    """Whether a block is being traced, so that operations run only to be noted."""
    return _tracing


class CompiledForward:
    """The forward method of one block.

    Attributes:
        budget: the share of the activations saved for speed alone that may be saved; None to save results of matrix
            products and attention, and small reductions.
        shares: equal for blocks that share their compilations; None before the first call.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._eager = block.forward
        self._own = frozenset(vars(block))  # FSDP2 will add its state
        self._weights: list[tuple[dict[str, Any], str]] | None = None
        self._attributes: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] | None = None
        self._changed, self._variants = "", 0
        self._code: Any = None
        self._numbers: dict[Number, int] = {}
        self.budget: float | None = 1.0
        self.shares: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._eager(*args, **kwargs)
        if self._weights is None:
            self._weights = list(_weight_slots(self._block))
            self._attributes = list(_plain_attributes(self._block, self._own))
        if (values := self._current_values()) != self._values:
            self._note_change(values)
            self._code = code_of_module(self._block, self._own)
            self._numbers = numbers_of(self._block, self._own)
        weights = [_local_tensor(dictionary[name]) for dictionary, name in self._weights]
        call, tensors = _taken_apart(args, kwargs)
        inputs = [*weights, *tensors]
        modes = tuple(map(code_of, function_modes()))
        key = (self._code, self.budget, call, planned_kernels(), modes, *map(_compilation_key, inputs))
        if (compilation := self._known(key)) is None:
            compilation = self._compiled(key, inputs, call)
            self._values = self._current_values()  # what the trace itself changed is no change between calls
        self.shares = self._code, self.budget, tuple(compilation.numbers.items())
        results = list(compilation.run(*inputs))
        for place in reversed(compilation.stored):
            put(self._block, place, results.pop())
        return tree_unflatten(results, compilation.result)

    def _current_values(self) -> list[Any]:
        """Of the block's plain attributes: a schedule may change a dropout rate. Its whole code takes 1 ms to read."""
        return [dictionary.get(name) for dictionary, name in self._attributes]

    def _note_change(self, values: list[Any]) -> None:
        pairs = zip(self._attributes, self._values or values, values, strict=True)
        self._changed = ", ".join(sorted({name for (_, name), before, value in pairs if before != value}))
        self._values = values

    def _known(self, key: Any) -> _Compilation | None:
        """The compilation of a block with this key, and with the same numbers as far as they were read."""
        of_key = _compilations.get(key, ())
        return next(
            (compilation for compilation in of_key if compilation.numbers.items() <= self._numbers.items()),
            None,
        )

    def _compiled(self, key: Any, inputs: Sequence[Tensor], call: _CallForm) -> _Compilation:
        global _compile_seconds
        began = time.perf_counter()
        results: list[tuple[TreeSpec, Sequence[AttributePath]]] = []

        def traced(*tensors: Tensor) -> tuple[Any, ...]:
            with self._holding(tensors[: len(self._weights or ())]), _as_traced():
                args, kwargs = call.with_tensors(tensors[len(self._weights or ()) :])
                with storing(self._block) as stored:
                    leaves, spec = tree_flatten(self._eager(*args, **kwargs))
            results.append((spec, tuple(stored)))
            return (*leaves, *stored.values())

        fake = isinstance(inputs[0], FakeTensor)
        try:
            with numbers_read(self._block, self._numbers) as read:
                run = compiled(traced, inputs, _fused if fake else None, self._positions, self.budget)
        except Exception as error:
            raise _cannot_compile(self._block, error) from error
        compilation = _Compilation(
            run, *results[-1], {number: self._numbers[number] for number in sorted(read)}, self
        )
        self._keep(key, compilation)
        if not fake:
            self._count_values()
            gc.collect()  # graphs refer to themselves
            _compile_seconds += time.perf_counter() - began
        return compilation

    def _keep(self, key: Any, compilation: _Compilation) -> None:
        of_key = _compilations.setdefault(key, [])
        of_key.append(compilation)
        own = [other for other in of_key if other.maker is self]
        if len(own) > MOST_KEPT:
            of_key[:] = [other for other in of_key if other is not own[0]]
        while len(_compilations) > MOST_KEPT:
            _compilations.popitem(last=False)

    def _count_values(self) -> None:
        """A new value of an attribute was compiled: once is a phase of a schedule, many times a value per step."""
        if not self._changed:
            return
        self._variants += 1
        if self._variants == MANY_VALUES:
            kind = type(self._block).__name__
            text = (
                f"{kind} was compiled {MANY_VALUES} times because its {self._changed} changed, and each new value takes"
                " as long again: set strategy.compile: none, or store the value in a buffer"
            )
            if kind not in _warned:
                _warnings.append(text)
            _warned.add(kind)
        self._changed = ""

    @property
    def _positions(self) -> list[int]:
        """Of the inputs of the graph that are parameters; buffers may change before the backward pass."""
        slots = enumerate(self._weights or ())
        return [
            position for position, (dictionary, name) in slots if isinstance(dictionary[name], nn.Parameter)
        ]

    @contextmanager
    def _holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """In this block the weights and buffers are ``tensors``."""
        slots = self._weights or []
        before = [dictionary[name] for dictionary, name in slots]
        for (dictionary, name), tensor in zip(slots, tensors, strict=True):
            dictionary[name] = tensor
        try:
            yield
        finally:
            for (dictionary, name), value in zip(slots, before, strict=True):
                dictionary[name] = value


@contextmanager
def _as_traced() -> Iterator[None]:
    global _tracing
    before = _tracing
    _tracing = True
    try:
        yield
    finally:
        _tracing = before


# -- what a block and its arguments are --------------------------------------------------------------


def _weight_slots(block: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the weights and buffers of a block are held, by dictionary and name."""
    for module in block.modules():
        dictionary: dict[str, Any]
        for dictionary in (module._parameters, module._buffers):
            yield from ((dictionary, name) for name, value in dictionary.items() if value is not None)


def _plain_attributes(block: nn.Module, named: Collection[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Plain attributes of a block's modules, each as (dictionary, name); of the block itself, those ``named``."""
    for module in block.modules():
        attributes = vars(module)
        names = named if module is block else attributes
        yield from ((attributes, name) for name in names if type(attributes.get(name)) in _SCHEDULED_TYPES)


def _local_tensor(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _compilation_key(tensor: Tensor) -> Any:
    """What a compilation depends on. Fake tensors have compilations of their own, without kernels."""
    fake = isinstance(tensor, FakeTensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, fake


_TENSOR_SLOT = object()
"""The place of a tensor in the arguments of a call."""


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A dataclass argument that may hold tensors, such as the documents of a packed batch."""

    kind: type
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _CallForm:
    """The arguments of a call without its tensors."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left = iter(tensors)
        leaves = [_put_together(leaf, left) for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def _taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_CallForm, list[Tensor]]:
    leaves, spec = tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    forms = []
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            values = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
            tensors += (value for value in values if isinstance(value, Tensor))
            forms.append(_Fields(type(leaf), tuple(map(_argument_form, values))))
        else:
            tensors += [leaf] if isinstance(leaf, Tensor) else []
            forms.append(_argument_form(leaf))
    return _CallForm(tuple(forms), spec), tensors


def _put_together(form: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(form, _Fields):
        return form.kind(*(_put_together(value, tensors) for value in form.values))
    return next(tensors) if form is _TENSOR_SLOT else form


def _argument_form(value: Any) -> Any:
    return _TENSOR_SLOT if isinstance(value, Tensor) else value


def _cannot_compile(block: nn.Module, error: Exception) -> RecipeError:
    first = (str(error) or type(error).__name__).strip().splitlines()[0]
    return RecipeError(
        f"{type(block).__name__} cannot be compiled",
        where="strategy.compile: block",
        why=first,
        fix="the nearest that works is compile: none",
    )


# -- kernels in a dry run ----------------------------------------------------------------------------


def _fused(*arguments: Any) -> None:
    """In the place of a generated kernel: the dry run counts the bytes of its inputs and outputs."""
    torch.ops.shardwise.fused([argument for argument in arguments if isinstance(argument, Tensor)])


_COMPILED_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")  # lives as long as the process
_COMPILED_LIBRARY.define("fused(Tensor[] tensors) -> ()")
_COMPILED_LIBRARY.impl("fused", lambda tensors: None, "CompositeExplicitAutograd")
