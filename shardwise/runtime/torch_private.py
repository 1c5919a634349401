"""Every private name of PyTorch that this package uses. No other file names one.

A private name begins with an underscore, or is in a module or namespace that does. Any release of PyTorch may change
it, so an upgrade starts here. All were checked on torch ``CHECKED``. Where another release differs, the function says
so. Each entry gives the reason why a public name does not do. tests/test_architecture.py fails on a private name
of PyTorch in another file, and on an entry that nothing uses.

Modules that take long to import (DTensor, FSDP2, pipelining) are imported inside the functions that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

CHECKED = "2.13.0"
"""The release of PyTorch on which every name here was checked."""

__all__ = [
    "CHECKED",
    "ActivationWrapper",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "StaticFakeMode",
    "TorchDispatchMode",
    "TreeSpec",
    "checkpoint_wrapper",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_iter",
    "tree_map_only",
    "tree_unflatten",
]
"""Classes and functions that PyTorch documents, or uses in its own examples, but keeps in private modules. Fake tensors
make the dry run; dispatch modes see every operation of a rank; trees are the arguments of operations."""

# -- modes -------------------------------------------------------------------------------------------


class DispatchMode(TorchDispatchMode):
    """A dispatch mode for code that is never compiled: every call skips the switch that hides modes from Dynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


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

    _results: ClassVar[dict[tuple[Any, ...], tuple[bool, tuple[_Result, ...]]]] = {}

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self._asked: tuple[Any, ...] | None = None
        self._attributes: dict[torch.device, dict[str, Any]] = {}

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
        found = self.dispatch(func, types, args, kwargs or {})
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
        if not self._describe(described := [], args):
            super()._prep_args_for_hash(described := [], args, state, hashed_by_id)
        result += described

    def _make_cache_entry(self, *call: Any) -> Any:
        self._asked = None  # PyTorch tries every result of an entry alone
        return super()._make_cache_entry(*call)

    def _output_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        asked, self._asked = self._asked, None
        if asked is not None and asked[0] is func and (made := _results_of(entry, func.is_view)) is not None:
            self._results[asked] = entry.is_output_tuple, made
        return super()._output_from_cache_entry(state, entry, key, func, args)

    def _made(self, result: _Result, args: Any) -> Any:
        """One result: an argument itself, a view of it, or a new tensor."""
        if result.shape is None:
            return args[result.argument]
        like = {"dtype": result.dtype, "device": "meta", "requires_grad": result.requires_grad}
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


class _Result(NamedTuple):
    """One result of an operation: the argument at an index, where it has no shape of its own; else metadata, and the
    argument whose memory it views, if any."""

    argument: int | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    device: torch.device | None = None


def _view(tensor: Tensor) -> _Result:
    """A view of the first argument."""
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return _Result(0, shape, stride, offset, tensor.dtype, tensor.requires_grad, tensor.device)


def _results_of(entry: Any, is_view: bool) -> tuple[_Result, ...] | None:
    """What an entry of PyTorch's cache returns; None where that is not always made the same way."""
    found: list[_Result] = []
    for each in entry.output_infos:
        like = each.metadata
        if each.inplace_idx is not None:
            found.append(_Result(each.inplace_idx))
            continue
        if like is None or like.is_conj or like.is_neg or like.layout is not torch.strided:
            return None
        shape, stride = tuple(like.shape), tuple(like.stride)
        offset, grad = like.storage_offset, like.requires_grad
        argument = each.view_idx if is_view else None
        found.append(_Result(argument, shape, stride, offset, like.dtype, grad, like.device))
    return tuple(found)


def _metadata(t: FakeTensor) -> tuple[Any, ...]:
    """What the result of an operation may depend on."""
    memory = (t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t.fake_device)
    return (*memory, t.dtype, t.requires_grad, t.is_conj(), t.is_neg(), t.is_inference())


# -- tensors and storages ----------------------------------------------------------------------------


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of a storage object: equal keys are the same memory, while both are alive.

    ``data_ptr`` is 0 for every fake tensor.
    """
    return storage._cdata


def version_of(tensor: Tensor) -> int:
    """The version counter, which every in-place operation raises. Autograd compares it; nothing public reads it."""
    return tensor._version


def sharing_version_counter() -> AbstractContextManager[Any]:
    """In this block ``detach`` shares the version counter also below autograd, in a dispatch mode.

    There it is skipped with autograd's keys; the guard takes this one key back in.
    """
    guard: Any = torch._C._SetExcludeDispatchKeyGuard
    return cast("AbstractContextManager[Any]", guard(torch._C.DispatchKey.ADInplaceOrView, False))


def local_tensor(tensor: DTensor) -> Tensor:
    """A DTensor's local tensor itself. ``to_local`` returns a view, and runs an operation for it."""
    return tensor._local_tensor


def distributed_tensor(local: Tensor, like: DTensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """A DTensor over ``local``, placed like another. ``DTensor.from_local`` would move it to the mesh's device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(shape, stride, local.dtype)
    return DTensor(
        local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False
    )


def is_strided_shard(placement: Any) -> bool:
    """Whether a placement was cut after the other mesh axes, as tensor parallelism under FSDP2 is."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers that a state dict leaves out. ``register_buffer`` sets them; nothing public reads them."""
    return module._non_persistent_buffers_set


def reading_a_value() -> Any:
    """The operation that returns the value of a tensor to Python, for ``item`` and ``bool``. It has no public name."""
    return torch.ops.aten._local_scalar_dense.default


def eigenvectors_of(matrix: Tensor, uplo: str, vectors: bool) -> tuple[Tensor, Tensor]:
    """The operation behind ``torch.linalg.eigh``: eigenvalues, ascending, and eigenvectors."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._linalg_eigh(matrix, uplo, vectors)
    return found


# -- autograd ----------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def current_autograd_node() -> Any:
    """The node of the backward pass that runs; None outside. Its metadata names the module of an operation."""
    return torch._C._current_autograd_node()


def backward_of_input(
    ends: list[Tensor], gradients: list[Tensor] | None, inputs: list[Tensor], weights: Iterator[nn.Parameter]
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """First half of a split backward pass (zero bubble): gradients of the inputs, and the groups left for later."""
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(ends, gradients, inputs, weights)


def backward_of_weights(weights: Iterator[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Second half: accumulate the gradients of the weights."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(weights, groups)


# -- operations --------------------------------------------------------------------------------------

aten: Any = torch.ops.aten
flash_attention: Any = aten._scaled_dot_product_flash_attention
flash_attention_backward: Any = aten._scaled_dot_product_flash_attention_backward
flash_attention_varlen: Any = aten._flash_attention_forward
flash_attention_for_cpu: Any = aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_for_cpu_backward: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward
efficient_attention: Any = aten._scaled_dot_product_efficient_attention
efficient_attention_backward: Any = aten._scaled_dot_product_efficient_attention_backward
"""The attention kernels. Ring attention merges parts by the logarithms that the public function does not return, and
the dry run calls the kernel that the target would."""

functional_collectives: Any = torch.ops._c10d_functional
"""Collectives that return a new tensor, as operators that a dispatch mode sees. The public ones are in
``torch.distributed._functional_collectives``, and return a subclass that waits by itself."""

scaled_product: Any = torch._scaled_mm
"""The 8-bit matrix product of tensor cores."""

foreach_norm: Any = torch._foreach_norm
foreach_mul_: Any = torch._foreach_mul_
"""One kernel for many tensors; the public optimizers and gradient clipping call these."""


def schema_of(operation: Any) -> Any:
    """The schema of an operator: names of its arguments, and which of them it writes."""
    return operation._schema


def packet_of(operation: Any) -> Any:
    """All overloads of an operator, by which ``torch.utils.flop_counter`` registers FLOPs."""
    return operation._overloadpacket


def scoped_library() -> AbstractContextManager[Any]:
    """Kernels of ``aten`` operators for one block. The public ``Library`` keeps them until it is collected."""
    return cast("AbstractContextManager[Any]", torch.library._scoped_library("aten", "IMPL"))


def onednn_compiles() -> dict[torch.dtype, bool]:
    """16-bit dtypes whose matrix products oneDNN compiles on this processor, and whether it uses AMX tiles."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if not torch.backends.mkldnn.is_available() or not torch.cpu._is_avx512_bf16_supported():
        return {}
    amx = {torch.bfloat16: torch.cpu._is_amx_tile_supported()}
    return {dtype: amx.get(dtype, False) for dtype, known in supported.items() if known()}


# -- FSDP2 -------------------------------------------------------------------------------------------


def _fsdp_state(model: nn.Module) -> Any:
    return cast("Any", model)._get_fsdp_state()


def fsdp_initialise(model: nn.Module) -> None:
    """What FSDP2 does at the first forward pass: pads shards, and pins those in host memory."""
    _fsdp_state(model)._lazy_init()


def fsdp_gather_streams(model: nn.Module) -> tuple[Any, Any]:
    """The streams on which FSDP2 copies shards in and gathers them."""
    context = _fsdp_state(model)._comm_ctx
    return context.all_gather_copy_in_stream, context.all_gather_stream


def fsdp_after_backward(model: nn.Module) -> None:
    """FSDP2's work after a backward pass, for one that autograd ran in parts: reduce gradients, free weights."""
    root = _fsdp_state(model)
    for state in reversed(root._state_ctx.all_states):
        for group in reversed(_fsdp_groups(state)):
            group.post_backward()
    root._root_post_backward_final_callback()


def _fsdp_groups(state: Any) -> list[Any]:
    """A state's groups of parameters; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


@contextmanager
def fsdp_chunking(chunk: Callable[..., Any]) -> Iterator[None]:
    """In this block FSDP2 splits parameters by ``chunk(tensor, number, dim)``."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with _replaced(_fsdp_param, "_chunk_with_empty", chunk):
        yield


@contextmanager
def fsdp_copies(
    bring: Callable[[Any, Callable[[], Any]], Any], take_back: Callable[[Any, Callable[[], Any]], Any]
) -> Iterator[None]:
    """In this block two functions of FSDP2 are called through others.

    Args:
        bring: (parameter, call), for the inputs of an all-gather: shards are brought to the device.
        take_back: (parameters, call), for a reduction: gradients are brought to the shards' memory.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    inputs: Any = FSDPParam.all_gather_inputs
    reduce: Any = vars(_fsdp_param_group)["foreach_reduce"]

    def reduced(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return take_back(parameters, lambda: reduce(parameters, *args, **kwargs))

    brought = property(lambda parameter: bring(parameter, lambda: inputs.fget(parameter)))
    with (
        _replaced(FSDPParam, "all_gather_inputs", brought),
        _replaced(_fsdp_param_group, "foreach_reduce", reduced),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# -- meshes and process groups -----------------------------------------------------------------------


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one. There is no public way to join axes."""
    return mesh._flatten(name)


@contextmanager
def sharding_propagation_in(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """In this block DTensor works out shapes inside ``context``: it does so on fake tensors of global shape."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagated(*args: Any, **kwargs: Any) -> Any:
        with context():
            return propagate(*args, **kwargs)

    with _replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagated):
        yield


def forget_sharding() -> None:
    """Clear DTensor's cache of results, which holds meshes and with them process groups. Not in every release."""
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def fake_store() -> Store:
    """The store of the backend ``fake``, whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def default_group() -> dist.ProcessGroup:
    """The process group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective is told by name. RuntimeError when there is none."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    return cast("dist.ProcessGroup", resolve(name))


def copy_of_store() -> Store:
    """The store that the ranks met in, over a connection of its own. The annotations lack ``clone``."""
    store: Any = dist.distributed_c10d._get_default_store()
    return cast("Store", store.clone())


def set_timeouts(timeout: timedelta) -> None:
    """Set the timeout of later collectives in all process groups; those of a mesh else have the default of NCCL."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


# -- allocators --------------------------------------------------------------------------------------


def set_allocator(settings: str) -> None:
    """What ``PYTORCH_ALLOC_CONF`` would say, after torch has been imported."""
    torch._C._accelerator_setAllocatorSettings(settings)
