"""Is the machine what we think it is: ``shardwise doctor``, ceilings of the day, and the kernels of attention and loss.

Attention is timed for each kernel of scaled_dot_product_attention, also at lengths that are no multiple of 128, and its
output and gradients are compared with attention in fp32 that is written out here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_bench import Bench, Refused, Task, one, spread
from gpu_contenders import ATTENTION
from gpu_store import Row
from loss import FUNCTIONS, seconds
from machine import synchronise
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from shardwise.plugins.doctor.checks import examine
from shardwise.plugins.doctor.speed import copy_bandwidth, host_bandwidths, matrix_product

LENGTHS = (2048, 4160, 8192, 16448, 32768)
"""4,160 and 16,448 are 64 more than a multiple of 128."""
BACKENDS = (None, "flash", "cudnn", "efficient")
"""None is what PyTorch chooses."""
_CHUNK = 1024
"""Queries of the exact attention that are computed at once."""


def machine(bench: Bench) -> Iterator[Task]:
    yield one("doctor", partial(_doctor, bench), 10.0)
    for dtype in (torch.float32, torch.bfloat16):
        for size in (64,) if bench.tiny else (2048, 4096, 8192, 16384):
            name = f"product of {size:,} × {size:,}, {str(dtype).removeprefix('torch.')}"
            yield one(name, partial(_product, bench, dtype, size), 1.0)
    yield one("copies", partial(_copies, bench), 2.0)
    for length in (32, 24) if bench.tiny else LENGTHS:
        for backend in BACKENDS:
            name = f"attention of {length:,} tokens, {backend or 'as PyTorch chooses'}"
            yield one(name, partial(_attention, bench, length, backend), 3.0)
    for name in FUNCTIONS:
        yield one(f"loss: {name}", partial(_loss, bench, name), 3.0)


def _doctor(bench: Bench) -> Row:
    """Verdicts by check, and warnings; the texts about disks have folders of this machine."""
    found = examine(Path.cwd(), measure=not bench.tiny)
    warned = [
        check for check in found.checks if check.verdict in ("warn", "bad") and "disk" not in check.name
    ]
    return {
        "healthy": found.healthy,
        "verdicts": {check.name: check.verdict for check in found.checks},
        "warnings": [f"{check.name}: {check.found}" for check in warned],
    }


def _product(bench: Bench, dtype: torch.dtype, size: int) -> Row:
    found = matrix_product(bench.device, dtype, size=size, budget=0.05 if bench.tiny else 0.5)
    return {"flops": found.flops, "correct": found.correct}


def _copies(bench: Bench) -> Row:
    size = 2**20 if bench.tiny else 2**30
    to_device, to_host = (
        host_bandwidths(bench.device, size=size) if bench.device.type == "cuda" else (None, None)
    )
    copied = copy_bandwidth(bench.device, size=size, budget=0.1)
    return {"copy_bytes_per_s": copied, "to_device_bytes_per_s": to_device, "to_host_bytes_per_s": to_host}


def _attention(bench: Bench, length: int, backend: str | None) -> Row:
    """Causal attention of 32 heads of 128 channels in bf16, forward and backward: FLOP/s of the half that counts."""
    heads, channels = (2, 16) if bench.tiny else (32, 128)
    shape = (1, heads, length, channels)
    torch.manual_seed(0)
    inputs = [
        torch.randn(shape, device=bench.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    gradient = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
    forward, both = [], []
    only = nullcontext() if backend is None else sdpa_kernel(list(ATTENTION[backend]))
    with only:
        for _ in range(bench.untimed + bench.timed):
            for tensor in inputs:
                tensor.grad = None
            synchronise(bench.device)
            began = time.perf_counter()
            try:
                out = F.scaled_dot_product_attention(*inputs, is_causal=True)
            except RuntimeError as error:
                raise Refused(f"this kernel does not run here: {str(error).splitlines()[0]}") from error
            synchronise(bench.device)
            forward.append(time.perf_counter() - began)
            out.backward(gradient)
            synchronise(bench.device)
            both.append(time.perf_counter() - began)
    flops = 2 * heads * length**2 * channels
    taken = [statistics.median(times[bench.untimed :]) for times in (forward, both)]
    return {
        "forward_flops": flops / taken[0],
        "forward_backward_flops": 3.5 * flops / taken[1],
        **_errors(inputs, gradient, out),
    }


def _errors(inputs: list[Tensor], gradient: Tensor, out: Tensor) -> Row:
    """Largest differences of a head's output and gradients from attention in fp32, over the largest exact value."""
    exact = [tensor.detach()[0, 0].float().requires_grad_() for tensor in inputs]
    outputs = exact_attention(*exact, gradient[0, 0].float())
    pairs = {
        "output": (out.detach()[0, 0], outputs),
        **{
            f"gradient_of_{name}": (tensor.grad[0, 0], reference.grad)
            for name, tensor, reference in zip("qkv", inputs, exact, strict=True)
            if tensor.grad is not None and reference.grad is not None
        },
    }
    return {
        f"error_of_{name}": float((ours.float() - right).abs().max() / right.abs().max())
        for name, (ours, right) in pairs.items()
    }


def exact_attention(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> Tensor:
    """Causal attention of one head, softmax(q kᵀ / √d) v, in the dtype of its inputs [s, d], chunk by chunk.

    Leaves the gradients of q, k and v for that of the output; returns the output.
    """
    parts = []
    for first in range(0, len(q), _CHUNK):
        chunk = slice(first, min(first + _CHUNK, len(q)))
        positions = torch.arange(len(q), device=q.device)
        later = positions > positions[chunk].unsqueeze(1)
        scores = q[chunk] @ k.T / math.sqrt(q.shape[-1])
        part = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        part.backward(gradient[chunk])
        parts.append(part.detach())
    return torch.cat(parts)


def _loss(bench: Bench, name: str) -> Row:
    """Output layer and loss of 8,192 tokens, 4,096 wide, 128,256 words, in bf16: forward and backward."""
    rows, width, vocabulary = (16, 8, 32) if bench.tiny else (8192, 4096, 128_256)
    device, dtype = bench.device, torch.bfloat16
    hidden = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device=device)
    for _ in range(bench.untimed):
        seconds(FUNCTIONS[name], hidden, weight, labels)
    hidden.grad = weight.grad = None
    level = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        level = torch.cuda.memory_allocated()
    taken = [seconds(FUNCTIONS[name], hidden, weight, labels) for _ in range(bench.timed)]
    row = spread(taken)
    if device.type == "cuda":
        row["bytes_above_inputs"] = torch.cuda.max_memory_allocated() - level
    return row
