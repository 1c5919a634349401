"""Which attention kernel a device runs, and that a plan counts the same one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.errors import RecipeError
from shardwise.dryrun.target import TARGET_KERNELS
from shardwise.hardware.profiles import PROFILES
from shardwise.runtime.attention.backend import AttentionCall, enabled_backends, usable_backends

CALL = AttentionCall(
    torch.bfloat16,
    *(32, 8, 4096, 4096, 128, 128),
    masked=False,
    causal=True,
    dropout=False,
)


@pytest.mark.parametrize(
    ("device", "changed", "runs"),
    [
        ("H100-80GB", {}, "cudnn"),
        ("H200-141GB", {"width": 64, "value_width": 64}, "cudnn"),
        ("H100-80GB", {"masked": True, "causal": False}, "efficient"),
        ("H100-80GB", {"width": 192, "value_width": 192}, "flash"),
        ("H100-80GB", {"width": 320, "value_width": 320}, "efficient"),
        ("H100-80GB", {"dtype": torch.float32}, "efficient"),
        ("H100-80GB", {"dtype": torch.float64}, "math"),
        ("H100-80GB", {"queries": 1}, "cudnn"),
        ("A100-80GB", {}, "flash"),
        ("B200-180GB", {}, "flash"),
        ("V100-32GB", {"dtype": torch.float16}, "efficient"),
        ("MI300X-192GB", {"width": 100, "value_width": 100, "dtype": torch.float32}, "efficient"),
    ],
)
def test_the_kernel_follows_from_device_and_shape(device: str, changed: dict[str, Any], runs: str) -> None:
    assert usable_backends(replace(CALL, **changed), PROFILES[device].attention)[0] == runs


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func.name():
            self.names.append(func.name().removeprefix("aten::_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "kernel"), [("H100-80GB", "cudnn"), ("A100-80GB", "flash"), ("T4-16GB", "efficient")]
)
def test_a_dry_run_calls_the_kernel_of_its_device(device: str, kernel: str) -> None:
    assert attention_kernels(device) == [f"{kernel}_attention", f"{kernel}_attention_backward"]


def attention_kernels(device: str) -> list[str]:
    """What a dry run of a grouped causal call and its backward pass calls."""
    seen = Names()
    with FakeTensorMode(), TARGET_KERNELS["cuda"].kernels(1, PROFILES[device].attention), seen:
        q = torch.empty(2, 256, 8, 64, dtype=torch.float16, requires_grad=True)
        k, v = (torch.empty(2, 256, 2, 64, dtype=torch.float16, requires_grad=True) for _ in "kv")
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        out.sum().backward()
    assert out.shape == (2, 8, 256, 64) and k.grad is not None and k.grad.shape == k.shape
    return seen.names


@pytest.mark.parametrize(
    ("allowed", "kernel"),
    [
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
    ],
)
def test_a_dry_run_calls_what_the_model_allows(allowed: Any, kernel: str) -> None:
    with sdpa_kernel(allowed):
        assert attention_kernels("H100-80GB")[0] == f"{kernel}_attention"


def test_a_model_that_allows_no_kernel_of_its_call_is_refused() -> None:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        wide = replace(CALL, dtype=torch.float32)
        with pytest.raises(RecipeError, match=r"no attention kernel takes a call of the model.*cudnn, flash"):
            enabled_backends(wide, PROFILES["H100-80GB"].attention)
        assert enabled_backends(CALL, PROFILES["H100-80GB"].attention)[0] == "cudnn"
