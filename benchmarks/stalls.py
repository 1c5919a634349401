"""By how much runs of the playbook with stages take longer than predicted: ``python benchmarks/stalls.py``.

Prints, for runs on 512 GPUs and for those on 16 to 256 GPUs that others contradict or do not contradict (cases.py),
the seconds that a pass takes longer than predicted: the 5th, 25th, 50th, 75th and 95th percentile. ``--cache`` is the
folder of counts of calibrate.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from calibrate import FEW_GPUS, UNFITTED, logs
from cases import cases_of, repeated, stalled
from published import NODE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache") / "calibration", help="folder of counts")
    every, _ = cases_of(parser.parse_args().cache, counting=True)
    cases = [case for case in every if case.run.stack == UNFITTED]
    slower = repeated(cases)
    cases = [case for number, case in enumerate(cases) if number not in slower]
    waiting, predicted = stalled(cases), np.exp(logs(cases, {}))
    groups: dict[str, list[float]] = {}
    for number, (case, ratio) in enumerate(zip(cases, predicted, strict=True)):
        run = case.run
        if run.pipeline == 1 or run.gpus <= NODE:
            continue
        kind = "contradicted" if number in waiting else "others"
        name = f"{NODE * 2} to {FEW_GPUS} GPUs, {kind}" if run.gpus <= FEW_GPUS else f"{run.gpus} GPUs"
        longer = case.seconds * (1 - ratio) / (run.passes + run.pipeline - 1)
        groups.setdefault(name, []).append(longer)
    for name, found in sorted(groups.items()):
        percentiles = np.percentile(found, (5, 25, 50, 75, 95))
        print(f"{name}: {len(found)} runs,", " ".join(f"{each:.2f}" for each in percentiles), "s per pass")


if __name__ == "__main__":
    main()
