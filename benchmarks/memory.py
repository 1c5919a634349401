"""Predicted against published peak memory, and "does not fit" against failures: ``python benchmarks/memory.py``.

Rows of benchmarks/data/published_runs.csv with a peak, of the stacks of published.py, become a recipe, a cluster and a
strategy. The planner's own predictor says what the allocator reserves. torchtitan's "memory" is the peak reserved by
any rank. The playbook does not say what its figures are: they are compared without fragmentation. A row's notes are
read for ``reshard_after_forward=never`` (stage 2).

Dry runs have the loss and the recomputation of the row's software (stacks.py, practised.py): both hold more or less
than Shardwise's. Rows without stages are predicted by whole dry runs, with the allocator's replay. Those with stages
are predicted by shortened dry runs, without fragmentation. Of nanotron's sweeps all failures without stages are taken,
every RAN-th of the others without stages, and every STAGED-th with stages.

A failure counts as one of memory where the source says so, or where the same settings with a smaller micro-batch ran:
the playbook (published_failures.csv) does not separate crashes from memory.

Every row is kept in ``--cache`` as soon as it is predicted. Writes benchmarks/results/memory-accuracy.json, of which
`make docs` fills docs/reference/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from accuracy import memory_tables
from counted import cluster_for
from machine import described
from practised import practised
from published import Inexpressible, Published, expressed, lines
from stacks import practice_of

from shardwise.core.errors import RecipeError
from shardwise.core.ledger import Ledger
from shardwise.core.units import GiB
from shardwise.hardware.allocator_options import VARIABLES
from shardwise.model.open import blueprint_of
from shardwise.planner.predictor import Predictor
from shardwise.planner.ranks import predict_worst
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from

RESULTS = Path(__file__).parent / "results" / "memory-accuracy.json"
RAN, STAGED = 4, 200
OWN, SWEPT = "FSDP2", "nanotron"
STATES = 12
"""Bytes of a master weight and its two states of Adam."""

CHUNKED = "f4614f3337"
"""A commit whose loss has no logits of a whole sequence (torchtitan/components/loss.py, ChunkedLossWrapper)."""

OLD = "torchtitan commit 83c879f187"
"""Before torchtitan's run_train.sh set expandable segments; the notes of some of its rows doubt the dimensions."""


@dataclass(frozen=True)
class Row:
    """A published run that can be expressed.

    Attributes:
        stack: FSDP2 for torchtitan's without torch.compile, else the name in published.py; apart where the table of
            published runs is not sure of the model's dimensions.
        failed: for want of memory.
        extra: settings that its notes name.
    """

    run: Published
    stack: str
    failed: bool
    extra: Mapping[str, object]
    expandable: bool

    @property
    def fused(self) -> bool:
        """Whether the compiler chooses what a block saves; with selective recomputation its policy does."""
        return self.run.compiled and self.run.settings["activation_checkpointing"] != "selective"

    @property
    def key(self) -> str:
        run = self.run
        parts = (
            run.name,
            run.layers,
            dict(run.model),
            run.length,
            run.device,
            run.gpus,
            run.tensor,
            run.pipeline,
        )
        degrees = (run.sequence, run.copies, run.stages, run.micro_batch, run.batch)
        return json.dumps(
            [
                parts,
                degrees,
                dict(run.settings),
                dict(self.extra),
                self.expandable,
                str(practice_of(run)),
                self.fused,
            ],
            sort_keys=True,
        )


def rows_of() -> tuple[list[Row], Counter[str]]:
    """All rows with a peak or a failure, and how many others there are by reason."""
    found, left_out = list[Row](), Counter[str]()
    ran = defaultdict[Any, list[int]](list)
    for line in lines("published_runs.csv"):
        ran[_settings(line)].append(int(line["micro_batch"] or 0))
        failed = "OOM" in line["notes"]
        if line["peak_mem_gib"] or failed:
            _add(line, failed, found, left_out)
    for line in lines("published_failures.csv"):
        if any(size < int(line["micro_batch"]) for size in ran[_settings(line)]):
            _add(line, True, found, left_out)
        else:
            left_out["a failure that need not be one of memory"] += 1
    seen = Counter[int]()
    taken = list[Row]()
    for row in found:
        every = _every(row)
        if seen[every] % every == 0:
            taken.append(row)
        seen[every] += 1
    return taken, left_out


def _every(row: Row) -> int:
    """Of how many rows like this one is taken: dry runs of stages take a minute."""
    if row.run.stack != SWEPT:
        return 1
    return STAGED if row.run.pipeline > 1 else 1 if row.failed else RAN


def _settings(line: Mapping[str, str]) -> tuple[str, ...]:
    """All of a row but its micro-batch."""
    keys = ("source", "model", "seq_len", "gpus", "tp", "pp", "dp", "zero_stage_or_sharding", "global_batch")
    return tuple(line[key] for key in keys)


def _add(line: Mapping[str, str], failed: bool, found: list[Row], left_out: Counter[str]) -> None:
    try:
        run = expressed(line)
    except Inexpressible as reason:
        left_out[str(reason)] += 1
        return
    notes, sharding = line["notes"], line["zero_stage_or_sharding"]
    stack = run.stack
    if stack == "torchtitan":
        stack = OWN if sharding.startswith("FSDP2") else sharding.split()[0]
        stack += ", dimensions to check" if "(check)" in notes or run.source == OLD else ""
    if "POC" in notes:
        left_out["an experiment of its source"] += 1
        return
    extra: dict[str, object] = {"loss": "chunked" if run.source.endswith(CHUNKED) else "logits"}
    if "reshard_after_forward=never" in notes:
        extra["zero_stage"] = 2
    found.append(Row(run, stack, failed, extra, expandable=run.stack != SWEPT and run.source != OLD))


def predicted(row: Row) -> dict[str, Any]:
    """What the allocator reserves by the planner, and whether it says that the row fits."""
    run, practice = row.run, practice_of(row.run)
    settings = {
        **run.settings,
        **row.extra,
        "tensor_parallel": run.tensor,
        "pipeline_parallel": run.pipeline,
        "sequence_parallel": run.sequence,
        "sequence_method": "ring",
        "replicate": run.copies if run.settings["zero_stage"] != 0 else 1,
        "micro_batch_size": run.micro_batch,
    }
    if row.fused:
        settings["compile"] = "block"
    if practice.whole is not None:
        assert practice.whole == 0.5, "no other share is in these rows"
        settings["activation_checkpointing"] = "every:2"
    if run.stages > 1:
        settings |= {"pipeline_schedule": "interleaved", "pipeline_stages_per_rank": run.stages}
    values = {
        "model": {**run.model, "layers": run.layers},
        "data": {"sequence_length": run.length},
        "steps": 2,
        "batch_size": run.batch,
        "strategy": settings,
    }
    recipe = recipe_of(values, SETTINGS)
    os.environ[VARIABLES[0]] = f"expandable_segments:{row.expandable}"
    cluster = cluster_for(run)
    predictor = Predictor(recipe, blueprint_of(recipe), cluster)
    whole = run.pipeline == 1
    strategy, began = strategy_from(settings), time.perf_counter()
    if not predictor.may_fit(strategy):
        peak = predictor.candidates[strategy].peak_bytes
        return {"gib": peak / GiB, "how": "states alone", "fits": False}
    with (
        practised(practice),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, SHARDWISE_CACHE=folder),
    ):
        budget = predictor.budget_bytes
        found = predict_worst(recipe, predictor.blueprint, strategy, cluster, budget=budget, whole=whole)
        more = held_in_addition(run, predictor, found.peak.ledger)
        if found.sum_bytes + more <= budget < found.peak.bytes + more:
            # The allocator's replay has less room: it may find enough by emptying its cache.
            found = predict_worst(recipe, predictor.blueprint, strategy, cluster, budget=budget - more)
    reserved = found.peak.bytes + more - cluster.device.overhead.outside_allocator(found.run.communicators)
    if run.stack == SWEPT:
        reserved -= found.peak.ledger.fragmentation
    return {
        "gib": reserved / GiB,
        "how": "full" if whole else "shortened",
        "fits": predictor.fits(found) and found.peak.bytes + more <= budget,
        "ledger": {name: size / GiB for name, size in found.peak.ledger.as_dict().items() if size},
        "seconds": round(time.perf_counter() - began, 1),
    }


def held_in_addition(run: Published, predictor: Predictor, peak: Ledger) -> int:
    """Bytes of states that the run's software holds at the peak, and Shardwise does not; of equal stages."""
    practice = practice_of(run)
    if not practice.held:
        return 0
    parameters = sum(predictor.parameter_counts) / (run.tensor * run.pipeline)
    shards = run.data if run.settings["zero_stage"] == 1 else 1
    own = peak.parameters + peak.master_weights + peak.gradients + peak.optimizer_state
    return int(parameters * (practice.held + STATES / shards)) - own


def kept(rows: Sequence[Row], path: Path, only: bool) -> Iterator[dict[str, Any]]:
    """Every row with its prediction: from the file, or made now and added to it; ``only`` makes none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if path.exists():
        known = {each["key"]: each for each in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    for row in sorted(rows, key=lambda row: (row.stack != OWN, row.run.pipeline, row.run.layers)):
        if row.key not in known and only:
            yield {"left out": "not predicted yet"}
            continue
        if row.key not in known:
            try:
                made = predicted(row)
            except (RecipeError, RuntimeError, ValueError) as problem:
                made = {"left out": f"not predicted: {problem}"[:120]}
            known[row.key] = {"key": row.key, **made}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[row.key]) + "\n")
            print(
                row.stack, row.run.name, row.run.gpus, row.run.micro_batch, made, file=sys.stderr, flush=True
            )
        run, made = row.run, {name: value for name, value in known[row.key].items() if name != "key"}
        about = {"stack": row.stack, "source": run.source, "model": run.name, "tokens": run.length}
        mesh = {
            "gpus": run.gpus,
            "tensor": run.tensor,
            "pipeline": run.pipeline,
            "micro_batch": run.micro_batch,
        }
        held = {
            "published_gib": run.memory_gib,
            "failed": row.failed,
            "batch": run.batch,
            "device": run.device,
        }
        settings = {**run.settings, **row.extra}
        yield {**about, **mesh, **held, "settings": settings, "vocab": run.model.get("vocab", 0), **made}


def quality(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of predictions, and quantiles of published over predicted."""
    ratio = np.array([row["published_gib"] / row["gib"] for row in rows])
    size = np.abs(1 / ratio - 1)
    low, middle, high = np.quantile(ratio, (0.05, 0.5, 0.95))
    return {
        "runs": len(rows),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(1 / middle - 1),
        "published over predicted": {"p5": float(low), "p50": float(middle), "p95": float(high)},
    }


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How well "does not fit" finds runs that failed for want of memory."""
    refused = [row for row in rows if not row["fits"]]
    failed, hits = [row for row in rows if row["failed"]], [row for row in refused if row["failed"]]
    return {
        "runs": len(rows),
        "failed": len(failed),
        "refused": len(refused),
        "precision": len(hits) / len(refused) if refused else None,
        "recall": len(hits) / len(failed) if failed else None,
    }


def kinds(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by stack, stages of nanotron apart."""
    found = defaultdict[str, list[Mapping[str, Any]]](list)
    for row in rows:
        stages = "" if row["stack"] != SWEPT else ", stages" if row["pipeline"] > 1 else ", no stages"
        found[f"{row['stack']}{stages}"].append(row)
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache") / "memory.jsonl", help="file of predictions"
    )
    parser.add_argument("--only", default="", help="stacks whose name contains this")
    parser.add_argument("--kept", action="store_true", help="only rows that are in the file")
    options = parser.parse_args()
    rows, left_out = rows_of()
    rows = [row for row in rows if options.only in row.stack]
    made = list(kept(rows, options.cache, options.kept))
    left_out.update(row["left out"] for row in made if "left out" in row)
    made = [row for row in made if "left out" not in row]
    # Weights and optimizer state alone are a bound, not a prediction.
    measured = [row for row in made if row["published_gib"] and row["how"] != "states alone"]
    result: dict[str, Any] = {
        "machine": described(),
        "by stack": {name: quality(some) for name, some in kinds(measured).items()},
        "fits": {**{name: verdicts(some) for name, some in kinds(made).items()}, "all": verdicts(made)},
        "left out": dict(left_out.most_common()),
        "rows": made,
    }
    result["table"] = memory_tables(result)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(result["table"])


if __name__ == "__main__":
    main()
