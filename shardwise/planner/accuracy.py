"""How far predictions were from runs, as quantiles of measured over predicted: the source of a plan's intervals.

``accuracy.toml`` has them, with the runs that they come from. ``benchmarks/intervals.py`` writes it from the committed
results of the benchmarks; no figure is typed. No torch.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from shardwise.core.answer import Spread

FILE = Path(__file__).with_name("accuracy.toml")


@cache
def spreads() -> dict[str, dict[str, Spread]]:
    """Quantity ("seconds", "memory") -> device ("accelerator", "cpu") -> the spread."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {
        quantity: {device: Spread(**figures) for device, figures in devices.items()}
        for quantity, devices in tables.items()
    }


def spread_of(quantity: str, devices: str) -> Spread | None:
    """The spread among devices (``DeviceKind.spread``); None where no runs were compared."""
    return spreads().get(quantity, {}).get(devices)
