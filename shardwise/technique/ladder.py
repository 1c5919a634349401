"""The rungs of the ladder, cheapest in what they take from the user first: a bit of traffic, then time, then the link
to the host, then weights that are trained.

This is the order in which the literature and the guides of other trainers advise them, as data: which one to take is
decided by what each needs when it is dry-run, not by the order alone. Not a rung: a disk, which needs a
folder, and parallelism of tensors, pipelines and sequences, which changes what a recipe's devices are for.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.core.ladder import Rung
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING
from shardwise.technique.offload import OFFLOAD
from shardwise.technique.zero import ZERO_STAGE


def _values(stage: int, recomputed: str = "none", offloaded: str = "none") -> Mapping[str, object]:
    return {
        ZERO_STAGE.key: stage,
        ACTIVATION_CHECKPOINTING.key: recomputed,
        OFFLOAD.key: offloaded,
    }


_DIVIDED = (_values(2), _values(3), _values(3, "full"))

WHOLE = Rung("whole on every device", "one device holds everything; gradients are summed", (_values(0),))

LADDER: tuple[Rung, ...] = (
    WHOLE,
    Rung(
        "gradients and optimizer divided",
        "sends what data parallelism sends with one micro-batch, and leaves room for a larger one",
        (_values(2),),
    ),
    Rung("weights divided too", "every layer is gathered whenever it is used", (_values(3),)),
    Rung(
        "checkpointing",
        "computes activations again in the backward pass",
        (_values(3, "selective"), _values(3, "full")),
    ),
    Rung(
        "offload",
        "the processor updates, and the link to it carries gradients and weights",
        (_values(3, "full", "optimizer"), _values(3, "full", "optimizer+parameters")),
    ),
    Rung(
        "LoRA",
        "trains a few weights beside frozen ones, which have neither gradients nor optimizer state",
        _DIVIDED,
        adapter={},
    ),
    Rung("QLoRA", "the same, with frozen weights in 4 bits", _DIVIDED, adapter={"quantize": "nf4"}),
)
