"""Answers of a trained model to prompts of its own data, next to the answers in the data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from shardwise.checkpoint.run_folder import read_job
from shardwise.core.cache_folder import default_root
from shardwise.data.text import Examples, open_tokens, tokenizer_of
from shardwise.data.tokenizer import Tokenizer
from shardwise.serve.requests import Request
from shardwise.serve.sampling import Sampling
from shardwise.serve.serving import load_model

COUNT, TOKENS = 2, 60


@dataclass(frozen=True)
class AnswerSample:
    """A prompt of a record, the model's answer, and the record's own, cut to as many tokens."""

    prompt: str
    answer: str
    expected: str


def answers(folder: Path, device: str = "cpu") -> list[AnswerSample]:
    """Greedy answers to the first held-out records of a run, or of its training records if none is held out.

    Plain text has no prompts: its first sequence is continued.

    Raises:
        ShardwiseError: the data or the model cannot be opened.
    """
    recipe, _ = read_job(folder)
    tokenizer = tokenizer_of(recipe.data)
    opened = open_tokens(recipe.data.parts[0], tokenizer, default_root(), objective=recipe.model.objective)
    if isinstance(opened, Examples):
        side = opened.divided.held_out if opened.divided.held_out.sequences else opened.train
        records = [
            record for index in range(min(COUNT, side.sequences)) for record in side.records(index)[:1]
        ]
    else:
        tokens = [token for token, _ in opened.documents(0)[0]]
        records = [(tokens, [at >= TOKENS for at in range(len(tokens))])]
    pairs = [_parts(tokens, trained, tokenizer) for tokens, trained in records[:COUNT]]
    sampling = Sampling(tokens=TOKENS, temperature=0.0)
    requests = [Request(prompt, sampling=sampling) for prompt, _ in pairs]
    said = load_model(folder, device=device).complete(requests)
    return [
        AnswerSample(prompt, text, expected) for (prompt, expected), text in zip(pairs, said, strict=True)
    ]


def _parts(tokens: list[int], trained: list[bool], tokenizer: Tokenizer) -> tuple[str, str]:
    """(prompt, start of the answer) of a record: the tokens before the first trained one, and those from it on."""
    start = len(list(takewhile(lambda chosen: not chosen, trained)))
    return tokenizer.shown(tokens[:start]), tokenizer.shown(tokens[start : start + TOKENS])
