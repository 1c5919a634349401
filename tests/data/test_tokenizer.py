"""Tokenizers: text comes back, ids fit the vocabulary, and the separator is found or asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.core.errors import DataError
from shardwise.data.tokenizer import open_tokenizer
from shardwise.data.turns import Turn

TEXTS = ["def f(x):\n    return x\n", "zoë — 日本語 😀", ""]


def save(folder: Path, special: list[str], settings: object = None) -> Path:
    """A byte-level BPE tokenizer trained on a few words, as tokenizer.json in `folder`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["def return import self"] * 10, trainer)
    backend.enable_truncation(4)  # must not cut documents
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_bytes() -> None:
    tokenizer = open_tokenizer("bytes")
    assert (tokenizer.vocab, tokenizer.separator, tokenizer.dtype) == (256, 0, np.dtype(np.uint8))
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0xA9, 97, 0, 98]) == "�ab"
    assert [p.tolist() for p in tokenizer.encode_pieces([b"ab", b""])] == [[97, 98], []]


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    for name in ("bytes", str(save(tmp_path / "t", ["<|endoftext|>"]))):
        with pytest.raises(DataError, match="text is not Unicode"):
            open_tokenizer(name).encode("a\ud83d")


def test_spans_of_bytes() -> None:
    """A character of several bytes is trained on as a whole; U+0000 is the separator."""
    [(tokens, trained)] = open_tokenizer("bytes").encode_spans([("aé€😀\0b", [(1, 2), (3, 5)])])
    assert bytes(tokens).decode() == "aé€😀\0b"
    assert [token for token, chosen in zip(tokens, trained, strict=True) if chosen] == [*"é😀\0".encode()]


def test_a_tokenizer_json_or_its_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "t", ["<|endoftext|>"])
    tokenizer = open_tokenizer(str(folder))
    again = open_tokenizer(str(folder / "tokenizer.json"))
    assert tokenizer.fingerprint == again.fingerprint
    assert 257 <= tokenizer.vocab <= 300
    assert tokenizer.dtype == np.uint16
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids, tokenizer.separator]) == text
        assert tokenizer.encode_pieces([text.encode()])[0].tolist() == ids
        assert all(0 <= i < tokenizer.vocab for i in ids)
    assert len(tokenizer.encode(TEXTS[0])) > 4, "cut by the file's truncation setting"


def test_the_separator_is_what_the_folder_says_else_a_familiar_name(tmp_path: Path) -> None:
    special = ["<stop>", "</s>", "<|endoftext|>"]
    plain = open_tokenizer(str(save(tmp_path / "a", special)))
    named = open_tokenizer(str(save(tmp_path / "b", special, {"eos_token": "<stop>"})))
    nested = open_tokenizer(str(save(tmp_path / "c", special, {"eos_token": {"content": "</s>"}})))
    silent = open_tokenizer(str(save(tmp_path / "d", special, {"eos_token": None})))
    assert [t.separator for t in (plain, named, nested, silent)] == [2, 0, 1, 2]
    assert plain.fingerprint == silent.fingerprint != named.fingerprint


def test_a_tokenizer_without_separator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no end-of-text token.*eos_token"):
        open_tokenizer(str(save(tmp_path / "t", ["<pad>"])))


def test_an_end_of_text_token_that_is_not_in_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Another one would end the documents without a word."""
    folder = save(tmp_path / "t", ["</s>"], {"eos_token": "<stop>"})
    with pytest.raises(DataError, match=r"has no '<stop>' .*eos_token"):
        open_tokenizer(str(folder))


def test_special_tokens_of_a_template_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    extra = {"extra_special_tokens": {"image_token": "<image>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = save(tmp_path / "t", ["<s>", "</s>", "<image>"], extra)
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    template = "{{ bos_token + image_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = open_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    assert ours.chat is not None
    text = ours.chat.opened([Turn("user", "Hi")], "here")
    assert text == theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<s><image>Hi</s>" and ours.separator == theirs.eos_token_id


@pytest.mark.parametrize("place", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_only_the_files_next_to_it_name(place: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = save(tmp_path / "t", ["</s>"], settings)
    added = {"<|b|>": 999, "<|a|>": 1000}
    content = {
        **settings,
        "added_tokens_decoder": {str(n): {"content": t, "special": True} for t, n in added.items()},
    }
    (folder / place).write_text(json.dumps(content if place == "tokenizer_config.json" else added))
    theirs = AutoTokenizer.from_pretrained(str(folder))
    assert open_tokenizer(str(folder)).encode("def<|a|> <|b|>") == theirs("def<|a|> <|b|>")["input_ids"]


def test_a_pointer_of_git_lfs_in_place_of_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
    )
    with pytest.raises(DataError, match=r"tokenizer\.model is a Git LFS pointer"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b'{"eos_token": "<stop'),
        ("tokenizer_config.json", b'\xef\xbb\xbf{"eos_token": "</s>"}'),
        ("tokenizer_config.json", b"[]"),
        ("special_tokens_map.json", b"{"),
        ("generation_config.json", b"{"),
        ("chat_template.jinja", "{{ x }}".encode("utf-16")),
    ],
)
def test_a_damaged_file_next_to_it_is_no_missing_one(name: str, content: bytes, tmp_path: Path) -> None:
    folder = save(tmp_path / "t", ["<stop>", "</s>"])
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=f"unreadable {name}") as raised:
        open_tokenizer(str(folder))
    assert raised.value.line().isprintable()


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 3}', "\x00\xff"])
def test_a_damaged_file_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="unreadable tokenizer") as raised:
        open_tokenizer(str(path))
    assert raised.value.line().isprintable()


def test_an_id_goes_through_transformers_without_remote_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer.from_file(str(save(tmp_path, ["<s>", "<end>"]) / "tokenizer.json"))
    asked = []

    def load(name: str, **options: object) -> object:
        asked.append((name, options))
        if name == "someone/gone":
            raise OSError("We couldn't connect to 'https://huggingface.co'\nto load the files")
        return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    assert open_tokenizer("someone/model").separator == 1
    assert asked == [("someone/model", {"trust_remote_code": False})]
    with pytest.raises(DataError, match=r"cannot load tokenizer 'someone/gone'.*couldn't connect"):
        open_tokenizer("someone/gone")


@pytest.mark.parametrize("rebuilt", [False, True])
def test_autotokenizer_is_compared_on_probes(rebuilt: bool, tmp_path: Path) -> None:
    """transformers builds Qwen2's own pre-tokenizer, which splits digits, whatever tokenizer.json says."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from shardwise.data.tokenizer_probe import PROBES, tokenizer_differences

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    trained.train_from_iterator(["1234567 89 234567 1234567 " + probe for probe in PROBES] * 9, trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    kind = "Qwen2Tokenizer" if rebuilt else "PreTrainedTokenizerFast"
    config = {"tokenizer_class": kind, "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    said = list(tokenizer_differences(open_tokenizer(str(tmp_path)), str(tmp_path)))
    assert [kind in sentence for sentence in said] == ([True] if rebuilt else [])
    assert list(tokenizer_differences(open_tokenizer("bytes"), "bytes")) == []
