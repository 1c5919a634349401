"""Private names of PyTorch that this package uses; ``torch_private_*.py`` have those of one subject each.

A private name begins with an underscore, or is in a module or namespace that does. Any release of PyTorch may change
it, so an upgrade starts here. All were checked on torch ``CHECKED``. Where another release differs, the function says
so. Each entry gives the reason why a public name does not do. tests/test_architecture.py fails on a private name
of PyTorch in another file, and on an entry that nothing uses.

Modules that take long to import (DTensor, FSDP2, pipelining) are imported inside the functions that need them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
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


def function_modes() -> list[Any]:
    """The torch function modes around this call, the outermost first: a graph traced here contains their changes."""
    from torch.overrides import _get_current_function_mode_stack

    return _get_current_function_mode_stack()


def apply_to_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """The same structure with ``function`` applied to its tensors, as FSDP2 casts inputs: also of dataclasses."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(function, values)


def cast_floats(module: nn.Module, dtype: torch.dtype, kept: Iterable[Tensor] = ()) -> None:
    """``module.to(dtype)`` that leaves complex tensors complex; the public cast discards their imaginary parts.

    Args:
        kept: tensors that keep their dtype.
    """
    same = {id(tensor) for tensor in kept}
    complex_dtype = torch.promote_types(dtype, torch.float32).to_complex()

    def cast_one(tensor: Tensor) -> Tensor:
        if id(tensor) in same:
            return tensor
        if tensor.is_complex():
            return tensor.to(complex_dtype)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    module._apply(cast_one)


def without_modes() -> AbstractContextManager[Any]:
    """In this block no dispatch mode is active, so tensors are real also within a dry run."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


# -- tensors and storages ----------------------------------------------------------------------------


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of a storage object: equal keys are the same memory, while both are alive.

    ``data_ptr`` is 0 for every fake tensor.
    """
    return storage._cdata


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks are registered on a parameter; nothing public lists them."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


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


NEEDS_VALUES: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operations on fake tensors whose result, or its shape, depends on values."""


def reading_a_value() -> Any:
    """The operation that returns the value of a tensor to Python, for ``item`` and ``bool``. It has no public name."""
    return torch.ops.aten._local_scalar_dense.default


def eigenvectors_of(matrix: Tensor, uplo: str, vectors: bool) -> tuple[Tensor, Tensor]:
    """The operation behind ``torch.linalg.eigh``: eigenvalues, ascending, and eigenvectors."""
    eigenvectors: tuple[Tensor, Tensor] = torch.ops.aten._linalg_eigh(matrix, uplo, vectors)
    return eigenvectors


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


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def foreach_by_default() -> Iterator[None]:
    """In this block torch's optimizers take foreach kernels for fake CPU tensors, as they do on an accelerator."""
    from torch.optim import optimizer

    types = [*optimizer._foreach_supported_types, FakeTensor]
    with (
        replaced(optimizer, "_foreach_supported_types", types),
        replaced(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
    ):
        yield


# -- meshes and process groups -----------------------------------------------------------------------


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one. There is no public way to join axes."""
    return mesh._flatten(name)


def two_axes(mesh: DeviceMesh, first: str, second: str) -> DeviceMesh:
    """Two axes of a mesh as a mesh of their own. Each may be of joined axes (``flattened``).

    torch 2.11 refuses axes joined from both sides of the other one, whose degree is then 1: the joined axis is divided.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of slicing by the name of joined axes
        try:
            return mesh[first, second]
        except KeyError:
            joined = mesh[first]
            return joined._unflatten(0, (joined.size(), 1), (first, second))


@contextmanager
def sharding_propagation_in(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """In this block DTensor works out shapes inside ``context``: it does so on fake tensors of global shape."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagated(*args: Any, **kwargs: Any) -> Any:
        with context():
            return propagate(*args, **kwargs)

    with replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagated):
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


@contextmanager
def own_groups_of_meshes(rank: int) -> Iterator[None]:
    """In this block a mesh looks only at groups with this rank: the groups of 16,384 ranks take 0.1 s.

    Where a release has other names, it looks at all groups.
    """
    from torch.distributed import _mesh_layout
    from torch.distributed.device_mesh import DeviceMesh

    layout: Any = getattr(_mesh_layout, "_MeshLayout", None)
    create = getattr(DeviceMesh, "_init_one_process_group", None)
    if create is None or not hasattr(layout, "remap_to_tensor"):
        yield
        return
    every = layout.remap_to_tensor

    def own(self: Any, rank_map: Tensor) -> Tensor:
        groups = every(self, rank_map)
        return cast("Tensor", groups[(groups == rank).any(dim=-1)])

    def create_own(*args: Any, **kwargs: Any) -> Any:
        with replaced(layout, "remap_to_tensor", own):
            return create(*args, **kwargs)

    mesh: Any = DeviceMesh
    mesh._init_one_process_group = staticmethod(create_own)
    try:
        yield
    finally:
        mesh._init_one_process_group = staticmethod(create)


def default_group() -> dist.ProcessGroup:
    """The process group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective is told by name. RuntimeError when there is none."""
    return cast("dist.ProcessGroup", cast(Any, torch._C._distributed_c10d)._resolve_process_group(name))


def default_store() -> Store:
    """The store that the ranks met in. Raises ValueError before they met."""
    return dist.distributed_c10d._get_default_store()


def copy_of_store() -> Store:
    """That store, over a connection of its own. The annotations lack ``clone``."""
    return cast("Store", cast(Any, default_store()).clone())


def set_timeouts(timeout: timedelta) -> None:
    """Set the timeout of later collectives in all process groups; those of a mesh else have the default of NCCL."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


# -- allocators --------------------------------------------------------------------------------------


def set_allocator(settings: str) -> None:
    """What ``PYTORCH_ALLOC_CONF`` would say, after torch has been imported."""
    torch._C._accelerator_setAllocatorSettings(settings)
