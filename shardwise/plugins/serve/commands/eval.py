"""``shardwise eval``: the perplexity of a model on any data, its preferences, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import AsJson, ModelFolder, path_option
from shardwise.cli.spinner import working
from shardwise.core.errors import RecipeError
from shardwise.core.figures import measure_label

if TYPE_CHECKING:
    from shardwise.plugins.serve.evaluating import EvaluationOptions


PreferencesOption = Annotated[
    str | None,
    typer.Option(help="instead of DATA: pairs with chosen and rejected, as data.source", metavar="DATA"),
]
TasksOption = Annotated[
    str | None, typer.Option(help="instead of DATA: tasks of lm-evaluation-harness", metavar="NAME,NAME,…")
]
TaskFolderOption = Annotated[Path | None, path_option("folder of further tasks' YAML files", "DIR")]
ShotsOption = Annotated[
    int | None, typer.Option(help="examples in a task's prompt; default: the task's", min=0)
]
LimitOption = Annotated[int | None, typer.Option(help="examples of each task; default: all", min=1)]
ChatOption = Annotated[bool, typer.Option("--chat", help="render a task's prompts as chats")]


def command(
    model: ModelFolder,
    data: Annotated[
        str | None,
        typer.Argument(help="stdlib, files, a folder or the id of a dataset, as data.source", metavar="DATA"),
    ] = None,
    preferences: PreferencesOption = None,
    tasks: TasksOption = None,
    task_folder: TaskFolderOption = None,
    shots: ShotsOption = None,
    limit: LimitOption = None,
    chat: ChatOption = False,
    adapter: Annotated[
        Path | None,
        path_option("folder of an adapter to evaluate the model with", "DIR"),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="leave out the adapter that the run trained")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer to use instead of the model's: bytes, a folder or a Hub id")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="most tokens of a sequence; default: the model's, at most 1024", min=1)
    ] = None,
    sequences: Annotated[int | None, typer.Option(help="number of sequences; default: all", min=1)] = None,
    batch: Annotated[int, typer.Option(help="sequences at a time", min=1)] = 8,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    device: Annotated[str, typer.Option(help="such as cpu, cuda or cuda:1")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Print the loss and the perplexity of a model on any data, its accuracy on preferences, or results on tasks."""
    from shardwise.plugins.serve.evaluating import EvaluationOptions

    if [data, preferences, tasks].count(None) != 2:
        fix = "shardwise eval DIR DATA, eval DIR --preferences DATA, or eval DIR --tasks NAME"
        raise RecipeError("give one of data, preferences and tasks", where="command line", fix=fix)
    named = "adapter" if adapter is not None else "base" if base else None
    folders = (("adapter", adapter),) if adapter is not None else ()
    options = EvaluationOptions(
        named, folders, tokenizer, sequence_length, sequences, batch, precision, device
    )
    if data is not None:
        _print_perplexity(model, data, options, as_json)
        return
    if preferences is not None:
        _print_preferences(model, preferences, options, as_json)
        return
    names = [name.strip() for name in str(tasks).split(",") if name.strip()]
    _tasks(model, names, options, (task_folder, shots, limit, chat), as_json)


def _tasks(
    model: Path,
    names: list[str],
    options: EvaluationOptions,
    how: tuple[Path | None, int | None, int | None, bool],
    as_json: bool,
) -> None:
    with working(f"reading {model}"):
        from shardwise.plugins.serve.evaluating import TaskOptions, task_results
    results = task_results(model, names, options, TaskOptions(*how))
    if as_json:
        typer.echo(json.dumps(results, indent=1))
        return
    for task, metrics in results.items():
        for metric, value in metrics.items():
            name, _, rest = metric.partition(" ")
            error = metrics.get(f"{name}_stderr {rest}".rstrip())
            if not name.endswith("_stderr"):
                typer.echo(f"{task}  {metric} {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))


def _print_perplexity(model: Path, data: str, options: EvaluationOptions, as_json: bool) -> None:
    with working(f"reading {model}") as progress:
        from shardwise.plugins.serve.evaluating import perplexity

        result = perplexity(
            model, data, options, lambda done, whole: progress(f"{done:,} of {whole:,} sequences")
        )
    if as_json:
        typer.echo(json.dumps({**vars(result), "perplexity": result.perplexity}))
        return
    equal = result.tokens == result.sequences * result.sequence_length
    length = f"{'' if equal else 'up to '}{result.sequence_length:,} tokens"
    read = f"{result.targets:,} targets in {result.sequences:,} sequences of {length}"
    typer.echo(f"loss {result.loss:.4f} nats per target, perplexity {result.perplexity:.4g}, of {read}")


def _print_preferences(model: Path, data: str, options: EvaluationOptions, as_json: bool) -> None:
    with working(f"reading {model}") as progress:
        from shardwise.plugins.serve.preference_measures import preference_measures

        result = preference_measures(
            model, data, options, lambda done, whole: progress(f"{done:,} of {whole:,} pairs")
        )
    if as_json:
        typer.echo(json.dumps(vars(result)))
        return
    for name, value in result.measures.items():
        typer.echo(f"{measure_label(name)} {value:.4f}")
    against = f", against {result.reference}" if result.reference else ""
    notes = [f"{result.cut:,} cut to {result.sequence_length:,} tokens"] if result.cut else []
    notes += [f"{result.left_out:,} left out: nothing tells their answers apart"] if result.left_out else []
    typer.echo("; ".join([f"of {result.pairs:,} pairs scored by {result.objective}{against}", *notes]))
