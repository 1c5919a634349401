"""The explorer of Llama-3-8B on 8 H100: points and seconds of a cold start, and 20 random points planned afresh.

    python benchmarks/explorer.py [--seconds 60] [--compare 20]

Processor seconds of all processes are shared by the cores; ``import torch`` in a fresh process is the machine's speed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from shardwise.plugins.explorer.exploration import Exploration

RECIPE = Path(__file__).parent.parent / "recipes" / "llama-3-8b-8xh100.yaml"
NEEDED = 200
"""Points within the time."""


def main() -> None:
    """Print the table; exit 1 where a point differs from its plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no dry run after so many")
    parser.add_argument("--compare", type=int, default=20, help="points to plan afresh")
    options = parser.parse_args()
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    print(f"import torch: {time.monotonic() - began:.1f} s; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHARDWISE_CACHE"] = cache
        began = time.monotonic()
        from shardwise.plugins.explorer.exploration import Exploration
        from shardwise.plugins.explorer.page import page_of

        exploration = Exploration(RECIPE, [], RECIPE.stem)
        print(f"planned after {time.monotonic() - began:.1f} s")
        reached = [0.0, 0.0]

        def changed() -> None:
            spent = time.monotonic() - began
            if not reached[0]:
                reached[0] = spent
            if exploration.predicted >= NEEDED and not reached[1]:
                reached[1] = spent
                print(f"{NEEDED} points after {spent:.1f} s; {processor_seconds():.0f} s of all processes")

        exploration.fill(options.seconds - (time.monotonic() - began), changed)
        wall, spent = time.monotonic() - began, processor_seconds()
        page = len(page_of(exploration).encode())
        print(f"first points after {reached[0]:.1f} s")
        print(
            f"{exploration.in_words} after {wall:.1f} s; {spent:.0f} s of all processes; page {page / 1e6:.2f} MB"
        )
        sys.exit(1 if differing(exploration, options.compare) else 0)


def processor_seconds() -> float:
    """Of this process and its children, those that have ended among them."""
    own = psutil.Process()
    times = [own.cpu_times(), *(child.cpu_times() for child in own.children(recursive=True))]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def differing(exploration: Exploration, count: int) -> int:
    """The number of random points whose figures are not those of a plan of their recipe."""
    from shardwise.hardware.cluster import cluster_of
    from shardwise.model.open import blueprint_of
    from shardwise.planner.search import plan_for
    from shardwise.recipe.load import parse_recipe
    from shardwise.technique import SETTINGS

    points = [point for point in exploration.points if point.figures is not None]
    wrong = 0
    for point in random.Random(41).sample(points, min(count, len(points))):
        recipe = parse_recipe(point.recipe, SETTINGS)
        plan = plan_for(recipe, blueprint_of(recipe), cluster_of(recipe.cluster), compare=False)
        assert point.figures is not None
        same = (plan.peak.bytes, plan.step.seconds, plan.ledger) == (
            point.figures.peak.bytes,
            point.figures.step.seconds,
            point.figures.ledger,
        )
        wrong += not same
        print(f"{'equal' if same else 'DIFFERS'}  {plan.cluster}  {plan}".partition("\n")[0])
    print(f"{wrong} of {min(count, len(points))} differ")
    return wrong


if __name__ == "__main__":
    main()
