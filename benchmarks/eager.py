"""A training step of one process against the same model in plain PyTorch, interleaved.

``python benchmarks/eager.py [--precision bf16] [--compile block] [--rounds N]`` prints the medians of wall and user CPU
seconds per step, and their ratios. ``--profile`` prints the operations of Shardwise's step by self CPU time. Plain
PyTorch is the same decoder with fused AdamW, clipping and ``F.cross_entropy``; in bf16 under autocast, with fp32
weights. Run it alone on the machine: two processes on one memory bus disturb each other.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.launch.process import join
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from

MODEL = {"layers": 6, "width": 256, "heads": 4, "kv_heads": 4, "ffn": 704, "vocab": 4096}
SEQUENCES, LENGTH = 8, 256
WARM_UP = 4
RATE = 1e-4

Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", default="none")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    tokens = torch.randint(MODEL["vocab"], (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    with join("cpu"):
        ours = shardwise(given.precision, given.compile, tokens)
        plain = plain_pytorch(given.precision, tokens)
        for _ in range(WARM_UP):
            ours(), plain()
        if given.profile:
            profile(ours)
        report({"shardwise": ours, "plain PyTorch": plain}, given.rounds)


def shardwise(precision: str, compiled: str, tokens: torch.Tensor) -> Step:
    recipe = recipe_of(
        {"model": MODEL, "data": {"sequence_length": LENGTH}, "steps": 1, "batch_size": SEQUENCES}, SETTINGS
    )
    asked = {"precision": precision, "compile": compiled, "micro_batch_size": SEQUENCES}
    run = build(recipe, blueprint_of(recipe), strategy_from(asked), torch.device("cpu"))
    batch = {"input_ids": tokens, "labels": tokens}
    return lambda: step(run, [batch], RATE)


def plain_pytorch(precision: str, tokens: torch.Tensor) -> Step:
    recipe = recipe_of(
        {"model": MODEL, "data": {"sequence_length": LENGTH}, "steps": 1, "batch_size": SEQUENCES}
    )
    model = blueprint_of(recipe).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def one() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens)
        F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return one


def report(steps: dict[str, Step], rounds: int) -> None:
    wall: dict[str, list[float]] = {name: [] for name in steps}
    user: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, one in steps.items():
            began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
            one()
            wall[name].append(time.perf_counter() - began)
            user[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - used)
    first, second = steps
    for name in steps:
        print(
            f"{name:14} {statistics.median(wall[name]) * 1e3:7.1f} ms wall"
            f" {statistics.median(user[name]) * 1e3:7.1f} ms user,"
            f" {SEQUENCES * LENGTH / statistics.median(wall[name]):,.0f} tokens/s"
        )
    ratios = [mine / other for mine, other in zip(wall[first], wall[second], strict=True)]
    print(f"{first} takes {statistics.median(ratios):.3f} of the time of {second} (median of pairs)")


def profile(one: Step) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            one()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


if __name__ == "__main__":
    main()
