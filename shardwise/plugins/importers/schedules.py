"""How long a run of another trainer is, and its learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.plugins.importers.draft import Draft


def length(draft: Draft) -> None:
    """Steps or epochs. A schedule that ends elsewhere than the run is another training, and refused or lost."""
    steps, epochs, tokens = (draft.number(name) for name in ("max_steps", "epochs", "max_tokens"))
    schedule = draft.number("schedule_steps")
    if draft.values.get("data.sequence_length") == "whole":
        draft.lose("data.sequence_length", "null cuts no text; here data.too_long cuts, drops or splits them")
        draft.drop("data.sequence_length")
    draft.assume("data.sequence_length", 2048)
    said = [name for name in ("max_steps", "epochs") if draft.is_said(name) and draft.number(name)]
    if draft.facts.get("first_end") and len(said) == 2:
        draft.lose("epochs", "a run ends after its steps; there also after its epochs, if they end first")
    if schedule and said and not (said[0] == "max_steps" and schedule == steps):
        if not draft.share_a_file(said[0], "schedule_steps"):
            raise RecipeError(
                "the files contradict each other",
                where=f"{draft.origin(said[0])} and {draft.origin('schedule_steps')}",
                why=f"two lengths of the run, {draft.facts[said[0]]} and {schedule}",
                fix="remove one, or set the DeepSpeed file's to auto",
            )
        draft.lose("schedule_steps", "the schedule is as long as the run")
    elif schedule:
        steps = schedule
        draft.keys["max_steps"] = [*draft.keys.get("max_steps", []), *draft.keys["schedule_steps"]]
    if steps is not None and steps > 0:
        draft.put("steps", int(steps), "max_steps")
    elif epochs:
        draft.put("epochs", float(epochs), "epochs")
    elif tokens:
        length = draft.values["batch_size"] * (draft.number("data.sequence_length") or 1)
        draft.put("steps", max(1, round(tokens / length)), "max_tokens")
    if "steps" not in draft.values and "epochs" not in draft.values:
        draft.assume("steps", 1000)


def schedule(draft: Draft) -> None:
    warmup, ratio, least = (draft.number(name) for name in ("warmup_steps", "warmup_ratio", "min_lr"))
    steps = draft.values.get("steps")
    if warmup and ratio and draft.is_said("warmup_steps") and draft.is_said("warmup_ratio"):
        apart = not draft.share_a_file("warmup_steps", "warmup_ratio")
        if apart and (steps is None or math.ceil(ratio * steps) != warmup):
            where = f"{draft.origin('warmup_ratio')} and {draft.origin('warmup_steps')}"
            why = f"two warmups, {ratio} of the steps and {warmup} steps"
            raise RecipeError("the files contradict each other", where=where, why=why, fix="remove one")
    if draft.facts.get("no_warmup"):
        for name in ("warmup_steps", "warmup_ratio"):
            if draft.facts.get(name):
                draft.lose(name, "constant has no warmup there; constant_with_warmup has one")
        draft.put("schedule.warmup", 0, "no_warmup")
    elif (
        "usual_warmup" in draft.facts
        and not draft.is_said("warmup_steps")
        and "warmup_steps" not in draft.autos
    ):
        draft.put("schedule.warmup", draft.facts["usual_warmup"], "usual_warmup")
    elif warmup:
        draft.put("schedule.warmup", int(warmup) if warmup >= 1 else float(warmup), "warmup_steps")
    elif ratio is not None and (draft.is_said("warmup_ratio") or not draft.is_said("warmup_steps")):
        draft.put("schedule.warmup", float(ratio), "warmup_ratio")
    elif warmup is not None:
        draft.put("schedule.warmup", 0, "warmup_steps")
    if "usual_warmup" in draft.facts and not draft.facts.get("linear_warmup"):
        draft.notes["schedule.warmup"] = (
            "linear; of DeepSpeed by the logarithm of the step, without warmup_type: linear"
        )
    rate = draft.number("optimizer.learning_rate")
    if draft.facts.get("enables:finetuning"):
        draft.lose("min_lr", "LitGPT's fine-tuning decays to 0; its pretraining reads min_lr")
        draft.put("schedule.floor", 0.0, "enables:finetuning")
    elif least is not None and rate:
        draft.put("schedule.floor", min(1.0, float(least) / rate), "min_lr")
    for key in ("floor", "decay_shape"):
        if f"usual_{key}" in draft.facts and f"schedule.{key}" not in draft.values:
            draft.put(f"schedule.{key}", draft.facts[f"usual_{key}"], f"usual_{key}")
    warm = draft.values.get("schedule.warmup")
    _decay(draft, steps, warm)
    if draft.values.get("schedule.name") != "wsd":
        draft.drop("schedule.decay")
    if isinstance(steps, int) and isinstance(warm, int) and warm >= max(steps, 2):
        draft.values["schedule.warmup"] = max(0, steps - 1)


def _decay(draft: Draft, steps: Any, warm: Any) -> None:
    """torchtitan's decay: over a part of the run, or from the warmup on."""
    shape = draft.facts.get("decay_type")
    ratio = draft.number("decay_ratio")
    if shape is None:
        return
    if ratio is not None:
        draft.put("schedule.name", "wsd", "decay_ratio")
        left = steps - warm if isinstance(steps, int) and isinstance(warm, int) else math.inf
        longest = ratio >= 1 or ratio * (steps or 1) > left
        draft.put("schedule.decay", left if longest else float(ratio), "decay_ratio")
        draft.put("schedule.decay_shape", shape, "decay_type")
    elif shape == "sqrt" and isinstance(steps, int):
        draft.put("schedule.name", "wsd", "decay_type")
        draft.put("schedule.decay", max(0, steps - int(warm or 0)), "decay_type")
        draft.put("schedule.decay_shape", shape, "decay_type")
    else:
        draft.put("schedule.name", shape, "decay_type")
