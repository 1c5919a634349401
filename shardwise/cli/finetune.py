"""``shardwise finetune``: from a model and data to a trained adapter or model, in one command."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import Overrides, path_option, run_workers
from shardwise.cli.init import DataArgument, DeviceOption, Epochs, MethodOption, ModelArgument
from shardwise.cli.spinner import working
from shardwise.core.errors import RecipeError
from shardwise.recipe.fine_tuning import Method


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
) -> None:
    """Fine-tune a model: find the devices, choose full, LoRA or QLoRA by the plan, train, name the next commands."""
    from shardwise.jobs.finetuning import (
        EPOCHS,
        RECIPE,
        Options,
        choose,
        draft,
        going_on,
        hardware_here,
        require_no_run,
    )
    from shardwise.jobs.training import train
    from shardwise.launch.launcher import preloaded
    from shardwise.launch.placement import launched_by

    file = out / RECIPE
    if launched_by() is not None:
        why = "finetune starts its own processes"
        fix = "write a recipe with `shardwise init`, and train it with `shardwise train`"
        raise RecipeError("started by another launcher", where="finetune", why=why, fix=fix)
    with ExitStack() as stack:
        with working("reading the data") as progress:
            hardware = hardware_here(device.value if device else None)
            stack.enter_context(preloaded(hardware.count))
            wanted: Method | None = method.value if method else None
            if file.is_file():
                given = Options(epochs, wanted, hardware.device if device else None)
                recipe, cluster = going_on(file, model, data, given, overrides or ())
                plan = None
            else:
                require_no_run(out)
                asked = draft(model, data, epochs or EPOCHS, hardware)
                chosen = choose(asked, wanted, overrides or (), progress)
                text, recipe, cluster, plan = chosen
                out.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
        typer.echo(f"{file}: the recipe, {'read' if plan is None else 'written'}")
        with working() as progress:
            say = progress.stopping(typer.echo)
            train(recipe, cluster, out, run_workers, plan=plan, say=say, progress=progress)
    _finish(out, cluster.device.kind != "cpu")


def _finish(out: Path, accelerated: bool) -> None:
    """Write card and tokenizer, show samples, and say which commands are next."""
    from shardwise.checkpoint.run_folder import read_job
    from shardwise.export.model_card import finish_adapter, finish_model
    from shardwise.jobs.finetuning import result_folder
    from shardwise.report.record import read_run
    from shardwise.serve.answers import answers

    recipe, plan = read_job(out)
    loss, target = read_run(out).held_out_loss, result_folder(out, recipe)
    if recipe.adapter is not None:
        finish_adapter(target, recipe, plan, loss)
    else:
        finish_model(out, target, recipe, plan, loss)
    for sample in answers(out, "cuda" if accelerated else "cpu"):
        typer.echo(
            f"\nprompt    {sample.prompt!r}\nanswer    {sample.answer!r}\nexpected  {sample.expected!r}"
        )
    typer.echo(f"\n{target}: {'adapter' if recipe.adapter else 'model'}, tokenizer and model card. Next:")
    if recipe.adapter is not None:
        typer.echo(f"  shardwise generate {recipe.model.hf} --adapter {target} --prompt TEXT")
        typer.echo(f"  shardwise merge {recipe.model.hf} {target} MERGED")
    else:
        typer.echo(f"  shardwise generate {target} --prompt TEXT")
        typer.echo(f"  shardwise export {out} OUT.gguf")
