"""How long training waits for a checkpoint, in the foreground and in the background.

``python benchmarks/checkpoint_stall.py``: one process and two with ZeRO 3, a decoder of 44 million weights in fp32 with
AdamW. Saves alternate between ``checkpoint.background`` false and true, with steps between them; medians. Three minutes
on two cores. Writes benchmarks/results/checkpoint-stall-<device>.json.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import described
from torch.multiprocessing import spawn

from shardwise.checkpoint.saver import Saver
from shardwise.engine.build import build
from shardwise.engine.run import Run
from shardwise.engine.step import step
from shardwise.engine.train_state import TrainState
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import strategy_from

RESULTS = Path(__file__).parent / "results"
MODEL = {"layers": 8, "width": 640, "heads": 10, "ffn": 1728, "vocab": 8192, "context": 256}
ROUNDS = 7


def made(background: bool) -> Run:
    recipe = recipe_of(
        {"model": MODEL, "steps": 1000, "batch_size": 2, "checkpoint": {"background": background, "keep": 1}}
    )
    strategy = strategy_from({"zero_stage": 3 if dist.get_world_size() > 1 else 0, "micro_batch_size": 1})
    return build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))


def stepped(run: Run) -> float:
    """Seconds of one step of one sequence on each rank."""
    tokens = torch.randint(0, 8192, (1, 128))
    began = time.perf_counter()
    step(run, [{"input_ids": tokens, "labels": tokens}], 1e-4)
    return time.perf_counter() - began


def rank_main(rank: int, ranks: int, port: int, folder: str, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    kinds = {False: "foreground", True: "background"}
    runs = {background: made(background) for background in kinds}
    savers = {b: Saver(run, Path(folder) / kinds[b], "") for b, run in runs.items()}
    stalls: dict[str, list[float]] = {name: [] for name in kinds.values()}
    writes, plain, during = [], [], []
    for number in range(ROUNDS + 1):
        for background, run in runs.items():
            plain.append(stepped(run))
            dist.barrier()
            began = time.perf_counter()
            savers[background].save(TrainState(number + 1, 0))
            stall = time.perf_counter() - began
            if background:
                during.append(stepped(run))
                savers[background].wait()
                writes.append(time.perf_counter() - began)
            if number:  # the first save of each touches memory
                stalls[kinds[background]].append(stall)
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in stalls.items()}
        files = sum(f.stat().st_size for f in (Path(folder) / "foreground").rglob("*.safetensors"))
        found.put(
            {
                "ranks": ranks,
                "checkpoint_bytes": files,
                "stall_seconds": medians,
                "ratio": medians["background"] / medians["foreground"],
                "background_write_seconds": statistics.median(writes[1:]),
                "step_seconds": {"alone": statistics.median(plain), "during": statistics.median(during)},
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def measured(ranks: int, port: int) -> dict[str, Any]:
    folder = tempfile.mkdtemp(dir=".")
    found = torch.multiprocessing.get_context("spawn").SimpleQueue()
    try:
        spawn(rank_main, (ranks, port, folder, found), nprocs=ranks)
    finally:
        shutil.rmtree(folder)
    return dict(found.get())


def main() -> None:
    rows = [measured(ranks, 29700 + ranks) for ranks in (1, 2)]
    for row in rows:
        print(json.dumps(row))
    path = RESULTS / "checkpoint-stall-cpu.json"
    path.write_text(json.dumps({"machine": described(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
