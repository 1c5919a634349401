"""A scaling law of small models on the standard library's source: ``python benchmarks/scaling_law.py``.

Five sizes are trained, each as one stable run at a constant learning rate. From its checkpoints, four branches decay
over their last fifth to four numbers of tokens (WSD, ``checkpoint.start_from``). L(N, D) is fitted to the 20 ends, as
``shardwise fit`` does. Then the law predicts the loss of a larger run, the prediction is written to prediction.json,
and only after that the run is trained. Every loss is the held-out one, of the same bytes.

The sweep is resumable: the same command leaves finished runs as they are and goes on from the newest checkpoint. It
goes through the engine and the checkpoints that ``shardwise train`` uses, in one process, as benchmarks/wsd.py does.
Sizes are of one family (scaling/family.py). The peak learning rate falls with the square root of the width;
the batch is the same for all. ``--sweep full`` trains 0.1M to 2.7M parameters and predicts 5.8M: about an hour on two
free cores. ``--sweep small`` has fewer steps of 0.07M to 0.65M and predicts 1.6M: about 10 minutes on one core.
``--sweep miniature`` checks that the benchmark works, in half a minute. Writes benchmarks/results/scaling-law.json and
its picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import described
from wsd import Training

from shardwise.checkpoint.checkpoint import save_checkpoint
from shardwise.checkpoint.manifest import committed
from shardwise.core.atomic_file import write_whole
from shardwise.core.units import format_count
from shardwise.launch.process import World, join
from shardwise.plugins.scaling.budgeting import of_size
from shardwise.plugins.scaling.family import sized
from shardwise.plugins.scaling.files import law_text
from shardwise.plugins.scaling.fit import Fit, TrainedPoint, fit_law
from shardwise.plugins.scaling.isoflop import envelope, exponent, isoflops
from shardwise.plugins.scaling.report.pictures import scaling_picture
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.load import recipe_of
from shardwise.recipe.presets import dimensions_of
from shardwise.recipe.sections import Recipe
from shardwise.report.pictures import png
from shardwise.technique import SETTINGS

RESULTS = Path(__file__).parent / "results" / "scaling-law.json"
BATCH, LENGTH = 16, 128
BRANCHES = (2, 4, 6, 8)
"""Ends of the branches, in eighths of a size's steps."""
DECAY = 0.2
"""Share of a branch that decays."""
WARMUP = 50
PEAK, PEAK_WIDTH = 4e-3, 96
"""Peak learning rate at a width (benchmarks/wsd.py chose it); it falls with the square root of the width."""
WITHIN = 0.01
"""Relative error of the predicted loss that the sweep aims at."""


@dataclass(frozen=True)
class Sweep:
    """Width, layers and steps of the sizes that are fitted, and of the larger run that is predicted."""

    fitted: tuple[tuple[int, int, int], ...]
    predicted: tuple[int, int, int]
    sequences: int = 256
    warmup: int = WARMUP


SWEEPS = {
    "full": Sweep(
        ((48, 3, 8000), (64, 4, 8000), (96, 5, 4000), (128, 6, 2000), (176, 7, 1200)), (256, 7, 1000)
    ),
    "small": Sweep(((32, 4, 1200), (48, 3, 1120), (64, 3, 800), (80, 4, 560), (112, 4, 400)), (144, 6, 300)),
    "miniature": Sweep(
        ((16, 1, 240), (24, 2, 160), (32, 3, 120), (48, 2, 80)), (64, 2, 60), sequences=16, warmup=2
    ),
}


class Runs:
    """The runs of a sweep: checkpoints in a folder of each size, and the ends of the branches in points.jsonl."""

    def __init__(self, sweep: Sweep, folder: Path, world: World) -> None:
        self.sweep, self.folder, self.world = sweep, folder, world
        self.pattern = pattern(sweep)
        folder.mkdir(parents=True, exist_ok=True)
        self.done = {point.run: point for point in self._recorded()}

    def _recorded(self) -> Iterator[TrainedPoint]:
        path = self.folder / "points.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            yield TrainedPoint(**json.loads(line))

    def train_size(self, width: int, layers: int, steps: int) -> list[TrainedPoint]:
        """The ends of a size's branches; the stable run goes on from one branch's start to the next."""
        made, points = sized(self.pattern, width, layers), []
        stable: Training | None = None
        for eighths in BRANCHES:
            end, start = steps * eighths // 8, steps // 10 * eighths
            saved = self.folder / str(made.parameters) / f"step-{start}"
            if f"{made.parameters}-{end}" not in self.done and not saved.exists():
                stable = stable or self._resumed(made, round((1 - DECAY) * steps), {"name": "constant"})
                self._train(stable, start)
            points.append(self._branch(made, end, saved))
        return points

    def train_predicted(self) -> TrainedPoint:
        width, layers, steps = self.sweep.predicted
        return self._branch(sized(self.pattern, width, layers), steps, None)

    def _resumed(self, made: Dimensions, steps: int, schedule: dict[str, Any]) -> Training:
        """A run from its newest checkpoint, or from new weights."""
        folder = self.folder / str(made.parameters)
        start_from = folder if folder.exists() and committed(folder) else None
        return self._of(made, steps, schedule, start_from)

    def _of(self, made: Dimensions, steps: int, schedule: dict[str, Any], start: Path | None) -> Training:
        return Training(of_size(recipe(self.sweep, steps, _peak(made), schedule, start), made), self.world)

    def _train(self, training: Training, until: int) -> None:
        """Train with a checkpoint every so many steps, from which an interrupted sweep goes on."""
        made = dimensions_of(training.recipe.model).parameters
        every = max(1, training.recipe.steps // 8)
        while training.state.step < until:
            training.train(min(until, (training.state.step // every + 1) * every))
            save_checkpoint(
                training.run,
                training.state,
                self.folder / str(made),
                keep=3 * len(BRANCHES),
                fingerprint=training.data.fingerprint,
            )

    def _branch(self, made: Dimensions, end: int, start: Path | None) -> TrainedPoint:
        """The end of a run that decays: a branch from ``start``, or the predicted run, which resumes."""
        name = f"{made.parameters}-{end}"
        if name not in self.done:
            if start is None:
                training = self._resumed(made, end, decaying(end))
                self._train(training, end)
            else:
                training = self._of(made, end, decaying(end), start)
                training.train(end)
            loss, tokens = training.held_out(), float(training.state.tokens)
            self.done[name] = TrainedPoint(float(made.parameters), tokens, loss, name)
            with (self.folder / "points.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.done[name])) + "\n")
        print(f"{name}: {self.done[name].loss:.4f}", flush=True)
        return self.done[name]


def decaying(end: int) -> dict[str, Any]:
    """The schedule of a run that decays to zero over its last fifth."""
    return {"name": "wsd", "decay": round(DECAY * end), "floor": 0.0}


def pattern(sweep: Sweep) -> Dimensions:
    """What the sizes of a sweep have in common."""
    return replace(dimensions_of(recipe(sweep, 10 * sweep.warmup).model), tied=False)


def _peak(made: Dimensions) -> float:
    return PEAK * (PEAK_WIDTH / made.width) ** 0.5


def recipe(
    sweep: Sweep,
    steps: int,
    rate: float = PEAK,
    schedule: dict[str, Any] | None = None,
    start_from: Path | None = None,
) -> Recipe:
    return recipe_of(
        {
            "model": {"layers": 3, "width": 96, "heads": 4, "ffn": 256, "vocab": 256, "context": LENGTH},
            "data": {"source": "stdlib", "sequence_length": LENGTH},
            "steps": steps,
            "batch_size": BATCH,
            "optimizer": {"learning_rate": rate},
            "schedule": {"warmup": sweep.warmup, **(schedule or {})},
            "evaluation": {"sequences": sweep.sequences},
            "checkpoint": {"start_from": None if start_from is None else str(start_from)},
            "strategy": {"zero_stage": 0, "micro_batch_size": BATCH},
        },
        SETTINGS,
    )


def predicted_once(path: Path, found: Fit, made: Dimensions, tokens: int) -> dict[str, Any]:
    """The prediction of the larger run; a prediction that was made before is kept."""
    if not path.exists():
        low, high = found.loss_interval(made.parameters, tokens)
        loss = found.law.loss(made.parameters, tokens)
        values = {"parameters": made.parameters, "tokens": tokens, "loss": loss, "interval": [low, high]}
        write_whole(path, (json.dumps(values, indent=1) + "\n").encode("utf-8"))
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def results(name: str, found: Fit, prediction: dict[str, Any], measured: float) -> dict[str, Any]:
    law, points = found.law, found.points
    vertices = [(each.flops, each.optimum[0]) for each in isoflops(points) if each.optimum is not None]
    error = prediction["loss"] / measured - 1
    values = {
        "machine": described(),
        "sweep": name,
        "points": [[point.run, point.parameters, point.tokens, point.loss] for point in points],
        "coefficients": {key: getattr(law, key) for key in ("E", "A", "B", "alpha", "beta")},
        "intervals": {key: list(pair) for key, pair in law.intervals.items()},
        "residual": found.residual,
        "exponent": law.exponent,
        "exponent_interval": list(found.exponent_interval()),
        "exponent_envelope": exponent([(each[0], each[1]) for each in envelope(points)]),
        "exponent_isoflop": exponent(vertices),
        "prediction": prediction,
        "measured": measured,
        "error": error,
        "met": abs(error) <= WITHIN,
    }
    return {**values, "table": table(values, points)}


def table(values: dict[str, Any], points: tuple[TrainedPoint, ...]) -> str:
    """The figures as the documentation shows them."""
    lines = ["| parameters | tokens of the branches | held-out loss |", "| ---: | --- | --- |"]
    for size in sorted({point.parameters for point in points}):
        ends = [point for point in points if point.parameters == size]
        tokens = ", ".join(format_count(point.tokens) for point in ends)
        lines.append(
            f"| {format_count(size)} | {tokens} | {', '.join(f'{point.loss:.4f}' for point in ends)} |"
        )
    lines += ["", "| coefficient | fit | 95 % interval |", "| --- | ---: | --- |"]
    for key, value in values["coefficients"].items():
        low, high = values["intervals"][key]
        lines.append(f"| {key} | {value:.4g} | {low:.4g} to {high:.4g} |")
    low, high = values["exponent_interval"]
    lines.append(f"| a in N ~ C^a | {values['exponent']:.3f} | {low:.3f} to {high:.3f} |")
    prediction = values["prediction"]
    low, high = prediction["interval"]
    lines += [
        "",
        f"Predicted before it was trained: {format_count(prediction['parameters'])} parameters on"
        f" {format_count(prediction['tokens'])} tokens reach {prediction['loss']:.4f} ({low:.4f} to {high:.4f})."
        f" Measured: {values['measured']:.4f}. The prediction is {values['error']:+.2%} off; the aim is"
        f" {WITHIN:.0%}. Sweep: `{values['sweep']}`. Repeat with `python benchmarks/scaling_law.py --sweep"
        f" {values['sweep']}`.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", choices=list(SWEEPS), default="full")
    parser.add_argument("--runs", type=Path, default=Path("runs/scaling-law"), help="folder of the runs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    sweep = SWEEPS[asked.sweep]
    torch.set_num_threads(asked.threads)
    with join("cpu") as world:
        runs = Runs(sweep, asked.runs / asked.sweep, world)
        points = [point for size in sweep.fitted for point in runs.train_size(*size)]
        found = fit_law(points, name=f"scaling-law-{asked.sweep}")
        width, layers, steps = sweep.predicted
        made, tokens = sized(runs.pattern, width, layers), steps * BATCH * LENGTH
        prediction = predicted_once(runs.folder / "prediction.json", found, made, tokens)
        print(f"predicted: {prediction['loss']:.4f}", flush=True)
        measured = runs.train_predicted()
    values = results(asked.sweep, found, prediction, measured.loss)
    rows = [(point.run, point.parameters, point.tokens, point.loss) for point in found.points]
    write_whole(runs.folder / "law.toml", law_text(found.law, rows).encode("utf-8"))
    write_whole(asked.results, (json.dumps(values, indent=1) + "\n").encode("utf-8"))
    write_whole(asked.results.with_suffix(".png"), png(scaling_picture(found.points, found.law)))
    print(values["table"])


if __name__ == "__main__":
    main()
