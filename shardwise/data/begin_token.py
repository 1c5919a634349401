"""The token that a tokenizer puts before a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.data.template_files import settings_next_to, special_in

if TYPE_CHECKING:
    import tokenizers


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
