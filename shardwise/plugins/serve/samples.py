"""Samples of a trained model: answers to records of its own data, and text of its own.

A model of records, such as chats, answers the first held-out ones as they were before their first answer. A model of
plain text continues the start of a held-out sequence (`answers`), or writes the start of a document (in the report).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice, takewhile
from pathlib import Path

import torch

from shardwise.checkpoint.run_folder import read_job, read_outcome, write_outcome
from shardwise.core.errors import CheckpointError, DataError, RecipeError
from shardwise.core.run_files import AnswerRecord, Outcome
from shardwise.core.units import format_count
from shardwise.data.chat import ChatTemplate
from shardwise.data.dataset import Splits, TokenDataset
from shardwise.data.opening import open_part, tokenizer_of
from shardwise.data.template_forms import ANSWER, QUESTION
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.turns import Turn
from shardwise.hardware.kinds import HOST, DeviceKind
from shardwise.hardware.profiles import kind_named
from shardwise.plugins.serve.load import open_model
from shardwise.plugins.serve.multi_lora import BASE
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import LENGTH_END, ServedModel, load_model, serving_device
from shardwise.recipe.sections import Recipe
from shardwise.verifier.reference import reference_model

SAMPLE_FLOPS, DEVICE_FLOPS = 5e11, 5e13
"""Budget of a report's samples, a few seconds, on the processor and on an accelerator. Larger models write a shorter
text, or none."""

SAMPLE_TOKENS = (100, 300)
"""The shortest sample of plain text worth reading, and the longest written."""

PROMPTS = 3
"""Held-out records that a report's samples answer."""
COUNT, ANSWER_TOKENS = 2, 60
"""Records that are answered at the end of a fine-tuning run, and the longest answer, also in a report."""
_LOOKED_AT = 100
"""Records among which those with room for an answer are looked for."""
_MORE = " …"
_FIRST = "first"
"""Name of the adapter that the run has started from."""


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
    return _greedy_answers(load_model(folder, precision=precision, device=device), questions, ANSWER_TOKENS)


def record_sample(folder: Path) -> None:
    """Add samples to the run's report.json, if the run has a report and a text model; or why there are none.

    It runs after training, on one device, so it changes neither the training nor its memory.
    """
    outcome = read_outcome(folder)
    if outcome is None:
        return
    recipe, plan = read_job(folder)
    if recipe.writes_text:
        write_outcome(folder, _sampled(folder, recipe, outcome, kind_named(plan.device)))


def _sampled(folder: Path, recipe: Recipe, outcome: Outcome, kind: DeviceKind) -> Outcome:
    """The outcome with samples, or with the reason why there are none."""
    part = recipe.data.parts[0]
    size = outcome.parameters
    large = f"a model of {format_count(size)} parameters takes too long on one {kind.name}"
    affordable = int((SAMPLE_FLOPS if kind.is_host else DEVICE_FLOPS) / (2 * size))
    if affordable < ANSWER_TOKENS:
        return replace(outcome, unsampled=large)
    try:
        if part.stream_window is not None or not _opened(recipe).train.from_records:
            shortest, longest = SAMPLE_TOKENS
            tokens = int(SAMPLE_FLOPS / (2 * size * recipe.data.sequence_length))
            if tokens < shortest:
                return replace(outcome, unsampled=large)
            return replace(outcome, sample=_text(folder, min(tokens, longest)))
        questions = list(_questions(recipe, PROMPTS, ANSWER_TOKENS))
        lengths = [len(tokenizer_of(part).encode(question.prompt)) + ANSWER_TOKENS for question in questions]
        questions = [q for n, q in enumerate(questions) if 2 * sum(lengths[: n + 1]) <= affordable]
        if not questions:
            return replace(outcome, unsampled=large if lengths else "no prompt leaves room for an answer")
        return replace(outcome, answers=_before_and_after(folder, recipe, questions, kind))
    except RecipeError:
        return outcome  # as the functions that are called say
    except torch.OutOfMemoryError:
        return replace(outcome, unsampled=f"the whole model does not fit on one {kind.name}")


def _opened(recipe: Recipe) -> Splits[TokenDataset]:
    part = recipe.data.parts[0]
    return open_part(recipe, part, tokenizer_of(part))


def _text(folder: Path, tokens: int) -> str:
    """The start of a document. Raises RecipeError if the model does not generate text."""
    return load_model(folder).complete([Request("", sampling=Sampling(tokens=tokens, past_end=True))])[0]


def _before_and_after(
    folder: Path, recipe: Recipe, questions: Sequence[Question], kind: DeviceKind
) -> tuple[AnswerRecord, ...]:
    """Raises RecipeError if the model does not generate text, or this process sees no such device."""
    dtype = torch.float32 if kind.is_host else torch.bfloat16
    device = serving_device(kind.torch_type)
    opened = open_model(folder, None, dtype, device)
    start = None if recipe.adapter is None else recipe.adapter.start_from
    served = ServedModel(opened, {} if start is None else {_FIRST: start})
    answered = _greedy_answers(served, questions, ANSWER_TOKENS, _first_adapter(recipe, served))
    before = [answer.before for answer in answered]
    if recipe.adapter is None:
        opened.model.to("meta")  # one model at a time
        with suppress(CheckpointError, DataError):  # the files that the run started from may be gone
            first = reference_model(opened.blueprint, recipe.seed, dtype).eval().requires_grad_(False)
            served = ServedModel(replace(opened, model=first.to(device)))
            before = [answer.text for answer in _greedy_answers(served, questions, ANSWER_TOKENS)]
    return tuple(
        AnswerRecord(answer.question.asked, text, answer.text, answer.question.expected)
        for answer, text in zip(answered, before, strict=True)
    )


def _first_adapter(recipe: Recipe, served: ServedModel) -> str | None:
    """The adapter with which the model is as before training; None if there is none of it in memory."""
    if recipe.adapter is None or recipe.adapter.loftq_iterations:
        return None
    name = BASE if recipe.adapter.start_from is None else _FIRST
    return name if name in served.adapters else None


def _greedy_answers(
    model: ServedModel, questions: Sequence[Question], tokens: int, before: str | None = None
) -> list[AnswerSample]:
    """Greedy answers of the trained model; also with the adapter that is as ``before`` training."""
    sampling = Sampling(tokens=tokens, temperature=0.0)
    names = [None] if before is None else [None, before]
    texts = [""] * len(questions) * len(names)
    for piece in model.generate([Request(q.prompt, name, sampling) for name in names for q in questions]):
        texts[piece.request] += piece.text + (_MORE if piece.end == LENGTH_END else "")
    texts = [text.strip() for text in texts]
    first: list[str | None] = [*texts[len(questions) :]] or [None] * len(questions)
    return [AnswerSample(*three) for three in zip(questions, texts, first, strict=False)]


# ---- questions --------------------------------------------------------------------------------------------


def _questions(recipe: Recipe, count: int, tokens: int) -> Iterator[Question]:
    """The first held-out records with a prompt that leaves room for an answer, or a start of plain text."""
    splits = _opened(recipe)
    tokenizer = tokenizer_of(recipe.data.parts[0])
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
    text = tokenizer.shown(ids)
    start = len(ids) // 2
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
