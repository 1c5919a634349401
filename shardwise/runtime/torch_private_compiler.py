"""Private names of PyTorch's compiler (AOTAutograd and inductor); torch_private.py has all others.

``torch.compile`` itself does not do: Dynamo refuses fake tensors of another mode, so a dry run could not compile the
step that a trainer runs. Below Dynamo both compile the same joint graph with the same partitioner and scheduler. All
names were checked on torch 2.13.0 (``torch_private.CHECKED``).

The compiler takes seconds and 100 MB to import. So every function here imports what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn

from shardwise.runtime.torch_private import FakeTensorMode, without_modes
from shardwise.runtime.torch_private_partitioner import partitioned

Function = Callable[..., tuple[Any, ...]]
"""From tensors to tensors."""


class _Traced(nn.Module):
    """A function as the compiler takes it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function: Function | None = function

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        assert self.function is not None, "a function is traced once"
        return self.function(*inputs)


def compiled(
    function: Function,
    like: Sequence[Tensor],
    kernel: Callable[..., None] | None,
    weights: Collection[int] = (),
    budget: float | None = 1.0,
) -> Function:
    """Both passes of ``function``, compiled by AOTAutograd and inductor.

    The joint graph is traced on fake tensors with the shapes, strides, dtypes and devices of ``like``, and is cut by
    the min-cut partitioner (torch_private_partitioner.py). Nothing of ``function`` is needed afterwards.

    Args:
        weights: positions of inputs that exist until the backward pass in any case.
        budget: what the partitioner may save, see there.
        kernel: called with the tensors of every generated kernel in its place. Then no kernel is compiled, and the
            result runs on fake tensors; its allocations, frees, library calls and kernels are those of the real code.
    """
    from torch._inductor.compile_fx import compile_fx

    traced = _Traced(function)
    with ExitStack() as stack:
        stack.enter_context(without_modes())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_compile_options(real=kernel is None))
        stack.enter_context(partitioned(frozenset(weights), budget))
        inputs = _fakes(like)
        if kernel is not None:
            stack.enter_context(_without_kernels(kernel))
        passes = compile_fx(cast("Any", traced), inputs, inner_compile=_compile_graph)
    traced.function = None
    return cast("Function", passes)


def is_tracing() -> bool:
    """Whether AOTAutograd traces a function now. It takes the derivatives with ``torch.autograd.grad``."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def _compile_graph(graph: Any, inputs: Any, **options: Any) -> Any:
    """Compile one pass; C++ of a pass with 8-bit values without vectors.

    g++ 12 with AVX-512 compiles inductor's transposed tiles next to 8-bit stores to code that gave gradients 1e8 times
    too large, without a word (torch 2.13, rowwise scaling, 64 columns). Processors only emulate 8 bits.
    """
    from torch._inductor import config as inductor
    from torch._inductor.compile_fx import compile_fx_inner

    values = (node.meta.get("val") for node in graph.graph.nodes)
    eight = any(isinstance(value, Tensor) and value.dtype in _EIGHT_BITS for value in values)
    with inductor.patch({"cpp.simdlen": 1} if eight else {}):
        return compile_fx_inner(graph, inputs, **options)


def _fakes(like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these in a fake mode of their own, without symbolic shapes."""
    with FakeTensorMode():
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(
                t.requires_grad
            )
            for t in like
        ]


@contextmanager
def _compile_options(real: bool) -> Iterator[None]:
    """How every graph is compiled: in this process, one kernel at a time, for static shapes.

    ``real``: kernels are compiled. Inductor compiles a program to find the CPU's vector instructions, 8 seconds once.
    Without kernels it writes scalar code: that is half of the time, and vectors change no buffer
    (tests/technique/test_compiling.py). Triton kernels have comparisons in the place of minimum and maximum, next to
    which it stores wrong 8-bit values (triton-lang/triton#11111). torch 2.13 has them on NVIDIA GPUs alone.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor.codegen.triton import TritonOverrides

    with (
        mock.patch.object(TritonOverrides, "minimum", staticmethod(partial(_extreme, "<"))),
        mock.patch.object(TritonOverrides, "maximum", staticmethod(partial(_extreme, ">"))),
        inductor.patch({"compile_threads": 1, "fx_graph_cache": real, **({} if real else _SCALAR)}),
        functorch.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
    ):
        yield


def _extreme(sign: str, a: object, b: object) -> str:
    """Triton's expression of a minimum or maximum, with NaN where an operand is NaN."""
    return f"tl.where(({a} {sign} {b}) | ({a} != {a}), {a}, {b})"


_EIGHT_BITS = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
_SCALAR = {"cpp.vec_isa_ok": True, "cpp.simdlen": 1}


@contextmanager
def _without_kernels(kernel: Callable[..., None]) -> Iterator[None]:
    """In this block generated code calls ``kernel`` in the place of each generated kernel."""
    from torch._inductor.graph import GraphLowering

    with mock.patch.object(GraphLowering, "compile_to_module", lambda graph: _loaded(graph, kernel)):
        yield


def _loaded(graph: Any, kernel: Callable[..., None]) -> Any:
    """The generated code of a graph as a module on fake tensors."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    code, _ = graph.codegen()
    key, path = PyCodeCache.write(code.value)
    graph.cache_key = key
    graph.cache_path = path
    graph.cache_linemap = []
    with mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *_: kernel):
        # It is not among sys.modules, so it is not taken for that of the real code.
        spec = cast("ModuleSpec", spec_from_file_location(f"shardwise_dry_run_{key}", path))
        module = module_from_spec(spec)
        cast("Any", spec.loader).exec_module(module)
    vars(module).update({**_ON_FAKES, **graph.constants})
    return SimpleNamespace(call=module.call)


def _strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _no_check(*_: object) -> None:
    """Fake tensors have no addresses."""


_ON_FAKES: Mapping[str, Any] = {
    "empty_strided_cpu": _strided,
    "reinterpret_tensor": torch.as_strided,
    "assert_alignment": _no_check,
}
"""What generated code calls past the dispatcher, where no dispatch mode would see it."""
