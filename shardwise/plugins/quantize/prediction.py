"""The peak memory of a pass, before it runs: the pass itself on fake tensors, which the tracker counts.

Of blocks that are alike, one runs. A fake tensor has no values, so a method that asks for one gets 0, of a
condition True: errors and residuals are 0, and factorizations succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.dryrun.reading import peaks
from shardwise.dryrun.target import TARGET_KERNELS
from shardwise.dryrun.tracker import Tracker, asked_device
from shardwise.hardware.this_machine import cpu_profile
from shardwise.model.merging import ReadTensor
from shardwise.plugins.quantize.experts import ExpertLayer
from shardwise.plugins.quantize.quantizer import Quantizer
from shardwise.plugins.quantize.source import SourceModel
from shardwise.plugins.quantize.state import QuantizedBlock
from shardwise.plugins.quantize.stream import Batches, quantize_blocks
from shardwise.plugins.quantize.walk import Walk
from shardwise.runtime.torch_private import TorchDispatchMode, reading_a_value
from shardwise.runtime.torch_private_fake import StaticFakeMode


class _Unsaved:
    """The state of a pass that has no file."""

    def __contains__(self, index: int) -> bool:
        return False

    def load(self, index: int) -> QuantizedBlock:
        raise KeyError(index)

    def save(self, index: int, block: QuantizedBlock) -> None:
        pass


class _Constants(TorchDispatchMode):
    """The values that are read from fake tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        if func is reading_a_value():
            dtype = args[0].dtype
            if dtype == torch.bool:
                return True
            return 0.0 if dtype.is_floating_point else 0
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


def predicted_peak(
    source: SourceModel,
    quantizer: Quantizer,
    experts: Sequence[ExpertLayer],
    batches: Batches,
    dtype: torch.dtype,
    original: SourceModel | None = None,
) -> int:
    """Peak bytes of ``quantize_blocks``, with the device's workspaces, as a plan counts them."""
    walk = _fake_walk(source, dtype)
    base = None if original is None else _fake_walk(original, dtype)
    # A blueprint with a depth can be built shallower, so its blocks are alike, and one gives the peak.
    blocks = None if source.blueprint.depth is None else range(1)
    # The experts of fake tensors get 0 tokens; with least_tokens=0 they still go through the method.
    rehearsed = replace(quantizer, method=quantizer.method.rehearsal(), least_tokens=0)

    def run() -> None:
        # Made in here, under the fake mode: all of them are in memory during the pass, and count.
        fake_batches = Batches(
            _like(batches.calibration),
            _like(batches.held_out),
            _like(batches.labels),
            [None if mask is None else torch.empty_like(mask) for mask in batches.counted],
        )
        quantize_blocks(
            walk, rehearsed, fake_batches, _Unsaved(), blocks=blocks, experts=experts, original=base
        )

    return counted_peak(run) + cpu_profile(1).overhead.workspace_bytes


def counted_peak(run: Callable[[], object]) -> int:
    """Peak bytes of the tensors that ``run`` makes, which are fake."""
    target = TARGET_KERNELS["cpu"]
    tracker = Tracker({}, target.workspace, target.kept, lambda: "")
    fake = StaticFakeMode(allow_non_fake_inputs=True)
    with fake, tracker.watching(), target.kernels(1, ()), _Constants():
        run()
    return max(peak.bytes for peak in peaks(tracker).values())


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _fake_walk(source: SourceModel, dtype: torch.dtype) -> Walk:
    return Walk(source.blueprint, source.over(_fake_read(source)), dtype)


def _fake_read(source: SourceModel) -> ReadTensor:
    """Reads undefined tensors of the stored shapes and dtypes."""

    def read(name: str) -> Tensor:
        shape, dtype = source.stored(name)
        return torch.empty(shape, dtype=dtype)

    return read
