"""Callbacks: a user's code that a run calls after steps, evaluations, checkpoints and events.

A callback is any object with some of the methods of ``Callback``. Each gets a plain dict. It runs on rank 0, or on
every rank if its ``every_rank`` is true. ``on_step`` may return what it asks for: one of ``ASKS``, or several. The
ranks agree on it with the flags that every step all-reduces anyway (launch/signals.py), so all do the same after the
same step. The host reads results one step late, so it happens at the third step after the one that ``on_step`` saw, or
earlier where the run pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from shardwise.core.errors import RecipeError, ShardwiseError
from shardwise.core.user_objects import resolve
from shardwise.launch.user_code import place_in

STOP, SAVE, EVALUATE, SKIP = "stop", "save", "evaluate", "skip"
ASKS = (STOP, SAVE, EVALUATE, SKIP)
"""What ``on_step`` may return: end the run as if it had no more steps; save a checkpoint; measure the validation loss;
leave an update out."""

PREEMPT = "preempt"
"""A signal asked for a stop."""

Values = dict[str, Any]


class Callback:
    """The methods of a callback; all are optional, and this base does nothing.

    Attributes:
        every_rank: call it on every rank, not on rank 0 alone.
    """

    every_rank = False

    def on_start(self, run: Values) -> None:
        """Before the first step: ``folder``, ``recipe``, ``plan``, ``step`` (done before), ``steps``, ``rank`` and
        ``world_size``.
        """

    def on_step(self, step: Values) -> str | Iterable[str] | None:
        """After a step: the keys of its line in metrics.jsonl; ``peak_bytes`` is this rank's.

        Returns what it asks for: "stop", "save", "evaluate", "skip", several of them, or None.
        """
        return None

    def on_evaluate(self, evaluation: Values) -> None:
        """After an evaluation: ``step``, ``held_out_loss`` (None without held-out data), ``held_out_losses`` of the
        named sets, and ``metrics``.
        """

    def on_save(self, saved: Values) -> None:
        """After a save: ``step``, ``path``, and ``committed``, which is False while a thread still writes."""

    def on_event(self, event: Values) -> None:
        """After an event of the guard, such as a spike or a rewind: the keys of its line in events.jsonl."""

    def on_end(self, end: Values) -> None:
        """At the end: ``step``, ``tokens``, ``reason`` (finished, stopped, preempted or failed) and ``error``."""


class Hooks:
    """The callbacks of one rank.

    Attributes:
        listening: whether this rank has any callback.
        may_ask: whether the run has any callback, on any rank.
    """

    def __init__(
        self, named: Sequence[tuple[str, Any]], rank: int, silent: Sequence[tuple[str, Any]] = ()
    ) -> None:
        """``silent`` are further callbacks of this rank, which ask for nothing."""
        called = [
            (name, callback)
            for name, callback in named
            if rank == 0 or getattr(callback, "every_rank", False)
        ]
        self._named = [*called, *silent]
        self.listening = bool(self._named)
        self.may_ask = bool(named)  # equal on all ranks, as their collectives need it
        self._asked: set[str] = set()

    def asked(self) -> tuple[bool, ...]:
        """Which of ASKS the callbacks of this rank have asked for since the last call."""
        asked = self._asked
        self._asked = set()
        return tuple(ask in asked for ask in ASKS)

    def step(self, values: Values) -> None:
        for name, answer in self._call("on_step", values):
            asks = {answer} if isinstance(answer, str) else set(answer or ())
            if unknown := asks.difference(ASKS):
                what = "a callback asks for an unknown action"
                why = f"on_step returned {min(map(str, unknown))!r}"
                fix = f"return one of {', '.join(ASKS)}, a list of them, or None"
                raise RecipeError(what, where=f"callbacks: {name}", why=why, fix=fix)
            self._asked |= asks

    def call(self, method: str, values: Values) -> None:
        """Call a method other than on_step of each callback. Raises RecipeError where one fails."""
        self._call(method, values)

    def _call(self, method: str, values: Values) -> list[tuple[str, Any]]:
        answers: list[tuple[str, Any]] = []
        for name, callback in self._named:
            function = getattr(callback, method, None)
            if function:
                # A copy for each, so that no callback changes the values of the next.
                answers.append((name, _answered(name, method, function, dict(values))))
        return answers


def open_callbacks(targets: Sequence[str], key: str = "callbacks") -> list[tuple[str, Any]]:
    """The callbacks of a recipe with their names; a class or a function is called to make one.

    Raises:
        RecipeError: one cannot be imported or made.
    """
    callbacks: list[tuple[str, Any]] = []
    methods = [name for name in vars(Callback) if name.startswith("on_")]
    for target in targets:
        callback = resolve(target, key)
        # A class makes the callback, because its methods need an instance; so does a function without these methods.
        if isinstance(callback, type) or not any(hasattr(callback, name) for name in methods):
            callback = _answered(target, "__init__", callback)
        if not any(hasattr(callback, name) for name in methods):
            why = f"it has none of {', '.join(methods)}"
            raise RecipeError("this is no callback", where=f"{key}: {target}", why=why)
        callbacks.append((target, callback))
    return callbacks


def _answered(name: str, method: str, function: Callable[..., Any], *values: Any) -> Any:
    try:
        return function(*values)
    except ShardwiseError:
        raise
    except Exception as error:  # the user's code
        raise RecipeError(
            "a callback failed",
            where=f"callbacks: {name}.{method}{place_in(error)}",
            why=f"{type(error).__name__}: {error}",
        ) from error


def raised(flags: Tensor) -> frozenset[str]:
    """The names of the flags that all ranks agreed on."""
    return frozenset(name for name, flag in zip((PREEMPT, *ASKS), flags.tolist(), strict=True) if flag)
