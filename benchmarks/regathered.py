"""Which runs of the playbook kept the inputs that tensor parallelism gathers: ``python benchmarks/regathered.py``.

nanotron can gather these inputs again in the backward pass instead of keeping them (``tp_recompute_allgather``). The
published table does not say which runs did. Their memory suggests it: a run without stages is taken to have gathered
again where its published peak is nearer to the predicted one without the gathered inputs than to the one with them.
Only runs of benchmarks/results/memory-accuracy.json are judged, and only where these inputs are a fifth of the
prediction.

Prints published over predicted seconds of both kinds. ``--cache`` is the folder of counts of calibrate.py.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from calibrate import logs
from cases import Case, cases_of
from memory import RESULTS, SWEPT

from shardwise.core.units import GiB

LEAST = 0.2
"""Share of the predicted memory."""


def gathered_gib(case: Case) -> float:
    """What a rank holds of the gathered inputs of one micro-batch, more than its shares of them."""
    run = case.run
    found = (
        each.bytes * each.calls
        for each in case.stages.costs[0].collectives
        if (each.kind, each.axis, each.phase) == ("all_gather", "tensor", "forward")
    )
    return sum(found) / run.passes * (1 - 1 / run.tensor) / GiB


def judged(cases: list[Case]) -> Iterator[tuple[Case, bool]]:
    """The runs that can be judged, and whether each gathered again."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    predicted = {_key(row): row["gib"] for row in rows if row["stack"] == SWEPT and row["published_gib"]}
    for case in cases:
        run = case.run
        found = {"model": run.name, "gpus": run.gpus, "tensor": run.tensor, "pipeline": run.pipeline}
        found |= {"micro_batch": run.micro_batch, "batch": run.batch, "settings": run.settings}
        with_them = predicted.get(_key({**found, "published_gib": run.memory_gib}))
        if with_them is None or run.pipeline > 1 or run.tensor == 1 or run.memory_gib is None:
            continue
        share = gathered_gib(case)
        if share >= LEAST * with_them:
            kept = abs(math.log(run.memory_gib / with_them))
            yield case, abs(math.log(run.memory_gib / (with_them - share))) < kept


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("model", "gpus", "tensor", "pipeline", "micro_batch", "batch", "published_gib")
    return (*(row[name] for name in names), row["settings"]["zero_stage"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache") / "calibration", help="folder of counts")
    options = parser.parse_args()
    cases, _ = cases_of(options.cache, counting=True)
    found = list(judged([case for case in cases if case.run.stack == SWEPT]))
    for again in (False, True):
        some = [case for case, regathered in found if regathered == again]
        ratios = np.exp(-logs(some, {}))
        low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
        print(
            f"{'gathered again' if again else 'kept'}: {len(some)} runs, published over predicted seconds:"
            f" median {middle:.2f}, 10 to 90 % {low:.2f} to {high:.2f}"
        )


if __name__ == "__main__":
    main()
