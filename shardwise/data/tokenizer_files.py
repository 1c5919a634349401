"""What the files next to a tokenizer say: chat templates, special tokens, and the tokens around a text.

An answer is over at one set of tokens in training, generation, samples, evaluation and export: the tokenizer's
end-of-text token, the tokens that the model's files name (`eos_token_id` of `generation_config.json`, else of
`config.json`, as in transformers), and the token that ends an answer of the chat template, on which a chat is trained.
A base model often names only its end-of-text token, and its chats end with another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

GENERATION_CONFIG = "generation_config.json"


def templates_next_to(path: Path) -> dict[str, str]:
    """The chat templates in the folder of a `tokenizer.json`, by name; {} if there are none.

    As transformers: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else `tokenizer_config.json`.
    """
    folder = path.parent
    sources = {"default": _text_of_file(folder / "chat_template.jinja")}
    sources |= {
        file.stem: _text_of_file(file)
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    sources = {name: text for name, text in sources.items() if text}
    return sources or templates_of(settings_next_to(path).get("chat_template"))


def templates_of(value: object) -> dict[str, str]:
    """The templates in a tokenizer's settings, which hold one text or several by name."""
    if isinstance(value, str):
        value = {"default": value}
    elif isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    named = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str) and text}


def settings_next_to(path: Path) -> dict[str, Any]:
    """`tokenizer_config.json` in the folder of a `tokenizer.json`; {} if it is missing or malformed."""
    with suppress(OSError, ValueError):
        settings = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
        return settings if isinstance(settings, dict) else {}
    return {}


def special_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer's settings name: bos_token, eos_token and so on."""
    named = {key: _content_of(value) for key, value in settings.items() if key.endswith("_token")}
    return {key: value for key, value in named.items() if value}


def _text_of_file(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    return ""


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
    if settings.get("add_bos_token") is not True or "bos_token" not in special_in(settings):
        return None
    return backend.token_to_id(special_in(settings)["bos_token"])


def added_before(backend: tokenizers.Tokenizer) -> int | None:
    """The one token that a tokenizer's post-processor puts before a text, or None."""
    with_special, plain = (list(backend.encode("a", add_special_tokens=added).ids) for added in (True, False))
    return (
        with_special[0] if plain and with_special[1 : 1 + len(plain)] == plain != with_special[:1] else None
    )


# -- the tokens after which an answer is over


def ends_of_model(folder: Path) -> tuple[int, ...]:
    """The ends that the files of a model's folder name, in their order; () if there are none."""
    for name in (GENERATION_CONFIG, "config.json"):
        with suppress(OSError, ValueError):  # missing or malformed
            ends = ends_in(json.loads((folder / name).read_text(encoding="utf-8")))
            if ends:
                return ends
    return ()


def ends_in(settings: Any) -> tuple[int, ...]:
    """`eos_token_id` of a config, which holds one id or several; of its text part, if only that has one."""
    if not isinstance(settings, dict):
        return ()
    ends = settings.get("eos_token_id")
    if ends is None and isinstance(settings.get("text_config"), dict):
        ends = settings["text_config"].get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends]
    return tuple(token for token in ids if isinstance(token, int) and not isinstance(token, bool))
