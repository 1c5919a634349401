"""``shardwise finetune``: from a model and data to a trained adapter or model, in one command."""

from __future__ import annotations

import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.common import Overrides, next_lines, path_option, run_workers
from shardwise.cli.spinner import working
from shardwise.core.errors import RecipeError
from shardwise.core.plugins import plugin
from shardwise.plugins.finetune.init import (
    DataArgument,
    DeviceOption,
    Epochs,
    MethodOption,
    ModelArgument,
    ObjectiveOption,
)
from shardwise.plugins.finetune.written_recipe import FineTuningMethod

INDENT, WIDTH, TEXT_LINES = 10, 100, 3
"""Of a sample: columns before its texts, the longest line, and most lines of a text."""


def command(
    model: ModelArgument,
    data: DataArgument,
    overrides: Overrides = None,
    epochs: Epochs = None,
    out: Annotated[
        Path,
        path_option("folder of the run; resumes when it holds a checkpoint", "DIR"),
    ] = Path("finetuned"),
    method: MethodOption = None,
    device: DeviceOption = None,
    objective: ObjectiveOption = None,
) -> None:
    """Fine-tune a model: find the devices, choose full, LoRA or QLoRA by the plan, train, name the next commands."""
    from shardwise.jobs.training import train_in_folder
    from shardwise.launch.launcher import preloaded_run
    from shardwise.launch.placement import launched_by
    from shardwise.plugins.finetune.choosing import (
        FINETUNE_RECIPE,
        Options,
        choose_method,
        draft,
        going_on,
        hardware_here,
        require_no_run,
    )

    file = out / FINETUNE_RECIPE
    if launched_by() is not None:
        why = "finetune starts its own processes"
        fix = "write a recipe with `shardwise init`, and train it with `shardwise train`"
        raise RecipeError("started by another launcher", where="finetune", why=why, fix=fix)
    with ExitStack() as stack:
        with working("reading the data") as progress:
            wanted: FineTuningMethod | None = method.value if method else None
            preference = objective.value if objective else None
            read = None
            if not file.is_file():
                require_no_run(out)
                read = draft(model, data, epochs, preference=preference)
            hardware = hardware_here(device.value if device else None)
            stack.enter_context(preloaded_run(hardware.count))
            if read is None:
                given = Options(epochs, wanted, hardware.device if device else None, preference)
                recipe, cluster = going_on(file, model, data, given, overrides or ())
                plan = None
            else:
                chosen = choose_method(read.on(hardware), wanted, overrides or (), progress)
                recipe, cluster, plan = chosen.recipe, chosen.cluster, chosen.plan
                out.mkdir(parents=True, exist_ok=True)
                file.write_text(chosen.text, encoding="utf-8")
        typer.echo(f"{file}: the recipe, {'read' if plan is None else 'written'}")
        with working() as progress:
            say = progress.stopping(typer.echo)
            train_in_folder(recipe, cluster, out, run_workers, plan=plan, say=say, progress=progress)
    _finish(out, cluster.device.traits.torch_type)


def _finish(out: Path, device: str) -> None:
    """Write card and tokenizer, show samples, and say which commands are next."""
    from shardwise.checkpoint.run_folder import read_job
    from shardwise.jobs.next_commands import next_commands
    from shardwise.plugins.finetune.choosing import result_folder
    from shardwise.plugins.finetune.model_card import finish_adapter, finish_model
    from shardwise.report.record import read_run

    recipe, plan = read_job(out)
    loss = read_run(out).held_out_loss
    target = result_folder(out, recipe)
    if recipe.adapter is not None:
        finish_adapter(target, recipe, plan, loss)
    else:
        finish_model(out, target, recipe, plan, loss)
    for answer in _sample_answers(out, device):
        parts = {"prompt": answer.question.asked, "answer": answer.text, "expected": answer.question.expected}
        typer.echo("\n" + "\n".join(_sample_text(name, text) for name, text in parts.items()))
    typer.echo(f"\n{target}: {'adapter' if recipe.adapter else 'model'}, tokenizer and model card")
    for line in next_lines(next_commands(out)):
        typer.echo(line)


def _sample_answers(out: Path, device: str) -> list[Any]:
    """Answers to records of the run; none of a model that does not fit on one device."""
    from torch import OutOfMemoryError

    samples = plugin("serve.samples")
    if samples is None:
        return []
    try:
        return list(samples.answers(out, device))
    except OutOfMemoryError:
        typer.echo("no samples: the model does not fit on one device")
        return []


def _sample_text(name: str, text: str) -> str:
    """A part of a sample: its name, and up to three lines of its text below each other."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    shown = [line if len(line) <= WIDTH else f"{line[:WIDTH]} …" for line in lines[:TEXT_LINES]]
    if len(lines) > TEXT_LINES:
        shown.append("…")
    return textwrap.indent("\n".join(shown), " " * INDENT).replace(" " * INDENT, name.ljust(INDENT), 1)
