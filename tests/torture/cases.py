"""Runs cases in this process, judges how each ends, and prints a summary as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.errors import LONGEST_LINE, ShardwiseError

MOST_SECONDS = 1.0
"""Processor time that one case may take."""
_SHOWN = 20

Case = tuple[str, Callable[[], object]]
"""What the case is, in a few words, and what it runs."""
Cases = Callable[[int, random.Random], Iterator[Case]]
"""So many cases, drawn with a generator of random numbers."""


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: a test process holds millions of objects that a command does not have."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass
class Tally:
    """How cases ended.

    Attributes:
        allowed: exit codes that keep the promise; 0 is a case that was accepted.
    """

    allowed: Collection[int]
    codes: Counter[int] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    broken: list[str] = field(default_factory=list)

    def run(self, name: str, action: Callable[[], object]) -> None:
        began, fault = time.process_time(), ""
        try:
            with uncollected():
                action()
            code = 0
        except ShardwiseError as error:
            code, line = error.exit_code, error.line()
            if "\n" in line or not line.isprintable() or len(line) > LONGEST_LINE:
                fault = f"not one printable line: {line!r}"
        except Exception as error:
            code, last = 1, traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{type(error).__name__}: {str(error)[:120]} ({last.filename.rpartition('/')[2]}:{last.lineno})"
        seconds = time.process_time() - began
        self.codes[code] += 1
        self.slowest = max(self.slowest, (seconds, name))
        if seconds > MOST_SECONDS:
            fault = fault or f"it took {seconds:.1f} s"
        if not fault and code not in self.allowed:
            fault = f"exit code {code}"
        if fault:
            self.broken.append(f"{name}: {fault}")

    def summary(self) -> dict[str, Any]:
        return {
            "cases": self.codes.total(),
            "exit_codes": {str(code): count for code, count in sorted(self.codes.items())},
            "slowest_seconds": round(self.slowest[0], 3),
            "slowest": self.slowest[1],
            "broken": len(self.broken),
            "first_broken": self.broken[:_SHOWN],
        }


def tortured(cases: Cases, count: int, seed: int, allowed: Collection[int]) -> Tally:
    """Run ``count`` cases. The first runs twice: the first time it imports modules."""
    tally = Tally(allowed)
    for number, (name, action) in enumerate(cases(count, random.Random(seed))):
        if number == 0:
            Tally(allowed).run(name, action)
        tally.run(name, action)
    return tally


def main(cases: Cases, count: int, allowed: Collection[int]) -> int:
    """The command: prints the summary; returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tally = tortured(cases, given.count, given.seed, allowed)
    print(json.dumps(tally.summary(), indent=1))
    return 1 if tally.broken else 0


# ---- damage -----------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 10**6, 2**31, 2**63, 10**25, -(10**400), 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", " ", "\0", "\u2028", "é" * 300, "../../etc/passwd", "/dev/zero", "{}", "1", "x" * 5000, [], {}, [[]],
    {"a": {"a": {}}}, [1, "1", None],
)  # fmt: skip
"""Values that no file should hold at most places."""


def damaged_json(value: Any, random: random.Random) -> bytes:
    """The text of a JSON value with one to three things changed: a value, a key, or bytes of the text."""
    value = json.loads(json.dumps(value))
    for _ in range(random.randint(1, 3)):
        value = _changed(value, random)
    raw = json.dumps(value).encode()
    return damaged_bytes(raw, random) if random.random() < 0.3 else raw


def _changed(value: Any, random: random.Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        how = random.random()
        if how < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.25:
            return {(k + "x" if k == key else k): v for k, v in value.items()}
        return {k: _changed(v, random) if k == key else v for k, v in value.items()}
    if isinstance(value, list) and value and random.random() < 0.9:
        place = random.randrange(len(value))
        how = random.random()
        if how < 0.15:
            return value[:place] + value[place + 1 :]
        if how < 0.25:
            return value + [value[place]]
        return [_changed(v, random) if i == place else v for i, v in enumerate(value)]
    if type(value) in (int, float) and random.random() < 0.4:
        return random.choice(
            [value + 1, value - 1, -value, value * 1000, float(value) if abs(value) < 1e300 else 0]
        )
    return random.choice(ODD)


def damaged_bytes(raw: bytes, random: random.Random) -> bytes:
    """The bytes with one fault: a flipped bit, a cut, a doubled part, other bytes, or deep brackets."""
    place, end = sorted(random.randrange(len(raw) + 1) for _ in range(2))
    how = random.randrange(7)
    if how == 0 and raw:
        place = random.randrange(len(raw))
        return raw[:place] + bytes([raw[place] ^ (1 << random.randrange(8))]) + raw[place + 1 :]
    if how == 1:
        return raw[:place]
    if how == 2:
        return raw[:place] + raw[end:]
    if how == 3:
        return raw[:end] + raw[place:]
    if how == 4:
        return raw[:place] + random.randbytes(random.randint(1, 20)) + raw[place:]
    if how == 5:
        return (
            raw[:place]
            + random.choice([b"[", b"{", b'{"a":', b"("]) * random.choice([50, 5_000, 60_000])
            + raw[end:]
        )
    return random.choice(
        [b"", b"\0" * 64, b"\xff\xfe", b"\xef\xbb\xbf" + raw, raw.replace(b"\n", b"\r\n"), b"null"]
    )
