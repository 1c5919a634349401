"""Errors for users: one class per exit code.

An error is one line: `error: WHAT (WHERE): WHY; WHAT TO DO`. Its four parts are attributes, so the launcher can
add a worker's rank without parsing the text. The command line prints `line()` and exits with `exit_code`; the traceback
is only in `logs/`.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar

LONGEST_LINE = 300
"""Maximum characters of an error line; longer parts are cut in the middle."""

# Minimum characters of each part. Parts are cut in this order until the line fits; place and remedy come last.
_SHORTEST = {"why": 60, "what": 60, "fix": 50, "where": 110}


def shorten(text: str, limit: int) -> str:
    """`text` in at most `limit` characters, with an ellipsis in the middle."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    return text[: limit - tail - 1] + "…" + text[len(text) - tail :]


def one_line(text: str) -> str:
    """`text` without newlines, repeated blanks and non-printable characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question for a name that resembles one of `names`: `did you mean 'gptq'?`; "" if it resembles none."""
    near = get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def one_of(name: str, names: Iterable[str]) -> str:
    """What to do about a name that is none of `names`: `did you mean 'gptq'? give one of rtn, gptq`."""
    known = list(names)
    return f"{did_you_mean(name, known)} give one of {', '.join(known)}".lstrip()


class ShardwiseError(Exception):
    """An error for the user: what went wrong, where, why, and what to do. Raise a subclass.

    `what` is required; the line omits other parts that are empty. Parts are phrases without a final full stop:
    `RecipeError("unknown key 'widht'", where="r.yaml:3: model.widht", fix="did you mean 'width'?")`.
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
        # Exception's own __reduce__ passes only `args`, which loses the keyword-only parts.
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
    """A checkpoint or a weight file is missing, incomplete, damaged or of another model."""

    exit_code = 4


class RankError(ShardwiseError):
    """A rank was lost or hung."""

    exit_code = 5


class NumericsError(ShardwiseError):
    """The loss or gradients are not finite, or a run and its reference disagree."""

    exit_code = 6


class ResourceError(ShardwiseError):
    """Not enough memory, disk space, processes or ports."""

    exit_code = 7


class OutOfMemory(ResourceError):
    """A rank ran out of memory while training; its run folder's ``oom.json`` says how the run can go on.

    The exit code is for the launcher, which may start all ranks again.
    """

    exit_code = 101


class Preempted(ShardwiseError):
    """The run was asked to stop. Its state is saved; the same command resumes it."""

    exit_code = 75
