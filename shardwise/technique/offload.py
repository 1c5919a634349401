"""Which parts of a run live in host memory: one key for all, because it is asked for in one breath.

A value is the name of one part, or the names of several joined by ``+``. Each part is moved by a technique of its own
(activation_offload.py); they all read this setting, and ``parts`` says which parts it names. Chosen: one key with a
closed set of values, so that a wrong one is refused by name. Refused: a key per part, three lines of a recipe for one
intent. The price is that the closed set names every combination.
"""

from __future__ import annotations

from shardwise.core.strategy import Case, Rule, Setting, Strategy

OFFLOAD: Setting[str] = Setting(
    "offload",
    default="none",
    doc="what lives in host memory and is brought to the device for its use: nothing (none), what the forward pass"
    " keeps for the backward pass (activations), the optimizer's state, that and the parameters, or several of these",
    choices=(
        "none",
        "activations",
        "optimizer",
        "optimizer+parameters",
        "activations+optimizer",
        "activations+optimizer+parameters",
    ),
)


def parts(strategy: Strategy) -> frozenset[str]:
    """The parts that live in host memory."""
    return frozenset(strategy[OFFLOAD].split("+")) - {"none"}


def _unwritten(case: Case) -> bool:
    return not parts(case.strategy) <= {"activations"}


RULES: tuple[Rule, ...] = (
    Rule(
        key="offload",
        reason="only activations are offloaded: the optimizer and the parameters are not in this version yet",
        broken=_unwritten,
        nearest=lambda case: {"offload": "activations" if "activations" in parts(case.strategy) else "none"},
    ),
)
