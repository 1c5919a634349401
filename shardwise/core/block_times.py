"""One micro-batch through the blocks of a model: which block runs when, forward, again or backward, and what it keeps.

Time is the number of the dry run's event, so it has an order and no seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwise.core.json_file import CLOSED, PositiveInt, Size

RunKind: TypeAlias = Literal["forward", "again", "backward"]

BlockRun: TypeAlias = tuple[Size, RunKind, Size, Size]
"""Block, kind, first event and last event."""

KeptBytes: TypeAlias = tuple[Size, Size, Size, Size]
"""Block, first event, last event and bytes of activations that the block has allocated and that are in memory."""


@dataclass(frozen=True)
class BlockTimes:
    """The first micro-batch of a step on one rank.

    Attributes:
        blocks: those of the rank.
        end: the event after the last run.
        runs: in the order of their beginnings.
        kept: in the order of blocks and events.
    """

    __pydantic_config__ = CLOSED

    blocks: PositiveInt
    end: PositiveInt
    runs: tuple[BlockRun, ...]
    kept: tuple[KeptBytes, ...]

    @property
    def forward_runs(self) -> float:
        """Runs forward per block, the first one included."""
        return sum(1 for _, kind, _, _ in self.runs if kind != "backward") / self.blocks

    @property
    def most_kept(self) -> int:
        """The highest sum of kept bytes at one event."""
        changes: dict[int, int] = {}
        for _, begin, end, size in self.kept:
            changes[begin] = changes.get(begin, 0) + size
            changes[end] = changes.get(end, 0) - size
        level = most = 0
        for event in sorted(changes):
            level += changes[event]
            most = max(most, level)
        return most
