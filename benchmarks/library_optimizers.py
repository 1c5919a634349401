"""Optimizers of other libraries against a plain loop: ``python benchmarks/library_optimizers.py``.

A small native decoder in fp64 for 60 steps, with warmup and cosine decay: on one process, with ZeRO 3 and with tensor
parallelism on two ranks. A row is the largest relative difference of a loss from the plain loop's, or the refusal. Its
"noise" is that of a second plain loop, in which each gradient is rounded once more: no layout can be closer than that.
Needs ``pip install pytorch_optimizer prodigyopt``. About ten minutes on two cores; nothing in it is a time.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import described
from optimizer_ranks import STEPS, plain, trained
from ranks import on_ranks

RESULTS = Path(__file__).parent / "results" / "library-optimizers.json"
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "ZeRO 3 x 2": (2, {"zero_stage": 3}),
    "TP 2": (2, {"tensor_parallel": 2}),
}
_CLASSES = (
    "AdaBelief ADOPT AdEMAMix AdaShift Adan AggMo CAME DAdaptAdam Kron LARS Lamb LaProp Lion MARS NovoGrad"
    " Prodigy Ranger SOAP ScheduleFreeAdamW Shampoo StableAdamW StableSPAM Tiger"
)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"factory": f"pytorch_optimizer:{name}"} for name in _CLASSES.split()},
    "Ranger21": {"factory": "pytorch_optimizer:Ranger21", "arguments": {"num_iterations": STEPS}},
    "Muon": {"factory": "optimizer_ranks:muon"},
    "Lookahead of AdamW": {"factory": "optimizer_ranks:lookahead"},
    "prodigyopt Prodigy": {"factory": "prodigyopt:Prodigy"},
    **{f"torch {name}": {"factory": f"torch.optim:{name}"} for name in ("NAdam", "Rprop", "ASGD", "Adagrad")},
}
EPSILON = 2.0**-52
RATES = {"CAME": 2e-4, "Prodigy": 1.0, "prodigyopt Prodigy": 1.0, "DAdaptAdam": 1.0, "torch Rprop": 1e-3}


def row(name: str) -> dict[str, float | str]:
    optimizer = {"learning_rate": RATES.get(name, 1e-2), **OPTIMIZERS[name]}
    expected = on_ranks(1, plain, optimizer)[0]
    rounded = on_ranks(1, plain, optimizer, EPSILON)[0]
    found: dict[str, float | str] = {"first loss": expected[0], "last loss": expected[-1]}
    found["noise"] = worst(rounded, expected)
    for layout, (world, settings) in LAYOUTS.items():
        try:
            losses = on_ranks(world, trained, optimizer, settings)[0]
        except Exception as error:
            losses = f"failed: {type(error).__name__}: {error}"
        if isinstance(losses, str):
            found[layout] = losses
        else:
            found[layout] = worst(losses, expected)
    return found


def worst(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="optimizers whose name contains this")
    names = [name for name in OPTIMIZERS if parser.parse_args().only in name]
    rows = dict[str, Any]()
    versions = {name: version(name) for name in ("torch", "pytorch_optimizer", "prodigyopt")}
    for name in names:
        rows[name] = row(name)
        cells = (
            f"{v:.1e}" if isinstance(v, float) else v
            for k, v in rows[name].items()
            if k in (*LAYOUTS, "noise")
        )
        print(f"{name}: {' | '.join(cells)}", flush=True)
        found = {"machine": described(), "versions": versions, "steps": STEPS, "rows": rows}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
