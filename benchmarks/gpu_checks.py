"""Is it right on this device: techniques against one plain process, a run that is killed, and memory as planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_bench import TINY, Bench, Task, one
from gpu_ladder import PLAIN
from gpu_store import Row

from shardwise.core.strategy import Strategy
from shardwise.launch.process import join
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import ORDER, SETTINGS, broken_rules, strategy_from
from shardwise.trainer.meter import MemoryMeter
from shardwise.trainer.warm_up import warm_kernels
from shardwise.verifier.plain_runs import run_plain
from shardwise.verifier.verify import exactly, rounds_more, run_reference, run_verification

ROOT = Path(__file__).parents[1]
STEPS = 20
SMALL = {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 256, "context": 128}
_HELD = {"precision": "fp64", "micro_batch_size": 2}
"""What a value is tried with where it is exact."""
_OF_SEVERAL = ("pipeline_", "tensor_", "sequence_")
"""Settings that change nothing on one device."""


def parity(bench: Bench) -> Iterator[Task]:
    """A row for each value of each setting that one device can take, in fp64; fewer bits as ``verify`` judges them.

    Values that were never checked on this kind of device come first, and a killed run before those that were.
    """
    recipe = recipe_of(
        {
            "model": TINY if bench.tiny else SMALL,
            "data": {"sequence_length": 32},
            "steps": 2 if bench.tiny else STEPS,
            "batch_size": 4,
        },
        SETTINGS,
    )
    tasks = [
        *(
            one(name, partial(_verified, recipe, strategy, bench.device), 12.0)
            for name, strategy in values(recipe)
        ),
        one(KILLED, partial(killed_and_resumed, bench), 60.0),
    ]
    yield from sorted(tasks, key=lambda task: bench.last("parity", task.names[0]) is not None)


def values(recipe: Recipe) -> Iterator[tuple[str, Strategy]]:
    """Each setting's values, with the others at their defaults, as far as one device can take them."""
    for technique in ORDER:
        for setting in technique.settings:
            if setting.key.startswith(_OF_SEVERAL):
                continue
            for value in setting.examples:
                for held in (_HELD, {"micro_batch_size": 2, "precision": "fp8"}, {"micro_batch_size": 2}):
                    strategy = strategy_from(held | {setting.key: value})
                    if not any(broken_rules(strategy, 1, recipe)):
                        yield f"{setting.key}: {value}", strategy
                        break


def _verified(recipe: Recipe, strategy: Strategy, device: torch.device) -> Row:
    with join(device.type), tempfile.TemporaryDirectory() as folder:
        plain = strategy
        if rounds_more(recipe, strategy):
            run_plain(recipe, strategy, Path(folder), device)
            _, plain, _ = exactly(recipe, strategy)
        run_reference(recipe, plain, Path(folder))
        verdict = run_verification(recipe, strategy, Path(folder), device)
    return {
        "passed": verdict.passed,
        "loss": verdict.max_loss_difference,
        "gradient_norm": verdict.max_gradient_norm_difference,
        "parameters": verdict.max_parameter_difference,
        "precision": verdict.precision,
    }


KILLED = "a run that is killed and resumed"
LIMIT = 240.0
"""Seconds after which a command of that row is given up."""
_ENVIRONMENT = os.environ | {"SHARDWISE_MEASURE": "0"}
"""Its plans measure nothing first."""


def killed_and_resumed(bench: Bench) -> Row:
    """``shardwise train`` is killed between two checkpoints and started again: every line as of an unbroken run.

    In fp64, where attention is computed by kernels whose sums have one order.
    """
    steps, every = (12, 4) if bench.tiny else (40, 10)
    values = bench.values(
        SMALL,
        64,
        4,
        {**PLAIN, "precision": "fp64", "micro_batch_size": 2},
        checkpoint={"every": every, "keep": 2},
    ) | {"steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        _train(recipe, whole)
        at = _killed(recipe, broken, every + 1)
        _train(recipe, broken)
        pairs = list(zip(_curve(whole), _curve(broken), strict=True))
    return {
        "killed_after_step": at,
        "steps": len(pairs),
        "passed": at < steps and all(one == other for one, other in pairs),
        "first_difference": next((one[0] for one, other in pairs if one != other), None),
    }


def _command(recipe: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "shardwise", "train", str(recipe), "--out", str(out)]


def _train(recipe: Path, out: Path) -> None:
    """Raises RuntimeError with the last line that a failing run says."""
    done = subprocess.run(
        _command(recipe, out), cwd=ROOT, env=_ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])


def _killed(recipe: Path, out: Path, lines: int) -> int:
    """Start a run and kill it when it has written so many lines of metrics; how many it has written in the end."""
    metrics = out / "metrics.jsonl"
    run = subprocess.Popen(
        _command(recipe, out),
        cwd=ROOT,
        env=_ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + LIMIT

    def written() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    while run.poll() is None and written() < lines and time.monotonic() < end:
        time.sleep(0.005)
    run.kill()
    run.wait()
    return written()


def _curve(out: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every line."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


MODELS: dict[str, dict[str, Any]] = {
    "150M": {"layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "ffn": 3072, "vocab": 32768},
    "400M": {"layers": 24, "width": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 50304},
    "gpt2 124M": {"family": "gpt2", "layers": 12, "width": 768, "heads": 12, "ffn": 3072, "vocab": 50257},
}
CONFIGURATIONS: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("150M", 1024, 4, {"precision": "fp32"}),
    ("150M", 1024, 8, {"precision": "bf16"}),
    ("150M", 1024, 8, {"precision": "bf16", "master_weights": False}),
    ("150M", 1024, 8, {"precision": "fp16"}),
    ("150M", 1024, 8, {"precision": "fp8"}),
    ("150M", 1024, 8, {"precision": "bf16", "loss": "logits"}),
    ("150M", 1024, 8, {"precision": "bf16", "activation_checkpointing": "full"}),
    ("150M", 1024, 8, {"precision": "bf16", "activation_checkpointing": "selective"}),
    ("150M", 1024, 8, {"precision": "bf16", "activation_checkpointing": "every:2"}),
    ("150M", 1024, 8, {"precision": "bf16", "activation_checkpointing": "budget:0.5"}),
    ("150M", 1024, 8, {"precision": "bf16", "offload": "activations"}),
    ("150M", 1024, 8, {"precision": "bf16", "offload": "optimizer"}),
    ("150M", 1024, 8, {"precision": "bf16", "zero_stage": 3}),
    ("400M", 2048, 2, {"precision": "bf16"}),
    ("400M", 2048, 4, {"precision": "bf16", "activation_checkpointing": "full"}),
    ("400M", 2048, 4, {"precision": "bf16", "zero_stage": 2}),
    ("400M", 4096, 1, {"precision": "bf16"}),
    ("gpt2 124M", 1024, 8, {"precision": "bf16"}),
    ("gpt2 124M", 512, 16, {"precision": "bf16", "loss": "logits"}),
    ("gpt2 124M", 1024, 4, {"precision": "fp32", "activation_checkpointing": "full"}),
)


def memory(bench: Bench) -> Iterator[Task]:
    """A row for each configuration: two micro-batches a step, three steps."""
    for each in CONFIGURATIONS[: 2 if bench.tiny else None]:
        yield one(configuration(*each), partial(_peaks, bench, *each), 10.0)


def configuration(model: str, length: int, micro: int, settings: dict[str, Any]) -> str:
    """The name of a row."""
    return f"{model}, {micro} × {length}, {', '.join(f'{key} {value}' for key, value in settings.items())}"


def _peaks(bench: Bench, model: str, length: int, micro: int, settings: dict[str, Any]) -> Row:
    micro = 1 if bench.tiny else micro
    dimensions = MODELS[model] | {"context": length}
    recipe = bench.recipe(dimensions, length, 2 * micro, settings | {"micro_batch_size": micro})
    plan = bench.plan(recipe)
    with join(bench.device.type):
        warm_kernels(bench.device, plan.strategy)
        meter = MemoryMeter(bench.device)
        bench.seconds(bench.run(recipe, plan.strategy), repeat=2)
        meter.sample()
    predicted = plan.predicted_allocated(0)
    row: Row = {
        "predicted_bytes": predicted,
        "allocated_bytes": meter.peak.allocated,
        "error": predicted / meter.peak.allocated - 1 if meter.peak.allocated else None,
    }
    if meter.peak.reserved:
        fragmentation = plan.ledger.fragmentation
        reserved = predicted + fragmentation
        row |= {"reserved_bytes": meter.peak.reserved, "reserved_error": reserved / meter.peak.reserved - 1}
    return row
