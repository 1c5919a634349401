"""Checks of the recipe's `objective:` against its other keys."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.recipe.error_messages import Complaint
from shardwise.recipe.objective import READ, ObjectiveSpec
from shardwise.recipe.sections import Recipe
from shardwise.recipe.yaml_source import KeyPath, YamlDocument


def named_objective(recipe: Recipe, document: YamlDocument) -> Iterator[Complaint]:
    """Contradictions of the section, and of a named objective with the model and the data."""
    spec = recipe.objective
    if spec is None:
        return
    yield from _section(spec, document)
    if spec.name is None:
        return
    yield from _depends_on_the_model(spec)
    path: KeyPath = ("objective", "name")
    if recipe.model.factory is not None:
        why = "a factory brings data of its own, and its model need not return logits"
        yield Complaint(path, f"objective cannot be {spec.name} here", why, "give model.hf or a preset")
    elif recipe.model.objective != "causal":
        why = f"model.objective is {recipe.model.objective}, and {spec.name} trains a causal language model"
        yield Complaint(path, f"objective cannot be {spec.name} here", why, "remove model.objective")
    if recipe.data.stream_window is not None:
        why = f"{spec.name} reads records, and only plain text is streamed"
        yield Complaint(("data", "stream_window"), "stream_window cannot be set here", why, "remove it")
    if recipe.data.train_on == "all":
        why = f"{spec.name} compares answers, and their prompt is the same"
        yield Complaint(("data", "train_on"), "train_on cannot be all here", why, "remove it")
    plain = recipe.data.format == "text" or (recipe.data.source == "stdlib" and recipe.data.mixture is None)
    if plain:
        key = "format" if recipe.data.format == "text" else "source"
        why = f"{spec.name} needs records, and this is plain text"
        fix = "give records of prompt, chosen and rejected (docs/how-to/train-on-preferences.md)"
        yield Complaint(("data", key), f"{key} cannot be {getattr(recipe.data, key)} here", why, fix)
    if spec.name in ("grpo", "rloo", "ppo"):
        yield from _rewards(recipe, spec)


def _section(spec: ObjectiveSpec, document: YamlDocument) -> Iterator[Complaint]:
    """The objective has one origin, and reads all of its keys."""
    if (spec.name is None) == (spec.factory is None):
        why = "a name and a factory are both given" if spec.name else "it has neither a name nor a factory"
        fix = "keep one of them" if spec.name else f"for example write objective: {next(iter(READ))}"
        yield Complaint(("objective",), "the objective is not clear", why, fix)
        return
    who = spec.name or "a factory"
    for key in spec.unread:
        readers = ", ".join(name for name, keys in READ.items() if key in keys)
        why = f"{who} does not read it" + (f"; {readers} do" if "," in readers else f"; {readers} does")
        yield Complaint(("objective", key), f"{key} cannot be set here", why, "remove it")


def _depends_on_the_model(spec: ObjectiveSpec) -> Iterator[Complaint]:
    """A loss with no weight on any part of it is constant; that of ipo is infinite."""
    why, fix = "the loss would not depend on the model", "give a positive number"
    if spec.beta == 0 and not spec.nll_weight and spec.name in ("dpo", "ipo", "simpo", "cpo", "kto"):
        yield Complaint(("objective", "beta"), "beta cannot be 0 here", why, fix)
    if spec.name == "kto" and not spec.desirable_weight and not spec.undesirable_weight:
        yield Complaint(("objective", "desirable_weight"), "one of kto's weights must not be 0", why, fix)


def _rewards(recipe: Recipe, spec: ObjectiveSpec) -> Iterator[Complaint]:
    """There is a reward; groups divide the batch; prompt and completion fit into a sequence."""
    if not spec.rewards and spec.reward_model is None:
        why = f"{spec.name} makes a reward large, and there is none"
        fix = 'add `rewards: ["my_rewards:function"]` to objective, or reward_model'
        yield Complaint(("objective", "rewards"), "rewards is missing", why, fix, absent=True)
    if spec.reward_weights is not None and len(spec.reward_weights) != len(spec.rewards or ()):
        why = f"there are {len(spec.rewards or ())} rewards and {len(spec.reward_weights)} weights"
        yield Complaint(("objective", "reward_weights"), "every reward needs a weight", why)
    if recipe.data.packing:
        fix = "remove it: completions have rows of their own"
        yield Complaint(("data", "packing"), "packing cannot be set here", "it is of given records", fix)
    yield from _endpoint(recipe, spec)
    group = spec.group or 1
    length = spec.completion_length
    if recipe.batch_size % group:
        why = f"batch_size is {recipe.batch_size}, and every prompt has {group} completions"
        fix = f"the nearest that works is {max(1, round(recipe.batch_size / group)) * group}"
        yield Complaint(("batch_size",), "batch_size must be a multiple of objective.group", why, fix)
    if group == 1 and spec.name in ("grpo", "rloo"):
        why = f"{spec.name} compares the completions of a prompt"
        yield Complaint(("objective", "group"), "group must be at least 2", why)
    every = {
        ("steps",): recipe.steps,
        ("checkpoint", "every"): recipe.checkpoint.every,
        ("evaluation", "every"): recipe.evaluation.every,
        ("guard", "snapshot_every"): recipe.guard.snapshot_every,
    }
    for path, steps in every.items():
        if steps and steps % recipe.unit:
            why = f"a rollout is trained on in {recipe.unit} steps, objective.epochs times minibatches"
            fix = f"the nearest that works is {max(1, round(steps / recipe.unit)) * recipe.unit}"
            yield Complaint(path, f"{path[-1]} must be whole rollouts", why, fix)
    if length is not None and length >= recipe.data.sequence_length:
        why = f"data.sequence_length is {recipe.data.sequence_length}, and the prompt needs a part of it"
        yield Complaint(("objective", "completion_length"), "completion_length is too long", why, "lower it")


def _endpoint(recipe: Recipe, spec: ObjectiveSpec) -> Iterator[Complaint]:
    """The server has an address, and what only the trained weights' completions tell is not asked for."""
    if spec.endpoint is None:
        if spec.endpoint_model is not None:
            what, why = "endpoint_model cannot be set here", "there is no endpoint"
            yield Complaint(("objective", "endpoint_model"), what, why, "remove it")
        return
    if not spec.endpoint.startswith(("http://", "https://")):
        fix = "for example write http://localhost:8000/v1"
        yield Complaint(("objective", "endpoint"), "endpoint is not a URL", f"it is {spec.endpoint}", fix)
    asked: dict[KeyPath, object] = {
        ("evaluation", "every"): recipe.evaluation.every,
        ("evaluation", "sets"): recipe.evaluation.sets,
        ("checkpoint", "best"): recipe.checkpoint.best,
    }
    for path, value in asked.items():
        if value:
            why = "the weights of objective.endpoint do not follow training, so held-out rewards tell nothing"
            yield Complaint(path, f"{path[-1]} cannot be set here", why, "remove it")
