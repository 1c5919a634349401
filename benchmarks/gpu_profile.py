"""Some steps under torch.profiler: the fastest rung of the ladder, and compiled plain PyTorch.

The largest item that is no product is the next thing to work on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from gpu_bench import Bench, Task, one
from gpu_contenders import Contender, attention
from gpu_ladder import LARGE, SMALL, best
from gpu_peers import peers
from gpu_store import Row
from gpu_trace import breakdown
from peer_profiles import read
from torch.profiler import ProfilerActivity

from shardwise.launch.process import join
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS

STEPS = 3


def profile(bench: Bench) -> Iterator[Task]:
    for work in (SMALL, LARGE):
        fastest = best(bench, work)
        plain = [
            each for each in peers(bench, work.label(), work.values(bench, {})) if "compile" in each.name
        ]
        yield one(f"{work.label()}: the fastest rung", partial(_profiled, bench, fastest), 45.0)
        for peer in plain:
            yield one(peer.name, partial(_profiled, bench, peer), 45.0)


def _profiled(bench: Bench, contender: Contender) -> Row:
    recipe = recipe_of(contender.recipe, SETTINGS)
    if contender.own:
        bench.pinned(recipe)
    torch.compiler.reset()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.capacity else [])]
    with (
        join(bench.device.type),
        attention(contender.attention),
        contender.build() as times,
        tempfile.TemporaryDirectory() as folder,
    ):
        times(bench.untimed)
        unprofiled = times(STEPS)
        with torch.profiler.profile(activities=activities) as profiler:
            times(STEPS)
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [
            e for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if e.get("ph") == "X"
        ]
        found = breakdown(events, STEPS) or {
            "milliseconds": {kind: 1e3 * spent / STEPS for kind, spent in read(path).items()}
        }
    return {"trained": contender.name, "unprofiled_milliseconds": 1e3 * unprofiled, **found}
