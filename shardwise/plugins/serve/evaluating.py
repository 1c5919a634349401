"""Perplexity of a model on any data, and tasks of lm-evaluation-harness: ``eval`` and ``evaluate_text``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.cache_folder import default_root
from shardwise.core.errors import DataError, RecipeError, ShardwiseError, one_of
from shardwise.core.extras import install
from shardwise.core.paths import path_of
from shardwise.data import Batch
from shardwise.data.batches import batch_of
from shardwise.data.opening import open_splits
from shardwise.plugins.serve.by_length import batches_by_length
from shardwise.plugins.serve.load import OWN_ADAPTER, OpenedModel, open_model
from shardwise.plugins.serve.multi_lora import BASE
from shardwise.plugins.serve.serving import SERVED_DTYPES, ServedModel, serving_device
from shardwise.recipe.sections import DataSpec
from shardwise.runtime.cross_entropy import IGNORED, cross_entropy_sum

EVALUATED_LENGTH = 1024
"""Tokens of a sequence where neither the caller nor the model's context says less."""


@dataclass(frozen=True)
class Perplexity:
    """Loss of a model on some data.

    Attributes:
        loss: mean over the targets, in nats.
        targets: tokens that count: all of a text, the completions of records.
        sequences: number of sequences that were read.
        sequence_length: tokens of the longest one.
        tokens: of all sequences together, without padding.
    """

    loss: float
    targets: int
    sequences: int
    sequence_length: int
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class EvaluationOptions:
    """How a model is evaluated.

    Attributes:
        adapter: a name of ``adapters``, own or base; None is the model as it was trained.
        adapters: folders by name.
        sequence_length: most tokens of a sequence; None for the model's, at most EVALUATED_LENGTH.
        sequences: how many to read, from the first; None for all.
        batch: sequences at a time.
    """

    adapter: str | None = None
    adapters: tuple[tuple[str, Path], ...] = ()
    tokenizer: str | None = None
    sequence_length: int | None = None
    sequences: int | None = None
    batch: int = 8
    precision: str = "fp32"
    device: str = "cpu"


@torch.no_grad()
def perplexity(
    model: Path, source: str, options: EvaluationOptions, progress: Callable[[int, int], None]
) -> Perplexity:
    """The loss of a run's newest checkpoint, or of a Hugging Face folder, on a data source.

    Args:
        source: as ``data.source`` of a recipe; all of it counts, and nothing is held out.
        progress: called with the sequences done and all.

    Raises:
        CheckpointError, DataError, RecipeError: the model, the data or an option cannot be used.
    """
    opened, served, length = opened_model(model, options)
    spec = DataSpec(source=source, sequence_length=length, held_out=0.0)
    dataset = open_splits(spec, opened.tokenizer, default_root()).train
    count = min(len(dataset), options.sequences or len(dataset))
    lengths = [dataset.filled(sample) or length for sample in range(count)]
    served.bank.select([chosen_adapter(opened, options)] * options.batch)
    device = next(opened.model.parameters()).device
    total = 0.0
    targets = 0
    done = 0
    for samples in batches_by_length(lengths, options.batch, opened.model):
        longest = lengths[samples[0]]
        rows = [*samples, *[None] * (options.batch - len(samples))]
        batch = {name: tensor[:, :longest].to(device) for name, tensor in batch_of(dataset, rows).items()}
        loss, valid = _batch_loss(opened, batch)
        total, targets = total + loss, targets + valid
        done += len(samples)
        progress(done, count)
    return Perplexity(total / max(1, targets), targets, count, max(lengths, default=0), sum(lengths))


def _batch_loss(opened: OpenedModel, batch: Batch) -> tuple[float, int]:
    """(cross-entropy in nats, summed in fp64, number of targets) of a batch; without a router's auxiliary loss."""
    logits = opened.blueprint.logits(opened.model, batch["input_ids"])
    labels = batch["labels"]
    counted = labels != IGNORED
    rows = zip(logits, labels, counted, strict=True)  # one row at a time is copied to fp64
    losses = [cross_entropy_sum(row[mask].double(), targets[mask]) for row, targets, mask in rows]
    return float(torch.stack(losses).sum()), int(counted.sum())


@dataclass(frozen=True)
class TaskOptions:
    """How tasks of lm-evaluation-harness are run.

    Attributes:
        folder: of further tasks' YAML files.
        shots: examples in a prompt; None for the task's own number.
        limit: examples of each task, from the first; None for all.
        chat: render prompts with the chat template.
    """

    folder: Path | None = None
    shots: int | None = None
    limit: int | None = None
    chat: bool = False


def task_results(
    model: Path, tasks: Sequence[str], options: EvaluationOptions, how: TaskOptions
) -> dict[str, dict[str, float]]:
    """The metrics of tasks of lm-evaluation-harness by name, as ``acc`` and ``acc_stderr``.

    Args:
        tasks: names of tasks, groups or tags, which the harness knows or which ``how.folder`` has.

    Raises:
        CheckpointError, DataError, RecipeError: the model, a task or an option cannot be used.
    """
    harness = _harness()
    from shardwise.plugins.serve.task_model import TaskModel

    opened, served, length = opened_model(model, options)
    manager = harness.tasks.TaskManager(include_path=None if how.folder is None else str(how.folder))
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        fix = "see https://github.com/EleutherAI/lm-evaluation-harness, or name its folder: --task-folder"
        raise RecipeError(f"there is no task {unknown[0]!r}", where="--tasks", fix=fix)
    asked = TaskModel(opened, served, chosen_adapter(opened, options), length, options.batch)
    try:
        evaluation = harness.simple_evaluate(
            asked,
            tasks=list(tasks),
            task_manager=manager,
            num_fewshot=how.shots,
            limit=how.limit,
            apply_chat_template=how.chat,
            fewshot_as_multiturn=how.chat,
            bootstrap_iters=1000,
        )
    except ShardwiseError:
        raise
    except Exception as error:  # the harness's code, a task's, or the Hub's
        first = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            "a task failed", where=", ".join(tasks), why=f"{type(error).__name__}: {first}"
        ) from error
    return {name: dict(_metrics(values)) for name, values in evaluation["results"].items()}


def _harness() -> Any:
    """lm-evaluation-harness. Raises RecipeError if it is not installed."""
    try:
        import lm_eval
        import lm_eval.tasks
    except ImportError as error:
        raise RecipeError(
            "lm-evaluation-harness is missing", where="--tasks", why=str(error), fix=install("eval")
        ) from error
    return lm_eval


def _metrics(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a task: ``acc,none`` becomes acc, ``acc,strict`` becomes acc (strict)."""
    for key, value in values.items():
        name, _, filtered = key.partition(",")
        if isinstance(value, int | float) and not isinstance(value, bool) and filtered:
            yield name if filtered == "none" else f"{name} ({filtered})", float(value)


def opened_model(model: Path, options: EvaluationOptions) -> tuple[OpenedModel, ServedModel, int]:
    """The model, its adapters, and the tokens of a sequence."""
    opened = open_model(model, options.tokenizer, model_dtype(options), serving_device(options.device))
    length = evaluated_length(options, opened.context)
    return opened, ServedModel(opened, dict(options.adapters)), length


def evaluated_length(options: EvaluationOptions, context: int | None) -> int:
    """The tokens of a sequence of a model that reads ``context`` at most. Raises RecipeError if more are asked for."""
    length = options.sequence_length or min(context or EVALUATED_LENGTH, EVALUATED_LENGTH)
    if context is not None and length > context:
        why = f"the model's context is {context}"
        raise RecipeError(f"sequences of {length} tokens are too long", where="sequence_length", why=why)
    return length


def model_dtype(options: EvaluationOptions) -> torch.dtype:
    """Raises RecipeError for an unknown precision."""
    if options.precision not in SERVED_DTYPES:
        fix = one_of(options.precision, SERVED_DTYPES)
        raise RecipeError(f"precision is {options.precision!r}", where="precision", fix=fix)
    return SERVED_DTYPES[options.precision]


def chosen_adapter(opened: OpenedModel, options: EvaluationOptions) -> str:
    """The name of the adapter to evaluate with."""
    return options.adapter or (OWN_ADAPTER if opened.own else BASE)


def evaluate_text(
    model: str | Path,
    data: str,
    *,
    adapter: str | Path | None = None,
    base: bool = False,
    tokenizer: str | None = None,
    sequence_length: int | None = None,
    sequences: int | None = None,
    batch: int = 8,
    precision: str = "fp32",
    device: str = "cpu",
) -> Perplexity:
    """Loss and perplexity of a run's newest checkpoint, or of a model's folder, on any data.

    Args:
        data: as ``data.source``; all of it counts, and nothing is held out.
        adapter: folder of an adapter to evaluate the model with.
        base: leave out the adapter that the run trained.
        tokenizer: bytes, a folder or a hub id, instead of the model's.
        sequence_length: most tokens of a sequence; None for the model's, at most 1024.
        sequences: how many to read; None for all.
        batch: sequences at a time.
        precision: fp32, bf16 or fp16.

    Raises:
        CheckpointError, DataError, RecipeError: the model, the data or an option cannot be used.
    """
    options = _evaluation(adapter, base, tokenizer, sequence_length, sequences, batch, precision, device)
    return perplexity(path_of(model), data, options, lambda done, whole: None)


def evaluate_tasks(
    model: str | Path,
    tasks: Sequence[str],
    *,
    task_folder: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    adapter: str | Path | None = None,
    base: bool = False,
    tokenizer: str | None = None,
    sequence_length: int | None = None,
    batch: int = 8,
    precision: str = "fp32",
    device: str = "cpu",
) -> dict[str, dict[str, float]]:
    """The metrics of tasks of lm-evaluation-harness, by task and name of the metric.

    Args:
        tasks: names of tasks, groups or tags.
        task_folder: folder of further tasks' YAML files.
        shots: examples in a prompt; None for the task's own number.
        limit: examples of each task; None for all.
        chat: render prompts with the chat template.
        adapter, base, tokenizer, sequence_length, batch, precision, device: as in ``evaluate_text``.

    Raises:
        CheckpointError, DataError, RecipeError: the model, a task or an option cannot be used.
    """
    options = _evaluation(adapter, base, tokenizer, sequence_length, None, batch, precision, device)
    folder = None if task_folder is None else path_of(task_folder)
    return task_results(path_of(model), tasks, options, TaskOptions(folder, shots, limit, chat))


def _evaluation(
    adapter: str | Path | None, base: bool, tokenizer: str | None, length: int | None, *rest: Any
) -> EvaluationOptions:
    folders = () if adapter is None else (("adapter", path_of(adapter)),)
    named = "adapter" if adapter is not None else "base" if base else None
    return EvaluationOptions(named, folders, tokenizer, length, *rest)
