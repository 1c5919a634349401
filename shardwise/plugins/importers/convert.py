"""A file of another trainer as a recipe, with a row for every key: mapped, not needed and why, or no equivalent.

No key is passed over: one that the format's table does not have is a row of its own, with the nearest known name. A
training that Shardwise cannot do is refused, and so are files that contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import isdir
from pathlib import Path
from typing import Any

from shardwise.core.errors import RecipeError, shorten
from shardwise.core.paths import PathBase, path_of, seen_from
from shardwise.plugins.importers.collect import Collection, File, KeyRow, Status
from shardwise.plugins.importers.draft import ASSUMED, DEFAULT_MARK, Draft
from shardwise.plugins.importers.facts import combine
from shardwise.plugins.importers.foreign import read_foreign
from shardwise.plugins.importers.formats import (
    FORMAT_NAMES,
    STRANGE,
    ForeignFormat,
    Likeness,
    format_named,
    recognised,
)
from shardwise.recipe.load import REPLACES
from shardwise.recipe.overrides import overridden
from shardwise.recipe.paths import with_whole_paths
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import Recipe
from shardwise.recipe.yaml_source import Origin, YamlDocument, dotted, parse_document, written

NODE = 8
"""Devices of a node where the other file says only how many there are."""

COSTS_TIME = ("strategy.offload", "strategy.activation_checkpointing")
"""Pins that save memory and cost time: a plan without them may be faster."""


@dataclass(frozen=True)
class Imported:
    """A recipe out of another trainer's file.

    Attributes:
        keys: top-level keys by which the file was recognised; none if the format was given.
        values: the recipe as nested data, not yet checked.
        sources: the other file's keys for each key of the recipe.
    """

    path: Path
    format: ForeignFormat
    keys: tuple[str, ...]
    rows: tuple[KeyRow, ...]
    values: Mapping[str, Any]
    sources: Mapping[str, list[str]]

    def of(self, *statuses: Status) -> list[KeyRow]:
        """The rows with one of these statuses."""
        return [row for row in self.rows if row.status in statuses]

    def sentence(self) -> str:
        """The numbers of keys by status, and the names of those that a user must look at."""
        lost = self.of("no equivalent", "unknown")
        counts = [f"{len(self.of('mapped'))} keys mapped", f"{len(self.of('not needed'))} not needed"]
        if assumed := self.of("assumed"):
            counts.append(f"{len(assumed)} assumed ({', '.join(row.key for row in assumed)})")
        named = f": {', '.join(row.key for row in lost)}" if lost else ""
        counts.append(f"{len(lost)} without an equivalent{named}")
        return f"{self.path} ({self.format.title}): {', '.join(counts)}"

    @property
    def costly_pins(self) -> list[str]:
        """Pinned keys that save memory and cost time."""
        strategy = self.values.get("strategy", {})
        return [key for key in COSTS_TIME if strategy.get(key.partition(".")[2]) not in (None, "none")]

    def text(self, folder: Path | None = None) -> str:
        """The recipe as YAML, with the source of each value as a comment.

        Args:
            folder: of the file that will have the text, from which paths below it are named; None is the current one.
        """
        lines = [f"# From {self.path.name} ({self.format.title}), by shardwise from."]
        for name in Recipe.model_fields:
            value = self.values.get(name)
            if isinstance(value, Mapping):
                pins = "  # pinned as in the file; without a line, the planner chooses"
                lines.append(f"{name}:{pins if name == 'strategy' else ''}")
                inside = {key: _seen_from(inner, folder or Path.cwd()) for key, inner in value.items()}
                lines += [self._line(f"{name}.{key}", key, inner, "  ") for key, inner in inside.items()]
            elif value is not None:
                lines.append(self._line(name, name, value, ""))
        return "\n".join(lines) + "\n"

    def _line(self, path: str, key: str, value: Any, indent: str) -> str:
        sources = shorten(", ".join(self.sources.get(path, [])), 70)
        if path in self.costly_pins:
            sources += " (saves memory, costs time)"
        return f"{indent}{key}: {written(value)}".ljust(34) + (f"  # {sources}" if sources else "")


def _seen_from(value: Any, folder: Path) -> Any:
    return seen_from(value, folder) if isinstance(value, str) and value.startswith("/") else value


def imported(
    path: Path,
    *,
    model: str | None = None,
    world: str | None = None,
    kind: str | None = None,
    overrides: Sequence[str] = (),
) -> Imported:
    """Convert a file.

    Args:
        model: preset, folder or Hub id, instead of the file's.
        world: number of devices (``8``), or a cluster (``8xH100-80GB``), instead of the file's.
        kind: a name in FORMAT_NAMES; None recognises it.
        overrides: ``section.key=value`` of the recipe, applied in order.

    Raises:
        RecipeError: the file cannot be read, is of no known kind or contradicts itself or one that it names, or it
            asks for a training that Shardwise cannot do.
    """
    content = read_foreign(path)
    form = format_named(kind) if kind else None
    likeness = Likeness("", form, ()) if form else recognised(content)
    form = _file_format(path, likeness, content)
    collection = Collection()
    draft = collection.draft
    draft.path = path
    collection.read(File(path, form, content))
    collection.settle()
    for file in collection.files:
        draft.facts = {**file.format.facts, **draft.facts}
    if model is not None:
        for name in ("model", "family", "flavor"):
            draft.replace(name, f"--model {model}")
        draft.take("@model", model if model in PRESETS else PathBase.here().located(model), "--model")
    if world is not None:
        _replace_world(draft, world)
    overrides = _objective_asked(draft, overrides)
    combine(draft)
    _fill_required(draft, world)
    rows = [_finished_row(row, draft) for row in collection.rows]
    for key, to in draft.targets.items():
        if key.endswith(DEFAULT_MARK) and to:
            rows.append(KeyRow(key, None, "default", ", ".join(dict.fromkeys(to))))
    for key, value in draft.values.items():
        if draft.sources[key] == [ASSUMED] or key in draft.notes:
            rows.append(KeyRow(key, value, "assumed", draft.notes.get(key, "the file does not say it")))
    keys = likeness.keys if likeness else ()
    document = YamlDocument(path.name, _nested(draft.values), {(): Origin(0, 0)}, path)
    made = Imported(path, form, keys, tuple(rows), with_whole_paths(document).values, draft.sources)
    return _overridden(made, overrides) if overrides else made


def _objective_asked(draft: Draft, overrides: Sequence[str]) -> list[str]:
    """The overrides without the objective's name, which says the trainer where the file does not."""
    names = ("objective=", "objective.name=")
    asked = [text for text in overrides if text.startswith(names) and "{" not in text]
    if not asked or not draft.facts.get("trl"):
        return list(overrides)
    draft.take("@objective_asked", asked[-1].partition("=")[2], asked[-1])
    return [text for text in overrides if text not in asked]


def _file_format(path: Path, likeness: Likeness | None, content: Mapping[str, Any]) -> ForeignFormat:
    """The format of a file. Raises RecipeError for another trainer's, which would be half read."""
    known = f"read are {', '.join(format_named(name).title for name in FORMAT_NAMES)}"
    if likeness is None:
        what = "this file is of no known trainer"
        raise RecipeError(what, where=str(path), why=known, fix="give --format to read it as one")
    keys = ", ".join(likeness.keys)
    if likeness.format is None:
        what = f"files of {likeness.title} are not read"
        raise RecipeError(what, where=str(path), why=f"recognised by {keys}", fix=known)
    strange = likeness.strange
    if len(strange) >= STRANGE and 4 * len(strange) > len(content):
        raise RecipeError(
            "this file is of no known trainer",
            where=str(path),
            why=f"it has {keys} as {likeness.title}, but not its keys are {', '.join(strange)}",
            fix=f"if it is one, give --format {likeness.format.name}",
        )
    return likeness.format


def _overridden(made: Imported, overrides: Sequence[str]) -> Imported:
    """With overrides of the command line, whose keys have no other source."""
    document = with_whole_paths(overridden(parse_document(made.text(), made.path.name), overrides, REPLACES))
    own = {dotted(path): ["command line"] for path, origin in document.origins.items() if origin.override}
    rows = tuple(row for row in made.rows if row.status != "assumed" or _holds(document.values, row, own))
    return replace(made, rows=rows, values=document.values, sources={**made.sources, **own})


def _holds(values: Any, row: KeyRow, own: Mapping[str, Any]) -> bool:
    """Whether an assumption still holds: no override has set or dropped its key."""
    head, _, rest = row.key.partition(".")
    inner = values.get(head)
    there = rest in inner if rest and isinstance(inner, Mapping) else not rest and inner is not None
    return there and row.key not in own


def _replace_world(draft: Draft, world: str) -> None:
    """The devices of the command line instead of the file's."""
    for name in ("world", "devices_per_node", "nodes"):
        draft.replace(name, f"--world {world}")
    if world.isdecimal():
        draft.take("@world", int(world), "--world")
        return
    from shardwise.hardware.cluster import parse_preset

    try:
        nodes, per_node, _ = parse_preset(world)
    except ValueError as problem:
        raise RecipeError(
            "--world is a number or a cluster", where="command line", why=str(problem)
        ) from None
    draft.take("@world", nodes * per_node, "--world")
    draft.take("@nodes", nodes, "--world")


def _fill_required(draft: Draft, world: str | None) -> None:
    """Fill in the keys that every recipe needs, and name the hardware."""
    if not {"model.preset", "model.layers"} & draft.values.keys():
        draft.assume("model.hf", "MODEL")
    name, preset = draft.values.get("model.hf"), draft.values.get("model.preset")
    if draft.facts.get("tensor_sequence") and name:
        draft.lose("tensor_sequence", "presets have it; blocks of transformers need whole sequences")
    elif draft.facts.get("tensor_sequence"):
        draft.put("strategy.tensor_sequence_parallel", "gathered", "tensor_sequence")
    if "data.mixture" not in draft.values:
        draft.assume("data.source", "data.jsonl" if name else "stdlib")
    if name and "data.tokenizer" not in draft.values:
        draft.put("data.tokenizer", name, "model")
        draft.sources["data.tokenizer"] = draft.sources["model.hf"]
    if draft.sources["data.sequence_length"] == [ASSUMED]:
        context = PRESETS[preset].context if preset else _context_of(name)
        draft.values["data.sequence_length"] = min(2048, context or 2048)
    if world is not None and not world.isdecimal():
        for key in ("cluster.device", "cluster.nodes", "cluster.devices_per_node"):
            draft.values.pop(key, None)
        draft.values["cluster.preset"], draft.sources["cluster.preset"] = world, ["--world"]
        return
    draft.assume("cluster.device", "h100")
    devices = draft.values["cluster.devices_per_node"]
    if devices > NODE and devices % NODE == 0 and "cluster.nodes" not in draft.values:
        draft.values |= {"cluster.nodes": devices // NODE, "cluster.devices_per_node": NODE}
        draft.sources["cluster.nodes"] = draft.sources["cluster.devices_per_node"]


def _finished_row(row: KeyRow, draft: Draft) -> KeyRow:
    """A mapped row with its places in the recipe, or the reason why it has none."""
    if row.status != "mapped":
        return row
    targets = [target for target in dict.fromkeys(draft.targets.get(row.key, ())) if target in draft.values]
    if by := draft.replaced.get(row.key):
        status: Status = "not needed" if by.startswith("--") else "no equivalent"
        return replace(row, status=status, detail=f"{by} is used instead")
    if row.key in draft.lost:
        return replace(row, status="no equivalent", detail=draft.lost[row.key])
    if targets:
        return replace(row, detail=", ".join(targets))
    auto = "auto: a default, or the plan's choice"
    return replace(
        row,
        status="not needed",
        detail=auto if str(row.value).lower() == "auto" else "off, or decided by another key",
    )


def _context_of(model: str | None) -> int | None:
    """The longest sequence of a model whose folder is here; None if it is not, or does not say."""
    if model is None or not isdir(path_of(model)):
        return None
    from shardwise.plugins.finetune.choosing import context_of

    try:
        return context_of(model)
    except RecipeError:
        return None


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections, in the order of a recipe's sections."""
    made: dict[str, Any] = {}
    for section in Recipe.model_fields:
        for key, value in values.items():
            head, _, rest = key.partition(".")
            if head == section and rest:
                made.setdefault(head, {})[rest] = value
            elif head == section:
                made[head] = value
    return made
