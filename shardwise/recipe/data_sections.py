"""The `data:` section of a recipe, and the items of its mixture."""

from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from shardwise.core.paths import only_a_path, path_of, seen_from
from shardwise.recipe.section import RecipeText, Section, words

MOST_LENGTH = 100_000_000
"""Tokens of the longest sequence."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "spm.model", "vocab.json", "vocab.txt", "tekken.json",
)  # fmt: skip


def _date_text(value: object) -> object:
    """A date of YAML as text."""
    return value.isoformat() if isinstance(value, date) else value


def _checked_text(text: str) -> str:
    date.fromisoformat(text)  # raises ValueError
    return text


class MixtureSpec(Section):
    """One source of a mixture."""

    source: RecipeText
    """as data.source"""
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """share of the sequences of every 1,024, relative to the other weights"""
    format: Literal["auto", "text", "prompt", "messages", "sharegpt", "alpaca", "preference", "unpaired"] = (
        "auto"
    )
    """as data.format"""
    text_key: RecipeText | None = None
    """as data.text_key; null is that"""


class DataSpec(Section):
    """The training data, and how it becomes token sequences."""

    source: RecipeText = "stdlib"
    """stdlib (the source code of Python's standard library); a file, folder or glob of txt, jsonl or parquet; or
    the id of a Hugging Face dataset"""
    mixture: Annotated[tuple[MixtureSpec, ...] | None, BeforeValidator(words)] = None
    """several sources instead of one, with weights: [{source, weight, format, text_key}, ...]"""
    tokenizer: RecipeText = "bytes"
    """bytes (byte-level), or the path or id of a Hugging Face tokenizer; by default that of model.hf, if it has one"""
    begin: Literal["auto", "none"] = "auto"
    """beginning-of-sequence token (BOS) before every document and prompt: auto adds it if the tokenizer itself does;
    none adds none. A chat template writes its own"""
    sequence_length: Annotated[int, Field(ge=1, le=MOST_LENGTH)] = 256
    """tokens per sequence; of the encoder's sequence under model.objective seq2seq"""
    completion_length: Annotated[int, Field(ge=1, le=MOST_LENGTH)] | None = None
    """tokens of the decoder's sequence under model.objective seq2seq; null is sequence_length"""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """fraction of the documents held out for the validation loss"""
    text_key: RecipeText = "text"
    """field of a jsonl or parquet record with the text"""
    format: Literal["auto", "text", "prompt", "messages", "sharegpt", "alpaca", "preference", "unpaired"] = (
        "auto"
    )
    """format of a record: text; prompt and completion; chat messages; ShareGPT conversations; Alpaca's
    instruction, input and output; preference (chosen, rejected, perhaps prompt); unpaired (prompt, completion, label).
    auto decides by the fields of the first record, and by the objective"""
    train_on: Literal["completion", "all"] | None = None
    """tokens of a record that the loss counts: completion (of a chat, the assistant's turns) or all; null is all for
    text and completion for other formats"""
    packing: bool = False
    """sequence packing: put several records into a sequence, with attention masked between them; false pads each
    record to a sequence. Plain text is concatenated either way; true masks attention between its documents"""

    too_long: Literal["cut", "drop", "split"] = "cut"
    """records longer than a sequence: cut their end, drop them, or split a chat between two exchanges, each part with
    the system turn"""
    date: Annotated[str, BeforeValidator(_date_text), AfterValidator(_checked_text)] | None = None
    """date that chat templates write, as 2026-11-28; null is today, and a run keeps the date of its start"""
    stream_window: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """stream the source: tokens of a window, which are made while the window before is trained on, and shuffled
    together. A Hugging Face dataset stays on the hub. Null makes all tokens before the first step"""

    @property
    def decoder_length(self) -> int:
        """Tokens of the decoder's sequence."""
        return self.completion_length or self.sequence_length

    @property
    def parts(self) -> tuple["DataSpec", ...]:
        """One section per source: this one, or those of the mixture. Paths are as messages show them."""
        return tuple(
            self.model_copy(
                update={
                    "mixture": None,
                    "source": seen_from(part.source, Path.cwd()),
                    "format": part.format,
                    "text_key": part.text_key or self.text_key,
                }
            )
            for part in self.mixture or ()
        ) or (self.model_copy(update={"source": seen_from(self.source, Path.cwd())}),)


def brings_tokenizer(model: str) -> bool:
    """Whether a model of Hugging Face has a tokenizer: a folder with a tokenizer's file, or an id on the Hub."""
    path = path_of(model)
    if path.exists() or only_a_path(model):
        return any((path / name).is_file() for name in TOKENIZER_FILES)
    return True
