"""A wrong attention kernel is caught, named and replaced before it trains anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.dryrun.target import cuda_kernels
from shardwise.runtime.attention import steering
from shardwise.runtime.attention.backend import AttentionCall
from shardwise.runtime.attention.check import attention_error
from shardwise.runtime.flops import FlopCounter
from shardwise.runtime.kernel_check import KERNEL_TOLERANCES, newly_replaced

CPU = torch.device("cpu")
FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
KERNELS = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in (FORWARD, BACKWARD)}


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No answers of other tests, in memory or on the disk, and none for them."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    steering._trusted_backends.cache_clear()
    steering._wrong.clear()
    newly_replaced()
    steering.prefer_backends(CPU, ("fused",))
    yield
    steering._trusted_backends.cache_clear()
    steering._wrong.clear()


@pytest.fixture
def plant() -> Iterator[Callable[[str, Callable[..., Any]], None]]:
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        yield lambda name, kernel: library.impl(name, kernel, "CPU")


def nan_for_low_scores(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, *rest: Any, **more: Any
) -> Any:
    """As cuDNN did: NaN gradients of queries that score low with all keys, for 64 tokens over a multiple of 128."""
    dq, dk, dv = KERNELS[BACKWARD].call_boxed(ON_CPU, slope, q, k, v, out, logs, *rest, **more)
    broken = (logs < -88.7) & (q.shape[2] % 128 == 64)
    return dq.masked_fill(broken.unsqueeze(-1), torch.nan), dk, dv


def off_by_a_key(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Any:
    """Attends to the key before, as with a wrong offset of a tile."""
    return KERNELS[FORWARD].call_boxed(ON_CPU, q, k.roll(1, 2), v.roll(1, 2), *rest, **more)


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device")


def call(dtype: torch.dtype, length: int) -> AttentionCall:
    return AttentionCall(dtype, *(4, 2, length, length, 64, 64), masked=False, causal=True, dropout=False)


def trained(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output of a call as a model makes it, and its gradients."""
    torch.manual_seed(0)
    drawn = (torch.randn(1, length, heads, 64).bfloat16().to(dtype) for heads in (4, 2, 2))
    q, k, v = (tensor.requires_grad_() for tensor in drawn)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [192, 200, 256])
def test_kernels_that_are_right_are_trusted(dtype: torch.dtype, length: int) -> None:
    for names in (("fused",), ("math",)):
        assert attention_error(call(dtype, length), CPU, names) < KERNEL_TOLERANCES[dtype] / 2
    trained(length, dtype)
    assert not newly_replaced()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("queries", "keys", "masked", "causal"),
    [
        (24, 16, True, False),  # a decoder whose text is longer than the encoder's
        (16, 24, True, False),
        (24, 16, False, True),
        (16, 24, False, True),
        (1, 24, False, True),
        (5, 1, False, False),  # one key has all the weight, and gradients of q and k are 0
        (1, 1, False, True),
    ],
)
def test_kernels_are_trusted_with_other_numbers_of_keys_than_queries(
    dtype: torch.dtype, queries: int, keys: int, masked: bool, causal: bool
) -> None:
    other = AttentionCall(dtype, *(4, 2, queries, keys, 8, 8), masked=masked, causal=causal, dropout=False)
    for names in (("fused",), ("math",)):
        assert attention_error(other, CPU, names) < KERNEL_TOLERANCES[dtype] / 2


@pytest.mark.parametrize(
    ("name", "kernel", "length", "said"),
    [
        (BACKWARD, nan_for_low_scores, 192, "has an error of nan"),
        (FORWARD, off_by_a_key, 200, "has an error of"),
        (FORWARD, raising, 128, "raises"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_kernel_is_named_and_replaced(
    plant: Callable[..., None],
    name: str,
    kernel: Callable[..., Any],
    length: int,
    said: str,
    dtype: torch.dtype,
) -> None:
    expected = [tensor.detach() for tensor in trained(length, torch.float64)]
    plant(name, kernel)
    results = trained(length, dtype)
    (sentence,) = newly_replaced()
    assert sentence.startswith("fused attention ") and said in sentence
    assert f"{length} x {length} tokens" in sentence
    loose = 0.1 if dtype == torch.bfloat16 else 1e-4
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), reference, rtol=loose, atol=loose)


def test_a_kernel_is_wrong_for_some_shapes_alone(plant: Callable[..., None]) -> None:
    plant(BACKWARD, nan_for_low_scores)
    trained(192)
    trained(256)
    (sentence,) = newly_replaced()
    assert "192 x 192" in sentence


def test_an_answer_is_kept_on_the_disk(plant: Callable[..., None], tmp_path: Path) -> None:
    trained(128)
    (answer,) = (tmp_path / "kernels").iterdir()
    answer.write_text("0.7", encoding="utf-8")
    steering._trusted_backends.cache_clear()
    trained(128)
    assert newly_replaced()[0].startswith("fused attention has an error of 0.7 for float32, 128 x 128 tokens")


def test_calls_without_gradients_are_not_checked(plant: Callable[..., None]) -> None:
    """Generation has a call of another length for each token."""
    plant(FORWARD, off_by_a_key)
    with torch.no_grad():
        q = torch.randn(1, 2, 16, 8)
        F.scaled_dot_product_attention(q, q, q)
    assert not newly_replaced()


def test_evaluation_avoids_what_training_knows_to_be_wrong(plant: Callable[..., None]) -> None:
    q = torch.randn(1, 2, 16, 8)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    plant(FORWARD, off_by_a_key)
    trained(128)
    with torch.no_grad():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, is_causal=True), expected)


def test_a_kernel_that_raises_is_tried_again_by_the_next_process(
    plant: Callable[..., None], tmp_path: Path
) -> None:
    """It may have run out of memory."""
    plant(FORWARD, raising)
    trained(128)
    assert "raises" in newly_replaced()[0]
    assert not list(tmp_path.rglob("*.txt"))


def test_a_checked_call_leaves_random_numbers_and_saved_tensors_alone() -> None:
    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    torch.manual_seed(0)
    state = torch.get_rng_state()
    q = torch.randn(1, 2, 96, 16, requires_grad=True)
    torch.set_rng_state(state)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert {shape[-2] for shape in saved if len(shape) == 4} == {96} and len(saved) < 8


def test_a_model_s_own_choice_of_kernels_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sdpa_kernel`` around a call, as for second derivatives, which fused kernels do not have."""
    monkeypatch.setattr(steering, "HOST", None)  # the CPU chooses as an accelerator does
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, q, q)
    (slope,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), q)
    assert bool(second.isfinite().all())


def test_a_dry_run_for_an_accelerator_leaves_attention_as_it_was() -> None:
    """Also under a dispatch mode, for which PyTorch looks kernels up by name."""
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with cuda_kernels(1, ("flash", "efficient")):
        pass
    with FlopCounter() as counter:
        F.scaled_dot_product_attention(q, q, q)
    assert counter.flops == 2 * 2 * 2 * 16 * 16 * 8
