"""The recipe: what is wanted, typed and strict, from YAML and overrides to one frozen object and back.

A recipe is read before torch is imported, so that a typing mistake costs a fraction of a second and not a
job's place in a queue. It says nothing of how many processes there are or which rank this is: the same
recipe is the plan's input, the trainer's, and, resolved, the `recipe.yaml` of a run.

Chosen: pydantic models (`sections.py`) as the one declaration of keys, types, limits, defaults and documentation. The
`strategy:` section is the exception: its keys belong to the techniques, so it is checked against the
Settings passed in, and holds only what the recipe pins. Refused: coercion ("100" for 100, 1 for true),
because a recipe that means something other than it says is found out a week later; environment variables
and includes; the price is some repetition between recipes.

In overrides, naming the model or the cluster another way replaces how the file named it:
`model.preset=gpt2` on a recipe that gives dimensions drops those dimensions, and
`cluster.preset=8xH100-80GB` drops `device` and counts.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from shardwise.core.complaint import Complaint, explain, first_error, nearest, unknown_key
from shardwise.core.consistency import contradictions
from shardwise.core.document import (
    Document,
    KeyPath,
    Origin,
    parse_document,
    read_document,
    written,
)
from shardwise.core.override import overridden
from shardwise.core.sections import Recipe as Recipe
from shardwise.core.sections import Section as Section
from shardwise.core.strategy import Setting


def _sections(optional: bool) -> dict[str, type[Section]]:
    """The sections of a recipe by name: those that are always there, or those that may be null."""
    kinds = {name: field.annotation for name, field in Recipe.model_fields.items()}
    found = {n: get_args(k)[:1] or (None,) if optional else (k,) for n, k in kinds.items()}
    return {n: k for n, (k, *_) in found.items() if isinstance(k, type) and issubclass(k, Section)}


_ALWAYS = _sections(optional=False)
SECTIONS: Mapping[str, type[Section]] = {**_ALWAYS, **_sections(optional=True)}

_EXAMPLES = {"model": "model: {preset: ...}", "steps": "steps: 100", "batch_size": "batch_size: 16"}
_DIMENSIONS = (
    "family", "layers", "width", "heads", "kv_heads", "ffn", "vocab", "context", "tied", "rope_theta",
)  # fmt: skip
_REPLACES: Mapping[KeyPath, Sequence[str]] = {
    ("model", "preset"): ("hf", "factory", "arguments", *_DIMENSIONS),
    ("model", "hf"): ("preset", "factory", "arguments", *_DIMENSIONS),
    ("model", "factory"): ("preset", "hf", *_DIMENSIONS),
    ("cluster", "preset"): ("device", "nodes", "devices_per_node", "memory_gib", "host_memory_gib"),
    ("cluster", "device"): ("preset",),
}


def load_recipe(path: Path, overrides: Sequence[str], settings: Sequence[Setting[Any]]) -> Recipe:
    """Read a recipe file, put `section.key=value` overrides over it, and check the whole.

    Args:
        path: a YAML 1.2 file, in UTF-8.
        overrides: applied in order; a value is text, a number, or YAML in brackets or quotes; null unsets.
        settings: the keys that `strategy:` may have (`shardwise.technique.SETTINGS`).

    Raises:
        RecipeError: for the first fault in reading order, naming file, line and key path.
    """
    return _checked(overridden(read_document(Path(path)), overrides, _REPLACES), settings)


def parse_recipe(text: str, settings: Sequence[Setting[Any]], name: str = "recipe") -> Recipe:
    """As `load_recipe`, from YAML text; `name` stands for the file in errors."""
    return _checked(parse_document(text, name), settings)


def recipe_of(values: Mapping[str, Any], settings: Sequence[Setting[Any]] = ()) -> Recipe:
    """A checked recipe from plain data (dicts, lists, scalars), for code that writes none down."""
    return _checked(Document("recipe", copy.deepcopy(dict(values)), {(): Origin(0, 0)}), settings)


def locate(path: Path, overrides: Sequence[str], key: KeyPath) -> str:
    """`FILE:LINE: key.path` of a key in a recipe that `load_recipe` accepts, for errors found later."""
    return overridden(read_document(Path(path)), overrides, _REPLACES).where(key)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key, defaults too; reading it gives an equal recipe."""
    lines = list[str]()
    for name, value in recipe:
        if not isinstance(value, Section | Mapping):
            lines.append(f"{name}: {written(value)}")
            continue
        pairs = _said(value) if isinstance(value, Section) else list(value.items())
        if pairs:
            lines.append(f"{name}:")
            lines += [f"  {written(key)}: {written(inner)}" for key, inner in pairs]
    return "\n".join(lines) + "\n"


def _said(section: Section) -> list[tuple[str, Any]]:
    """The pairs to write: all that say something; beside a preset, which the defaults would contradict, only
    those that differ from the default.
    """
    fields = type(section).model_fields
    defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
    brief = getattr(section, "preset", None) is not None
    said = [(k, v) for k, v in section if v != defaults[k] or not (brief or defaults[k] in (None, {}))]
    return [(k, dict(_said(v)) if isinstance(v, Section) else v) for k, v in said]


def _checked(document: Document, settings: Sequence[Setting[Any]]) -> Recipe:
    """The recipe in `document`. Raises RecipeError for its first fault."""
    values = {k: {} if v is None and k in (*_ALWAYS, "strategy") else v for k, v in document.values.items()}
    strategy, complaints = _parse_strategy(values.pop("strategy", {}), settings)
    try:
        recipe = Recipe.model_validate({**values, "strategy": strategy})
    except ValidationError as error:
        complaints += _complaints(error, settings)
    else:
        if not complaints:
            complaints += contradictions(recipe, document)
        if not complaints:
            return recipe
    raise first_error(complaints, document)


def _parse_strategy(pins: Any, settings: Sequence[Setting[Any]]) -> tuple[dict[str, object], list[Complaint]]:
    """The values of the pinned keys, parsed; null pins nothing."""
    if not isinstance(pins, Mapping):
        return {}, [_complaint_of_section("strategy", pins)]
    known = {setting.key: setting for setting in settings}
    parsed, complaints = dict[str, object](), list[Complaint]()
    for key, value in pins.items():
        path = ("strategy", str(key))
        if key not in known:
            complaints.append(unknown_key(path, list(known), _homes(settings)))
        elif value is not None:
            try:
                parsed[key] = known[key].parse(value)
            except ValueError as reason:
                # A note explains the refusal (`fp16 is not in this version yet`): then it was no misspelling.
                choices = [] if known[key].note else [str(choice) for choice in known[key].choices]
                near = nearest(value, choices) if isinstance(value, str) else None
                fix = f"did you mean '{near}'?" if near else ""
                complaints.append(Complaint(path, f"bad value for {key}", str(reason), fix))
    return parsed, complaints


def _complaint_of_section(name: str, found: object) -> Complaint:
    fault: Any = {"loc": (name,), "type": "mapping_type", "input": found, "msg": ""}
    return explain(fault)


def _complaints(error: ValidationError, settings: Sequence[Setting[Any]]) -> Iterator[Complaint]:
    """Pydantic's faults as complaints; a key is not missing where a misspelling of it was found."""
    faults = error.errors(include_url=False)
    meant = set[str]()
    for fault in faults:
        path = tuple(fault["loc"])
        if fault["type"] == "extra_forbidden":
            names = list(_section_at(path).model_fields)
            if len(path) == 1 and (near := nearest(str(path[0]), names)):
                meant.add(near)
            yield unknown_key(path, names, _homes(settings))
    for fault in faults:
        key = str(fault["loc"][-1])
        if fault["type"] == "missing" and len(fault["loc"]) == 1:
            if key not in meant:
                yield Complaint((key,), f"{key} is missing", fix=f"add `{_EXAMPLES[key]}`", absent=True)
        elif fault["type"] != "extra_forbidden":
            yield explain(fault)


def _section_at(path: KeyPath) -> type[Section]:
    """The section that holds the last key of `path`."""
    section: type[Section] = Recipe
    for key in path[:-1]:
        kinds = (
            section.model_fields[str(key)].annotation,
            *get_args(section.model_fields[str(key)].annotation),
        )
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    return section


def _homes(settings: Sequence[Setting[Any]]) -> dict[str, str]:
    """The section in which each key belongs, for hints; keys that several sections have are left out."""
    homes = {setting.key: "strategy" for setting in settings}
    seen = [(key, name) for name, section in SECTIONS.items() for key in section.model_fields]
    keys = [key for key, _ in seen]
    return homes | {key: name for key, name in seen if keys.count(key) == 1}
