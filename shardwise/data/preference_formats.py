"""Records of preferences: two completions of a prompt, the better one first, or one completion with a label.

`preference` has `chosen` and `rejected`, and the prompt in one of these ways. A completion of a conversation is a list
of turns, one turn, or the text of the assistant's one.

    prompt                          a text, of completions that are texts; else turns, or the text of a user's turn
    none                            chosen and rejected begin with it: their common turns, or their common text
    conversations, messages         turns, with a completion each (LLaMA-Factory)
    instruction, perhaps input      a user's turn; without a chat template, Alpaca's wording (LLaMA-Factory)
    question, or input              a user's turn (Intel/orca_dpo_pairs)
    prompt and system               both turns, of completions that are texts, too

The common text is cut back before its last blank, or behind its last mark, so that no word is divided. Texts that have
none in common are refused: their prompt is likely in a field that is not read. Completions may repeat the turns of
`prompt` (UltraFeedback). `margin` is a number that says by how much the chosen one is better.

`unpaired` is a record of another format with `label`, or `kto_tag`: true if its last answer is desirable.

Only the completions are trained on; of a conversation, the assistant's turns in them. One may be empty: then its end
is trained on, as in TRL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.core.errors import DataError, shorten
from shardwise.data.formats import (
    LABELS,
    PROMPT_FIELDS,
    TEXT_KEYS,
    Chat,
    Completed,
    Example,
    alpaca_of,
    chat_of,
    example_of,
    require_fields,
    with_turns,
)
from shardwise.data.readers import Record, json_kind
from shardwise.data.turns import REASONING, Turn, parsed_json, text_in, turns_of

SIDES = ("chosen", "rejected")
_ROLE_KEYS = ("role", "content")
_DESIRABLE = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
"""Labels as texts; pandas writes a column with gaps as decimals."""
_BLANK = re.compile(r"\s(?=\S*$)")
"""The last blank of a text."""
_MARK = re.compile(r"\W(?=\w*$)")
"""The last character of a text that is part of no word."""
_LARGEST_MARGIN = 3.4e38
"""That of fp32, which margins are in."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two completions of one prompt.

    Attributes:
        read: the fields that a text reads.
        margin: by how much the chosen one is better (``margin_of``); None if the record does not say.
        implicit: whether the prompt is the text that both begin with.
    """

    chosen: Example
    rejected: Example
    read: frozenset[str]
    implicit: bool = False
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Labelled:
    """A completion, and whether it is desirable. `read` names the fields that a text reads."""

    example: Example
    desirable: bool
    read: frozenset[str]


def preference_of(record: Record, template: bool) -> Preference:
    """Parse a record of the format `preference`. Raises DataError if it is none.

    Args:
        template: whether the tokenizer has a chat template.
    """
    require_fields(record, "preference")
    if not _turns_before(record.fields) and all(_begins_with_answer(record, key) for key in SIDES):
        record = with_turns(record, template)
    fields = record.fields
    where = record.where
    read = TEXT_KEYS["preference"]
    if all(isinstance(fields[key], str) for key in SIDES) and not _turns_before(fields):
        implicit = fields.get("prompt") is None and fields.get("instruction") is None
        if not implicit and fields.get("prompt") is None:
            read |= TEXT_KEYS["alpaca"] - {"output"}
            chosen, rejected = (
                replace(alpaca_of(fields, where, key, empty=True), only_last=True) for key in SIDES
            )
        else:
            chosen, rejected = _text_pair(fields, where)
        return Preference(chosen, rejected, read, implicit)
    return Preference(*_chats(record), read)


def labelled_of(record: Record, template: bool) -> Labelled:
    """Parse a record of the format `unpaired`. Raises DataError if it is none.

    Args:
        template: whether the tokenizer has a chat template.
    """
    fields = record.fields
    where = record.where
    key = next((key for key in LABELS if fields.get(key) is not None), None)
    if key is None:
        why = f"data.format is unpaired, and the record has {', '.join(fields) or 'nothing'}"
        raise DataError("no 'label'", where=where, why=why, fix="say whether each completion is desirable")
    value = fields[key]
    label = _DESIRABLE.get(str(value).lower())  # CSV has texts
    if label is None:
        what = f"'{key}' is {value!r}"
        why = "a completion is desirable or it is not"
        raise DataError(what, where=where, why=why, fix="write true or false")
    bare = Record({name: value for name, value in fields.items() if name not in LABELS}, where)
    name = next((name for name, field in PROMPT_FIELDS.items() if fields.get(field) is not None), "prompt")
    output = {"alpaca": "output", "prompt": "completion"}.get(name)
    if output and isinstance(answer := fields.get(output), str):
        asked = with_turns(bare, template)
        if asked is not bare:
            turns = [{"role": "assistant", "content": text_in(answer, output, where)}]
            others = {key: value for key, value in asked.fields.items() if key != output}
            bare = Record({**others, "completion": turns}, where)
            name = "prompt"
    example = example_of(bare, name, empty=True)
    if isinstance(example, Completed):
        return Labelled(replace(example, only_last=True), label, TEXT_KEYS[name] | set(LABELS))
    if name != "prompt":  # a prompt says itself where the completion begins
        before = (replace(turn, trained=False) for turn in example.turns[:-1])
        example = replace(example, turns=(*before, example.turns[-1]))
    return Labelled(example, label, TEXT_KEYS[name])


def is_empty(example: Example) -> bool:
    """Whether its completion has no words, calls or reasoning."""
    if isinstance(example, Completed):
        return not example.completion.strip()
    last = example.turns[-1]
    return not (last.text.strip() or last.calls or any(last.keys.get(key) for key in REASONING))


def margin_of(fields: Mapping[str, object], where: str) -> float | None:
    """The margin of a record; None if it has none. Raises DataError if it is no number of fp32."""
    value = parsed_json(fields.get("margin"))  # of CSV: a text
    if value is None or value == "":
        return None
    # A bool is an int in Python, and only NaN differs from itself.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise DataError("'margin' is not a number", where=where, why=f"it is {value!r}", fix="write a number")
    if not abs(value) <= _LARGEST_MARGIN:
        why = f"it is {shorten(str(value), 40)}"
        fix = f"write a number of at most {_LARGEST_MARGIN:g}"
        raise DataError("'margin' is too large", where=where, why=why, fix=fix)
    return float(value)


# -- texts


def _text_pair(fields: Mapping[str, object], where: str) -> tuple[Completed, Completed]:
    chosen, rejected = (text_in(fields[key], key, where) for key in SIDES)
    if fields.get("prompt") is None:
        border = _border(chosen, rejected)
        if not border and chosen != rejected:
            fix = "name the prompt's field 'prompt', or begin both with it; an empty 'prompt' says that there is none"
            raise _no_prompt(fields, where, "the texts begin differently", fix)
        prompt = chosen[:border]
        chosen = chosen[border:]
        rejected = rejected[border:]
    else:
        prompt = text_in(fields["prompt"], "prompt", where)
    return Completed(((prompt, chosen),)), Completed(((prompt, rejected),))


def _no_prompt(fields: Mapping[str, object], where: str, why: str, fix: str) -> DataError:
    other = [key for key in fields if key not in SIDES]
    reason = f"there is no 'prompt', and {why}"
    if other:
        reason += f"; the record also has {', '.join(other)}"
    return DataError("chosen and rejected have no prompt in common", where=where, why=reason, fix=fix)


def _border(chosen: str, rejected: str) -> int:
    """Length of the prompt that two texts begin with. It leaves both a completion with a word."""
    shortest = min(len(text.rstrip()) for text in (chosen, rejected))
    common = chosen[: max(0, min(shared_length(chosen, rejected), shortest - 1))]
    if blank := _BLANK.search(common):
        return blank.start()
    mark = _MARK.search(common)  # of languages without blanks
    return mark.end() if mark else 0


# -- conversations


def _turns_before(fields: Mapping[str, object]) -> str | None:
    """The field with the turns before the completions; None if they have the prompt themselves, or it is a text."""
    names = [name for name in ("prompt", "conversations", "messages") if fields.get(name) is not None]
    if not names or (names[0] == "prompt" and not isinstance(fields["prompt"], list)):
        return None
    return names[0]


def _chats(record: Record) -> tuple[Chat, Chat]:
    fields = record.fields
    where = record.where
    sides = [_answer(fields, key, where) for key in SIDES]
    name = _turns_before(fields)
    if name != "prompt" and all(side[0].role != "assistant" for side in sides):
        name = None  # UltraFeedback's messages are those of chosen
    if name is not None:
        prompt = turns_of(fields, name, _ROLE_KEYS, where, empty=True)
        repeated = all(side[: len(prompt)] == prompt for side in sides)
    else:
        prompt = _common(*sides)
        repeated = True
        if fields.get("prompt") is not None:
            text = text_in(fields["prompt"], "prompt", where)
            if all(side[0].role == "assistant" for side in sides):
                prompt = (Turn("user", text),)
                repeated = False
            elif text.strip() not in [turn.text.strip() for turn in prompt]:
                raise DataError(
                    "'prompt' is not a turn that chosen and rejected begin with",
                    where=where,
                    why="a prompt that is a text is the first turn of both, or both have the answer alone",
                    fix="correct it, or leave 'prompt' out",
                )
    if not prompt:
        fix = "begin both with the same turns, or give 'prompt'"
        raise _no_prompt(fields, where, "their first turns differ", fix)
    before = [replace(turn, trained=False) for turn in prompt]
    chosen, rejected = (
        chat_of(record, "preference", (*before, *(side[len(prompt) :] if repeated else side)), key)
        for key, side in zip(SIDES, sides, strict=True)
    )
    return chosen, rejected


def _begins_with_answer(record: Record, key: str) -> bool:
    """Whether a completion begins with the answer."""
    return _answer(record.fields, key, record.where)[0].role == "assistant"


def _answer(fields: Mapping[str, object], key: str, where: str) -> tuple[Turn, ...]:
    """The turns of a completion, which may begin with those of the prompt."""
    value = fields[key]
    if isinstance(value, str):
        return (Turn("assistant", text_in(value, key, where)),)
    if isinstance(value, dict):
        return turns_of({key: [value]}, key, _ROLE_KEYS, where, empty=True)
    if not isinstance(value, list):
        why = f"it is of type {json_kind(value)}"
        raise DataError(f"'{key}' is neither text nor turns", where=where, why=why, fix="write one of them")
    return turns_of(fields, key, _ROLE_KEYS, where, empty=True)


def _common(chosen: Sequence[Turn], rejected: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns that both begin with. They leave both a turn."""
    return tuple(chosen[: min(shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)])


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Number of items that two sequences begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
