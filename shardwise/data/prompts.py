"""Prompts alone, for objectives that complete them during training.

A record has `prompt`, a text or turns; or it is a chat, whose last answer is cut off; or Alpaca's instruction. Turns
are rendered with the opening of an answer (`add_generation_prompt`), as the command `chat` does; so are instructions,
and a text with `system`, as those of preferences are (`formats.with_turns`). A text stays as it is, behind the
tokenizer's `begin`. The fields of a record go to the functions that score completions.

Prompts are tokenized by every process, in the order of the source, and stay in memory. One that leaves no room for its
completion in a sequence is left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import xxhash

from shardwise.core.errors import DataError
from shardwise.data.cache_header import json_hash
from shardwise.data.completions import held_out_records, longer_sequences
from shardwise.data.dataset import Lengths, MaskedTokens, OpenedSource, Sample, Splits, TokenDataset, TokenIds
from shardwise.data.encoding import require_template
from shardwise.data.formats import KEYS, PROMPT_FIELDS, Chat, alpaca_of, chat_of, misspelt, with_turns
from shardwise.data.readers import Record
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.turns import Turn, said, turns_of
from shardwise.recipe.sections import DataSpec


@dataclass(frozen=True)
class PromptDataset(TokenDataset):
    """Prompts of one side of the split.

    Attributes:
        tokens: of all prompts, one after the other.
        ends: where each ends in them, [prompts].
        fields: the records, all of their fields.
        closings: tokens that a chat template writes after the end of the answer to each; of a text, none.
        length: most tokens of a prompt.
        from_chats: whether a chat template wrote one of them.
    """

    tokenizer: Tokenizer
    tokens: TokenIds
    ends: TokenIds
    fields: Sequence[Mapping[str, object]]
    closings: Sequence[Sequence[int]]
    length: int
    from_chats: bool

    from_records = True

    @property
    def chats(self) -> bool:
        return self.from_chats

    def __len__(self) -> int:
        return len(self.ends)

    def sample(self, index: int) -> Sample:
        """`prompt` and `closing`, lists of tokens, and `fields`, the record. They do not stack into a batch."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        prompt = self.record(index)[0]
        return {"prompt": prompt, "closing": self.closings[index], "fields": self.fields[index]}

    def padding(self) -> Sample:
        return {"prompt": [], "closing": [], "fields": {}}

    def release(self) -> None:
        return

    def filled(self, index: int) -> int:
        return len(self.record(index)[0])

    def text(self, index: int) -> str:
        return self.tokenizer.decode(self.record(index)[0])

    def record(self, index: int) -> tuple[list[int], list[bool]]:
        start = int(self.ends[index - 1]) if index else 0
        tokens = self.tokens[start : int(self.ends[index])].tolist()
        return tokens, [False] * len(tokens)

    def documents(self, index: int) -> list[MaskedTokens]:
        return [[(token, False) for token in self.record(index)[0]]]

    def lengths(self) -> Lengths:
        lengths = np.diff(self.ends, prepend=0)
        return Lengths(int(lengths.max()), float(lengths.mean()))


def open_prompts(opened: OpenedSource) -> Splits[PromptDataset]:
    """The prompts of a source. Raises DataError if a record has none, or all are too long."""
    spec = opened.spec
    name = opened.source.name
    longest = opened.prompt_tokens or spec.sequence_length - 1
    reader = _Reader(spec, opened.format, opened.tokenizer)
    tokens: list[list[int]] = []
    records: list[Mapping[str, object]] = []
    closings: list[Sequence[int]] = []
    lengths: list[int] = []
    for record in opened.source.records(sorted(KEYS[opened.format] | opened.source.fields())):
        prompt, closing = reader.tokens(record)
        lengths.append(len(prompt))
        if len(prompt) <= longest:
            tokens.append(prompt)
            records.append(record.fields)
            closings.append(closing)
    count = len(lengths)
    if not tokens:
        why = f"all {count:,} have more than {longest:,} tokens" if count else "it has no records"
        needed = np.array(lengths, np.int64) + spec.sequence_length - longest
        fix = longer_sequences(needed) if count else "check data.source"
        raise DataError("no prompt within a sequence", where=name, why=why, fix=fix)
    hashes = np.array(
        [xxhash.xxh3_64_intdigest(np.array(prompt, "<u8").tobytes()) for prompt in tokens], np.uint64
    )
    is_held_out = held_out_records(hashes, spec.held_out)

    def side(held_out: bool) -> PromptDataset:
        chosen = np.flatnonzero(is_held_out == held_out).tolist()
        prompts = [tokens[number] for number in chosen]
        flat = np.array([token for prompt in prompts for token in prompt], np.int64)
        ends = np.cumsum([len(prompt) for prompt in prompts], dtype=np.int64)
        fields = [records[number] for number in chosen]
        after = [closings[number] for number in chosen]
        return PromptDataset(opened.tokenizer, flat, ends, fields, after, longest, reader.chats)

    train = side(False)
    held_out = side(True)

    def sentences() -> list[str]:
        mean = sum(map(len, tokens)) / len(tokens)
        lines = [
            f"{spec.source}: format {opened.format}, {count:,} prompts of {mean:.0f} tokens on average",
            f"{len(train):,} prompts to complete in training and {len(held_out):,} held out",
        ]
        if dropped := count - len(tokens):
            lines.append(f"too long: {dropped:,} prompts of more than {longest:,} tokens dropped")
        return lines

    digest = xxhash.xxh3_128_hexdigest(json.dumps([tokens, records], default=str).encode())
    return Splits(train, held_out, json_hash([digest, longest, spec.held_out, "prompts"]), sentences)


class _Reader:
    """The tokens of the prompts of one format. `chats` says whether one so far was turns."""

    def __init__(self, spec: DataSpec, name: str, tokenizer: Tokenizer) -> None:
        self.chats = False
        self._closing: list[int] | None = None
        self._name = name
        self._tokenizer = tokenizer
        self._today = date.fromisoformat(spec.date) if spec.date else date.today()

    def tokens(self, record: Record) -> tuple[list[int], list[int]]:
        """The prompt, and what follows the end of its answer. Raises DataError if the record has no such prompt."""
        name = self._name
        field = PROMPT_FIELDS[self._name]
        if record.fields.get(field) is None:
            why = f"data.format is {name}, and the record has {', '.join(record.fields) or 'nothing'}"
            fix = misspelt(record.fields, [field]) or f"give every record {field}"
            raise DataError(f"no '{field}'", where=record.where, why=why, fix=fix)
        if name == "alpaca":
            # A further field ``prompt`` is not the prompt of this format: ``with_turns`` would keep it.
            record = Record({**record.fields, "prompt": None}, record.where)
        if name in ("prompt", "alpaca"):
            record = with_turns(record, self._tokenizer.chat is not None)
        if (value := record.fields.get("prompt")) is not None and name == "alpaca":
            name = field = "prompt"
        if name == "prompt" and not isinstance(value, list):
            return self._begun(said(value, field, record.where)), []
        if name == "alpaca":
            # Only the prompt is read, and a completion must not be empty.
            return self._begun(alpaca_of({**record.fields, "output": "-"}, record.where).prompt), []
        self.chats = True
        keys = ("from", "value") if name == "sharegpt" else ("role", "content")
        turns = turns_of(record.fields, field, keys, record.where)
        if turns[-1].role == "assistant":
            turns = turns[:-1]
        # An answer must be able to follow.
        chat = chat_of(record, name, (*turns, Turn("assistant", "-")), field)
        before = chat.turns[:-1]
        if not before:
            why = "it has the assistant's turn alone"
            fix = "begin with the user's"
            raise DataError("no prompt", where=f"{record.where}: {field}", why=why, fix=fix)
        template = require_template(self._tokenizer)
        opened = replace(chat, turns=before)
        template.checked(opened, record.where, self._today)
        prompt = self._tokenizer.encode(template.text(opened, record.where, self._today, opening=True))
        if self._closing is None:  # it depends on the template alone
            self._closing = self._after_an_answer(chat, record.where)
        return prompt, self._closing

    def _after_an_answer(self, chat: Chat, where: str) -> list[int]:
        """The tokens that the template writes after the one that ends the last answer, such as a line break."""
        try:
            written = require_template(self._tokenizer).written(chat, where, self._today)
        except DataError:  # answers need not be found to be sampled
            return []
        start = written.trained[-1][0] if written.trained else len(written.text)
        tokens = self._tokenizer.encode(written.text[start:])
        last = max(
            (n for n, token in enumerate(tokens) if token in self._tokenizer.ends), default=len(tokens)
        )
        return tokens[last + 1 :]

    def _begun(self, text: str) -> list[int]:
        return self._tokenizer.begun(self._tokenizer.encode(text))
