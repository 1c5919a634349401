"""Formats of records: plain text, or a prompt and its completion.

    format     fields                                  becomes
    text       data.text_key                           plain text (see `split`)
    messages   messages: role and content              turns of a chat
    sharegpt   conversations: from and value           turns of a chat
    prompt     prompt, completion                      a prompt and its completion
    alpaca     instruction, output, perhaps input      a prompt of Stanford Alpaca's wording, and its completion

`auto` checks the fields of the source's first record in this order. A record with the text key is text. Every record
must have this format; the first one that differs ends the run with its position. A chat has an optional system turn,
then user and assistant turns that alternate, and ends with the assistant. Tool calls and content other than text are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from shardwise.core.errors import DataError
from shardwise.data.readers import Record, checked, kind_of
from shardwise.data.sources import Source
from shardwise.recipe.sections import DataSpec

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
KEYS = tuple(dict.fromkeys(key for keys in (*_NEEDED.values(), ("input",)) for key in keys))
"""All fields that some format reads."""

_SHAREGPT = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant",
}  # fmt: skip
_MESSAGES = {role: role for role in ("system", "user", "assistant", "tool")}

_ALPACA = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the"
    " request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat; `role` is system, user, assistant or tool. `calls` are the assistant's calls of tools."""

    role: str
    text: str
    calls: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """A prompt, which may be empty, and its completion, which must not be empty."""

    prompt: str
    completion: str


Example = Completed | tuple[Turn, ...]


def format_of(spec: DataSpec, source: Source) -> str:
    """The format of a source's records: the one in the recipe, or the detected one.

    Raises:
        DataError: the recipe asks for completions, and the source is plain text.
    """
    name = spec.format if spec.format != "auto" else _detected(source.fields(), spec.text_key)
    if name == "text" and spec.train_on == "completion":
        raise DataError(
            "no completions in the data source",
            where=spec.source,
            why="its records are plain text, and data.train_on is completion",
            fix=f"give records of {', '.join(_NEEDED)}, or leave that key out",
        )
    return name


def _detected(fields: frozenset[str], text_key: str) -> str:
    if text_key in fields:
        return "text"
    return next((name for name, needed in _NEEDED.items() if fields.issuperset(needed)), "text")


def example_of(record: Record, name: str) -> Example:
    """Parse a record of the format `name`.

    Raises:
        DataError: the record does not have this format, or has nothing to complete.
    """
    fields, place = record.fields, record.place
    missing = [key for key in _NEEDED[name] if fields.get(key) is None]
    if missing:
        raise DataError(
            f"no '{missing[0]}'",
            where=place,
            why=f"data.format is {name}, and the record has {', '.join(fields) or 'nothing'}",
            fix=f"give every record {' and '.join(_NEEDED[name])}, or name its data.format",
        )
    if name == "messages":
        return _chat(fields["messages"], ("messages", "role", "content"), _MESSAGES, place)
    if name == "sharegpt":
        return _chat(fields["conversations"], ("conversations", "from", "value"), _SHAREGPT, place)
    if name == "alpaca":
        return _alpaca(fields, place)
    return Completed(
        _text(fields["prompt"], "prompt", place), _said(fields["completion"], "completion", place)
    )


def _alpaca(fields: Mapping[str, object], place: str) -> Completed:
    extra = _text(fields.get("input") or "", "input", place)
    prompt = _ALPACA.format(
        with_input=", paired with an input that provides further context" if extra else "",
        instruction=_said(fields["instruction"], "instruction", place),
        input=f"### Input:\n{extra}\n\n" if extra else "",
    )
    return Completed(prompt, _said(fields["output"], "output", place))


def _chat(
    value: object, keys: tuple[str, str, str], roles: Mapping[str, str], place: str
) -> tuple[Turn, ...]:
    """Check a list of messages and return its turns."""
    name, role_key, text_key = keys
    if not isinstance(value, list) or not value:
        why = "it is empty" if isinstance(value, list) else f"it is of type {kind_of(value)}"
        fix = f'write [{{"{role_key}": ..., "{text_key}": ...}}, ...]'
        raise DataError(f"'{name}' is not a list of turns", where=place, why=why, fix=fix)
    turns = tuple(
        _turn(item, (role_key, text_key), roles, f"{name}[{number}]", place)
        for number, item in enumerate(value)
    )
    _check_order(turns, name, place)
    return turns


def _turn(item: object, keys: tuple[str, str], roles: Mapping[str, str], path: str, place: str) -> Turn:
    role_key, text_key = keys
    if not isinstance(item, dict):
        why, fix = f"it is of type {kind_of(item)}", f'write {{"{role_key}": ..., "{text_key}": ...}}'
        raise DataError(f"'{path}' is not an object", where=place, why=why, fix=fix)
    said: dict[str, object] = item
    calls = _calls(said, f"{path}.tool_calls", place)
    if calls and said.get(text_key) is None:
        said = {**said, text_key: ""}
    for key in keys:
        if said.get(key) is None:
            why = f"the turn has {', '.join(map(str, said)) or 'nothing'}"
            raise DataError(
                f"no '{path}.{key}'", where=place, why=why, fix=f"give every turn {' and '.join(keys)}"
            )
    role = said[role_key]
    if not isinstance(role, str) or role not in roles:
        known = ", ".join(roles)
        raise DataError(
            f"unknown role {role!r}", where=f"{place}: {path}.{role_key}", why=f"known are {known}"
        )
    value = _joined(said[text_key], f"{path}.{text_key}", place)
    needed = roles[role] == "assistant" and not calls
    return Turn(roles[role], (_said if needed else _text)(value, f"{path}.{text_key}", place), calls)


def _joined(value: object, key: str, place: str) -> object:
    """Content parts as one text: ``[{"type": "text", "text": ...}, ...]``."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            why, fix = f"a part is of type {kind}", "give parts of type text: the models read text alone"
            raise DataError(f"'{key}' is not text", where=place, why=why, fix=fix)
        texts.append(part["text"])
    return "".join(texts)


def _calls(turn: Mapping[str, object], key: str, place: str) -> tuple[Mapping[str, Any], ...]:
    """The tool calls of a turn, as the template gets them: with arguments as an object where they are JSON text."""
    calls = turn.get("tool_calls")
    if not calls:
        return ()
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"'{key}' is not a list of calls", where=place, why=f"it is of type {kind_of(calls)}")
    return tuple(_parsed_call(call) for call in calls)


def _parsed_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        with suppress(ValueError):
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


def _check_order(turns: tuple[Turn, ...], name: str, place: str) -> None:
    """Require an optional system turn, then alternating user and assistant turns, the assistant last.

    After a turn that calls tools come the tools' turns, and the assistant again.
    """
    first = 1 if turns[0].role == "system" else 0
    before: Turn | None = None
    for number, turn in enumerate(turns[first:], first):
        expected = "assistant"
        if before is None or before.role == "assistant":
            expected = "tool" if before is not None and before.calls else "user"
        again = before is not None and before.role == turn.role == "tool"
        before = turn
        if turn.role != expected and not again:
            raise DataError(
                "roles do not alternate",
                where=f"{place}: {name}[{number}]",
                why=f"found {turn.role}, expected {expected}",
                fix="write an optional system turn, then alternate user and assistant",
            )
    if turns[-1].role != "assistant":
        raise DataError(
            "nothing to complete",
            where=f"{place}: {name}",
            why=f"the last turn is {turns[-1].role}, not assistant",
            fix="end every chat with the assistant's answer",
        )


def _said(value: object, key: str, place: str) -> str:
    """A text that must not be empty."""
    text = _text(value, key, place)
    if not text.strip():
        raise DataError(
            f"'{key}' is empty", where=place, why="there is nothing to train on", fix="fill or remove it"
        )
    return text


def _text(value: object, key: str, place: str) -> str:
    checked(value, key, place, fix="make it a string")
    return cast(str, value)
