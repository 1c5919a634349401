"""Which parts of a run live in host memory or on a disk: one key for all, as it is asked for in one breath.

A value is the name of one part, or the names of several joined by ``+``. Each part is moved by a technique of its own
(activation_offload.py, state_offload.py); they all read this setting, and ``parts`` says which parts it names.
Chosen: one key with a closed set of values, so that a wrong one is refused by name. Refused: a key per part, three
lines of a recipe for one intent. The price is that the closed set names every combination.
"""

from __future__ import annotations

from shardwise.core.strategy import FolderForm, Setting, Strategy

NVME: tuple[FolderForm, ...] = tuple(
    FolderForm("+".join((*parts, "nvme")))
    for parts in ((), ("activations",), ("parameters",), ("activations", "parameters"))
)
"""Optimizer state in files of a folder, alone or with what else lives in host memory."""

OFFLOAD: Setting[str] = Setting(
    "offload",
    default="none",
    doc="what lives in host memory and is brought to the device for its use: nothing (none), what the forward pass"
    " keeps for the backward pass (activations), the optimizer's state, that and the parameters, or several of these;"
    " nvme:FOLDER keeps the optimizer's state in files of a folder",
    choices=(
        "none",
        "activations",
        "optimizer",
        "optimizer+parameters",
        "activations+optimizer",
        "activations+optimizer+parameters",
    ),
    forms=NVME,
)


def parts(strategy: Strategy) -> frozenset[str]:
    """The parts that live in host memory; ``nvme`` where the optimizer's state is on a disk."""
    return frozenset(strategy[OFFLOAD].partition(":")[0].split("+")) - {"none"}


def folder(strategy: Strategy) -> str | None:
    """The folder of the optimizer's files; None when it has none."""
    return next((path for form in NVME if (path := form.folder(strategy[OFFLOAD])) is not None), None)
