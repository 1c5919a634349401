"""The private names that a dry run's fake mode replaces; torch_private.py has all others but the compiler's.

All names were checked on torch 2.13.0 (``torch_private.CHECKED``).
"""

from __future__ import annotations

import logging
from types import NoneType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shardwise.runtime.torch_private import FakeTensor, FakeTensorMode, storage_key, tree_iter, without_modes

logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)
"""The fake mode logs a trace of every operation that fails, also of those whose error is caught."""

_CACHEABLE_TYPES = frozenset(
    (bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments that are their own cache keys, together with the type: 1 and 1.0 are equal."""


class StaticFakeMode(FakeTensorMode):
    """A fake mode without symbolic shapes, whose dry runs take half the time.

    The fake mode finds the result of an operation by the metadata of its arguments. PyTorch's key takes every size
    and stride for itself, because it may be symbolic. Here the metadata of a tensor is one tuple. What PyTorch's own
    cache returns twice for the same arguments is made here from then on, without its checks. So are the results of
    operations that its cache leaves out (``_NOT_CACHED``, ``_OPERATORS``).
    """

    _results: ClassVar[dict[tuple[Any, ...], _Known]] = {}
    """By the call."""

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self._asked: tuple[Any, ...] | None = None
        self._reads_constant = False
        self._last: tuple[Any, _Known] | None = None
        self._attributes: dict[torch.device | None, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._last = None
        if func in _PROFILED:
            return func(*args)  # reads no tensor
        kwargs = kwargs or {}
        self._reads_constant = False
        key = self._key(func, args, kwargs)
        if self._reads_constant and (func._schema.is_mutable or _are_constants((args, kwargs))):
            key = None  # the value of the result is known, too, or that of an argument changes
        if key is not None and (known := self._results.get(key)) is not None:
            made = [self._made(result, args, kwargs) for result in known.results]
            self._last = func, known
            return made[0] if known.sequence is None else known.sequence(made)
        self._asked = key
        output: Any = self.dispatch(func, types, args, kwargs)
        self._last = None
        if key is not None and (func in _NOT_CACHED or func.namespace in _OPERATORS):
            self._remember(key, func, output, args, kwargs)
        return output

    def notes(self, func: Any) -> dict[Any, Any] | None:
        """A dict for the caller, which all calls share whose arguments have equal metadata.

        None if the last call was not of ``func``, or is not known yet.
        """
        return self._last[1].notes if self._last is not None and self._last[0] is func else None

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """What the results of a call may depend on; None if that is not known of an argument (``_describe``)."""
        described: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        known = self._describe(described, args) and (not kwargs or self._describe(described, kwargs))
        return tuple(described) if known else None

    def _describe(self, result: list[Any], args: Any) -> bool:
        """Append what a result may depend on.

        False if an argument is neither a plain value, nor a fake tensor, nor on the meta device.
        """
        if isinstance(args, dict):
            result.append(tuple(args))
            args = args.values()
        result.append(len(args))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.fake_mode is not self or arg.layout is not torch.strided:
                    return False
                self._reads_constant |= arg.constant is not None
                result.append(_metadata(arg, arg.fake_device))
            elif kind in _CACHEABLE_TYPES:
                result += kind, arg
            elif kind is list or kind is tuple:
                result.append(kind)
                if not self._describe(result, arg):
                    return False
            elif kind is Tensor and arg.is_meta:
                result += _META, _metadata(arg, arg.device)
            else:
                return False
        return True

    def _remember(self, key: tuple[Any, ...], func: Any, output: Any, args: Any, kwargs: Any) -> None:
        """Keep the results of an operation that PyTorch does not cache, unless it has changed an argument's shape."""
        several = type(output) if isinstance(output, list | tuple) else None
        results = [_produced(result, args, kwargs) for result in (output if several else (output,))]
        if all(result is not None for result in results) and self._key(func, args, kwargs) == key:
            self._results[key] = _Known(
                several, tuple(result for result in results if result is not None), {}
            )

    def _prep_args_for_hash(self, result: list[Any], args: Any, state: Any, hashed_by_id: list[Any]) -> None:
        described: list[Any] = []
        if self._asked is None or not self._describe(described, args) or _META in described:
            described.clear()
            super()._prep_args_for_hash(described, args, state, hashed_by_id)
        result += described

    def _make_cache_entry(self, state: Any, key: Any, *call: Any) -> Any:
        """``call``: the operation, its arguments and result; from torch 2.15 on without the operation."""
        asked, self._asked = self._asked, None  # PyTorch tries every result of an entry alone
        entry = super()._make_cache_entry(state, key, *call)
        self._remember_entry(asked, entry, key.key[0])
        return entry

    def _output_from_cache_entry(self, state: Any, entry: Any, key: Any, *call: Any) -> Any:
        asked = self._asked
        self._asked = None
        self._remember_entry(asked, entry, key.key[0])
        return super()._output_from_cache_entry(state, entry, key, *call)

    def _remember_entry(self, asked: tuple[Any, ...] | None, entry: Any, func: Any) -> None:
        if asked is not None and asked[0] is func and (made := _results_of(entry, func.is_view)) is not None:
            self._results[asked] = _Known(tuple if entry.is_output_tuple else None, made, {})

    def _made(self, result: _Produced, args: Any, kwargs: Any) -> Any:
        """One result: nothing, an argument itself, a view of it, or a new tensor."""
        given = None if result.argument is None else _argument(result.argument, args, kwargs)
        if result.shape is None:
            return given
        like: dict[str, Any] = {
            "dtype": result.dtype,
            "device": "meta",
            "requires_grad": result.requires_grad,
        }
        meta_tensor = torch.empty_strided(result.shape, result.stride, **like)
        if given is not None:
            meta_tensor.set_(given.untyped_storage(), result.offset, result.shape, result.stride)
        device = result.device
        made = Tensor._make_subclass(
            FakeTensor,
            meta_tensor,
            result.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        # As FakeTensor.__new__: reading memory that does not exist raises.
        torch._C._set_throw_on_mutable_data_ptr(made)
        if device not in self._attributes:
            # Those of this release of PyTorch; they are the same for all fake tensors of a device.
            self._attributes[device] = dict(FakeTensor(self, meta_tensor, device).__dict__)
        made.__dict__.update(self._attributes[device])
        return made


_META = "on the meta device, and not fake"
_ATEN = torch.ops.aten
_PROFILED: frozenset[Any] = frozenset(
    (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)
_NOT_CACHED: frozenset[Any] = frozenset(
    (
        # views: the schema of the first says that it is none, the others are decomposed
        *(_ATEN._unsafe_view.default, _ATEN.split_with_sizes.default, _ATEN.unbind.int, _ATEN.to.dtype),
        *(_ATEN.mm.out, _ATEN.addmm.out, _ATEN.bmm.out, _ATEN.baddbmm.out),
        _ATEN.bitwise_right_shift.Tensor_Scalar_out,
        _ATEN.empty_like.default,  # of tensors on the meta device
    )
)
"""Operations that PyTorch's cache leaves out although their results follow from the metadata of their arguments."""
_OPERATORS = ("fsdp", "shardwise", "_c10d_functional")
"""Namespaces of more of these."""


_FILL_VALUES: dict[Any, Any] = {
    **{getattr(_ATEN, name).default: 0.0 for name in ("zeros", "zeros_like", "new_zeros")},
    **{getattr(_ATEN, name).default: 1.0 for name in ("ones", "ones_like", "new_ones")},
}
"""Operations that fill a new tensor, and the value."""


def know_value(func: Any, made: FakeTensor) -> None:
    """Make a constant of a tensor of one element that ``func`` has filled, as PyTorch does with ``torch.tensor``."""
    value = _FILL_VALUES.get(func)
    if value is not None and made.numel() == 1 and made.constant is None:
        with without_modes():
            made.constant = torch.full(made.shape, value, dtype=made.dtype)
        made.fake_mode.fake_tensor_converter.add_constant_storage_mapping(made)


def value_of(tensor: Tensor) -> float:
    """The value that the host reads: of a constant its own, of any other tensor 1.

    Optimizers of libraries read step counts, norms, and whether to update at all.
    """
    constant = tensor.constant if isinstance(tensor, FakeTensor) else None
    if constant is None:
        return 1.0 if tensor.dtype.is_floating_point else 1
    with without_modes():
        return constant.item()


class _Produced(NamedTuple):
    """One result of an operation: the argument at an index or name, where it has no shape of its own; else metadata,
    and the argument whose memory it views, if any. Without either it is None."""

    argument: int | str | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    device: torch.device | None = None


class _Known(NamedTuple):
    """What a call returns: the type of the sequence of results, if it is one, and how each is made; and the caller's
    ``notes``."""

    sequence: type | None
    results: tuple[_Produced, ...]
    notes: dict[Any, Any]


def _are_constants(given: Any) -> bool:
    return all(tensor.constant is not None for tensor in tree_iter(given) if isinstance(tensor, FakeTensor))


def _argument(where: int | str, args: Any, kwargs: Any) -> Any:
    return args[where] if isinstance(where, int) else kwargs[where]


def _produced(result: Any, args: Any, kwargs: Any) -> _Produced | None:
    """How a result is made; None where it is no fake tensor, or a view of one within a list."""
    if result is None:
        return _Produced(None)
    if type(result) is not FakeTensor:
        return None
    storage = storage_key(result.untyped_storage())
    viewed = None
    for where, given in (*enumerate(args), *kwargs.items()):
        if given is result:
            return _Produced(where)
        for tensor in tree_iter(given):
            if isinstance(tensor, Tensor) and storage_key(tensor.untyped_storage()) == storage:
                if tensor is not given:
                    return None
                viewed = where
    shape = tuple(result.shape)
    stride = result.stride()
    offset = int(result.storage_offset())
    return _Produced(viewed, shape, stride, offset, result.dtype, result.requires_grad, result.device)


def _results_of(entry: Any, is_view: bool) -> tuple[_Produced, ...] | None:
    """What an entry of PyTorch's cache returns; None where that is not always made the same way."""
    results: list[_Produced] = []
    for output_info in entry.output_infos:
        like = output_info.metadata
        if output_info.inplace_idx is not None:
            results.append(_Produced(output_info.inplace_idx))
            continue
        if like is None or like.is_conj or like.is_neg or like.layout is not torch.strided:
            return None
        shape, stride = tuple(like.shape), tuple(like.stride)
        offset, grad = like.storage_offset, like.requires_grad
        argument = output_info.view_idx if is_view else None
        results.append(_Produced(argument, shape, stride, offset, like.dtype, grad, like.device))
    return tuple(results)


def _metadata(t: Tensor, device: torch.device) -> tuple[Any, ...]:
    """What the result of an operation may depend on."""
    memory = (t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), device)
    return (*memory, t.dtype, t.requires_grad, t.is_conj(), t.is_neg(), t.is_inference())
