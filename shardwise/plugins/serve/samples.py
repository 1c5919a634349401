"""Samples of a trained model: answers to records of its own data, and text of its own.

A model of records, such as chats, answers the first held-out ones as they were before their first answer. A model of
plain text continues the start of a held-out sequence (`answers`), or writes the start of a document (in the report).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, takewhile
from pathlib import Path

from shardwise.checkpoint.run_folder import read_job, read_outcome, write_outcome
from shardwise.core.errors import DataError, RecipeError
from shardwise.data.chat import ChatTemplate
from shardwise.data.opening import open_part, tokenizer_of
from shardwise.data.template_forms import ANSWER, QUESTION
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.turns import Turn
from shardwise.hardware.kinds import HOST
from shardwise.plugins.serve.multi_lora import BASE
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import LENGTH_END, ServedModel, load_model
from shardwise.recipe.sections import Recipe

SAMPLE_FLOPS = 5e11
"""Budget of a report's sample, a few seconds on a laptop. Larger models write a shorter sample, or none."""

SAMPLE_TOKENS = (100, 300)
"""The shortest sample worth reading, and the longest written."""

PROMPTS = 3
"""Most held-out records that a report's sample answers."""
COUNT, ANSWER_TOKENS = 2, 60
"""Records that are answered at the end of a fine-tuning run, and the longest answer."""
_LOOKED_AT = 100
"""Records among which those with room for an answer are looked for."""
_MORE = " …"


@dataclass(frozen=True)
class Question:
    """A record of the data up to its first answer.

    Attributes:
        prompt: the text that the model continues.
        asked: the user's last turn in it, or the text without special tokens.
        expected: the answer in the data, cut where the model's is.
    """

    prompt: str
    asked: str
    expected: str


@dataclass(frozen=True)
class AnswerSample:
    """The model's answer to a question; ``before`` training if the run has an adapter and that was asked for."""

    question: Question
    text: str
    before: str | None = None


def answers(folder: Path, device: str = "cpu") -> list[AnswerSample]:
    """Greedy answers to the first held-out records of a run, or of its training records if none is held out.

    [] for a model that does not generate text.

    Raises:
        ShardwiseError: the data or the model cannot be opened.
    """
    recipe, _ = read_job(folder)
    if not recipe.writes_text:
        return []
    questions = list(_questions(recipe, COUNT, ANSWER_TOKENS))
    precision = "fp32" if device == HOST.torch_type else "bf16"
    return _greedy_answers(
        load_model(folder, precision=precision, device=device), questions, ANSWER_TOKENS, False
    )


def record_sample(folder: Path) -> None:
    """Add a sample to the run's report.json, if the run has a report and a small text model."""
    outcome = read_outcome(folder)
    if outcome is None:
        return
    recipe, _ = read_job(folder)
    shortest, longest = SAMPLE_TOKENS
    affordable = int(SAMPLE_FLOPS / (2 * outcome.parameters * recipe.data.sequence_length))
    if affordable < shortest or not recipe.writes_text:
        return
    try:
        sample = _sample_of_text(folder, recipe, min(affordable, longest))
    except RecipeError:
        return  # the model does not generate text
    write_outcome(folder, replace(outcome, sample=sample))


def _sample_of_text(folder: Path, recipe: Recipe, tokens: int) -> str:
    """The sample. Raises RecipeError if the model does not generate text."""
    model = load_model(folder)
    part = recipe.data.parts[0]
    splits = open_part(recipe, part, tokenizer_of(part))
    if not splits.train.from_records:
        return model.complete([Request("", sampling=Sampling(tokens=tokens, past_end=True))])[0]
    questions = list(_questions(recipe, PROMPTS, tokens // PROMPTS))
    answered = _greedy_answers(model, questions, tokens // PROMPTS, len(model.adapters) > 1)
    return "\n\n".join(
        f"── {title} ──\n{text}" for answer in answered for title, text in _answer_parts(answer)
    )


def _answer_parts(answer: AnswerSample) -> Iterator[tuple[str, str]]:
    yield "prompt", answer.question.asked
    yield "the trained model", answer.text
    if answer.before is not None:
        yield "before training", answer.before
    yield "in the data", answer.question.expected


def _greedy_answers(
    model: ServedModel, questions: Sequence[Question], tokens: int, base: bool
) -> list[AnswerSample]:
    """Greedy answers: of the trained model, and of its base before training."""
    sampling = Sampling(tokens=tokens, temperature=0.0)
    names = [None, BASE] if base else [None]
    texts = [""] * len(questions) * len(names)
    for piece in model.generate([Request(q.prompt, name, sampling) for name in names for q in questions]):
        texts[piece.request] += piece.text + (_MORE if piece.end == LENGTH_END else "")
    texts = [text.strip() for text in texts]
    before: list[str | None] = [*texts[len(questions) :]] or [None] * len(questions)
    return [AnswerSample(*three) for three in zip(questions, texts, before, strict=False)]


# ---- questions --------------------------------------------------------------------------------------------


def _questions(recipe: Recipe, count: int, tokens: int) -> Iterator[Question]:
    """The first held-out records with a prompt that leaves room for an answer, or a start of plain text."""
    part = recipe.data.parts[0]
    tokenizer = tokenizer_of(part)
    splits = open_part(recipe, part, tokenizer)
    side = splits.held_out if len(splits.held_out) else splits.train
    if side.from_records:
        template = tokenizer.chat if side.chats else None
        records = (side.record(index) for index in range(min(_LOOKED_AT, side.records)))
        questions = (_question(*record, tokenizer, template, tokens) for record in records)
        room = recipe.data.sequence_length
        fitting = (q for q in questions if 0 < len(tokenizer.encode(q.prompt)) < room)
        yield from islice(fitting, count)
    else:
        ids, _ = side.record(0)
        half = min(tokens, len(ids) // 2)
        prompt = tokenizer.shown(ids[:half])
        yield Question(prompt, tokenizer.decode(ids[:half]).strip(), _cut_text(ids[half:], tokens, tokenizer))


def _question(
    ids: list[int], trained: list[bool], tokenizer: Tokenizer, template: ChatTemplate | None, tokens: int
) -> Question:
    """The question of a record: what comes before its first trained token, and its first trained tokens."""
    start = len(list(takewhile(lambda chosen: not chosen, trained)))
    length = len(list(takewhile(bool, trained[start:])))
    if start == 0:  # data.train_on is all
        start, length = _opening_in(ids, tokenizer, template)
    prompt = tokenizer.shown(ids[:start])
    asked = tokenizer.decode(ids[:start]) if template is None else _last_turn(prompt, tokenizer, template)
    return Question(prompt, asked.strip(), _cut_text(ids[start : start + length], tokens, tokenizer))


def _opening_in(ids: list[int], tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[int, int]:
    """Where the first answer of a record starts, in tokens, and its length; half of it if no opening is found."""
    after = "" if template is None else _around_a_turn(template)[1]
    text, start = tokenizer.shown(ids), len(ids) // 2
    for opening in (after.rstrip(), after):  # its last blank may be part of the answer's first token
        before = tokenizer.encode(text[: text.find(opening) + len(opening)]) if opening in text else []
        if opening and ids[: len(before)] == before:
            start = len(before)
    over = tokenizer.ends | tokenizer.special
    return start, len(list(takewhile(lambda token: token not in over, ids[start:])))


def _cut_text(ids: list[int], tokens: int, tokenizer: Tokenizer) -> str:
    text = tokenizer.decode(ids[:tokens]).strip()
    return text + _MORE if len(ids) > tokens else text


def _last_turn(prompt: str, tokenizer: Tokenizer, template: ChatTemplate) -> str:
    """The user's last turn in a prompt; the prompt without special tokens if it does not end with such a turn."""
    before, after = _around_a_turn(template)
    if not prompt.rstrip().endswith(after.rstrip()):  # its last blank may be part of the answer's first token
        return tokenizer.decode(tokenizer.encode(prompt))
    turn = prompt.rstrip().removesuffix(after.rstrip())
    ids = tokenizer.encode(turn.rpartition(before)[2] if before else turn)
    parts = [list(part) for tag, part in groupby(ids, tokenizer.special.__contains__) if not tag]
    texts = [text for part in parts if (text := tokenizer.decode(part)).strip()]
    return texts[-1] if texts else ""


def _around_a_turn(template: ChatTemplate) -> tuple[str, str]:
    """What the template writes before and after any turn of the user, the opening of the answer included."""
    question = Turn("user", QUESTION)
    try:
        one = template.opened([question], "the template")
        two = template.opened([question, Turn("assistant", ANSWER), question], "the template")
    except DataError:
        return "", ""
    first, second = (text.rpartition(QUESTION)[0] for text in (one, two))
    shorter = min(len(first), len(second))
    same = next((n for n in range(shorter) if first[-1 - n] != second[-1 - n]), shorter)
    return first[len(first) - same :], one.rpartition(QUESTION)[2]
