"""The token that begins a prompt."""

from __future__ import annotations

from shardwise.data import open_tokenizer
from shardwise.plugins.serve.serving import _prompted
from tests.data.test_begin import BOS, adding

__all__ = ["adding"]


def test_a_prompt_to_generate_from_begins_as_in_training(adding: str) -> None:
    tokenizer = open_tokenizer(adding)
    ids = tokenizer.encode("the")
    assert _prompted(tokenizer, "the") == _prompted(tokenizer, f"{BOS}the") == [tokenizer.begin, *ids]
    assert _prompted(tokenizer, "") == [tokenizer.begin]
    silent = open_tokenizer(adding, "none")
    assert _prompted(silent, "the") == ids and _prompted(silent, "") == [silent.separator]
