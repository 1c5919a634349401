"""The model card of a fine-tuned model (README.md, with the metadata that the Hub reads), and its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardwise.checkpoint import manifest
from shardwise.core.atomic_file import write_whole
from shardwise.core.plan import Plan
from shardwise.exporter.export_run import checkpoint_of, export_run, tokenizer_files
from shardwise.model.hf import auto_class, load_config
from shardwise.recipe.objective import ObjectiveSpec
from shardwise.recipe.sections import Recipe
from shardwise.recipe.yaml_source import written

CARD_FILE = "README.md"
REWARD = "reward"

_TASKS = {
    "causal": "text-generation",
    "masked": "fill-mask",
    "seq2seq": "text2text-generation",
    REWARD: "text-classification",
}
"""The Hub's names of tasks, by the kind of model."""

_REWARD_CLASS = "AutoModelForSequenceClassification"
_PEFT_CLASSES = {
    "AutoModelForCausalLM": "AutoPeftModelForCausalLM",
    _REWARD_CLASS: "AutoPeftModelForSequenceClassification",
}
"""Classes of PEFT that load an adapter with its base, by transformers' class of the base."""

_ONE_SCORE = ", num_labels=1"
"""Of a reward model: classes of PEFT take it for one with two labels."""


def finish_adapter(folder: Path, recipe: Recipe, plan: Plan, loss: float | None) -> None:
    """Add the tokenizer and the card to the folder of an adapter. Raises DataError, ResourceError."""
    for name, source in tokenizer_files(recipe.data.tokenizer, required=False).items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_whole(folder / name, source.read_bytes() if isinstance(source, Path) else source())
    write_whole(folder / CARD_FILE, model_card(recipe, plan, loss, class_of(recipe)).encode("utf-8"))


def finish_model(run: Path, folder: Path, recipe: Recipe, plan: Plan, loss: float | None) -> None:
    """Export the run's model to ``folder``, if it is not there or older, with its card. Raises ShardwiseError."""
    checkpoint = checkpoint_of(run)[1]
    config = folder / "config.json"
    if config.exists() and config.stat().st_mtime < (checkpoint / manifest.MANIFEST).stat().st_mtime:
        shutil.rmtree(folder)  # the run has gone on since
    if not config.exists():
        export_run(run, folder)
    write_whole(folder / CARD_FILE, model_card(recipe, plan, loss, class_of(recipe)).encode("utf-8"))


def _unit(recipe: Recipe) -> str:
    """Of the loss: an objective has one of its own."""
    return "nats per token" if recipe.objective is None else f"of {recipe.objective.name or 'its objective'}"


def _kind(recipe: Recipe) -> str:
    """Of the trained model: the objective of its class, or reward for a model that scores."""
    scores = recipe.objective is not None and recipe.objective.head == "score"
    return REWARD if scores else recipe.model.objective


def _objective_line(spec: ObjectiveSpec) -> str:
    return spec.name or spec.factory or "" if spec.beta is None else f"{spec.name}, beta {spec.beta:g}"


def model_card(recipe: Recipe, plan: Plan, loss: float | None, auto: str) -> str:
    """The text of a card. ``auto``: transformers' class of the trained model."""
    base = recipe.model.hf or ""
    adapter = recipe.adapter
    kind = "all weights" if adapter is None else f"{adapter.name} of rank {adapter.rank}"
    if adapter is not None and adapter.quantize != "none":
        kind += f" on a base in {adapter.quantize}"
    samples = f"{recipe.batch_size} {recipe.counted_samples}"
    head = {
        "base_model": base,
        "library_name": "transformers" if adapter is None else "peft",
        "tags": ["shardwise", _TASKS[_kind(recipe)], *_methods(recipe)],
    }
    rows = {
        "base model": base,
        "trained": kind,
        **({} if recipe.objective is None else {"objective": _objective_line(recipe.objective)}),
        "data": ", ".join(part.source for part in recipe.data.parts),
        "steps": f"{recipe.steps:,} of {samples} of {recipe.data.sequence_length:,} tokens",
        "learning rate": f"{recipe.optimizer.learning_rate:g}, {recipe.schedule.name}",
        "strategy": f"{plan.line} on {plan.world_size} x {plan.device}",
        "validation loss": "not measured" if loss is None else f"{loss:.4f} {_unit(recipe)}",
    }
    lines = ["---", *(f"{key}: {written(value)}" for key, value in head.items()), "---", ""]
    lines += [f"# {Path(base).name}, fine-tuned", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in rows.items()]
    return "\n".join([*lines, "", "## Use", "", "```python", *_usage_lines(recipe, auto), "```", ""])


def _methods(recipe: Recipe) -> list[str]:
    """Tags of the objective and the adapter, as TRL and PEFT write them."""
    objective = recipe.objective.name if recipe.objective is not None else None
    return [name for name in (objective, recipe.adapter and recipe.adapter.name) if name]


def class_of(recipe: Recipe) -> str:
    """The name of transformers' class of the trained model."""
    if _kind(recipe) == REWARD:
        return _REWARD_CLASS
    assert recipe.model.hf is not None
    return auto_class(recipe.model.objective, load_config(recipe.model.hf, recipe.model.objective).config)


def _usage_lines(recipe: Recipe, auto: str) -> list[str]:
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")'
    if recipe.adapter is None:
        return [
            f"from transformers import {auto}, AutoTokenizer",
            "",
            f'model = {auto}.from_pretrained("THIS_FOLDER")',
            tokenizer,
        ]
    if (peft := _PEFT_CLASSES.get(auto)) is not None:
        labels = _ONE_SCORE if auto == _REWARD_CLASS else ""
        return [
            f"from peft import {peft}",
            "from transformers import AutoTokenizer",
            "",
            f'model = {peft}.from_pretrained("THIS_FOLDER"{labels})',
            tokenizer,
        ]
    return [
        "from peft import PeftModel",
        f"from transformers import {auto}, AutoTokenizer",
        "",
        f'base = {auto}.from_pretrained("{recipe.model.hf}")',
        'model = PeftModel.from_pretrained(base, "THIS_FOLDER")',
        tokenizer,
    ]
