"""Where the time of training steps goes on a device, from the kernels of a trace of torch.profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

KINDS: Mapping[str, tuple[str, ...]] = {
    "collectives": ("nccl",),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "optimizer": ("multi_tensor", "adam"),
}
"""Parts of kernels' names, by the kind of work; the first that matches counts. Attention comes before products,
because kernels of attention are built from the templates of products."""
MEMORY_BOUND, COPIES, IDLE = "memory-bound kernels", "copies", "idle"
_ON_DEVICE = {"kernel": "", "gpu_memcpy": COPIES, "gpu_memset": COPIES}
SHOWN = 5


def kind_of(kernel: str) -> str:
    """The kind of work of a kernel: whatever is no product, attention, optimizer or collective is bound by memory."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), MEMORY_BOUND)


def breakdown(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any] | None:
    """Milliseconds of one step by kind, idle time, launches, and the largest items that are no products.

    Idle is the time from the first kernel's start to the last one's end in which no kernel runs. The kinds' sum exceeds
    the step where streams overlap. None without kernels.

    Args:
        events: complete events of a Chrome trace (``ph: X``); ``ts`` and ``dur`` are microseconds.
        steps: number of steps that the trace has, without a wait between them.
    """
    work = sorted((e for e in events if e.get("cat") in _ON_DEVICE), key=lambda e: e["ts"])
    if not work:
        return None
    kinds, names = Counter[str](), Counter[str]()
    for event in work:
        kind = _ON_DEVICE[event["cat"]] or kind_of(event["name"])
        kinds[kind] += event["dur"] / 1e3 / steps
        names[event["name"]] += event["dur"] / 1e3 / steps
    kinds[IDLE] = idle_time(work) / 1e3 / steps
    last = max(e["ts"] + e["dur"] for e in work)
    others = Counter({name: spent for name, spent in names.items() if kind_of(name) != "products"})
    others[IDLE] = kinds[IDLE]
    return {
        "milliseconds": {kind: round(spent, 3) for kind, spent in kinds.most_common()},
        "step_milliseconds": round((last - work[0]["ts"]) / 1e3 / steps, 3),
        "launches": sum(e["cat"] == "kernel" for e in work) / steps,
        "largest_others": [[name[:120], round(spent, 3)] for name, spent in others.most_common(SHOWN)],
    }


def idle_time(work: Sequence[Mapping[str, Any]]) -> float:
    """Microseconds between the first start and the last end in which none of the events runs; sorted by start."""
    idle, end = 0.0, work[0]["ts"]
    for event in work:
        idle += max(0.0, event["ts"] - end)
        end = max(end, event["ts"] + event["dur"])
    return float(idle)
