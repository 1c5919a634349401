"""The settings of CUDA's caching allocator that change how much it reserves. No torch.

``PYTORCH_ALLOC_CONF`` (before torch 2.9 ``PYTORCH_CUDA_ALLOC_CONF``, which still works) is a comma-separated list of
``key:value`` pairs. The plan reads the same variable as the run, so a plan and a run from one shell agree. Three keys
are modelled; the plan names the others that are set.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.errors import RecipeError
from shardwise.core.units import MiB
from shardwise.hardware.kinds import DEVICE_KINDS

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The first one that is set is used."""

_INTERVALS = 16
"""Intervals between powers of two, from 1 MiB to 32 GiB and above."""
_PAIR = re.compile(r"\s*([a-z0-9_]+)\s*:\s*(\[[^\]]*\]|[^,\[]+?)\s*(?:,|$)")
# PyTorch refuses a max_split_size below the size of its large segments.
_LEAST_SPLIT = 20 * MiB


@dataclass(frozen=True)
class AllocatorOptions:
    """How the allocator is configured.

    Attributes:
        expandable_segments: grow one segment for each stream and pool.
        max_split_size: blocks of at least this many bytes are not split; infinite if not set.
        divisions: per power of two from 1 MiB: the number of parts between it and the next power to which
            requests are rounded up; 0 rounds to multiples of 512 bytes.
        ignored: keys that are set but not modelled.
    """

    expandable_segments: bool = False
    max_split_size: float = math.inf
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    ignored: tuple[str, ...] = ()

    def rounded(self, size: int) -> int:
        """Bytes of the block for a request of ``size`` bytes."""
        if size < 512:
            return 512
        parts = self.divisions[min(max(size.bit_length() - 21, 0), _INTERVALS - 1)]
        if parts > 1 and size > 512 * parts:
            step = (1 << (size.bit_length() - 1)) // parts
            return -(-size // step) * step
        return (size + 511) & -512

    def described(self) -> str:
        """The settings that differ from the defaults, in the variable's syntax; "" for none."""
        said = []
        if self.expandable_segments:
            said.append("expandable_segments:True")
        if self.max_split_size != math.inf:
            said.append(f"max_split_size_mb:{int(self.max_split_size) // MiB}")
        if any(self.divisions):
            said.append(f"roundup_power2_divisions:{_divisions_text(self.divisions)}")
        return ",".join(said)


def _divisions_text(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    return "[" + ",".join(f"{1 << i}:{parts}" for i, parts in enumerate(divisions)) + "]"


def unset(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment sets neither variable."""
    return not any(environment.get(variable, "").strip() for variable in VARIABLES)


def options_in(kind: str, environment: Mapping[str, str] = os.environ) -> AllocatorOptions:
    """The options of a run on a kind of device. Raises RecipeError for values that PyTorch would refuse."""
    for variable in VARIABLES:
        if text := environment.get(variable, "").strip():
            return options_from(text, variable)
    return options_from(DEVICE_KINDS[kind].allocator, "")


def options_from(text: str, where: str = VARIABLES[0]) -> AllocatorOptions:
    """Parse ``key:value,key:value``. Raises RecipeError."""
    options: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _PAIR.match(text, position)
        if match is None:
            what = f"cannot read {text[position : position + 40]!r}"
            raise RecipeError(what, where=where, fix="write key:value,key:value")
        options[match[1]] = match[2].strip()
        position = match.end()
    try:
        return AllocatorOptions(
            expandable_segments=_flag(options.pop("expandable_segments", "False")),
            max_split_size=_split_size(options.pop("max_split_size_mb", "")),
            divisions=_divisions(options.pop("roundup_power2_divisions", "0")),
            ignored=tuple(options),
        )
    except ValueError as problem:
        raise RecipeError(str(problem), where=where) from None


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"expandable_segments must be True or False, found {text[:20]!r}")
    return text == "True"


def _split_size(text: str) -> float:
    if not text:
        return math.inf
    if not text.isdecimal():
        raise ValueError(f"max_split_size_mb must be a whole number, found {text[:20]!r}")
    size = int(text) * MiB
    if size <= _LEAST_SPLIT:
        raise ValueError(f"max_split_size_mb must be above {_LEAST_SPLIT // MiB}, found {text[:20]}")
    return size


def _divisions(text: str) -> tuple[int, ...]:
    """One number for all sizes, or ``[256:1,512:2,>:8]`` by power of two in MiB; the first also applies below it."""
    if not text.startswith("["):
        return (_power(text),) * _INTERVALS
    values = [0] * _INTERVALS
    last: int | None = None
    for item in text[1:-1].split(","):
        bound, _, parts = (part.strip() for part in item.partition(":"))
        if bound == ">":
            start = 0 if last is None else last + 1
            values[start:] = [_power(parts)] * (_INTERVALS - start)
            continue
        index = min(_power(bound, least=1).bit_length() - 1, _INTERVALS - 1)
        if last is None:
            values[:index] = [_power(parts)] * index
        values[index], last = _power(parts), index
    return tuple(values)


def _power(text: str, least: int = 0) -> int:
    if not text.isdecimal() or (number := int(text)) & (number - 1) or number < least:
        raise ValueError(f"roundup_power2_divisions takes powers of two, found {text[:20]!r}")
    return number
