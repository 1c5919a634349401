"""Hung ranks: in each trial one rank of a run hangs, and the error must name it, in time, with its stack.

    python -m tests.torture.hangs --trials 30 --seed 1 --out hangs.json

A trial draws the fault, the rank, the step, the number of ranks and the ZeRO stage from the seed. The report is JSON:
each trial with its verdict, and the count of right ones. The exit code is 1 if one was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.harness.commands import Shell
from tests.harness.pool import Pool
from tests.torture.hanging_model import FAULTS

WATCHDOG = 3.0
MARGIN = 3.0
"""Seconds after the watchdog's within which the run must have ended."""

MODEL = Path(__file__).parent / "hanging_model.py"
RECIPE = """
model: {{factory: "hanging_model:make", arguments: {{fault: {fault}, rank: {rank}, call: {call}, began: "{began}"}}}}
steps: 1000000
batch_size: {batch}
watchdog: {watchdog}
cluster: {{device: cpu, devices_per_node: {ranks}}}
strategy: {{zero_stage: {stage}, micro_batch_size: 2, precision: fp32, activation_checkpointing: none}}
"""


@dataclass(frozen=True)
class Fault:
    """What happens: ``rank`` of ``ranks`` meets a fault of hanging_model.py in its ``call``-th loss."""

    fault: str
    rank: int
    ranks: int = 2
    call: int = 4
    stage: int = 1
    watchdog: float = WATCHDOG


@dataclass(frozen=True)
class Verdict:
    """What came of a trial.

    Attributes:
        named: the rank that the error names; -1 if none.
        seconds: from the hang to the end of the command; infinity when it had to be ended.
        stack: whether the log of that rank shows the function in which it hangs.
    """

    code: int
    named: int
    seconds: float
    stack: bool
    line: str

    def is_right(self, fault: Fault) -> bool:
        in_time = self.seconds <= fault.watchdog + MARGIN
        return self.code == 5 and self.named == fault.rank and self.stack and in_time


def prepare(folder: Path, fault: Fault) -> Path:
    """Write the model and ``recipe.yaml`` into a folder; the file that has the time when the fault began."""
    shutil.copy(MODEL, folder)
    began = folder / "began"
    batch = 2 * fault.ranks
    (folder / "recipe.yaml").write_text(RECIPE.format(**asdict(fault), began=began, batch=batch))
    return began


def trial(shell: Shell, folder: Path, fault: Fault) -> Verdict:
    """Train in ``folder`` until the fault, and see what the command says of it."""
    began = prepare(folder, fault)
    with shell.start("train", "recipe.yaml", "--out", "run", folder=folder, ranks=fault.ranks) as command:
        try:
            code = command.wait(120)
        except TimeoutError:
            code = -1
        ended, line = time.monotonic(), command.stderr.strip()
    seconds = ended - float(began.read_text()) if code >= 0 and began.exists() else float("inf")
    match = re.match(r"error: rank (\d+) hung", line)
    log = folder / "run" / "logs" / f"rank-{fault.rank}.log"
    stack = log.exists() and expected_function(fault.fault) in log.read_text()
    return Verdict(code, int(match[1]) if match else -1, round(seconds, 2), stack, line)


def expected_function(fault: str) -> str:
    """A rank that left out a collective shows where it waits instead."""
    return "most recent call first" if fault == "skip" else f"in {FAULTS[fault].__name__}"


def drawn(seed: int, count: int) -> list[Fault]:
    """The faults of ``count`` trials."""
    dice = random.Random(seed)
    kinds = sorted(FAULTS)
    faults = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        ranks = 3 if kind == "skip" else dice.choice((2, 3))  # of two ranks, either may have left it out
        faults.append(Fault(kind, dice.randrange(ranks), ranks, dice.randint(3, 12), dice.choice((0, 1, 3))))
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.hangs", description=__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the JSON report; standard output by default")
    given = parser.parse_args(arguments)
    pool, results = Pool(4), []
    try:
        for number, fault in enumerate(drawn(given.seed, given.trials)):
            with tempfile.TemporaryDirectory() as folder:
                verdict = trial(Shell(pool), Path(folder), fault)
            right = verdict.is_right(fault)
            results.append({**asdict(fault), **asdict(verdict), "right": right})
            print(
                f"{number + 1}: {'right' if right else 'WRONG'} {fault} {verdict}",
                file=sys.stderr,
                flush=True,
            )
    finally:
        pool.close()
    count = sum(result["right"] for result in results)
    report = {"seed": given.seed, "trials": given.trials, "right": count, "results": results}
    text = json.dumps(report, indent=1) + "\n"
    (given.out.write_text(text) if given.out else sys.stdout.write(text))
    return 0 if count == given.trials else 1


if __name__ == "__main__":
    sys.exit(main())
