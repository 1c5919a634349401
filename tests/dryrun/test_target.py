"""Planning for CUDA on a machine without it: the kernels that stand in, and what they keep."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shardwise.dryrun import target
from shardwise.dryrun.target import TARGET_KERNELS
from shardwise.runtime.attention.local import local_attention


def saved_bytes(function: object, *inputs: Tensor) -> int:
    """Bytes of distinct storages that autograd keeps, inputs included."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*inputs)  # type: ignore[operator]
    out.sum().backward()
    return sum(kept.values())


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (64,), weight)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_fused_norm_keeps_its_input_and_one_number_a_row(kind: str) -> None:
    with FakeTensorMode(), TARGET_KERNELS[kind].kernels(1, ("flash", "efficient")):
        x = torch.empty(32, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(64, dtype=torch.bfloat16, requires_grad=True)
        assert saved_bytes(norm, x, weight) == 32 * 64 * 2 + 64 * 2 + 32 * 4
        assert x.grad is not None and x.grad.shape == x.shape


def test_flash_attention_keeps_no_scores_and_no_repeated_heads() -> None:
    """q, k, v, the output, one fp32 log-sum per query and head, and the generator's two numbers."""
    with FakeTensorMode(), TARGET_KERNELS["cuda"].kernels(1, ("flash", "efficient")):
        q = torch.empty(1, 8, 256, 32, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(1, 2, 256, 32, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
        kept = saved_bytes(attention, q, k, v)
    exact = 2 * 256 * 32 * (8 + 2 + 2 + 8) + 4 * 8 * 256
    assert exact <= kept <= exact + 64


@pytest.mark.parametrize(
    ("kind", "dtype"), [("cuda", torch.bfloat16), ("rocm", torch.bfloat16), ("cuda", torch.float32)]
)
def test_windows_and_sinks_keep_no_scores_and_no_mask(kind: str, dtype: torch.dtype) -> None:
    """q, k, v, the output, one fp32 log-sum per query and head, and the sinks; CUDA in 16 bits makes no mask either."""

    class Largest(TorchDispatchMode):
        squares = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.squares += sum(
                isinstance(x, Tensor) and x.shape[-2:] == (256, 256) for x in tree_leaves(out)
            )
            return out

    with FakeTensorMode(), Largest() as seen, TARGET_KERNELS[kind].kernels(1, ("flash", "efficient")):
        q = torch.empty(1, 8, 256, 32, dtype=dtype, requires_grad=True)
        k, v = (torch.empty(1, 2, 256, 32, dtype=dtype, requires_grad=True) for _ in "kv")
        sinks = torch.empty(8, dtype=dtype, requires_grad=True)
        kept = saved_bytes(lambda *inputs: local_attention(*inputs[:3], 0.1, 16, inputs[3]), q, k, v, sinks)
    size = dtype.itemsize
    assert kept == size * 256 * 32 * (8 + 2 + 2 + 8) + 4 * 8 * 256 + size * 8
    assert (seen.squares == 0) == (kind == "cuda" and dtype == torch.bfloat16)


def test_attention_on_mps_keeps_its_scores() -> None:
    """The softmax [1, 8, 256, 256], once in fp32 where nothing is fused."""
    with FakeTensorMode(), TARGET_KERNELS["mps"].kernels(1, ("flash", "efficient")):
        q, k, v = (torch.empty(1, 8, 256, 32, requires_grad=True) for _ in "qkv")
        kept = saved_bytes(attention, q, k, v)
    scores, whole = 4 * 8 * 256 * 256, 4 * 8 * 256 * 32
    assert scores + 3 * whole <= kept <= scores + 6 * whole


def test_fp32_attention_runs_forward_and_backward() -> None:
    with FakeTensorMode(), TARGET_KERNELS["cuda"].kernels(1, ("flash", "efficient")):
        q = torch.empty(1, 8, 64, 32, requires_grad=True)
        k, v = (torch.empty(1, 2, 64, 32, requires_grad=True) for _ in "kv")
        attention(q, k, v).sum().backward()
        assert k.grad is not None and k.grad.shape == k.shape


def test_a_recomputation_meets_the_same_kernels() -> None:
    with FakeTensorMode(), TARGET_KERNELS["cuda"].kernels(1, ("flash", "efficient")):
        x = torch.empty(32, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(64, dtype=torch.bfloat16, requires_grad=True)
        checkpoint(norm, x, weight, use_reentrant=False).sum().backward()
        assert weight.grad is not None


def test_afterwards_the_cpu_s_own_kernels_are_back() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    before = norm(x, weight)
    with FakeTensorMode(), TARGET_KERNELS["cuda"].kernels(1, ("flash", "efficient")):
        pass
    torch.testing.assert_close(norm(x, weight), before, rtol=0, atol=0)
    q = torch.randn(1, 2, 8, 4)
    assert torch.isfinite(attention(q, q, q)).all()


def test_gloo_copies_and_nccl_does_not() -> None:
    assert (
        TARGET_KERNELS["cpu"].workspace("all_gather", 100)
        == TARGET_KERNELS["cpu"].workspace("reduce_scatter", 100)
        == 100
    )
    assert TARGET_KERNELS["cpu"].workspace("all_reduce", 100) == 0
    assert TARGET_KERNELS["cuda"].workspace("all_gather", 100) == 0


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor for which oneDNN compiles 16-bit products."""
    monkeypatch.setattr(target, "_compiled_product_bytes", lambda: {torch.bfloat16: 560 * 1024})


@pytest.mark.usefixtures("compiling")
def test_onednn_keeps_one_compiled_product_a_shape_in_bf16() -> None:
    cpu, half = TARGET_KERNELS["cpu"].kept, torch.empty(30, 50, dtype=torch.bfloat16)
    factors = half, torch.empty(50, 50, dtype=torch.bfloat16)
    assert cpu("aten::mm", factors, half) == cpu("aten::mm", factors, half.repeat(2, 2)) > 0
    assert cpu("aten::mm", factors, half.float()) == cpu("aten::add.Tensor", factors, half) == 0
    assert TARGET_KERNELS["cuda"].kept("aten::mm", factors, half) == 0


MULTIPLY = """
import torch
for batch, m, k, n in ((1, 4, 64, 10), (1, 8, 64, 10), (1, 16, 16, 16), (1, 16, 16, 17), (2, 4, 64, 8), (2, 4, 64, 9)):
    left, right = (torch.ones(batch, *shape, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    bias = torch.ones(n, dtype=torch.bfloat16)
    one, two = left[0], right[0]
    for call in ("bmm(left, right)", "baddbmm(bias, left, right)", "mm(one, two)", "addmm(bias, one, two)"):
        print("product", batch, m, k, n, call.partition("(")[0], flush=True)
        eval("torch." + call)
"""


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies nothing in bf16 here"
)
@pytest.mark.usefixtures("compiling")
def test_small_products_are_not_compiled() -> None:
    """As oneDNN tells which of them it runs."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    command = [sys.executable, "-c", MULTIPLY]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    for part in said.split("product ")[1:]:
        *sizes, name = part.split("\n")[0].split()
        batch, m, k, n = map(int, sizes)
        shape = (batch, m, n) if "bmm" in name else (m, n)
        left = torch.empty(*shape[:-1], k, dtype=torch.bfloat16)
        args = [torch.empty(n), left] if "add" in name else [left]
        counted = TARGET_KERNELS["cpu"].kept(f"aten::{name}", args, torch.empty(shape, dtype=torch.bfloat16))
        assert (counted > 0) == (",exec," in part), part


ATTEND = """
import sys, torch
for length in map(int, sys.argv[1:]):
    q, k, v = (torch.randn(1, length, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    print("backward of", length, flush=True)
    out.backward(torch.ones_like(out))
"""


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies nothing in bf16 here"
)
@pytest.mark.usefixtures("compiling")
def test_attention_has_onednn_compile_three_products_for_each_pair_of_block_sizes() -> None:
    lengths = (48, 192, 800)
    said = subprocess.run(
        [sys.executable, "-c", ATTEND, *map(str, lengths)],
        env={**os.environ, "ONEDNN_VERBOSE": "profile_create"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("backward of")[1:]
    kernel = target._ATTENTION_KERNEL
    for length, part in zip(lengths, said, strict=True):
        grad = torch.empty(1, 2, length, 64, dtype=torch.bfloat16)
        counted = TARGET_KERNELS["cpu"].kept(target._CPU_ATTENTION_BACKWARD, (), (grad, grad, grad)) // kernel
        assert counted == part.count("create:cache_miss")
