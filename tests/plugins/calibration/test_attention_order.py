"""The order of attention backends is by speed, without those that are wrong on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.plugins.calibration import attention_order
from shardwise.plugins.calibration.attention_order import fastest_backends
from shardwise.runtime.kernel_check import KernelCheck


def test_the_cpu_has_one_fused_kernel() -> None:
    assert fastest_backends(torch.device("cpu"), heads=2, tokens=128) == ("fused",)


@pytest.mark.parametrize(
    ("wrong", "order"), [("", ("cudnn", "efficient", "flash")), ("cudnn", ("efficient", "flash"))]
)
def test_a_gpu_s_order_is_by_seconds_without_wrong_kernels(
    wrong: str, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that are not installed are left out."""
    seconds = {"cudnn": 1.0, "flash": 3.0, "efficient": 2.0}

    def trusted(check: KernelCheck) -> bool:
        return check.kernel != f"{wrong} attention"

    def timed(name: str, *_: Any) -> float:
        return seconds[name]

    monkeypatch.setattr(attention_order, "trusted", trusted)
    monkeypatch.setattr(attention_order, "_seconds", timed)
    assert fastest_backends(torch.device("cuda")) == order
