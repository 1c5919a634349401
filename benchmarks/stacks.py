"""Differences between published software and Shardwise: facts with their sources, none of them fitted.

A fact becomes a setting of the dry run, or changes what it counted. One factor per stack is left for kernels, and it is
fitted (calibrate.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import nanotron
from published import Published

from shardwise.core.cost import Collective, Kernel, StepCost


@dataclass(frozen=True)
class Practice:
    """How a run was made.

    Attributes:
        settings: of the dry run, in place of the run's own.
        whole: share of blocks that are recomputed whole, where it is not the settings'.
        repeats: whether selective recomputation repeats every second product.
        attention: its kernels: flash (FlashAttention-2), cudnn, or triton.
        casts: how it casts to 8 bits: every time, as here; weights once a step and the rest within other kernels
            (fused); or weights before FSDP2 gathers them, and activations before tensor parallelism does (gathered).
        own_stages: whether it cuts the model into stages by its own rule (nanotron.py).
        loss: the loss, by its name in practised.py, where it holds more than Shardwise's.
        held: bytes that a rank keeps of each of its parameters for the whole run, without master weights and optimizer
            states, where that differs from Shardwise.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    whole: float | None = None
    repeats: bool = False
    attention: str = "flash"
    casts: str = "every time"
    own_stages: bool = False
    loss: str = ""
    held: int = 0


HELD_BY_NANOTRON = 2 + 4 + 2
"""Weights in bf16; gradients in fp32, also with ZeRO 1; and DDP's buckets of gradients in bf16, which its hook reads
(nanotron/optim/gradient_accumulator.py, build_grad_buffers and get_fp32_accum_hook)."""

NORM_IN_PARTS = "norm in parts"
"""A setting of the dry run that is not Shardwise's: RMS norm as PyTorch's CUDA build ran it before 2.9."""

ALL_HEADS = "rotation of all heads"
"""A setting of the dry run that is not Shardwise's: queries and keys of all heads are gathered over the tensor ranks
before each rank rotates them and takes its own."""

CASTS = ("shardwise::float8_scale", "shardwise::float8_cast")
OF_WEIGHT = " of a weight"
"""Ends the name of a cast whose bytes do not depend on the micro-batch."""

TRITON_ATTENTION = 1.8
"""FlashAttention-2 is 1.3 to 2.5 times as fast as FlashAttention in Triton (arXiv:2307.08691, section 4.1): their
geometric mean."""

RECOMPUTED_BLOCKS: Mapping[tuple[str, str], float] = {
    ("Llama2 13B", "A100-80GB"): 0.39,
    ("Llama2 13B", "H100-80GB"): 0.21,
    ("Llama2 34B", "A100-80GB"): 1.0,
    ("Llama2 34B", "H100-80GB"): 0.87,
}
"""IBM's selective checkpointing recomputes a share of the blocks whole (fms_fsdp/policies/ac_handler.py). Its README
gives HFU and MFU: a recomputed block takes a third more FLOPs."""


FUSED_NORM = ("d9bdfbb206", "f4614f3337")
"""Commits since November 2025, whose PyTorch has aten._fused_rms_norm (github.com/pytorch/pytorch/pull/153666)."""
COMPILED_LOSS = (*FUSED_NORM, "d66b72a6ac", "H200 trainy", "asyncTP 2025-06")
"""Sources since 2 April 2025 (commit bbb1b616e), when torchtitan compiled the loss again. It had not since 18 December
2024 (e8977b007), nor before 22 October 2024 (e10cb9494). torchao's table got its MI300X in August 2025."""
GATHERED_HEADS = "d66b72a6ac"
"""A commit whose tensor parallelism replicates the output of Qwen3's norms of heads (NoParallel in
torchtitan/experiments/qwen3/infra/parallelize.py): "unnecessary all-gather", which pull request 1870 removed."""
CUDNN = (*FUSED_NORM, "ad84033452")
"""Commits that run cuDNN's attention (torchtitan/models/common/attention.py; "cuDNN SDPA" in the message of 2024)."""


def practice_of(run: Published) -> Practice:
    """The facts of a run's software."""
    settings: dict[str, object] = {}
    if run.compiled:
        # The compiler chooses what a block saves; recomputed products are added below.
        settings["compile"] = "block"
    selective = run.settings["activation_checkpointing"] == "selective"
    if run.stack == "composer":
        # Its sweeps of 2023 ran `attn_impl: triton` (scripts/train/benchmarking/submit_benchmarks.py, b2a43a147);
        # those on 128 and more H100 installed flash-attn 2 (5e85bd62d).
        return Practice(settings, attention="flash" if "Large Scale" in run.notes else "triton")
    if run.stack == "fms-fsdp":
        return Practice(
            settings | {"activation_checkpointing": "none"},
            whole=RECOMPUTED_BLOCKS[run.name, run.device] if selective else None,
        )
    if run.software == "torchtitan":
        return _torchtitan(run, settings)
    if run.stack == "megatron":
        return _megatron(run)
    if run.stack == "nanotron":
        return Practice(settings, own_stages=True, loss="softmax", held=HELD_BY_NANOTRON)
    return Practice(settings)


def _torchtitan(run: Published, settings: dict[str, object]) -> Practice:
    repeats, whole = False, None
    if run.settings["activation_checkpointing"] == "selective":
        if "layer" in run.recomputation:  # every second block
            whole = 0.5
        else:  # saves every second mm, also of 8-bit tensors (torchtitan/distributed/activation_checkpoint.py)
            repeats = True
        if whole or run.compiled:
            settings["activation_checkpointing"] = "none"
    if not run.compiled and not run.source.endswith(FUSED_NORM):
        settings[NORM_IN_PARTS] = True
    if run.tensor > 1 and run.source.endswith(GATHERED_HEADS):
        settings[ALL_HEADS] = True
    attention = "cudnn" if run.source.endswith(CUDNN) else "flash"
    loss = "fp32 in chunks" if "chunked CE" in run.notes else "fp32"
    since_august = run.source.startswith("torchao") and run.device.startswith("MI300X")
    fused = since_august or run.source.endswith(COMPILED_LOSS)
    if run.compiled and fused:
        loss = ""
    return Practice(settings, whole, repeats, attention, _torchtitan_casts(run), loss=loss)


def _megatron(run: Published) -> Practice:
    if run.device.startswith(("H100", "GB")):
        # Transformer Engine: cuDNN's attention, weights that are cast for the first micro-batch (is_first_microbatch),
        # and other casts within the kernels before (LayerNormLinear, LayerNormMLP).
        return Practice(attention="cudnn", casts="fused")
    return Practice()


def _torchtitan_casts(run: Published) -> str:
    """With scales per tensor, torchao casts weights and activations before they are gathered (docs/float8.md)."""
    per_tensor = run.eight_bits.startswith("tensorwise")
    gathers = run.tensor > 1 or "gather" in run.eight_bits or "AG" in run.eight_bits
    return "gathered" if per_tensor and gathers else "every time"


def changed(cost: StepCost, run: Published, blocks: int) -> StepCost:
    """The cost of a model of ``blocks`` blocks on one rank, with the software's own ways."""
    practice = practice_of(run)
    kernels = [_attending(kernel, practice.attention) for kernel in cost.kernels]
    kernels = [cast for kernel in kernels if (cast := _cast(kernel, practice.casts, run)) is not None]
    kernels += _repeated(cost.kernels, blocks * run.passes) if practice.repeats else []
    collectives = tuple(_narrow(each, practice.casts) for each in cost.collectives)
    return replace(cost, kernels=tuple(kernels), collectives=collectives)


def synchronised(cost: StepCost, run: Published, tied: bool) -> StepCost:
    """The cost of one rank with the software's own collectives over the data.

    Args:
        tied: whether the rank has the embedding or the head.
    """
    if run.stack != "nanotron":
        return cost
    return nanotron.synchronised(cost, run, tied and bool(run.model["tied"]))


def _cast(kernel: Kernel, how: str, run: Published) -> Kernel | None:
    """A cast to 8 bits as it was made, or None."""
    if how == "every time" or not kernel.operation.startswith(CASTS):
        return kernel
    of_weight = kernel.operation.endswith(OF_WEIGHT)
    if how == "gathered":
        return replace(kernel, bytes=kernel.bytes // (run.data // run.copies)) if of_weight else kernel
    return replace(kernel, calls=max(1, kernel.calls // run.passes)) if of_weight else None


def _narrow(collective: Collective, how: str) -> Collective:
    """All-gathers of blocks' weights and of activations in 8 instead of 16 bits."""
    narrow = how == "gathered" and collective.kind == "all_gather" and collective.axis in ("shard", "tensor")
    return replace(collective, bytes=collective.bytes // 2) if narrow else collective


def _attending(kernel: Kernel, backend: str) -> Kernel:
    """An attention kernel of the run's software, in the place of that of the device's profile."""
    if "attention" not in kernel.operation:
        return kernel
    others = ("_cudnn_", "_flash_") if backend != "cudnn" else ("_flash_", "_cudnn_")
    slower = TRITON_ATTENTION if backend == "triton" else 1.0
    return replace(kernel, operation=kernel.operation.replace(*others), flops=round(kernel.flops * slower))


def _repeated(kernels: tuple[Kernel, ...], blocks: int) -> list[Kernel]:
    """Products of the forward pass that the backward pass repeats: of c equal ones in a block, c // 2."""
    products = (k for k in kernels if k.phase == "forward" and k.flops and "attention" not in k.operation)
    counts = ((product, product.calls // blocks // 2) for product in products)
    return [replace(each, phase="backward", calls=count * blocks) for each, count in counts if count]
