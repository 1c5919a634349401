"""``shardwise init``: a recipe for fine-tuning, with comments, to edit and to train."""

from __future__ import annotations

import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import next_lines, path_option
from shardwise.core.errors import RecipeError
from shardwise.core.paths import seen_from
from shardwise.plugins.finetune.written_recipe import FineTuning

PLACEHOLDER = "MODEL"


class MethodName(StrEnum):
    """The trained weights: all, an adapter, or an adapter on a base in 4 bits."""

    full = "full"
    lora = "lora"
    qlora = "qlora"


class ObjectiveName(StrEnum):
    """Objectives on given answers."""

    dpo = "dpo"
    ipo = "ipo"
    kto = "kto"
    orpo = "orpo"
    simpo = "simpo"
    cpo = "cpo"
    reward = "reward"


class DeviceName(StrEnum):
    """The devices to train on."""

    auto = "auto"
    cpu = "cpu"


ModelArgument = Annotated[str, typer.Argument(help="folder or Hub id of a model", metavar="MODEL")]
DataArgument = Annotated[
    str,
    typer.Argument(
        help="file, folder, glob or Hub id of conversations, completions, preferences or text", metavar="DATA"
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option(help="passes over the data; default: 3, of preferences 1", min=1e-6, max=1_000_000),
]
MethodOption = Annotated[
    MethodName | None,
    typer.Option(help="full, lora or qlora; default: the first of them whose plan fits"),
]
ObjectiveOption = Annotated[
    ObjectiveName | None,
    typer.Option(
        help="train on preferences; DATA has pairs, or labelled answers for kto; grpo, rloo, ppo need a recipe"
    ),
]
DeviceOption = Annotated[DeviceName | None, typer.Option(help="cpu leaves GPUs unused; default: auto")]


def command(
    model: ModelArgument = PLACEHOLDER,
    data: DataArgument = "data.jsonl",
    out: Annotated[Path, path_option("the file to write")] = Path("recipe.yaml"),
    epochs: Epochs = None,
    method: MethodOption = None,
    device: DeviceOption = None,
    objective: ObjectiveOption = None,
) -> None:
    """Write a commented recipe for fine-tuning on this machine's devices. Trains nothing.

    Sequences follow from the model and the data, as for `finetune`, where they are on this machine.
    """
    if out.exists():
        why, fix = "there is a file of this name", "give another --out, or remove it"
        raise RecipeError("nothing is replaced", where=str(out), why=why, fix=fix)
    from shardwise.core.atomic_file import write_whole
    from shardwise.plugins.finetune.choosing import EPOCHS, draft, hardware_here
    from shardwise.plugins.finetune.written_recipe import PREFERENCE_EPOCHS

    preference = objective.value if objective else None
    if model == PLACEHOLDER:
        passes = epochs or (PREFERENCE_EPOCHS if preference else EPOCHS)
        asked = FineTuning(model, data, passes, preference=preference, unread=(model, data))
    else:
        asked = draft(model, data, epochs, preference=preference, missing_ok=True)
        asked = replace(
            asked, model=seen_from(asked.model, out.parent), data=seen_from(asked.data, out.parent)
        )
    asked = asked.on(hardware_here(device.value if device else None))
    chosen = method.value if method else "lora"
    write_whole(out, asked.recipe(chosen).encode("utf-8"))  # type: ignore[arg-type]
    typer.echo(f"{out}: the recipe, written")
    if model == PLACEHOLDER:
        typer.echo("write your model and your data into it")
        return
    if asked.unread:
        typer.echo(f"not read: {', '.join(asked.unread)}; look at sequence_length and batch_size")
    file = shlex.quote(str(out))
    commands = [
        (f"shardwise data {file}", "look at the records"),
        (f"shardwise plan {file}", "memory and seconds, without training"),
        (f"shardwise train {file} --out {shlex.quote(str(Path('runs') / out.stem))}", "train"),
    ]
    for line in next_lines(commands):
        typer.echo(line)
