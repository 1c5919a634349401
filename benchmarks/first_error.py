"""How soon a mistake is shown: ``python benchmarks/first_error.py``.

A recipe with a misspelt key, planned by a process of its own each time: processor time and seconds from the start of
the interpreter to its end, medians. DESIGN's figure is half a second. A quarter of a minute; about a hundred megabytes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from machine import described

RESULTS = Path(__file__).parent / "results" / "first-error.json"
ROUNDS = 15
RECIPE = "model: {preset: tiny, widht: 32}\ndata: {source: corpus.txt, sequence_length: 32}\nsteps: 1\nbatch_size: 1\n"


def one(recipe: Path) -> tuple[float, float]:
    """Processor time and seconds of one failing ``shardwise plan``."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "plan", str(recipe)], capture_output=True, text=True, check=False
    )
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and "did you mean" in done.stderr, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE, encoding="utf-8")
        one(recipe)  # the files are in the system's cache from here on
        rounds = [one(recipe) for _ in range(ROUNDS)]
    processor, seconds = (median(column) for column in zip(*rounds, strict=True))
    print(f"processor time {processor:.2f} s, in all {seconds:.2f} s, medians of {ROUNDS}")
    found = {"machine": described(), "rounds": ROUNDS, "processor_seconds": processor, "seconds": seconds}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
