"""YAML 1.2 to plain data, with the file and line of every value.

ruamel's parser events are composed into values and origins, so that an error can name `optimizer.betas[1]` on line 14
of a file or on the command line. Scalars follow the core schema of YAML 1.2 (§10.3.2): `3e-4` is a float, `no` and
`1_000` are strings. Anchors, aliases, merge keys and tags are errors, so a glob such as `*.txt` needs quotes in a file.
Files over 64 KiB are errors too: they are data or checkpoints, not recipes.

Refused: ruamel's round-trip loader, which has line numbers in `.lc`. It reads `1_000` as 1000, `0b11` as 3 and dates as
dates; it merges anchors silently; deep nesting ends in a RecursionError; and after a syntax error it has no tree, so
the message could not name the key. It also takes 1.7 times as long.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from shardwise.core.errors import RecipeError, one_line, shorten
from shardwise.recipe.installed import instead_of

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"
KeyPath: TypeAlias = tuple[str | int, ...]
"""`("optimizer", "betas", 1)`: the keys and list positions of a value; () is the whole document."""

COMMAND_LINE = "command line"
LARGEST_RECIPE = 64 * 1024
DEEPEST = 12

_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = {"", "~", "null", "Null", "NULL"}
_NUMBERS = (
    (re.compile(r"[-+]?[0-9]+"), lambda text: int(text)),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), lambda text: float(text)),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: float("nan")),
)
_LONGEST_NUMBER = 40
# Characters that YAML 1.2 calls non-printable (§5.1), and a byte order mark inside the text.
_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_OPENING_KEY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_-]*)\s*:")


@dataclass(frozen=True, order=True)
class Origin:
    """Where a value was written. Sorts in reading order: the file by line, then the overrides."""

    override: int  # 0 in the file, else the position of the override on the command line, from 1
    line: int  # from 1; 0 for data that was not read from a file


@dataclass(frozen=True)
class YamlDocument:
    """Plain data and the origin of every key path in it.

    Attributes:
        name: the file's name in messages, as the user wrote it.
        values: the top-level mapping.
        origins: one entry per key path that was written, and () for the document.
        file: where the text is from, at whose folder its relative paths start; None is the current folder.
    """

    name: str
    values: dict[str, Value]
    origins: Mapping[KeyPath, Origin]
    file: Path | None = None

    def origin(self, path: KeyPath) -> Origin:
        """The origin of `path`, or of its nearest written parent."""
        while path not in self.origins:
            path = path[:-1]
        return self.origins[path]

    def where(self, path: KeyPath) -> str:
        """The place in an error: `FILE:LINE: key.path`, or `command line: key.path`."""
        origin = self.origin(path)
        location = COMMAND_LINE if origin.override else shorten(self.name, 120)
        location += f":{origin.line}" if origin.line and not origin.override else ""
        return f"{location}: {shorten(dotted(path), 70)}" if path else location

    def find(self, path: KeyPath) -> Value:
        """The value at `path`; None if there is none."""
        value: Value = self.values
        for key in path:
            if isinstance(value, dict) and isinstance(key, str):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int):
                value = value[key]
            else:
                return None
        return value


def dotted(path: KeyPath) -> str:
    """A key path as text: `optimizer.betas[1]`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return one_line(text.removeprefix("."))


def read_document(path: Path) -> YamlDocument:
    """Read a recipe file. Raises RecipeError if it is missing, unreadable, not text or not YAML."""
    name = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_RECIPE + 1)
    except FileNotFoundError:
        why = "there is no such file"
        raise RecipeError("recipe not found", where=name, why=why, fix=instead_of(path)) from None
    except IsADirectoryError:
        why, fix = "it is a folder", "give the YAML file in it"
        raise RecipeError("cannot read the recipe", where=name, why=why, fix=fix) from None
    except (OSError, ValueError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise RecipeError("cannot read the recipe", where=name, why=why) from None
    if len(raw) > LARGEST_RECIPE:
        why = f"it is larger than {LARGEST_RECIPE // 1024} KiB, and a recipe is about a page"
        raise RecipeError("this is not a recipe", where=name, why=why, fix="give a YAML recipe")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{name}:{raw.count(10, 0, error.start) + 1}"
        why = f"byte 0x{raw[error.start]:02x} is not UTF-8 text"
        raise RecipeError("cannot read the recipe", where=where, why=why, fix="save it as UTF-8") from None
    return parse_document(text, name, path)


def parse_document(text: str, name: str, file: Path | None = None) -> YamlDocument:
    """Compose YAML `text`. `name` is the file's name in messages. Raises RecipeError for the first fault."""
    if unprintable := _NOT_TEXT.search(text):
        line = text.count("\n", 0, unprintable.start()) + 1
        why = f"character U+{ord(unprintable[0]):04X} is not text"
        raise RecipeError("cannot read the recipe", where=f"{name}:{line}", why=why)
    composer = Composer(text, name)
    root = composer.document()
    if root is None:
        fix = "write at least a model, data, steps and batch_size"
        raise RecipeError("the recipe is empty", where=f"{name}:1", fix=fix)
    if not isinstance(root, dict):
        fix = (
            "put a space after each colon"
            if isinstance(root, str) and ":" in root
            else "write `key: value` lines"
        )
        why = f"expected sections and keys, found {describe(root)}"
        raise RecipeError(
            "this is not a recipe", where=YamlDocument(name, {}, composer.origins).where(()), why=why, fix=fix
        )
    return YamlDocument(name, root, composer.origins, file)


def resolve_scalar(text: str) -> Value:
    """A plain (unquoted) scalar by the core schema of YAML 1.2. Raises ValueError for a very long number."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    for pattern, convert in _NUMBERS:
        if pattern.fullmatch(text):
            if len(text) > _LONGEST_NUMBER:
                raise ValueError(f"a number of {len(text)} characters")
            number: int | float = convert(text)
            return number
    return text


def written(value: object) -> str:
    """`value` as one line of YAML 1.2 that reads back as the same value."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{written(key)}: {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    text = str(value)
    plain = re.fullmatch(r"[A-Za-z0-9_./~+][\w./~+@-]*(:[\w./~+@-]+)*", text, re.ASCII)
    if plain and isinstance(_scalar_value(text), str):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\u2028\u2029\ufeff]", lambda match: f"\\u{ord(match[0]):04x}", quoted)


def _scalar_value(text: str) -> Value:
    try:
        return resolve_scalar(text)
    except ValueError:
        return None


def require_printable(text: str) -> str:
    """Return `text`. Raises ValueError for a character that is not printable."""
    if unprintable := _NOT_TEXT.search(text):
        raise ValueError(f"the character U+{ord(unprintable[0]):04X}, which is not text")
    return text


def describe(value: object) -> str:
    """A value in words, for a message: `the text '100'`, `a list`, `nothing`."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {shorten(str(value), 30)}"
        case str():
            return f"the text {shorten(one_line(value), 40)!r}"
        case list() | tuple():
            return "a list" if value else "an empty list"
    return "a section" if isinstance(value, dict) else f"a {type(value).__name__}"


class Composer:
    """Composes the parser's events into values; keeps the current path, so that a syntax error can name it."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self._lines = text.splitlines()
        self.origins: dict[KeyPath, Origin] = {(): Origin(0, 1)}
        self._path: KeyPath = ()
        self._stream: Iterator[events.Event] = iter(YAML(typ="safe", pure=True).parse(text))

    def document(self) -> Value:
        self._next()  # StreamStart
        if isinstance(self._next(), events.StreamEndEvent):
            return None
        first = self._next()
        self.origins[()] = Origin(0, _line_of(first))
        root = self._value(first)
        self._next()  # DocumentEnd
        if not isinstance(extra := self._next(), events.StreamEndEvent):
            raise self._error(_line_of(extra), "a second document begins here", "keep one recipe in a file")
        return root

    def _next(self) -> events.Event:
        try:
            return next(self._stream)
        except MarkedYAMLError as error:
            raise self._syntax_error(error) from None
        except (YAMLError, ValueError) as error:
            raise self._error(None, f"it is not YAML: {one_line(str(error))}", "") from None

    def _value(self, event: events.Event) -> Value:
        line = _line_of(event)
        if anchor := getattr(event, "anchor", None):
            mark = "*" if isinstance(event, events.AliasEvent) else "&"
            why = f"`{mark}{anchor}` is an anchor or alias of YAML, which recipes do not use"
            raise self._error(line, why, "write the value out, in quotes if it is a glob")
        if tag := getattr(event, "tag", None):
            tag = str(tag).replace("tag:yaml.org,2002:", "!!")
            raise self._error(line, f"the tag `{tag}` is not for recipes", "write the plain value")
        if len(self._path) > DEEPEST:
            raise self._error(line, f"nested deeper than {DEEPEST} levels", "")
        if isinstance(event, events.MappingStartEvent):
            return self._mapping()
        if isinstance(event, events.SequenceStartEvent):
            return self._sequence()
        assert isinstance(event, events.ScalarEvent), event
        try:
            text = require_printable(event.value)
            return text if event.style else resolve_scalar(text)  # quoted and block scalars are text
        except ValueError as error:
            raise self._error(line, f"found {error}", "") from None

    def _mapping(self) -> dict[str, Value]:
        section = dict[str, Value]()
        outer = self._path
        while not isinstance(key := self._next(), events.MappingEndEvent):
            if not isinstance(key, events.ScalarEvent) or key.anchor or key.tag:
                raise self._error(_line_of(key), "a key must be a plain word", "")
            name = str(key.value)
            self._path = (*outer, name)
            if name in section:
                why = f"already given on line {self.origins[self._path].line}"
                raise RecipeError(
                    f"duplicate key '{name}'", where=self._where(_line_of(key)), why=why, fix="keep one"
                )
            self.origins[self._path] = Origin(0, _line_of(key))
            section[name] = self._value(self._next())
            self._path = outer
        return section

    def _sequence(self) -> list[Value]:
        items = list[Value]()
        outer = self._path
        while not isinstance(event := self._next(), events.SequenceEndEvent):
            self._path = (*outer, len(items))
            self.origins[self._path] = Origin(0, _line_of(event))
            items.append(self._value(event))
            self._path = outer
        return items

    def _where(self, line: int | None) -> str:
        origins = {self._path: Origin(0, line)} if line else self.origins
        return YamlDocument(self.name, {}, origins).where(self._path)

    def _error(self, line: int | None, why: str, fix: str) -> RecipeError:
        return RecipeError("cannot read the recipe", where=self._where(line), why=why, fix=fix)

    def _syntax_error(self, error: MarkedYAMLError) -> RecipeError:
        problem = str(error.problem or error.context)
        line = None
        if error.problem_mark is not None:
            line = error.problem_mark.line + 1
        fix = ""
        if "'\\t'" in problem:
            problem, fix = "a tab is used as indentation", "indent with spaces"
        elif "incompatible YAML document" in problem:
            problem = "the file declares a version of YAML other than 1.x"
        elif "mapping values are not allowed" in problem:
            problem = "a colon in a place where no key is allowed"
            fix = "check the indentation, or quote text with a colon"
        elif "unexpected end of stream" in problem:
            problem, fix = "the text ends inside quotes", "close the quotes"
            line = error.context_mark.line + 1 if error.context_mark else line
        elif "<stream end>" in problem and error.context_mark:
            problem, fix = "the text ends inside a bracket", "close the bracket"
            line = error.context_mark.line + 1
        elif "cannot start any token" in problem:
            fix = "put the value in quotes"
        elif "<block end>" in problem:
            problem, fix = "this line does not continue the line above", "check the indentation"
        self._path = self._path_on(line)
        return self._error(line, problem, fix)

    def _path_on(self, line: int | None) -> KeyPath:
        """The current path plus the key at the start of `line`, because the scanner is ahead of the events."""
        text = self._lines[line - 1] if line and line <= len(self._lines) else ""
        key = _OPENING_KEY.match(text)
        return self._path if key is None or key[1] in self._path else (*self._path, key[1])


def _line_of(event: events.Event) -> int:
    return int(event.start_mark.line) + 1 if event.start_mark else 1
