"""The files of a tokenizer that hold its chat templates and its special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def templates_next_to(path: Path) -> dict[str, str]:
    """The chat templates in the folder of a `tokenizer.json`, by name; {} if there are none.

    As transformers: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else `tokenizer_config.json`.
    """
    folder = path.parent
    sources = {"default": _read(folder / "chat_template.jinja")}
    sources |= {
        file.stem: _read(file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
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
    named = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    return {key: value for key, value in named.items() if value}


def _read(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    return ""


def _content(token: object) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
