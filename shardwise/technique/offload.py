"""The ``offload`` setting: which parts of a run are in host memory or on a disk.

A value is the name of a part, or several names joined by ``+``. Each part has its own technique (activation_offload.py,
state_offload.py); all of them read this setting. Refused: a key per part, three lines of a recipe for one intent. The
price is that the closed set of values lists every combination.
"""

from __future__ import annotations

from shardwise.core.strategy import FolderForm, Setting, Strategy
from shardwise.technique.base import KEPT, STATES

NVME: tuple[FolderForm, ...] = tuple(
    FolderForm("+".join((*parts, "nvme")))
    for parts in ((), ("activations",), ("parameters",), ("activations", "parameters"))
)
"""Optimizer state in files of a folder, alone or with what else lives in host memory."""

OFFLOAD: Setting[str] = Setting(
    "offload",
    default="none",
    doc="CPU offload to pinned host memory: none, activations, optimizer (optimizer state, with the step on the CPU),"
    " optimizer+parameters, or combinations; nvme:FOLDER keeps the optimizer state in files (as ZeRO-Infinity)",
    choices=(
        "none",
        "activations",
        "optimizer",
        "optimizer+parameters",
        "activations+optimizer",
        "activations+optimizer+parameters",
    ),
    last_resort=("optimizer", "activations", "optimizer+parameters", "activations+optimizer+parameters"),
    forms=NVME,
)


def parts(strategy: Strategy) -> frozenset[str]:
    """The parts that live in host memory; ``nvme`` where the optimizer's state is on a disk."""
    return frozenset(strategy[OFFLOAD].partition(":")[0].split("+")) - {"none"}


def weights_on_host(strategy: Strategy) -> bool:
    """Whether the stored weights, and the gradients that are reduced, live in host memory."""
    return "parameters" in parts(strategy)


def of_part(strategy: Strategy, part: str | None) -> str:
    """The value that says the same of one part of the step, and nothing of the others."""
    words, colon, path = strategy[OFFLOAD].partition(":")
    kept = [word for word in words.split("+") if (word == "activations") == (part == KEPT)]
    if part not in (KEPT, STATES) or not kept:
        return OFFLOAD.default
    return "+".join(kept) + (colon + path if "nvme" in kept else "")


def folder(strategy: Strategy) -> str | None:
    """The folder of the optimizer's files; None when it has none."""
    return next((path for form in NVME if (path := form.folder(strategy[OFFLOAD])) is not None), None)
