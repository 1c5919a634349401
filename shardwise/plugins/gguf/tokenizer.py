r"""The tokenizer of a GGUF file: vocabulary, merges or scores, the tokens that end an answer, and the chat template.

Two kinds of ``tokenizer.json`` are known to llama.cpp:

    gpt2     byte-level BPE, which splits text by one of the rules in ``_RULES``, and then merges
    llama    a SentencePiece BPE: blanks are "▁", bytes that no token has are <0x0A> and so on

In the second kind, llama.cpp merges the pair with the highest score. A score is here the negative rank of the first
merge that makes the token, so both merge in the same order, and no ``tokenizer.model`` is needed.

A file of another tokenizer has none and takes token ids. llama.cpp does not apply a normalizer such as NFC.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.data.tokenizer_files import begins_with, special_next_to, templates_next_to, tokens_next_to
from shardwise.exporter.ends import ends_of
from shardwise.exporter.hf_writer import Contents

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MIXED_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SIGNS, _SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASHES = _SIGNS.replace(r"\n]*", r"\n/]*")
LLAMA_3 = "|".join([_ENDINGS, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", _SIGNS, _SPACES])
_RULES: Mapping[str, str] = {
    LLAMA_3: "llama-bpe",
    LLAMA_3.replace("{1,3}", ""): "qwen2",
    "|".join([*_MIXED_CASE, r"\p{N}", _SLASHES, _SPACES]): "tekken",
    "|".join([*(f"{words}{_ENDINGS}?" for words in _MIXED_CASE), r"\p{N}{1,3}", _SLASHES, _SPACES]): "gpt-4o",
}
"""llama.cpp's names of the ways to split text, by the pattern of the pre-tokenizer."""
_BLANK_MARK, _BYTE = "▁", re.compile(r"<0x[0-9A-F]{2}>")
_NORMAL, _UNKNOWN, _CONTROL_TYPE, _OWN, _UNUSED, _IS_BYTE = range(1, 7)
"""llama.cpp's types of tokens."""
_BLANK_NOTE = (
    "llama.cpp puts a blank after every added token, and this tokenizer only before a text:"
    " the tokens of chats may differ there"
)
_SENTENCEPIECE = {"Prepend", "Replace", "Metaspace", "Split"}
_NO_MERGE = -1e6
"""The score of a token that no merge makes."""


def add_tokenizer(writer: Any, contents: Contents, vocab: int) -> tuple[str | None, list[str]]:
    """Add the tokenizer of a folder to a file.

    Returns:
        llama.cpp's name of its kind, or None if the file has none; where llama.cpp finds other tokens, in sentences.
    """
    source, content = _tokenizer_in(contents)
    rule = _rule_of(content)
    if rule is None or source is None:
        writer.add_tokenizer_model("none")
        return None, []
    added = {token["id"]: token for token in (*tokens_next_to(source), *content.get("added_tokens", ()))}
    names = {number: text for text, number in content["model"]["vocab"].items()}
    spaced = rule == "llama"
    types = [_type(number, names, added, content["model"] if spaced else {}) for number in range(vocab)]
    names |= {number: token["content"] for number, token in added.items()}
    writer.add_tokenizer_model("llama" if spaced else "gpt2")
    writer.add_tokenizer_pre("default" if spaced else rule)
    writer.add_token_list([_token_text(names.get(n), types[n], n, spaced) for n in range(vocab)])
    writer.add_token_types(types)
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in content["model"]["merges"]]
    if spaced:
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault("".join(pair), rank)
        scores = [-float(ranks[name]) if (name := names.get(n)) in ranks else _NO_MERGE for n in range(vocab)]
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(any(_prepends(part) for part in _normalizers(_before(content))))
    else:
        writer.add_token_merges([" ".join(pair) for pair in merges])
    _add_special(writer, contents, source, {text: number for number, text in names.items() if number < vocab})
    first = spaced and any(part.get("prepend_scheme") == "first" for part in _normalizers(_before(content)))
    return rule, [_BLANK_NOTE] if first else []


def kind_of_tokenizer(contents: Contents) -> str | None:
    """llama.cpp's name of the kind of a folder's tokenizer; None if a file would have none."""
    return _rule_of(_tokenizer_in(contents)[1])


def _tokenizer_in(contents: Contents) -> tuple[Path | None, dict[str, Any]]:
    """The ``tokenizer.json`` of a folder, and what it says; (None, {}) without one."""
    source = contents.extra_files.get("tokenizer.json")
    if not isinstance(source, Path):
        return None, {}
    return source, json.loads(source.read_text(encoding="utf-8"))


def _add_special(writer: Any, contents: Contents, source: Path, numbers: Mapping[str, int]) -> None:
    """Add the special tokens, those that end an answer, and the chat templates."""
    config = contents.layout.config
    special = special_next_to(source)
    begin = begins_with(source)
    ids: dict[str, int | None] = {
        key: numbers.get(special.get(f"{key}_token", ""), config.get(f"{key}_token_id"))
        for key in ("bos", "unk", "pad")
    }
    if begin is not None:
        ids["bos"] = begin
    for key, number in ids.items():
        if isinstance(number, int):
            getattr(writer, f"add_{key}_token_id")(number)
    writer.add_add_bos_token(begin is not None)
    eos = config.get("eos_token_id")
    ends = dict.fromkeys([*([eos] if isinstance(eos, int) else []), *ends_of(contents)])
    named = numbers.get(special.get("eos_token", ""))
    numbered = list(ends) or ([] if named is None else [named])
    for key, end in zip(("eos", "eot", "eom"), numbered, strict=False):  # llama.cpp stops at each of them
        getattr(writer, f"add_{key}_token_id")(end)
    templates = {name: _without_marks(text) for name, text in templates_next_to(source).items()}
    if set(templates) == {"default"}:
        writer.add_chat_template(templates["default"])
    elif templates:
        writer.add_chat_template([{"name": name, "template": text} for name, text in templates.items()])


def _without_marks(template: str) -> str:
    """A template without transformers' marks of answers, which llama.cpp's Jinja does not know."""
    begun = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", begun)


def _rule_of(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for the way that a BPE splits text, "llama" for SentencePiece; None if it has none."""
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE":
        return None
    if model.get("byte_fallback"):
        known = {part["type"] for part in _normalizers(_before(tokenizer))} <= _SENTENCEPIECE
        return "llama" if known else None
    if any(part["type"] != "NFC" for part in _normalizers([tokenizer.get("normalizer")])):
        return None
    parts = list(_normalizers([tokenizer.get("pre_tokenizer")]))
    kinds = [part["type"] for part in parts]
    if kinds[-1:] != ["ByteLevel"] or parts[-1].get("add_prefix_space"):
        return None
    if parts[-1].get("use_regex", True):
        digits = kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits")
        return "gpt-2" if len(parts) == 1 else "smollm" if digits else None
    if kinds != ["Split", "ByteLevel"] or parts[0].get("invert"):
        return None
    return _RULES.get((parts[0].get("pattern") or {}).get("Regex", ""))


def _before(tokenizer: Mapping[str, Any]) -> list[Any]:
    """What happens to a text before its tokens are looked up."""
    return [tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")]


def _normalizers(steps: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """The normalizers and pre-tokenizers, those inside a sequence one by one."""
    for part in steps:
        if part and part["type"] == "Sequence":
            yield from _normalizers(part.get("normalizers") or part.get("pretokenizers") or [])
        elif part:
            yield part


def _prepends(part: Mapping[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer puts a blank before a text."""
    if part["type"] == "Metaspace":
        return bool(part.get("prepend_scheme", "always") != "never")
    return bool(part["type"] == "Prepend")


def _type(number: int, names: Mapping[int, str], added: Mapping[int, Any], model: Mapping[str, Any]) -> int:
    if number in added:
        return _CONTROL_TYPE if added[number].get("special") else _OWN
    name = names.get(number)
    if name is None:
        return _UNUSED
    if model and name == model.get("unk_token"):
        return _UNKNOWN
    return _IS_BYTE if model and _BYTE.fullmatch(name) else _NORMAL


def _token_text(name: str | None, kind: int, number: int, spaced: bool) -> str:
    if name is None:
        return f"[PAD{number}]"
    # llama.cpp looks for added tokens in the text before it writes blanks as "▁".
    return name.replace(_BLANK_MARK, " ") if spaced and kind == _OWN else name
