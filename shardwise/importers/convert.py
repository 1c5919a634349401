"""A file of another trainer as a recipe, with a row for every key: mapped, not needed and why, or no equivalent.

No key is passed over: one that the format's table does not have is a row of its own, with the nearest known name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from shardwise.core.errors import RecipeError, shorten
from shardwise.importers.draft import ASSUMED, Draft
from shardwise.importers.facts import combine
from shardwise.importers.foreign import leaves, read_foreign
from shardwise.importers.formats import NAMES, OFF, ForeignFormat, Mapped, format_named, recognised
from shardwise.recipe.load import REPLACES
from shardwise.recipe.overrides import overridden
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import Recipe
from shardwise.recipe.yaml_source import dotted, parse_document, resolve_scalar, written

Status = Literal["mapped", "not needed", "no equivalent", "unknown", "default", "assumed"]
NODE = 8
"""Devices of a node where the other file says only how many there are."""

_DEFAULT = " (default)"


@dataclass(frozen=True)
class Row:
    """One key of the other file: ``detail`` is the recipe's keys, or the reason."""

    key: str
    value: Any
    status: Status
    detail: str


@dataclass(frozen=True)
class Imported:
    """A recipe out of another trainer's file.

    Attributes:
        values: the recipe as nested data, not yet checked.
        sources: the other file's keys for each key of the recipe.
    """

    path: Path
    format: ForeignFormat
    rows: tuple[Row, ...]
    values: Mapping[str, Any]
    sources: Mapping[str, list[str]]

    def count(self, status: Status) -> int:
        """Number of keys with this status."""
        return sum(row.status == status for row in self.rows)

    def sentence(self) -> str:
        """The numbers of keys by status."""
        lost = [row.key for row in self.rows if row.status in ("no equivalent", "unknown")]
        kept = f"{self.count('mapped')} keys mapped, {self.count('not needed')} not needed"
        named = f": {', '.join(lost)}" if lost else ""
        return f"{self.path} ({self.format.title}): {kept}, {len(lost)} without an equivalent{named}"

    def text(self) -> str:
        """The recipe as YAML, with the source of each value as a comment."""
        lines = [f"# From {self.path.name} ({self.format.title}), by shardwise from."]
        for name in Recipe.model_fields:
            value = self.values.get(name)
            if isinstance(value, Mapping):
                lines.append(f"{name}:")
                lines += [self._line(f"{name}.{key}", key, inner, "  ") for key, inner in value.items()]
            elif value is not None:
                lines.append(self._line(name, name, value, ""))
        return "\n".join(lines) + "\n"

    def _line(self, path: str, key: str, value: Any, indent: str) -> str:
        sources = shorten(", ".join(self.sources.get(path, [])), 70)
        return f"{indent}{key}: {written(value)}".ljust(40) + (f"  # {sources}" if sources else "")


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
        kind: a name in NAMES; None recognises it.
        overrides: ``section.key=value`` of the recipe, applied in order.

    Raises:
        RecipeError: the file cannot be read or is of no known kind, or its values contradict each other.
    """
    values = read_foreign(path)
    found = format_named(kind) if kind else recognised(values)
    if found is None:
        known = ", ".join(NAMES)
        raise RecipeError(
            "this file is of no known kind", where=str(path), why=f"known are {known}", fix="give --format"
        )
    draft, rows = Draft(), list[Row]()
    _collect(found, values, path.parent, draft, rows, "")
    _defaults(found, draft)
    if model is not None:
        draft.facts["model"], draft.keys["model"] = model, ["--model"]
    if world is not None and world.isdigit():
        draft.facts["world"], draft.keys["world"] = int(world), ["--world"]
        for name in ("devices_per_node", "nodes"):
            draft.facts.pop(name, None)
    elif world is not None:
        _cluster(world, draft)
    combine(draft)
    _complete(draft, world)
    done = [_finished(row, draft) for row in rows]
    for key, to in draft.targets.items():
        if key.endswith(_DEFAULT) and to:
            done.append(Row(key, None, "default", ", ".join(to)))
    for key, sources in draft.sources.items():
        if sources == [ASSUMED] and key in draft.values:
            done.append(Row(key, draft.values[key], "assumed", "the file does not say it"))
    made = Imported(path, found, tuple(done), _nested(draft.values), draft.sources)
    return _overridden(made, overrides) if overrides else made


def _overridden(made: Imported, overrides: Sequence[str]) -> Imported:
    """With overrides of the command line, whose keys have no other source."""
    document = overridden(parse_document(made.text(), made.path.name), overrides, REPLACES)
    own = {dotted(path): ["command line"] for path, origin in document.origins.items() if origin.override}
    return replace(made, values=document.values, sources={**made.sources, **own})


def _collect(
    form: ForeignFormat, values: Mapping[str, Any], folder: Path, draft: Draft, rows: list[Row], prefix: str
) -> None:
    """Collect targets and facts of all keys, and a row for each; mapped ones are finished later."""
    for key, shown, value in leaves(values):
        inside = next((own for own in form.nested if key == own or key.startswith(f"{own}.")), None)
        if inside is not None and value not in OFF:
            if key == inside:
                rows.append(_opened(form, key, prefix + shown, value, folder, draft, rows))
            continue
        entry = form.entry(key)
        name = prefix + shown
        if entry is None:
            near = get_close_matches(key, form.entries, n=1, cutoff=0.7)
            why = f"no key of {form.title}" + (f"; did you mean {near[0]}?" if near else "")
            rows.append(Row(name, value, "unknown", why))
        elif isinstance(entry, Mapped):
            rows.append(Row(name, value, "mapped", ""))
            if form.auto and value == "auto":
                draft.idle[name] = "auto: a default, or the plan's choice"
            else:
                _map(entry, name, value, draft)
        elif not entry.needed:
            rows.append(Row(name, value, "not needed", entry.why))
        elif _is_off(value, entry.off) or (form.auto and value == "auto"):
            rows.append(Row(name, value, "not needed", "off"))
        else:
            rows.append(Row(name, value, "no equivalent", entry.why))
    for own, kind in form.nested.items():
        inner = _find(values, own)
        if isinstance(inner, Mapping) and inner:
            _collect(format_named(kind), inner, folder, draft, rows, f"{prefix}{own}.")


def _opened(
    form: ForeignFormat, key: str, name: str, value: Any, folder: Path, draft: Draft, rows: list[Row]
) -> Row:
    """Collect the file that a key names, relative to the file that names it or to the current folder."""
    candidates = [folder / str(value), Path(str(value))]
    inner = next((path for path in candidates if path.is_file()), None)
    if inner is None:
        return Row(name, value, "no equivalent", "there is no such file: import it on its own")
    _collect(
        format_named(form.nested[key]), read_foreign(inner), inner.parent, draft, rows, f"{inner.name}: "
    )
    return Row(name, value, "not needed", "its keys are in this table")


def _map(entry: Mapped, name: str, value: Any, draft: Draft) -> None:
    chosen = {entry.to: value}
    if entry.values is not None:
        found = entry.values.get("none" if value is None else str(value).lower())
        if found is None and entry.otherwise:
            draft.lost[name] = entry.otherwise
        elif found is None:
            draft.lost[name] = f"the values are {', '.join(entry.values)}"
        chosen = dict(found or {})
    elif value is None or value in ("", []):
        return
    if entry.enables and chosen and name not in draft.lost:
        draft.facts[f"enables:{entry.enables}"] = True
    for target, each in chosen.items():
        fact = target.removeprefix("@")
        number = resolve_scalar(each) if isinstance(each, str) and target != "data.source" else each
        each = number if isinstance(number, int | float) and not isinstance(number, bool) else each
        if fact.startswith("dataset:"):
            item = int((re.search(r"\[(\d+)\]", name) or [0, 0])[1])
            draft.facts.setdefault(fact, {})[item] = each
        elif fact != target:
            draft.facts[fact] = each
        draft.keys.setdefault(fact, []).append(name)
        if fact == target:
            draft.put(target, each, target)
            draft.keys.pop(target)


def _defaults(form: ForeignFormat, draft: Draft) -> None:
    """Apply the values that the other trainer uses for keys that the file does not set."""
    for key, entry in form.entries.items():
        if isinstance(entry, Mapped) and entry.default is not None and not _set(key, entry, draft):
            _map(entry, key + _DEFAULT, entry.default, draft)


def _set(key: str, entry: Mapped, draft: Draft) -> bool:
    """Whether the file sets what the key sets, or leaves it to the program that reads it."""
    if key in draft.idle:
        return True
    targets = [entry.to] if entry.to else [each for found in (entry.values or {}).values() for each in found]
    return any(
        each.removeprefix("@") in (draft.facts if each.startswith("@") else draft.values) for each in targets
    )


def _cluster(world: str, draft: Draft) -> None:
    """A cluster by name instead of the file's devices."""
    from shardwise.hardware.cluster import parse_preset

    try:
        nodes, per_node, _ = parse_preset(world)
    except ValueError as problem:
        raise RecipeError(
            "--world is a number or a cluster", where="command line", why=str(problem)
        ) from None
    draft.facts |= {"world": nodes * per_node, "nodes": nodes}
    draft.keys |= {"world": ["--world"], "nodes": ["--world"]}


def _complete(draft: Draft, world: str | None) -> None:
    """Fill in the keys that every recipe needs, and name the hardware."""
    if "model.preset" not in draft.values:
        draft.assume("model.hf", "MODEL")
    if any(key.endswith("16.enabled") for key in draft.idle):
        draft.assume("strategy.precision", "bf16")
    name = draft.values.get("model.hf")
    if draft.facts.get("tensor_sequence") and name:
        draft.lose("tensor_sequence", "presets have it; blocks of transformers need whole sequences")
    elif draft.facts.get("tensor_sequence"):
        draft.put("strategy.tensor_sequence_parallel", "gathered", "tensor_sequence")
    draft.assume("data.source", "data.jsonl" if name else "stdlib")
    if name:
        draft.assume("data.tokenizer", name)
    elif draft.values["data.sequence_length"] == 2048 and draft.sources["data.sequence_length"] == [ASSUMED]:
        draft.values["data.sequence_length"] = min(2048, PRESETS[draft.values["model.preset"]].context)
    if world is not None and not world.isdigit():
        for key in ("cluster.device", "cluster.nodes", "cluster.devices_per_node"):
            draft.values.pop(key, None)
        draft.values["cluster.preset"], draft.sources["cluster.preset"] = world, ["--world"]
        return
    draft.assume("cluster.device", "h100")
    devices = draft.values["cluster.devices_per_node"]
    if devices > NODE and devices % NODE == 0 and "cluster.nodes" not in draft.values:
        draft.values |= {"cluster.nodes": devices // NODE, "cluster.devices_per_node": NODE}
        draft.sources["cluster.nodes"] = draft.sources["cluster.devices_per_node"]


def _finished(row: Row, draft: Draft) -> Row:
    """A mapped row with its places in the recipe, or the reason why it has none."""
    if row.status != "mapped":
        return row
    targets = [target for target in dict.fromkeys(draft.targets.get(row.key, ())) if target in draft.values]
    if row.key in draft.lost:
        return Row(row.key, row.value, "no equivalent", draft.lost[row.key])
    if targets:
        return Row(row.key, row.value, "mapped", ", ".join(targets))
    return Row(row.key, row.value, "not needed", draft.idle.get(row.key, "off, or decided by another key"))


def _is_off(value: Any, off: tuple[object, ...]) -> bool:
    """Whether a value asks for nothing; True is not 1."""
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in off)


def _find(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


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
