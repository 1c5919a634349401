"""The remedies for a model that does not fit, in the order in which they are tried.

Settings come first, which change no result: more traffic, then more compute, then PCIe transfers. Then comes what
changes the training: fewer bits of optimizer state, then fewer trained weights. A dry run of each decides which one
fits. Two kinds of settings are not remedies: disk offload, which needs a folder, and axes that divide the model or the
sequence, which change the use of the devices.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.core.fit_advice import Remedy
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING
from shardwise.technique.offload import OFFLOAD
from shardwise.technique.zero import ZERO_STAGE


def _values(stage: int, recomputed: str = "none", offloaded: str = "none") -> Mapping[str, object]:
    return {
        ZERO_STAGE.key: stage,
        ACTIVATION_CHECKPOINTING.key: recomputed,
        OFFLOAD.key: offloaded,
    }


_SHARDED = (_values(2), _values(3), _values(3, "full"))

UNSHARDED = Remedy(
    "DDP (ZeRO-0)", "every device holds the whole model; gradients are all-reduced", (_values(0),)
)

REMEDIES: tuple[Remedy, ...] = (
    UNSHARDED,
    Remedy(
        "ZeRO-2",
        "shards gradients and optimizer state; the same traffic as DDP with one micro-batch",
        (_values(2),),
    ),
    Remedy(
        "ZeRO-3 (FSDP)",
        "also shards the weights; every layer is all-gathered for each forward and backward pass",
        (_values(3),),
    ),
    Remedy(
        "activation checkpointing",
        "recomputes activations in the backward pass",
        (_values(3, "selective"), _values(3, "full")),
    ),
    Remedy(
        "CPU offload",
        "optimizer step on the CPU, gradients and weights over PCIe",
        (_values(3, "full", "optimizer"), _values(3, "full", "optimizer+parameters")),
    ),
    Remedy(
        "8-bit AdamW",
        "stores moments in 8 bits: 2 bytes per trained weight instead of 8",
        (_values(3), _values(3, "full")),
        optimizer={"name": "adamw_8bit"},
    ),
    Remedy(
        "LoRA",
        "trains a few added weights; the frozen ones need no gradients and no optimizer state",
        _SHARDED,
        adapter={},
    ),
    Remedy("QLoRA", "LoRA with the frozen weights in 4 bits", _SHARDED, adapter={"quantize": "nf4"}),
)
