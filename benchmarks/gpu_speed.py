"""Is it fast on this device: ceilings, training steps, and what loss, offload and checkpoints cost.

Rivals of a row take turns in one process, because a device's clock drifts with its temperature.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Row, spread
from loss import FUNCTIONS, seconds
from machine import synchronise
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.checkpoint.saver import Saver
from shardwise.engine.train_state import TrainState
from shardwise.launch.process import join
from shardwise.plugins.doctor.speed import copy_bandwidth, host_bandwidths, matrix_product
from shardwise.recipe.sections import Recipe

MODELS: dict[str, dict[str, Any]] = {
    "0.5B": {
        "layers": 24,
        "width": 896,
        "heads": 14,
        "kv_heads": 2,
        "ffn": 4864,
        "vocab": 151936,
        "tied": True,
    },
    "1.5B": {
        "layers": 28,
        "width": 1536,
        "heads": 12,
        "kv_heads": 2,
        "ffn": 8960,
        "vocab": 151936,
        "tied": True,
    },
    "7B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000},
}
"""Dimensions of Qwen2.5-0.5B and 1.5B, and of Llama-2-7B."""


def ceilings(bench: Bench) -> Iterator[Callable[[], Row]]:
    for dtype in (torch.float32, torch.bfloat16):
        for size in (64,) if bench.tiny else (2048, 4096, 8192, 16384):
            yield partial(_product, bench, dtype, size)
    yield partial(_copies, bench)
    for length in (32,) if bench.tiny else (2048, 8192, 32768):
        yield partial(_attention, bench, length)


def _product(bench: Bench, dtype: torch.dtype, size: int) -> Row:
    found = matrix_product(bench.device, dtype, size=size, budget=0.05 if bench.tiny else 0.5)
    return {"product": size, "dtype": str(dtype), "flops": found.flops, "correct": found.correct}


def _copies(bench: Bench) -> Row:
    size = 2**20 if bench.tiny else 2**30
    to_device, to_host = (
        host_bandwidths(bench.device, size=size) if bench.device.type == "cuda" else (None, None)
    )
    copied = copy_bandwidth(bench.device, size=size, budget=0.1)
    return {"copy_bytes_per_s": copied, "to_device_bytes_per_s": to_device, "to_host_bytes_per_s": to_host}


def _attention(bench: Bench, length: int) -> Row:
    """Causal attention of 32 heads of 128 channels in bf16, forward and backward: FLOP/s of the half that counts."""
    heads, channels = (2, 16) if bench.tiny else (32, 128)
    shape = (1, heads, length, channels)
    made = [
        torch.randn(shape, device=bench.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    forward, both = [], []
    for _ in range(bench.untimed + bench.timed):
        synchronise(bench.device)
        began = time.perf_counter()
        out = torch.nn.functional.scaled_dot_product_attention(*made, is_causal=True)
        synchronise(bench.device)
        forward.append(time.perf_counter() - began)
        out.sum().backward()
        synchronise(bench.device)
        both.append(time.perf_counter() - began)
    flops = 2 * heads * length**2 * channels
    taken = [statistics.median(each[bench.untimed :]) for each in (forward, both)]
    return {
        "attention_length": length,
        "flash": _flash_runs(made),
        "forward_flops": flops / taken[0],
        "forward_backward_flops": 3.5 * flops / taken[1],
    }


def _flash_runs(made: list[Tensor]) -> bool:
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            torch.nn.functional.scaled_dot_product_attention(*made, is_causal=True)
    except RuntimeError:
        return False
    return True


def training(bench: Bench) -> Iterator[Callable[[], Row]]:
    """The planner's own choice for each model and precision, with what it predicted."""
    ceiling = matrix_product(bench.device, torch.bfloat16, size=64 if bench.tiny else 8192).flops
    for name, length, batch in (("0.5B", 1024, 32), ("1.5B", 1024, 32), ("7B", 2048, 8)):
        for precision in ("bf16", "fp8"):
            model = MODELS[name] | {"context": length}
            recipe = bench.recipe(model, length, batch, {"precision": precision})
            yield partial(_trained, bench, f"{name}, {precision}", recipe, ceiling)


def lora(bench: Bench) -> Iterator[Callable[[], Row]]:
    ceiling = matrix_product(bench.device, torch.bfloat16, size=64 if bench.tiny else 8192).flops
    model = {"preset": "llama-3-8b"}
    for quantize in ("none", "nf4"):
        adapter = {"rank": 16, "quantize": quantize}
        recipe = bench.recipe(model, 2048, 8, {"precision": "bf16"}, adapter=adapter)
        yield partial(_trained, bench, f"8B, LoRA 16, base {quantize}", recipe, ceiling)


def _trained(bench: Bench, name: str, recipe: Recipe, ceiling: float) -> Row:
    plan = bench.plan(recipe)
    row: Row = {"model": name, "plan": plan.line, "fits": plan.fits}
    if not plan.fits:
        return row
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with join(bench.device.type):
        taken = spread(bench.seconds(bench.run(recipe, plan)))
    median = taken["median_seconds"]
    row |= taken | {
        "predicted_seconds": plan.step.seconds,
        "tokens_per_second": plan.step.tokens / median,
        "model_flops_per_second": plan.step.model_flops / median,
        "share_of_bf16_ceiling": plan.step.model_flops / median / ceiling,
        "predicted_bytes": plan.predicted_allocated(0),
    }
    if bench.device.type == "cuda":
        row["allocated_bytes"] = torch.cuda.max_memory_allocated()
    return row


def cross_entropy(bench: Bench) -> Iterator[Callable[[], Row]]:
    """Output layer and loss of 8,192 tokens, 4,096 wide, 128,256 words, in bf16: forward and backward."""
    for name in FUNCTIONS:
        yield partial(_loss, bench, name)


def _loss(bench: Bench, name: str) -> Row:
    rows, width, vocabulary = (16, 8, 32) if bench.tiny else (8192, 4096, 128_256)
    device, dtype = bench.device, torch.bfloat16
    hidden = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device=device)
    taken = [seconds(FUNCTIONS[name], hidden, weight, labels) for _ in range(bench.untimed)]
    hidden.grad = weight.grad = None
    level = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        level = torch.cuda.memory_allocated()
    taken = [seconds(FUNCTIONS[name], hidden, weight, labels) for _ in range(bench.timed)]
    row = {"function": name} | spread(taken)
    if device.type == "cuda":
        row["bytes_above_inputs"] = torch.cuda.max_memory_allocated() - level
    return row


def offload(bench: Bench) -> Iterator[Callable[[], Row]]:
    yield partial(_offloaded, bench)


def _offloaded(bench: Bench) -> Row:
    """1.5B in bf16 with activations in host memory and on the device: times of both, in turn."""
    recipes = {
        place: bench.recipe(
            MODELS["1.5B"] | {"context": 2048},
            2048,
            4,
            {
                "precision": "bf16",
                "micro_batch_size": 2,
                "offload": place,
                "activation_checkpointing": "none",
            },
        )
        for place in ("none", "activations")
    }
    plans = {place: bench.plan(recipe) for place, recipe in recipes.items()}
    taken: dict[str, list[float]] = {place: [] for place in recipes}
    peaks: dict[str, int] = {}
    with join(bench.device.type):
        for _ in range(1 if bench.tiny else 2):
            for place, recipe in recipes.items():
                if bench.device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                taken[place] += bench.seconds(bench.run(recipe, plans[place]))
                if bench.device.type == "cuda":
                    peaks[place] = torch.cuda.max_memory_allocated()
    medians = {place: statistics.median(times) for place, times in taken.items()}
    return {
        "median_seconds": medians,
        "ratio": medians["activations"] / medians["none"],
        "predicted_ratio": plans["activations"].step.seconds / plans["none"].step.seconds,
        "allocated_bytes": peaks,
    }


def checkpoint(bench: Bench) -> Iterator[Callable[[], Row]]:
    """1.5B in bf16 with AdamW: seconds that training waits for a save."""
    for background in (False, True):
        yield partial(_stall, bench, background)


def _stall(bench: Bench, background: bool) -> Row:
    saves = {"background": background, "keep": 1}
    strategy = {"precision": "bf16", "micro_batch_size": 1}
    recipe = bench.recipe(MODELS["1.5B"] | {"context": 1024}, 1024, 1, strategy, checkpoint=saves)
    plan = bench.plan(recipe)
    stalls, writes = [], []
    with join(bench.device.type), tempfile.TemporaryDirectory() as folder:
        run = bench.run(recipe, plan)
        saver = Saver(run, Path(folder), "")
        for number in range(2):
            plain = bench.seconds(run, repeat=2)
            began = time.perf_counter()
            saver.save(TrainState(number + 1, 0))
            stalls.append(time.perf_counter() - began)
            saver.wait()
            writes.append(time.perf_counter() - began)
        held = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    return {
        "background": background,
        "checkpoint_bytes": held,
        "first_stall_seconds": stalls[0],
        "stall_seconds": stalls[-1],
        "whole_save_seconds": writes[-1],
        "step_seconds": statistics.median(plain),
    }
