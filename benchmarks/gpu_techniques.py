"""Techniques and objectives at size: what the ladder does not train. Each row has a plain one to compare with.

contenders       offload, 8-bit AdamW, the largest models and longest rows, a mixture of experts, DPO; in turn
checkpoint       how long training waits for a save of 1.5B, in the foreground and in the background
planner's choice the strategy that the planner chooses for 0.5B, 1.5B and 7B, and for LoRA of 8B
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Task, one, spread
from gpu_contenders import Contender, Steps, seconds_of, shardwise, task
from gpu_ladder import ADAPTER, BF16_ALONE, LARGE, MODELS, PLAIN, SMALL, Work
from gpu_store import Row

from shardwise.checkpoint.saver import Saver
from shardwise.data import open_data
from shardwise.engine.step import step
from shardwise.engine.train_state import TrainState
from shardwise.launch.process import join
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from shardwise.trainer.batches import RankBatches

LONG = Work("0.5B", MODELS["0.5B"], 1, 32_768, 30.0)
MIXTURE = Work(
    "1.4B mixture of 32 experts, 4 for a token",
    {
        "layers": 16, "width": 1024, "heads": 16, "kv_heads": 4, "ffn": 768, "vocab": 50304, "experts": 32,
        "experts_per_token": 4, "expert_ffn": 768, "balance_loss": 0.01,
    },
    4,
    2048,
    30.0,
)  # fmt: skip
PAIRS = Work("0.5B", MODELS["0.5B"], 8, 512, 30.0)
COMPILED: Mapping[str, Any] = {"compile": "block", "loss": "chunked"}
IN_BACKWARD: Mapping[str, Any] = {"optimizer_in_backward": True, "loss": "chunked"}


EIGHT: Mapping[str, Any] = {"name": "adamw_8bit"}


def techniques(bench: Bench) -> Iterator[Task]:
    """Rows of small risk first; those that fill the memory last."""
    yield task(bench, with_and_without(bench), SMALL.seconds)
    for background in (False, True):
        name = f"checkpoint of 1.5B, {'background' if background else 'foreground'}"
        yield one(name, partial(_stall, bench, background), 30.0)
    for contender in large(bench):
        yield task(bench, [contender], LARGE.seconds)
    yield from _choices(bench)


def with_and_without(bench: Bench) -> list[Contender]:
    """1.5B with a technique, and without any."""
    return [
        _row(bench, SMALL, "plain", {}),
        _row(bench, SMALL, "offload: activations", {"offload": "activations"}),
        _row(bench, SMALL, "offload: optimizer", {"offload": "optimizer"}),
        _row(bench, SMALL, "8-bit AdamW", {}, optimizer=EIGHT),
        _row(bench, SMALL, "selective recomputation", {"activation_checkpointing": "selective"}),
        _row(bench, SMALL, "full recomputation", {"activation_checkpointing": "full"}),
    ]


def large(bench: Bench) -> list[Contender]:
    """Experts, preferences, long rows, and 7B in little memory; each alone."""
    return [
        _row(bench, MIXTURE, "plain", {}),
        _preferences(bench),
        _row(bench, LONG, "chunked loss, compiled", COMPILED),
        _row(bench, LARGE, "8-bit AdamW, bf16 alone", BF16_ALONE, optimizer=EIGHT),
        _row(bench, LARGE, "8-bit AdamW in backward", IN_BACKWARD, optimizer={**EIGHT, "clip_norm": None}),
    ]


def _row(bench: Bench, work: Work, name: str, settings: Mapping[str, Any], **more: Any) -> Contender:
    return shardwise(bench, f"{work.label()}: {name}", work.values(bench, settings, **more))


def _preferences(bench: Bench) -> Contender:
    """DPO of an adapter; its reference is the model without the adapter."""
    data = {"source": "pairs.jsonl"}
    values = PAIRS.values(bench, {}, objective={"name": "dpo"}, adapter=dict(ADAPTER), data=data)
    length = values["data"]["sequence_length"]

    @contextmanager
    def build() -> Iterator[Steps]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pairs.jsonl"
            _write_pairs(path, length)
            recipe = recipe_of(values | {"data": values["data"] | {"source": str(path)}}, SETTINGS)
            run = bench.run(recipe, bench.pinned(recipe))
            batches, numbers = RankBatches(open_data(recipe), run), count()
            yield partial(seconds_of, bench.device, lambda: step(run, batches.at(next(numbers)), 1e-5))

    return Contender(f"DPO with LoRA, {PAIRS.label()}", build, values, {"unit": "tokens of a side"})


def _write_pairs(path: Path, length: int) -> None:
    """Pairs of random letters that fill a row; a byte is a token."""
    chance = random.Random(0)

    def letters(share: float) -> str:
        return "".join(chance.choices("abcdefgh ", k=max(1, int(share * length) - 2)))

    rows = [{"prompt": letters(0.5), "chosen": letters(0.5), "rejected": letters(0.5)} for _ in range(64)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def _choices(bench: Bench) -> Iterator[Task]:
    """What the planner chooses, with what it predicts."""
    for name, length, batch in (("0.5B", 1024, 32), ("1.5B", 1024, 32), ("7B", 2048, 8)):
        for precision in ("bf16", "fp8"):
            model = MODELS[name] | {"context": length}
            recipe = bench.recipe(model, length, batch, {"precision": precision})
            yield one(choice(name, precision, batch, length), partial(_chosen, bench, recipe), 45.0)
    for quantize in ("none", "nf4"):
        adapter = ADAPTER | {"quantize": quantize}
        recipe = bench.recipe({"preset": "llama-3-8b"}, 2048, 8, {"precision": "bf16"}, adapter=adapter)
        name = choice(f"8B, LoRA, base {quantize}", "bf16", 8, 2048)
        yield one(name, partial(_chosen, bench, recipe), 60.0)


def choice(model: str, precision: str, batch: int, length: int) -> str:
    """The name of a row whose strategy is the planner's."""
    return f"{model}, {precision}, {batch} × {length:,}: the planner's choice"


def _chosen(bench: Bench, recipe: Recipe) -> Row:
    plan = bench.plan(recipe)
    if not plan.fits:
        return {"reason": f"does not fit: {plan.line}"}
    ceiling = bench.product_flops()
    if bench.capacity:
        torch.cuda.reset_peak_memory_stats()
    with join(bench.device.type):
        taken = spread(bench.seconds(bench.run(recipe, plan.strategy)))
    median = taken["median_seconds"]
    row = taken | {
        "plan": plan.line,
        "predicted_seconds": plan.step.seconds,
        "tokens_per_second": plan.step.tokens / median,
        "model_flops_per_second": plan.step.model_flops / median,
        "product_flops": ceiling,
        "share_of_bf16_ceiling": plan.step.model_flops / median / ceiling,
        "predicted_bytes": plan.predicted_allocated(0),
    }
    if bench.capacity:
        row["allocated_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return row


def _stall(bench: Bench, background: bool) -> Row:
    """Seconds that training waits for a save: the second one, since the first makes the buffers."""
    saves = {"background": background, "keep": 1}
    strategy = {**PLAIN, "micro_batch_size": 1}
    recipe = bench.recipe(MODELS["1.5B"] | {"context": 1024}, 1024, 1, strategy, checkpoint=saves)
    stalls, writes = [], []
    with join(bench.device.type), tempfile.TemporaryDirectory() as folder:
        run = bench.run(recipe, bench.pinned(recipe))
        saver = Saver(run, Path(folder), "")
        for number in range(2):
            plain = bench.seconds(run, repeat=2)
            began = time.perf_counter()
            saver.save(TrainState(number + 1, 0))
            stalls.append(time.perf_counter() - began)
            saver.wait()
            writes.append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    return {
        "checkpoint_bytes": size,
        "first_stall_seconds": stalls[0],
        "stall_seconds": stalls[-1],
        "whole_save_seconds": writes[-1],
        "step_seconds": statistics.median(plain),
    }
