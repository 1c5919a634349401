"""The loss without the logits against the loss on whole logits: ``python benchmarks/loss.py``.

Forward and backward pass of the output layer and the cross-entropy, at vocabularies from 32 to 128 thousand, in fp32
and bf16: time of both side by side, interleaved, medians. Exactness and memory are tested
(tests/runtime/test_chunked_cross_entropy.py). Two minutes on two cores. Writes benchmarks/results/loss-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import described, synchronise
from torch import Tensor, nn

from shardwise.runtime.chunked_cross_entropy import linear_cross_entropy_sum
from shardwise.runtime.cross_entropy import cross_entropy_sum

RESULTS = Path(__file__).parent / "results"
VOCABULARIES = (32_000, 50_257, 128_256)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 3


def whole(hidden: Tensor, weight: Tensor, bias: None, labels: Tensor) -> Tensor:
    return cross_entropy_sum(nn.functional.linear(hidden, weight), labels)


def plain(hidden: Tensor, weight: Tensor, bias: None, labels: Tensor) -> Tensor:
    """As most training loops write it."""
    logits = nn.functional.linear(hidden, weight)
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


FUNCTIONS = {"chunked": linear_cross_entropy_sum, "logits": whole, "F.cross_entropy": plain}


def seconds(function: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    hidden.grad = weight.grad = None
    synchronise(hidden.device)
    start = time.perf_counter()
    (function(hidden, weight, None, labels) / len(labels)).backward()
    synchronise(hidden.device)
    return time.perf_counter() - start


def compared(vocab: int, dtype: torch.dtype, rows: int, width: int, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (rows,), device=device)
    for function in FUNCTIONS.values():
        seconds(function, hidden, weight, labels)
    taken: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    for _ in range(ROUNDS):
        for name, function in FUNCTIONS.items():
            taken[name].append(seconds(function, hidden, weight, labels))
    return {name: statistics.median(times) for name, times in taken.items()}


def table(rows: list[dict[str, Any]], tokens: int, width: int) -> str:
    """What the documentation shows."""
    head = f"| {tokens} tokens of width {width} | " + " | ".join(FUNCTIONS)
    head += " | chunked is faster than logits | than F.cross_entropy |"
    lines = [head, "|---|" + "---:|" * (len(FUNCTIONS) + 2)]
    for row in rows:
        times = " | ".join(f"{row['seconds'][name]:.2f} s" for name in FUNCTIONS)
        chunked = row["seconds"]["chunked"]
        ratios = " | ".join(
            f"{row['seconds'][name] / chunked:.2f} ×" for name in ("logits", "F.cross_entropy")
        )
        lines.append(f"| {row['dtype']}, {row['vocabulary']:,} | {times} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, dtype in DTYPES.items():
        for vocab in VOCABULARIES:
            found = compared(vocab, dtype, asked.rows, asked.width, torch.device(asked.device))
            rows.append({"dtype": name, "vocabulary": vocab, "seconds": found})
            print(name, vocab, found, flush=True)
    size = {"rows": asked.rows, "width": asked.width}
    result = {"machine": described(), **size, "measured": rows, "table": table(rows, asked.rows, asked.width)}
    (RESULTS / f"loss-{asked.device}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
