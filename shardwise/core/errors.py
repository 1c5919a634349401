"""Every failure a person can meet, one class per exit code.

A failure reads as one line: `error: WHAT (WHERE): WHY; WHAT TO DO`. The four parts are kept apart instead of
being one message, so that a worker process can hand its error to the launcher, which adds the rank, without
parsing English. The command line prints `line()` and exits with `exit_code`; the trace goes to `logs/` alone.

Chosen: subclasses by what a script must tell apart (the exit code), not by module. Refused: a numeric code
per message, which nobody looks up; the price is that two messages of one class differ by their words only.
"""

from typing import ClassVar

LONGEST_LINE = 300
"""Characters of an error line, beyond which the longest parts are cut in the middle."""

# A part is cut to no less than this, in this order, until the line fits: place and remedy matter most.
_SHORTEST = {"why": 60, "what": 60, "fix": 50, "where": 110}


def shorten(text: str, limit: int) -> str:
    """`text` in at most `limit` characters, its middle an ellipsis: the ends of a path tell most."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    return text[: limit - tail - 1] + "…" + text[len(text) - tail :]


def one_line(text: str) -> str:
    """`text` without newlines, runs of blanks, or what a terminal would obey or not show."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


class ShardwiseError(Exception):
    """A failure told to a person: what went wrong, where, why, and what to do about it.

    Raise a subclass. `what` is required; each other part is left out of the line when empty. Parts are
    phrases without a final full stop: `RecipeError("unknown key 'widht'", where="r.yaml:3: model.widht",
    fix="did you mean 'width'?")`.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def line(self) -> str:
        """`error: WHAT (WHERE): WHY; WHAT TO DO`, one printable line of at most `LONGEST_LINE` characters."""
        parts = {name: one_line(str(getattr(self, name))) for name in _SHORTEST}
        for name, shortest in _SHORTEST.items():
            excess = len(_join(parts)) - LONGEST_LINE
            if excess > 0:
                parts[name] = shorten(parts[name], max(shortest, len(parts[name]) - excess))
        return _join(parts)

    def __str__(self) -> str:
        return self.line().removeprefix("error: ")

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own way calls the class with `args` alone, which loses the keyword-only parts.
        return _rebuild, (type(self), self.what, self.where, self.why, self.fix)


def _join(parts: dict[str, str]) -> str:
    where = f" ({parts['where']})" if parts["where"] else ""
    rest = "; ".join(text for text in (parts["why"], parts["fix"]) if text)
    return f"error: {parts['what']}{where}" + (f": {rest}" if rest else "")


def _rebuild(kind: type[ShardwiseError], what: str, where: str, why: str, fix: str) -> ShardwiseError:
    return kind(what, where=where, why=why, fix=fix)


class RecipeError(ShardwiseError):
    """A recipe, an override or a command-line argument is wrong."""

    exit_code = 2


class DataError(ShardwiseError):
    """A data source or a tokenizer is missing, unreadable or malformed."""

    exit_code = 3


class CheckpointError(ShardwiseError):
    """A checkpoint or a weights file is missing, incomplete, damaged or of another model."""

    exit_code = 4


class RankError(ShardwiseError):
    """A rank was lost, or hung."""

    exit_code = 5


class NumericsError(ShardwiseError):
    """The loss or the gradients stopped being finite, or two runs that must agree do not."""

    exit_code = 6


class ResourceError(ShardwiseError):
    """It does not fit: memory, disk, processes, ports."""

    exit_code = 7


class Preempted(ShardwiseError):
    """Asked to stop; the state is saved and the same command goes on from it."""

    exit_code = 75
