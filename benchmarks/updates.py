"""How fast the optimizers' rules update weights: ``python benchmarks/updates.py``.

One matrix of 11.5 million weights, as AdamW's rules update it: torch's fused kernel in fp32, and the rules that go
through it in chunks, for weights in bf16 alone and for 8-bit moments. Each with freed memory kept for reuse, as most of
a run goes, and returned to the system at once, as in the first steps, where the peak is measured (trainer/meter.py).
Also, the search among the codes' borders that the table of 8-bit moments stands for. Side by side, interleaved,
medians. A minute on two cores. Writes benchmarks/results/updates-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import described, synchronise
from torch import Tensor, nn

from shardwise.engine.optim import build_optimizer
from shardwise.engine.optim.moment_storage import DynamicCode, code_values
from shardwise.recipe.sections import OptimizerSpec
from shardwise.trainer.meter import return_large_frees

RESULTS = Path(__file__).parent / "results"
SHAPE, ROUNDS = (5632, 2048), 7
CASES = {
    "fp32, adamw": (torch.float32, "adamw"),
    "bf16 weights alone, adamw": (torch.bfloat16, "adamw"),
    "fp32, adamw_8bit": (torch.float32, "adamw_8bit"),
    "bf16 weights alone, adamw_8bit": (torch.bfloat16, "adamw_8bit"),
}


def update_of(dtype: torch.dtype, name: str, device: torch.device) -> Callable[[], object]:
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False, device=device, dtype=dtype)
    model.weight.grad = torch.randn_like(model.weight)
    optimizer = build_optimizer(model, OptimizerSpec(name=name))
    optimizer.learning_rate = 1e-3
    applied = torch.zeros((), device=device)
    return lambda: optimizer.step(applied)


def searches(device: torch.device) -> dict[str, Callable[[], object]]:
    """The codes of as many values in [-1, 1], by the table and by a search among the borders."""
    values, code = torch.tensor(code_values(signed=True), device=device), DynamicCode(True, device)
    borders, unit = (values[:-1] + values[1:]) / 2, 2 * torch.rand(SHAPE, device=device) - 1

    def search() -> Tensor:
        return torch.bucketize(unit, borders, out_int32=True).to(torch.uint8)

    assert torch.equal(search(), code.encoded(unit))
    return {"search": search, "table": lambda: code.encoded(unit)}


def seconds(function: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - start


def compared(functions: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median seconds of each, taken in turn, the first round not counted."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(1 + ROUNDS):
        for name, function in functions.items():
            taken[name].append(seconds(function, device))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def table(kept: dict[str, float], returned: dict[str, float], codes: dict[str, float], weights: int) -> str:
    lines = ["| million weights a second | a run | while its peak is measured |", "|---|---:|---:|"]
    for name, taken in kept.items():
        lines.append(f"| {name} | {weights / taken / 1e6:.0f} | {weights / returned[name] / 1e6:.0f} |")
    search, found = (1e9 * codes[name] / weights for name in ("search", "table"))
    lines += ["", f"A code takes {found:.1f} ns by the table, {search:.1f} ns by a search among the borders."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.manual_seed(0)
    updates = {name: update_of(*case, device) for name, case in CASES.items()}
    measured: list[dict[str, float]] = []
    for enabled in (True, False):
        return_large_frees(enabled)
        measured.append(compared(updates, device))
    [returned, kept], codes = measured, compared(searches(device), device)
    weights = SHAPE[0] * SHAPE[1]
    result: dict[str, Any] = {
        "machine": described(),
        "weights": weights,
        "seconds": {"kept": kept, "returned": returned, "codes": codes},
        "table": table(kept, returned, codes, weights),
    }
    print(result["table"])
    out = RESULTS / f"updates-{device.type}.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
