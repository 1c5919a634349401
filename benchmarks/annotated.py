"""Predicted against annotated memory and seconds of example scripts: ``python benchmarks/annotated.py``.

The authors of ms-swift wrote the memory and the seconds of an example script into its head.
benchmarks/data/annotated_runs.csv has the scripts that a recipe can express. benchmarks/data/README.md lists the
others and the assumptions. Annotations are rounded, and their versions unknown: a row is worth a band, not a percent.

``held_bytes`` of a run with a reference has the two bytes of its frozen copy.

The models are folders with a config.json of the published dimensions. The plan has all settings of a row pinned. What
the row's software holds otherwise is put in its place:
  - without Liger kernels, transformers converts all logits to fp32 (practised.py);
  - Megatron keeps its weights in bf16 and gradients in fp32 on every rank, and shards the rest. A run of transformers
    alone keeps all in bf16. ``held_bytes`` and ``sharded_bytes`` are those of one parameter.

Compared is what PyTorch's allocator reserves, as ms-swift prints ``torch.cuda.max_memory_reserved``. Writes
benchmarks/results/annotated-runs.json, from which `make docs` fills docs/reference/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from machine import described
from practised import LOSSES, practised
from published import DATA, lines
from stacks import Practice

from shardwise.core.plan import Plan
from shardwise.core.units import GiB
from shardwise.hardware.allocator_options import VARIABLES
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from

ROWS = "annotated_runs.csv"
DIMENSIONS: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}
"""Of the native decoder, and of a config.json."""
RESULTS = Path(__file__).parent / "results" / "annotated-runs.json"


def model_of(row: Mapping[str, str]) -> dict[str, Any]:
    """``model:`` of a recipe: transformers' own class, or for Megatron's the native decoder, without Qwen2.5's biases.

    Blocks of transformers cannot shard their norms over the sequence.
    """
    folder = DATA / "models" / row["model"]
    if row["software"] != "Megatron":
        return {"hf": str(folder)}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {
        "family": {"qwen2": "llama", "qwen3": "qwen3"}[config["model_type"]],
        **{own: config[theirs] for own, theirs in DIMENSIONS.items()},
        **({"head_dim": config["head_dim"]} if "head_dim" in config else {}),
    }


def packed_pairs(folder: Path, length: int) -> dict[str, Any]:
    """``data:`` of a recipe with pairs of preferences of 4,000 bytes, which fill packed sequences."""
    source = folder / "pairs.jsonl"
    pairs = [{"prompt": f"{number} ", "chosen": "a" * 2000, "rejected": "b" * 2000} for number in range(64)]
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return {"sequence_length": length, "source": str(source), "format": "preference", "packing": True}


def recipe_for(row: Mapping[str, str], folder: str) -> Recipe:
    """The recipe of a row, with every setting pinned. Its data is written in ``folder``."""
    tensor, loss = int(row["tensor"]), row["loss"]
    length = int(row["sequence_length"])
    settings: dict[str, Any] = {
        "precision": "bf16",
        "zero_stage": int(row["zero_stage"]),
        "tensor_parallel": tensor,
        "tensor_sequence_parallel": "gathered" if tensor > 1 else "none",
        "micro_batch_size": int(row["micro_batch"]),
        "activation_checkpointing": row["recomputation"],
        "loss": "logits" if loss in LOSSES else loss,
    }
    if row["other"]:
        key, value = row["other"].split(": ")
        settings[key] = False if value == "false" else value
    if row["objective"]:
        settings["reference"] = "copy"
    rank = row["adapter_rank"]
    adapter = {"adapter": {"rank": int(rank), "alpha": 32.0, "targets": "all"}} if rank else {}
    values = {
        "model": model_of(row),
        "data": packed_pairs(Path(folder), length) if row["objective"] else {"sequence_length": length},
        "steps": 2,
        "batch_size": int(row["batch"]),
        "cluster": {"device": row["device"], "devices_per_node": int(row["devices"])},
        "strategy": dict(strategy_from(settings).values),
        **adapter,
        **({"objective": row["objective"]} if row["objective"] else {}),
    }
    return recipe_of(values, SETTINGS)


def reserved_bytes(plan: Plan, cluster: Cluster, row: Mapping[str, str]) -> int:
    """What the allocator reserves, with the states of the row's software."""
    ledger, overhead = plan.ledger, cluster.device.overhead
    reserved = plan.peak.bytes - (ledger.overhead - overhead.workspace_bytes)
    if not row["held_bytes"]:
        return reserved
    parameters = plan.parameters / int(row["tensor"])
    data = cluster.world_size // int(row["tensor"])
    states = int(row["held_bytes"]) + int(row["sharded_bytes"]) / data
    own = ledger.parameters + ledger.master_weights + ledger.gradients + ledger.optimizer_state
    return reserved - own + int(parameters * states)


def predicted(row: Mapping[str, str]) -> dict[str, Any]:
    """GiB and seconds of a step."""
    practice = Practice(loss=row["loss"] if row["loss"] in LOSSES else "")
    allocator = f"expandable_segments:{row['expandable_segments'] == 'yes'}"
    with (
        practised(practice),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"SHARDWISE_CACHE": folder, VARIABLES[0]: allocator}),
    ):
        recipe = recipe_for(row, folder)
        cluster = cluster_of(recipe.cluster)
        plan = make_plan(recipe, cluster)
    return {
        "gib": round(reserved_bytes(plan, cluster, row) / GiB, 2),
        "seconds": round(plan.step.seconds, 2),
        "strategy": plan.line,
        "ledger": {name: round(size / GiB, 2) for name, size in plan.ledger.as_dict().items() if size},
    }


def made(only: str) -> Iterator[dict[str, Any]]:
    """Every row with its prediction; ``only`` those whose file's name contains it."""
    for row in lines(ROWS):
        if only in row["file"]:
            found = {**row, "predicted": predicted(row)}
            print(row["file"], row["annotated_gib"], found["predicted"], file=sys.stderr, flush=True)
            yield found


def errors(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Predicted over annotated less one: of memory and of seconds."""
    memory = [row["predicted"]["gib"] / float(row["annotated_gib"]) - 1 for row in rows]
    timed = [row for row in rows if row["annotated_seconds"]]
    seconds = [row["predicted"]["seconds"] / float(row["annotated_seconds"]) - 1 for row in timed]
    return memory, seconds


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown, and their median errors."""
    head = "| script | software | model, devices | length | GiB annotated | predicted | | s annotated | predicted | |"
    text = [head, "|---|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        assumed = "" if row["device_is_stated"] == "yes" else " (assumed)"
        how = ", ".join(filter(None, [row["software"], row["notes"].partition(";")[0]]))
        cells = [f"`{row['file'].removeprefix('examples/')}`", how]
        cells.append(f"{row['model']}, {row['devices']} × {row['device'].split('-')[0]}{assumed}")
        [memory], seconds = errors([row])
        cells += [f"{int(row['sequence_length']):,}", row["annotated_gib"]]
        cells += [f"{row['predicted']['gib']:.1f}", f"{round(100 * memory):+d}%"]
        timed = [f"{row['predicted']['seconds']:.1f}", *(f"{round(100 * error):+d}%" for error in seconds)]
        cells += [row["annotated_seconds"], *timed] if seconds else [""] * 3
        text.append(f"| {' | '.join(cells)} |")
    memory, seconds = errors(rows)
    own, _ = errors([row for row in rows if not row["held_bytes"]])
    said = (
        f"Median error of memory: {_median(memory):.1%} of {len(memory)} annotations, {_median(own):.1%} of the"
        f" {len(own)} whose software holds the same states; of seconds: {_median(seconds):.0%} of {len(seconds)}."
    )
    return "\n".join([*text, "", said])


def _median(found: Sequence[float]) -> float:
    return statistics.median(map(abs, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose file's name contains this; writes nothing")
    only = parser.parse_args().only
    rows = list(made(only))
    result = {"machine": described(), "rows": rows, "table": table(rows)}
    if not only:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(result["table"])


if __name__ == "__main__":
    main()
