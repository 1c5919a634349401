"""Tokenizers: bytes, or a tokenizer in Hugging Face's format.

`bytes` needs no file and no training. A token is a byte of UTF-8, and the vocabulary is 256. 0x00 separates documents;
text does not contain it (the readers refuse it), so there is no 257th token. Losses are in nats per byte, which compare
across tokenizers.

Any other tokenizer is a `tokenizers` backend, read from `tokenizer.json`. Reading that file executes no code and needs
neither `transformers` nor a `config.json`. `transformers` is imported only for an id on the hub or a folder without
`tokenizer.json`, and never runs remote code. Tokenizers without a fast backend are refused, so a few old models need
theirs converted first.

A document begins with a beginning-of-sequence token where the tokenizer itself adds one (``data.begin: auto``): if its
post-processor does, or ``add_bos_token`` in ``tokenizer_config.json`` says so. Llama 3, Gemma and Mistral were trained
so. ``none`` adds none. One separator (the tokenizer's end-of-text token) follows each document. A text that has them
already, such as a rendered chat, gets no second ones. Sequences of plain text start anywhere.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardwise.core.errors import DataError, one_line, shorten
from shardwise.core.extras import install
from shardwise.core.hub_folder import refuse_lfs_pointer
from shardwise.core.paths import missing, only_a_path, path_of, seen_from
from shardwise.data.chat import ChatTemplate, plain_template
from shardwise.data.spans import TextSpan, mask_of
from shardwise.data.tokenizer_files import (
    add_tokens_next_to,
    added_before,
    begin_token,
    ends_of_model,
    special_next_to,
    templates_next_to,
    templates_of,
)
from shardwise.recipe.data_sections import TOKENIZER_FILES, brings_tokenizer

if TYPE_CHECKING:
    import tokenizers

Tokens = npt.NDArray[np.unsignedinteger[Any]]

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Names of end-of-text tokens, most specific first, for tokenizers whose files do not name one."""

_MASKS = ("[MASK]", "<mask>")

_TOKENIZER_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Tokenizer(ABC):
    """Converts text to tokens and back.

    Attributes:
        name: as in the recipe.
        vocab: number of token ids; every id is smaller.
        separator: the token between documents.
        begin: the token before every document, or None.
        pad: the token that fills short rows, or None.
        fingerprint: equal for two tokenizers exactly if they tokenize alike.
        mask: the token that hides another one (masked language models), or None.
        chat: its chat template, or None.
    """

    name: str
    vocab: int
    separator: int
    begin: int | None = None
    pad: int | None = None
    fingerprint: str
    mask: int | None = None
    chat: ChatTemplate | None = None

    @property
    @abstractmethod
    def ends(self) -> frozenset[int]:
        """The tokens after which an answer is over (`tokenizer_files`)."""

    @property
    @abstractmethod
    def special(self) -> frozenset[int]:
        """The tokens that `decode` leaves out: tags of chats, separators."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest unsigned integer dtype that holds every token."""
        return np.min_scalar_type(self.vocab - 1)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, without `begin` and separator."""

    def begun(self, tokens: list[int]) -> list[int]:
        """The tokens of a text with `begin` before them, which a text may have written itself."""
        return tokens if self.begin is None or tokens[:1] == [self.begin] else [self.begin, *tokens]

    @abstractmethod
    def encode_spans(
        self, texts: Sequence[tuple[str, Sequence[TextSpan]]]
    ) -> Iterator[tuple[list[int], list[bool]]]:
        """The tokens of each text, and the mask of those that have a character in one of its spans."""

    def framed(self, text: str) -> list[int]:
        """The tokens of `text` with the special tokens that the tokenizer itself adds, ending with the separator."""
        return [*self.encode(text), self.separator]

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` without separators; incomplete characters become U+FFFD."""

    @abstractmethod
    def shown(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` with the names of special tokens, for display."""

    @abstractmethod
    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """The tokens of each piece of valid UTF-8 without NUL, in `dtype`. The cache is built with this method."""


class ByteTokenizer(Tokenizer):
    """A token is a byte of UTF-8. U+0000 in a text is the separator."""

    name = "bytes"
    vocab = 256
    separator = 0
    pad = 0xFF  # in no UTF-8
    fingerprint = "bytes"

    @cached_property
    def chat(self) -> ChatTemplate:  # type: ignore[override]
        return plain_template(chr(self.separator))

    @property
    def ends(self) -> frozenset[int]:
        return frozenset((self.separator,))

    special = ends

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`. Raises DataError for a lone surrogate."""
        return list(_utf8(text))

    def encode_spans(
        self, texts: Sequence[tuple[str, Sequence[TextSpan]]]
    ) -> Iterator[tuple[list[int], list[bool]]]:
        for text, spans in texts:
            characters = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")
            # A character of UTF-8 has a byte more from each of these code points on.
            lengths = 1 + sum((characters >= first).astype(np.int64) for first in (0x80, 0x800, 0x10000))
            ends = np.cumsum(lengths)  # of each character, in bytes
            offsets = np.concatenate([[0], ends])
            trained = np.zeros(offsets[-1], np.bool_)
            for start, end in spans:
                trained[offsets[start] : offsets[end]] = True
            yield self.encode(text), trained.tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token != self.separator).decode("utf-8", errors="replace")

    def shown(self, tokens: Sequence[int]) -> str:
        text = bytes(tokens).decode("utf-8", errors="replace")
        return text.replace(chr(self.separator), "<end>")

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]


class BackendTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer`.

    Args:
        separator: its end-of-text token.
        templates, special: sources of chat templates by name, and the special tokens that they can write.
        begin: the token that begins a document, or None.
        ends: further tokens that end an answer, which the model's files name.
    """

    def __init__(
        self,
        name: str,
        backend: tokenizers.Tokenizer,
        separator: int,
        templates: Mapping[str, str] | None = None,
        special: Mapping[str, str] | None = None,
        begin: int | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self.separator = separator
        self.begin = begin
        self.pad = backend.token_to_id(special["pad_token"]) if special and "pad_token" in special else None
        masks = (backend.token_to_id(token) for token in _MASKS)
        self.mask = next((token for token in masks if token is not None), None)
        # Ids may have holes, so the vocabulary size follows from the largest id.
        self.vocab = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"{begin} {separator} {backend.to_str()}".encode())
        self._backend = backend
        known = {separator, *(token for token in ends if token < self.vocab)}
        if templates:
            added = [token.content for token in backend.get_added_tokens_decoder().values()]
            texts = [backend.id_to_token(token) for token in sorted(known)]
            self.chat = ChatTemplate(templates, special or {}, added, [text for text in texts if text])
        self._known_ends = known

    @cached_property
    def ends(self) -> frozenset[int]:
        """Found by rendering a chat, so only where it is asked for."""
        text = self.chat.end if self.chat else None
        token = None if text is None else self._backend.token_to_id(text)
        return frozenset(self._known_ends if token is None else {*self._known_ends, token})

    @cached_property
    def special(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`. Raises DataError for a lone surrogate."""
        if not text.isascii():  # the Rust side would raise its own error for a lone surrogate
            _utf8(text)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_spans(
        self, texts: Sequence[tuple[str, Sequence[TextSpan]]]
    ) -> Iterator[tuple[list[int], list[bool]]]:
        encodings = self._backend.encode_batch([text for text, _ in texts], add_special_tokens=False)
        for encoding, (_, spans) in zip(encodings, texts, strict=True):
            yield encoding.ids, mask_of(spans, encoding.offsets)

    def framed(self, text: str) -> list[int]:
        tokens = list(self._backend.encode(text, add_special_tokens=True).ids)
        return tokens if tokens[-1:] == [self.separator] else [*tokens, self.separator]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def shown(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tokens]:
        texts = [piece.decode("utf-8") for piece in pieces]
        # The fast method leaves out offsets, which plain text does not need.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"character {error.start} of {shorten(ascii(text), 60)}"
        fix = "write it in UTF-8"
        raise DataError("text is not Unicode", where=where, why=error.reason, fix=fix) from None


def open_tokenizer(name: str, begin: str = "auto") -> Tokenizer:
    """The tokenizer of the recipe's `data.tokenizer`.

    `name` is `bytes`, a `tokenizer.json`, a folder that holds one, or an id on the Hugging Face hub. `begin` is the
    recipe's `data.begin`: `none` leaves out the token that begins a document.

    Raises:
        DataError: it is missing, unreadable, or has no end-of-text token to separate documents.
    """
    if name == "bytes":
        return ByteTokenizer()
    name = seen_from(name, Path.cwd())  # shorter in messages
    path = path_of(name)
    if path.is_dir() and not brings_tokenizer(str(path)):
        why = "transformers would make an empty one of its config.json"
        fix = "give 'bytes', or a folder with tokenizer.json"
        raise DataError(f"no tokenizer in '{name}'", where="data.tokenizer", why=why, fix=fix)
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        return _through_transformers(name, str(path), begin)
    if path.exists():
        return _from_file(name, path / "tokenizer.json" if path.is_dir() else path, begin)
    if name.endswith(".json") or only_a_path(name) or not _TOKENIZER_ID.fullmatch(name):
        raise DataError(
            f"no tokenizer at '{name}'",
            where="data.tokenizer",
            why=missing(name),
            fix="give 'bytes', a folder with tokenizer.json, or an id on the Hugging Face hub",
        )
    return _through_transformers(name, name, begin)


def _from_file(name: str, path: Path, begin: str) -> Tokenizer:
    try:
        import tokenizers
    except ImportError:
        raise _not_installed("tokenizers") from None
    refuse_lfs_pointer(path, DataError)
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the Rust side raises a bare Exception for a malformed file
        raise DataError(
            "unreadable tokenizer",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="give a tokenizer.json as the tokenizers library saves it",
        ) from None
    add_tokens_next_to(backend, path)
    first = begin_token(backend, path) if begin == "auto" else None
    templates = templates_next_to(path)
    special = special_next_to(path)
    ends = ends_of_model(path.parent)
    separator = _separator(backend, path, special.get("eos_token"))
    return BackendTokenizer(name, backend, separator, templates, special, first, ends)


def _separator(backend: tokenizers.Tokenizer, path: Path, named: str | None) -> int:
    """The id of the end-of-text token: the one that the files next to `path` name, else one with a common name."""
    for token in _END_OF_TEXT if named is None else (named,):
        if (number := backend.token_to_id(token)) is not None:
            return int(number)
    raise DataError(
        "tokenizer has no end-of-text token" if named is None else f"the tokenizer has no {named!r}",
        where=str(path),
        why="documents need a separator" if named is None else "the files next to it name it as eos_token",
        fix="set eos_token in tokenizer_config.json next to it",
    )


def _through_transformers(name: str, source: str, begin: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise _not_installed("transformers") from None
    for file in TOKENIZER_FILES:
        refuse_lfs_pointer(Path(source) / file, DataError)
    try:
        loaded = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # network, hub or file format
        said = f"{type(error).__name__}: {one_line(str(error))}"
        is_local = Path(source).exists()
        raise DataError(
            f"cannot load tokenizer '{name}'",
            where="data.tokenizer",
            why=said if is_local else f"{missing(name)}; from the Hub: {said[:60]}…",
            fix=f"{'' if is_local else 'check the name and the network, or '}give a local folder with tokenizer.json",
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    separator = loaded.sep_token_id if loaded.eos_token_id is None else loaded.eos_token_id
    if backend is None or separator is None:
        lacks = "fast backend" if backend is None else "end-of-text token"
        raise DataError(
            f"tokenizer '{name}' has no {lacks}",
            where="data.tokenizer",
            fix="convert it to tokenizer.json" if backend is None else "set its eos_token",
        )
    special = {key: str(value) for key, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    templates = templates_of(getattr(loaded, "chat_template", None))
    first = added_before(backend) if begin == "auto" else None
    ends = _ends_through_transformers(source)
    return BackendTokenizer(name, backend, int(separator), templates, special, first, ends)


def _ends_through_transformers(source: str) -> Sequence[int]:
    """The ends of a model in a folder or on the hub; none if it has no such file."""
    from transformers import GenerationConfig

    with suppress(OSError, ValueError):
        ends = GenerationConfig.from_pretrained(source).eos_token_id
        if ends is not None:
            return ends if isinstance(ends, list) else [ends]
    return ()


def _not_installed(package: str) -> DataError:
    return DataError(
        "cannot read this tokenizer",
        where="data.tokenizer",
        why=f"the package {package} is not installed",
        fix=f"{install('hf')}, or use tokenizer: bytes",
    )


def mask_token(tokenizer: Tokenizer) -> int:
    """The id of the mask token. Raises DataError if there is none."""
    if tokenizer.mask is None:
        raise DataError(
            f"tokenizer '{tokenizer.name}' has no mask token",
            where="data.tokenizer",
            why="model.objective is masked",
            fix="give the tokenizer of the model, with [MASK] or <mask>",
        )
    return tokenizer.mask
