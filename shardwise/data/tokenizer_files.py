"""What the files next to a tokenizer say: chat templates, special tokens, and the tokens around a text.

An answer is over at one set of tokens in training, generation, samples, evaluation and export: the tokenizer's
end-of-text token, the tokens that the model's files name (`eos_token_id` of `generation_config.json`, else of
`config.json`, as in transformers), and the token that ends an answer of the chat template, on which a chat is trained.
A base model often names only its end-of-text token, and its chats end with another one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import DataError

if TYPE_CHECKING:
    import tokenizers

GENERATION_CONFIG = "generation_config.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Fields of ``tokenizers.AddedToken``: how the tokenizer matches the token in a text."""


def templates_next_to(path: Path) -> dict[str, str]:
    """The chat templates in the folder of a `tokenizer.json`, by name; {} if there are none.

    As transformers: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else `tokenizer_config.json`.
    Else `chat_template.json`, where models that also read images may have them.
    """
    folder = path.parent
    sources = {"default": _text_of_file(folder / "chat_template.jinja")}
    sources |= {
        file.stem: _text_of_file(file)
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    sources = {name: text for name, text in sources.items() if text}
    for settings in (settings_next_to(path), _object_in(folder / "chat_template.json")):
        sources = sources or templates_of(settings.get("chat_template"))
    return sources


def templates_of(value: object) -> dict[str, str]:
    """The templates in a tokenizer's settings, which hold one text or several by name."""
    if isinstance(value, str):
        value = {"default": value}
    elif isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    named = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str) and text}


def settings_next_to(path: Path) -> dict[str, Any]:
    """`tokenizer_config.json` in the folder of a `tokenizer.json`; {} if it is missing. Raises DataError."""
    return _object_in(path.parent / "tokenizer_config.json")


def special_next_to(path: Path) -> dict[str, str]:
    """The special tokens that the files next to a `tokenizer.json` name: bos_token, eos_token and so on.

    As in transformers, a chat template also has those of `special_tokens_map.json`, and the further names of
    `extra_special_tokens`. Raises DataError.
    """
    settings = settings_next_to(path)
    extra = settings.get("extra_special_tokens")
    named = _object_in(path.parent / "special_tokens_map.json")
    named |= extra if isinstance(extra, dict) else {}
    named |= settings  # the settings of the tokenizer count most
    contents = {key: _content_of(value) for key, value in named.items() if key.endswith("_token")}
    return {key: value for key, value in contents.items() if value}


def add_tokens_next_to(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Add the tokens that only the files next to a `tokenizer.json` name, as transformers does. Raises DataError."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in tokens_next_to(path):
        if token["content"] not in known:
            flags = {name: value for name in _FLAGS if isinstance(value := token.get(name), bool)}
            backend.add_tokens([AddedToken(token["content"], **flags)])


def tokens_next_to(path: Path) -> list[dict[str, Any]]:
    """The added tokens that the files next to a `tokenizer.json` name, in its form, by id. Raises DataError."""
    named = settings_next_to(path).get("added_tokens_decoder")
    if not isinstance(named, dict):
        named = {number: token for token, number in _object_in(path.parent / "added_tokens.json").items()}
    tokens = [
        {**(token if isinstance(token, dict) else {}), "id": int(number), "content": content}
        for number, token in named.items()
        if str(number).isdecimal() and (content := _content_of(token))
    ]
    return sorted(tokens, key=lambda token: token["id"])


def _object_in(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; {} if the file is missing. Raises DataError: a guess would change the tokens."""
    text = _text_of_file(path)
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None
    if not isinstance(value, dict):
        raise _unreadable(path, f"it is of type {type(value).__name__}, not an object")
    return value


def _text_of_file(path: Path) -> str:
    """The text of a file; "" if it is missing. Raises DataError."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        raise _unreadable(
            path, getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        ) from None


def _unreadable(path: Path, why: str) -> DataError:
    fix = "restore it, or remove it: the tokens around a text follow from it"
    return DataError(f"unreadable {path.name}", where=str(path), why=why, fix=fix)


def _content_of(token: object) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


# -- the token before a text


def begins_with(path: Path) -> int | None:
    """The token that a `tokenizer.json` puts before a text; None if it puts none, or cannot be read."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception:  # the Rust side raises a bare Exception for a malformed file
        return None
    return begin_token(backend, path)


def begin_token(backend: tokenizers.Tokenizer, path: Path) -> int | None:
    """The token before a text: as the post-processor adds it, else as `add_bos_token` next to `path` says.

    transformers 4 reads the latter for tokenizers of the Llama family.
    """
    if (added := added_before(backend)) is not None:
        return added
    settings = settings_next_to(path)
    special = special_next_to(path)
    if settings.get("add_bos_token") is not True or "bos_token" not in special:
        return None
    return backend.token_to_id(special["bos_token"])


def added_before(backend: tokenizers.Tokenizer) -> int | None:
    """The one token that a tokenizer's post-processor puts before a text, or None."""
    with_special = list(backend.encode("a", add_special_tokens=True).ids)
    plain = list(backend.encode("a", add_special_tokens=False).ids)
    follows = with_special[1 : 1 + len(plain)] == plain
    # The second check: a token that is added behind the text may be equal to a text of one token.
    if plain and follows and with_special[:1] != plain:
        return with_special[0]
    return None


# -- the tokens after which an answer is over


def ends_of_model(folder: Path) -> tuple[int, ...]:
    """The ends that the files of a model's folder name, in their order; () if there are none. Raises DataError."""
    named = (ends_in(_object_in(folder / name)) for name in (GENERATION_CONFIG, "config.json"))
    return next(filter(None, named), ())


def ends_in(settings: Any) -> tuple[int, ...]:
    """`eos_token_id` of a config, which holds one id or several; of its text part, if only that has one."""
    if not isinstance(settings, dict):
        return ()
    ends = settings.get("eos_token_id")
    if ends is None and isinstance(settings.get("text_config"), dict):
        ends = settings["text_config"].get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends]
    return tuple(token for token in ids if isinstance(token, int) and not isinstance(token, bool))
