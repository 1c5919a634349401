"""The cost of one optimizer step of one rank: kernels, collectives and copies.

Traffic follows the ring convention: in an all-gather or reduce-scatter of S bytes over n ranks each rank sends
(n-1)/n*S, in an all-reduce twice that (Patarasuk & Yuan 2009; the ZeRO paper's Ψ units). In an all-to-all each rank
keeps 1/n of its S bytes and sends the rest. A send transfers all S bytes.
FLOPs count a multiply-add as two, and only matmuls, convolutions and attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Kernel:
    """All calls of one operation with one shape in one phase.

    Attributes:
        flops: per call.
        bytes: read plus written, per call.
        on_host: the CPU runs it on tensors in host memory, concurrently with the device.
        shape: of a matrix product (products, m, n, k); of attention (heads of all samples, queries, keys, head
            dimension); () for other operations.
    """

    phase: str
    operation: str
    dtype: str
    calls: int
    flops: int
    bytes: int
    on_host: bool = False
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Collective:
    """All calls of one collective on one mesh axis with one payload.

    Attributes:
        elements, bytes: the full payload of one call (the gathered tensor, or the tensor before the scatter); for
            an all-to-all or a send, the input of this rank.
        phase: in which it is started.
        passes: micro-batches in which it is called; 1 where it is called once a step.
    """

    kind: str  # all_gather | reduce_scatter | all_reduce | broadcast | all_to_all | send
    axis: str
    degree: int
    calls: int
    elements: int
    bytes: int
    phase: str = ""
    passes: int = 1

    @property
    def rounds(self) -> int:
        """Passes of the payload around the ring: 2 for an all-reduce, else 1."""
        return 2 if self.kind == "all_reduce" else 1

    @property
    def traffic_bytes(self) -> float:
        """Bytes that each rank sends in all calls, by the ring convention."""
        return self.calls * self.rounds * self.bytes * self.share

    @property
    def share(self) -> float:
        """Fraction of the payload that each rank sends per round."""
        return 1.0 if self.kind == "send" else (self.degree - 1) / self.degree

    @property
    def traffic_elements(self) -> float:
        """Elements times rounds in all calls, without the factor (n-1)/n: the Ψ units of the ZeRO paper."""
        return float(self.calls * self.rounds * self.elements)


@dataclass(frozen=True)
class Transfer:
    """All copies of one size between two memories, or to or from a disk, in one phase.

    Attributes:
        way: to_host or to_device, between device and host memory; disk_read or disk_write.
    """

    phase: str
    way: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class StepCost:
    """The cost of one optimizer step of one rank, counted by the dry run.

    Attributes:
        micro_batches: in the step.
    """

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...] = ()
    micro_batches: int = 1

    @property
    def flops(self) -> int:
        """FLOPs that this rank executes, recomputation included; the later half of causal attention is not."""
        return round(sum(k.calls * k.flops for k in self.kernels))

    def traffic_by_axis(self) -> dict[str, int]:
        """Bytes that each rank sends per optimizer step, by mesh axis."""
        traffic: dict[str, float] = {}
        for c in self.collectives:
            traffic[c.axis] = traffic.get(c.axis, 0.0) + c.traffic_bytes
        return {axis: round(sent) for axis, sent in traffic.items()}

    def transferred_bytes(self) -> dict[str, int]:
        """Bytes copied between memories per optimizer step, by way."""
        copied: dict[str, float] = {}
        for t in self.transfers:
            copied[t.way] = copied.get(t.way, 0) + t.calls * t.bytes
        return {way: round(sent) for way, sent in copied.items()}


CountedCall: TypeAlias = Kernel | Collective | Transfer
"""What a dry run counts."""

CONTROL_AXIS = "control"
"""Axis name for collectives of a single element (token count, loss, gradient norm).

They are not traffic of the strategy, so they are not listed under the mesh axis of their group."""
