"""The private names that a dry run's fake mode replaces; torch_private.py has all others but the compiler's.

All names were checked on torch 2.13.0 (``torch_private.CHECKED``).
"""

from __future__ import annotations

import logging
from types import NoneType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shardwise.runtime.torch_private import FakeTensor, FakeTensorMode

logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)
"""The fake mode logs a trace of every operation that fails, also of those whose error is caught."""

_PLAIN = frozenset(
    (bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments that are their own cache keys, together with the type: 1 and 1.0 are equal."""


class StaticFakeMode(FakeTensorMode):
    """A fake mode without symbolic shapes, whose dry runs take half the time.

    The fake mode finds the result of an operation by the metadata of its arguments. PyTorch's key takes every size
    and stride for itself, because it may be symbolic. Here the metadata of a tensor is one tuple. What PyTorch's own
    cache returns twice for the same arguments is made here from then on, without its checks.
    """

    _results: ClassVar[dict[tuple[Any, ...], tuple[bool, tuple[_Produced, ...]]]] = {}

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self._asked: tuple[Any, ...] | None = None
        self._attributes: dict[torch.device | None, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _PROFILED:
            return func(*args)  # reads no tensor
        described: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        key = None
        if self._describe(described, args) and (not kwargs or self._describe(described, kwargs)):
            key = tuple(described)
            known = self._results.get(key)
            if known is not None:
                made = tuple([self._made(result, args) for result in known[1]])
                return made if known[0] else made[0]
        self._asked = key
        found: Any = self.dispatch(func, types, args, kwargs or {})
        if key is not None and func in _VIEWS:
            several = not isinstance(found, Tensor)
            self._results[key] = several, tuple(map(_view, found if several else (found,)))
        return found

    def _describe(self, result: list[Any], args: Any) -> bool:
        """Append what a result may depend on; False if an argument is neither a plain value nor a fake tensor."""
        if isinstance(args, dict):
            result.append(tuple(args))
            args = args.values()
        result.append(len(args))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.fake_mode is not self or arg.constant is not None or arg.layout is not torch.strided:
                    return False
                result.append(_metadata(arg))
            elif kind in _PLAIN:
                result += kind, arg
            elif kind is list or kind is tuple:
                result.append(kind)
                if not self._describe(result, arg):
                    return False
            else:
                return False
        return True

    def _prep_args_for_hash(self, result: list[Any], args: Any, state: Any, hashed_by_id: list[Any]) -> None:
        described: list[Any] = []
        if not self._describe(described, args):
            described.clear()
            super()._prep_args_for_hash(described, args, state, hashed_by_id)
        result += described

    def _make_cache_entry(self, *call: Any) -> Any:
        self._asked = None  # PyTorch tries every result of an entry alone
        return super()._make_cache_entry(*call)

    def _output_from_cache_entry(self, state: Any, entry: Any, key: Any, *call: Any) -> Any:
        """``call``: the operation and its arguments; from torch 2.15 on the arguments alone."""
        asked, self._asked = self._asked, None
        func = key.key[0]
        if asked is not None and asked[0] is func and (made := _results_of(entry, func.is_view)) is not None:
            self._results[asked] = entry.is_output_tuple, made
        return super()._output_from_cache_entry(state, entry, key, *call)

    def _made(self, result: _Produced, args: Any) -> Any:
        """One result: an argument itself, a view of it, or a new tensor."""
        if result.shape is None:
            return args[result.argument]
        like: dict[str, Any] = {
            "dtype": result.dtype,
            "device": "meta",
            "requires_grad": result.requires_grad,
        }
        held = torch.empty_strided(result.shape, result.stride, **like)
        if result.argument is not None:
            held.set_(args[result.argument].untyped_storage(), result.offset, result.shape, result.stride)
        device = result.device
        made = Tensor._make_subclass(
            FakeTensor, held, result.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        if device not in self._attributes:
            self._attributes[device] = dict(FakeTensor(self, held, device).__dict__)
        made.__dict__.update(self._attributes[device])
        return made


_PROFILED: Any = torch.ops.profiler._record_function_enter_new.default
_VIEWS = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.split_with_sizes.default})
"""Views of their first argument that PyTorch does not cache: one calls itself no view, the other decomposes."""


class _Produced(NamedTuple):
    """One result of an operation: the argument at an index, where it has no shape of its own; else metadata, and the
    argument whose memory it views, if any."""

    argument: int | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    device: torch.device | None = None


def _view(tensor: Tensor) -> _Produced:
    """A view of the first argument."""
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return _Produced(0, shape, stride, offset, tensor.dtype, tensor.requires_grad, tensor.device)


def _results_of(entry: Any, is_view: bool) -> tuple[_Produced, ...] | None:
    """What an entry of PyTorch's cache returns; None where that is not always made the same way."""
    found: list[_Produced] = []
    for each in entry.output_infos:
        like = each.metadata
        if each.inplace_idx is not None:
            found.append(_Produced(each.inplace_idx))
            continue
        if like is None or like.is_conj or like.is_neg or like.layout is not torch.strided:
            return None
        shape, stride = tuple(like.shape), tuple(like.stride)
        offset, grad = like.storage_offset, like.requires_grad
        argument = each.view_idx if is_view else None
        found.append(_Produced(argument, shape, stride, offset, like.dtype, grad, like.device))
    return tuple(found)


def _metadata(t: FakeTensor) -> tuple[Any, ...]:
    """What the result of an operation may depend on."""
    memory = (t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t.fake_device)
    return (*memory, t.dtype, t.requires_grad, t.is_conj(), t.is_neg(), t.is_inference())
