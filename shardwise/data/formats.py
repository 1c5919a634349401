"""Formats of records: plain text, a prompt and its completion, or a chat.

    format     fields                                  becomes
    text       data.text_key                           plain text (see `split`)
    messages   messages: role and content              a chat
    sharegpt   conversations: from and value           a chat
    prompt     prompt, completion                      a prompt and its completion, or a chat if both are lists of turns
    alpaca     instruction, output, perhaps input      a prompt of Stanford Alpaca's wording, and its completion
    preference chosen, rejected, perhaps prompt        two completions of a prompt (see `preference_formats`)
    unpaired   one of the above with a label           a prompt, its completion, and whether that is desirable

`auto` checks the fields of the source's first record in this order. A record with the text key is text. Samples of
preferences take the last two first, and prompts alone need no completion. Every record must have this format; the first
one that differs ends the run with its position.

The turns of a chat are parsed in `turns`. A record may list its `tools`; its `system` is the first turn. The template
gets those further fields of the record that it reads as variables, and all in `chat_template_kwargs`. Alpaca's `system`
and `history` (pairs of an instruction and its answer) are those of LLaMA-Factory.

Preferences and prompts alone take questions as turns (`with_turns`): Alpaca's fields if the tokenizer has a chat
template, `question` (Intel/orca_dpo_pairs), `input` alone, and a text of `prompt` next to `system` (both of argilla's
versions of that data set).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardwise.core.errors import DataError
from shardwise.data.readers import Record
from shardwise.data.source import Source
from shardwise.data.turns import (
    Turn,
    parsed_json,
    require_order,
    require_words,
    said,
    text_in,
    tools_in,
    turns_of,
)
from shardwise.recipe.error_messages import nearest_name
from shardwise.recipe.sections import DataSpec

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "preference": ("chosen", "rejected"),
}
PROMPT_FIELDS: Mapping[str, str] = {
    "prompt": "prompt", "messages": "messages", "sharegpt": "conversations", "alpaca": "instruction",
}  # fmt: skip
"""The field with the prompt, where a completion is not needed."""
QUESTION = "question"
"""A user's turn of a preference; the name of Intel/orca_dpo_pairs."""
LABELS = ("label", "kto_tag")
"""Fields that say whether a completion is desirable; the second is LLaMA-Factory's."""
_CHAT = ("tools", "functions", "system", "chat_template_kwargs")
_OWN: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", *_CHAT),
    "sharegpt": ("conversations", *_CHAT),
    "prompt": ("prompt", "completion", *_CHAT),
    "alpaca": ("instruction", "input", "output", "system", "history"),
}
KEYS: Mapping[str, frozenset[str]] = {
    **{name: frozenset(keys) for name, keys in _OWN.items()},
    "preference": frozenset(
        ("chosen", "rejected", "margin", "prompt", "messages", "conversations")
        + ("instruction", "input", "history", *_CHAT)
    ),
    "unpaired": frozenset((*LABELS, *(key for keys in _OWN.values() for key in keys))),
}
"""The fields that each format reads itself. A chat template may read further ones."""
TEXT_KEYS: Mapping[str, frozenset[str]] = {
    **KEYS,
    "prompt": frozenset(_NEEDED["prompt"]),
    "preference": frozenset(("prompt", "chosen", "rejected", "margin")),
}
"""The fields that a record without turns reads: a prompt in one text has no room for a system turn or for tools."""

_ALPACA = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the"
    " request."
)


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns, the tools that they may call, and the record's other fields, which a template may read as variables."""

    turns: tuple[Turn, ...]
    tools: list[object] | None = None
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completed:
    """Prompts, which may be empty, each with its completion, one after the other.

    Attributes:
        only_last: whether the last completion alone is trained on.
    """

    pairs: tuple[tuple[str, str], ...]
    only_last: bool = False

    @property
    def prompt(self) -> str:
        """The text before the last completion."""
        return "".join("".join(pair) for pair in self.pairs[:-1]) + self.pairs[-1][0]

    @property
    def completion(self) -> str:
        return self.pairs[-1][1]


Example = Completed | Chat


def format_of(spec: DataSpec, source: Source, kind: str = "causal") -> str:
    """The format of a source's records: the one in the recipe, or the detected one.

    Args:
        kind: of samples (`opening.OPENERS`).

    Raises:
        DataError: the recipe asks for completions, and the source is plain text.
    """
    name = spec.format if spec.format != "auto" else _detected(source.fields(), spec.text_key, kind)
    if name == "text" and spec.train_on == "completion":
        raise DataError(
            "no completions in the data source",
            where=spec.source,
            why="its records are plain text, and data.train_on is completion",
            fix=misspelt(sorted(source.fields()), needed_fields())
            or f"give records of {', '.join(_NEEDED)}, or leave that key out",
        )
    unsplit = ("text", "alpaca", "preference", "unpaired")
    without = {"cut": (), "drop": ("text",), "split": unsplit}[spec.too_long]
    if name in without:
        why = f"its records are {'plain text' if name == 'text' else f'of the format {name}'}"
        what = f"data.too_long: {spec.too_long} does not apply to this source"
        fix = "remove that key" + ("" if name == "text" else ", or write drop")
        raise DataError(what, where=spec.source, why=why, fix=fix)
    return name


def _detected(fields: frozenset[str], text_key: str, kind: str) -> str:
    formats = [name for name, needed in _NEEDED.items() if fields.issuperset(needed)]
    if kind == "prompts" and (opened := [name for name, key in PROMPT_FIELDS.items() if key in fields]):
        return opened[0]
    if kind == "unpaired" and formats[:1] not in ([], ["preference"]) and fields.intersection(LABELS):
        return "unpaired"
    # The turns of sharegpt may be the prompt of pairs.
    preferred = kind in ("pairs", "scored", "unpaired") or formats[:1] == ["sharegpt"]
    if "preference" in formats and preferred:
        return "preference"
    return "text" if text_key in fields or not formats else formats[0]


def example_of(record: Record, name: str, empty: bool = False) -> Example:
    """Parse a record of the format `name`.

    Args:
        empty: whether a completion may be empty, and its end alone is trained on.

    Raises:
        DataError: the record does not have this format, or has nothing to complete.
    """
    fields = record.fields
    where = record.where
    require_fields(record, name)
    if name == "messages":
        return chat_of(record, name, turns_of(fields, "messages", ("role", "content"), where, empty))
    if name == "sharegpt":
        return chat_of(record, name, turns_of(fields, "conversations", ("from", "value"), where, empty))
    if name == "alpaca":
        return alpaca_of(fields, where, empty=empty)
    if isinstance(fields["prompt"], list) and isinstance(fields["completion"], list):
        return _conversation(record, empty)
    prompt, completion = (text_in(fields[key], key, where) for key in ("prompt", "completion"))
    if not empty:
        require_words(completion, "completion", where)
    return Completed(((prompt, completion),))


def require_fields(record: Record, name: str) -> None:
    """Raises DataError if the record has not all fields that its format needs."""
    missing = [key for key in _NEEDED[name] if record.fields.get(key) is None]
    if missing:
        fix = f"give every record {' and '.join(_NEEDED[name])}, or name its data.format"
        raise DataError(
            f"no '{missing[0]}'",
            where=record.where,
            why=f"data.format is {name}, and the record has {', '.join(record.fields) or 'nothing'}",
            fix=misspelt(record.fields, missing) or fix,
        )


def needed_fields(formats: Iterable[str] = _NEEDED) -> list[str]:
    """The fields that records of some formats need, labels among them."""
    names = [name for name in formats if name != "text"]
    return [key for name in names for key in (LABELS if name == "unpaired" else _NEEDED[name])]


def misspelt(present: Collection[str], needed: Iterable[str]) -> str:
    """`did you mean 'chosen' by 'choosen'?`, of a field that resembles one that is needed and not there; else ""."""
    known = {*KEYS["preference"], *KEYS["unpaired"], QUESTION}
    missing = [key for key in needed if key not in present]
    for key in present:
        if key not in known and (near := nearest_name(key, missing)) is not None:
            return f"did you mean '{near}' by '{key}'?"
    return ""


def alpaca_of(
    fields: Mapping[str, object], where: str, output: str = "output", empty: bool = False
) -> Completed:
    """Stanford Alpaca's wording; LLaMA-Factory's `system` replaces its first sentences, `history` follows them.

    Args:
        output: the field with the completion.
        empty: whether it may be empty.
    """
    system, extra = (_text_if_given(fields, key, where) for key in ("system", "input"))
    with_input = ", paired with an input that provides further context" if extra else ""
    opening = f"{system or _ALPACA.format(with_input=with_input)}\n\n"
    texts: list[tuple[str, str]] = []
    for question, answer in _history(fields, where):
        texts.append((f"### Instruction:\n{question}\n\n### Response:\n", answer))
    instruction = said(fields["instruction"], "instruction", where)
    last = f"### Instruction:\n{instruction}\n\n" + (f"### Input:\n{extra}\n\n" if extra else "")
    read = text_in if empty else said
    texts.append((f"{last}### Response:\n", read(fields[output], output, where)))
    (first_prompt, first_answer), *later = texts
    pairs = [(opening + first_prompt, first_answer)]
    pairs += [(f"\n\n{prompt}", answer) for prompt, answer in later]
    return Completed(tuple(pairs))


def _text_if_given(fields: Mapping[str, object], key: str, where: str) -> str:
    """A text; "" if the record has none. A 0 is no missing text."""
    value = fields.get(key)
    return "" if value is None else text_in(value, key, where)


def _history(fields: Mapping[str, object], where: str) -> list[tuple[str, str]]:
    """The instructions before, each with its answer."""
    history = parsed_json(fields.get("history") or [])  # of CSV: JSON text
    pairs = history if isinstance(history, list) else [history]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise DataError(
            "'history' is not a list of pairs", where=where, fix="write [[instruction, answer], ...]"
        )
    names = [f"history[{number}]" for number in range(len(pairs))]
    return [
        (said(asked, name, where), said(answer, name, where))
        for name, (asked, answer) in zip(names, pairs, strict=True)
    ]


def with_turns(record: Record, template: bool) -> Record:
    """A record whose prompt is asked in other fields, or next to a system turn: with messages in `prompt`.

    An instruction or a question has its `input` on the next line, and `history` before it, as in LLaMA-Factory. Any
    other record stays as it is. The system turn is added by `chat_of`.

    Args:
        template: whether the tokenizer has a chat template. Without one, instructions have Alpaca's wording.
    """
    fields = record.fields
    where = record.where
    prompt = fields.get("prompt")
    if prompt is not None:
        if fields.get("system") is None or not isinstance(prompt, str) or not prompt.strip():
            return record
        return _with_prompt(record, [("user", text_in(prompt, "prompt", where))], ())
    names = [key for key in ("instruction", QUESTION) if fields.get(key) is not None][:1]
    if names == ["instruction"] and not template:
        return record
    if fields.get("input") is not None:
        names.append("input")
    if not names:
        return record
    question = "\n".join(text for name in names if (text := text_in(fields[name], name, where)).strip())
    require_words(question, names[0], where)
    before: list[tuple[str, str]] = []
    for earlier, answer in _history(fields, where):
        before += [("user", earlier), ("assistant", answer)]
    return _with_prompt(record, [*before, ("user", question)], (*names, "history"))


def _with_prompt(record: Record, turns: Iterable[tuple[str, str]], read: Collection[str]) -> Record:
    """The record with messages in `prompt` and without the fields `read`."""
    prompt = [{"role": role, "content": text} for role, text in turns]
    others = {key: value for key, value in record.fields.items() if key not in read}
    return Record({**others, "prompt": prompt}, record.where)


# -- chats


def chat_of(record: Record, name: str, turns: tuple[Turn, ...], last: str | None = None) -> Chat:
    """A chat with the record's system turn, checked for its order.

    Args:
        last: the field with the last turns.
    """
    fields = record.fields
    where = record.where
    if system := _text_if_given(fields, "system", where):
        if turns[0].role in ("system", "developer") and turns[0].text != system:
            why = "its first turn is another system turn"
            raise DataError("two system turns", where=f"{where}: system", why=why, fix="keep one of them")
        if turns[0].role not in ("system", "developer"):
            turns = (Turn("system", system), *turns)
    require_order(turns, last or _NEEDED[name][-1], where)
    own = KEYS[name]
    variables = {key: value for key, value in fields.items() if key not in own and value is not None}
    tools = tools_in(fields.get("tools"), where)
    if tools is None and (functions := tools_in(fields.get("functions"), where)):  # OpenAI's API before tools
        tools = [{"type": "function", "function": function} for function in functions]
    return Chat(turns, tools, {**variables, **_variables(fields, where)})


def _variables(fields: Mapping[str, object], where: str) -> Mapping[str, object]:
    """The record's `chat_template_kwargs`."""
    value = parsed_json(fields.get("chat_template_kwargs") or {})
    if not isinstance(value, dict):
        raise DataError(
            "'chat_template_kwargs' is not an object", where=where, fix="write {name: value, ...}"
        )
    return value


def _conversation(record: Record, empty: bool) -> Chat:
    """TRL's conversational prompt and completion: only answers of the completion are trained on."""
    prompt = turns_of(record.fields, "prompt", ("role", "content"), record.where)
    before = [replace(turn, trained=False) for turn in prompt]
    completion = turns_of(record.fields, "completion", ("role", "content"), record.where, empty)
    return chat_of(record, "prompt", (*before, *completion))
