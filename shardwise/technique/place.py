"""A rank's place on a mesh axis whose ranks hold different blocks of the model.

A dividing technique whose ranks are all alike, such as tensor parallelism, needs none. One that gives each rank other
blocks puts its place into ``EngineOptions.place``. The engine, checkpoints and the planner read it through this
interface and know nothing of the technique.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.core.timetable import Timetable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Reduced:
    """A dry run of less than a whole step.

    Attributes:
        micro_batches: at most so many of them.
        ranks_after: at most so many ranks of the axis after this one.
    """

    micro_batches: int | None = None
    ranks_after: int | None = None


@dataclass(frozen=True)
class Shortcut:
    """Peaks of a step from two reduced dry runs: those of ``fewer``, and ``times`` the difference to ``more``."""

    more: Reduced
    fewer: Reduced
    times: int


@dataclass(frozen=True)
class Stretch:
    """What stages of equal work and equal size make of a step, before any is looked at.

    Attributes:
        longer: by how much passes take longer than a rank's work, because ranks wait for each other.
        kept: activations that the fullest rank holds, as a share of those of one micro-batch in the whole model.
    """

    longer: float = 1.0
    kept: float = 1.0


@dataclass(frozen=True)
class RankTime:
    """Seconds of one rank's step by itself, of its passes forward and backward in it, and of a message."""

    step: float
    forward: float
    backward: float
    sending: float = 0.0


@dataclass(frozen=True)
class WholeStep:
    """One step of all ranks of the axis together.

    Attributes:
        seconds: predicted.
        waiting: the name under which the plan lists the time in which ranks wait for each other.
        timetable: the passes of the step, from which the report draws it.
    """

    seconds: float
    waiting: str
    timetable: Timetable


class Place(ABC):
    """One rank's place along ``axis``.

    Attributes:
        axis: the mesh axis; the outermost one.
        rank: this rank's number along it.
        ranks: the number of ranks along it.
        synchronous: whether all ranks are at the same optimizer step at the same time.
        splits_backward: whether a backward pass has two parts, between which weights must stay gathered.
    """

    axis: str
    rank: int
    ranks: int

    @property
    @abstractmethod
    def group(self) -> ProcessGroup:
        """All ranks along the axis."""

    @property
    @abstractmethod
    def verdict_group(self) -> ProcessGroup | None:
        """The ranks that judge the gradients of a step together; None for all ranks of the world."""

    @property
    def synchronous(self) -> bool:
        return self.verdict_group is None

    @property
    def splits_backward(self) -> bool:
        return False

    @abstractmethod
    def owns(self, parameter: str) -> bool:
        """Whether this place counts a parameter that it holds as its own, not as a copy of another place's."""

    # -- planning -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def depth(self) -> int | None:
        """Blocks of each of this rank's stages in the whole model; None where the stages differ."""

    @abstractmethod
    def ranks_to_probe(self, every: bool) -> Sequence[int]:
        """Numbers along the axis whose worst is the worst of all; ``every`` asks for one of each stage."""

    @abstractmethod
    def stand_in(self, rank: int, probed: Collection[int]) -> int:
        """The one of the ``probed`` numbers whose prediction stands for ``rank``."""

    @abstractmethod
    def reduced(self, to: Reduced) -> Place:
        """The same place with fewer ranks after it."""

    @abstractmethod
    def without_groups(self) -> Place:
        """The same place without process groups. It can be pickled, and is good for planning only."""

    @abstractmethod
    def shortcut(self, micro_batches: int) -> Shortcut | None:
        """A quicker way to the peaks of a step; None where there is none."""

    @abstractmethod
    def combined(
        self, times: Sequence[RankTime], micro_batches: int, worst: int, pass_bytes: int
    ) -> WholeStep:
        """The step of all ranks together.

        Args:
            times: of every rank along the axis.
            worst: the number of the rank that needs most memory.
            pass_bytes: activations that the forward pass of a micro-batch leaves on that rank.
        """
