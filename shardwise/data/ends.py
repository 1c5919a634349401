"""The tokens after which an answer is over.

One set serves training, generation, samples, evaluation and export: the tokenizer's end-of-text token, the tokens that
the model's files name (`eos_token_id` of `generation_config.json`, else of `config.json`, as in transformers), and the
token that ends an answer of the chat template, on which a chat is trained. A base model often names only its
end-of-text token, and its chats end with another one.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

GENERATION = "generation_config.json"


def ends_of_model(folder: Path) -> tuple[int, ...]:
    """The ends that the files of a model's folder name, in their order; () if there are none."""
    for name in (GENERATION, "config.json"):
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
