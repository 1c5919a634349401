"""Folders of SentencePiece and tiktoken, as older models have them, give the ids of those libraries."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from shardwise.data.tokenizer import open_tokenizer

CORPUS = Path(__file__).parents[2] / "README.md"
TEXTS = ["Plan a strategy that fits.", "def f(x):\n    return x\n", "zoë — 日本語 😀 12345"]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts text into words."""


def folder_of(path: Path, tokenizer_class: str, **settings: object) -> Path:
    path.mkdir(exist_ok=True)
    named = {"tokenizer_class": tokenizer_class, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    return path


def test_a_sentencepiece_model(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = folder_of(tmp_path / "llama", "LlamaTokenizer", add_bos_token=True, **special)
    sentencepiece.SentencePieceTrainer.train(
        input=str(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",  # as Llama's
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = open_tokenizer(str(folder))
    assert (tokenizer.vocab, tokenizer.begin, tokenizer.separator) == (500, 1, 2)
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokens == original.encode(text)
        assert tokenizer.decode(tokens) == original.decode(tokens)


def test_a_tiktoken_model(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken._educational import bpe_train

    ranks = bpe_train(CORPUS.read_text(encoding="utf-8")[:3000], 300, LLAMA_3, visualise=None)
    folder = folder_of(tmp_path / "llama-3", "PreTrainedTokenizerFast", eos_token="<|end_of_text|>")
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks.items()]
    (folder / "tokenizer.model").write_text("".join(lines), encoding="utf-8")
    original = tiktoken.Encoding("small", pat_str=LLAMA_3, mergeable_ranks=ranks, special_tokens={})
    tokenizer = open_tokenizer(str(folder))
    assert tokenizer.separator == len(ranks)
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokens == original.encode(text)
        assert tokenizer.decode(tokens) == text
