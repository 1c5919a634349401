"""Reading recipes: YAML and overrides to one checked, frozen object, and back to YAML.

A recipe is checked before torch is imported, so a typing mistake is an error in under half a second. The recipe knows
neither ranks nor processes: the planner and the trainer read the same one, and its resolved form is the `recipe.yaml`
of a run.

The pydantic models in `sections.py` declare all keys, types, limits and defaults. The exception is the `strategy:`
section: its keys belong to the techniques, so it is checked against the Settings passed in, and contains only the
pinned ones. Values are not coerced ("100" to 100, 1 to true). Recipes have no includes and no environment variables.
Paths become whole (`paths.py`), so that a recipe means the same in every folder.

An override that specifies the model or the cluster in another way replaces the file's: `model.preset=gpt2` drops
dimensions, and `cluster.preset=8xH100-80GB` drops `device` and counts.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from shardwise.core.paths import path_of
from shardwise.core.strategy import Setting
from shardwise.recipe.checks import contradictions
from shardwise.recipe.error_messages import Complaint, explain, first_error, nearest_name, unknown_key
from shardwise.recipe.overrides import NAMED, overridden
from shardwise.recipe.paths import with_whole_paths
from shardwise.recipe.section import Section
from shardwise.recipe.sections import Recipe
from shardwise.recipe.yaml_source import (
    KeyPath,
    Origin,
    YamlDocument,
    parse_document,
    read_document,
    written,
)


def _section_types(optional: bool) -> dict[str, type[Section]]:
    """The sections of a recipe by name: those that may be null (``optional``), or the others."""
    kinds = {name: field.annotation for name, field in Recipe.model_fields.items()}
    types = {n: get_args(k)[:1] or (None,) if optional else (k,) for n, k in kinds.items()}
    return {n: k for n, (k, *_) in types.items() if isinstance(k, type) and issubclass(k, Section)}


_ALWAYS = _section_types(optional=False)
SECTIONS: Mapping[str, type[Section]] = {**_ALWAYS, **_section_types(optional=True)}

_COMPARED_KEYS = 100
"""Unknown keys that are compared with the known ones; a file with more is no misspelled recipe."""
_EXAMPLES = {"model": "model: {preset: ...}", "steps": "steps: 100", "batch_size": "batch_size: 16"}
_DIMENSIONS = (
    "family", "layers", "width", "heads", "head_dim", "kv_heads", "kv_lora_rank", "q_lora_rank", "rope_head_dim",
    "v_head_dim", "ffn", "vocab", "context", "tied", "rope_theta",
)  # fmt: skip
REPLACES: Mapping[KeyPath, Sequence[str]] = {
    ("model", "preset"): ("hf", "factory", "arguments", *_DIMENSIONS),
    ("model", "hf"): ("preset", "factory", "arguments", *_DIMENSIONS),
    ("model", "factory"): ("preset", "hf", *_DIMENSIONS),
    ("cluster", "preset"): ("device", "nodes", "devices_per_node", "memory_gib", "host_memory_gib"),
    ("cluster", "device"): ("preset",),
    ("data", "source"): ("mixture",),
    ("data", "mixture"): ("source", "format", "text_key"),
    ("objective", "name"): ("factory", "arguments"),
    ("objective", "factory"): ("name",),
    ("steps",): ("epochs",),
    ("epochs",): ("steps",),
}
"""Keys that an override of a key replaces, in the same section."""


def load_recipe(path: Path, overrides: Sequence[str], settings: Sequence[Setting[Any]]) -> Recipe:
    """Read a recipe file, apply `section.key=value` overrides, and check the result.

    Args:
        path: a YAML 1.2 file, in UTF-8.
        overrides: applied in order. A value is text, a number, or YAML in brackets or quotes; null unsets.
        settings: the keys of `strategy:` (`shardwise.technique.SETTINGS`).

    Raises:
        RecipeError: for the first fault in reading order, with file, line and key path.
    """
    return read_recipe(path, overrides, settings)[0]


def read_recipe(
    path: Path, overrides: Sequence[str], settings: Sequence[Setting[Any]]
) -> tuple[Recipe, YamlDocument]:
    """Like `load_recipe`; also returns the document, whose `where(path)` gives the file and line of a key."""
    document = overridden(_with_sections(read_document(path_of(path))), overrides, REPLACES)
    return _checked_recipe(document, settings), document


def parse_recipe(
    text: str, settings: Sequence[Setting[Any]], name: str = "recipe", file: Path | None = None
) -> Recipe:
    """Like `load_recipe`, from YAML text. `name` is its name in errors; its paths start at the folder of `file`."""
    return _checked_recipe(parse_document(text, name, file), settings)


def recipe_of(
    values: Mapping[str, Any], settings: Sequence[Setting[Any]] = (), overrides: Sequence[str] = ()
) -> Recipe:
    """A checked recipe from plain data (dicts, lists, scalars), and overrides as of ``load_recipe``."""
    document = _with_sections(YamlDocument("recipe", copy.deepcopy(dict(values)), {(): Origin(0, 0)}))
    return _checked_recipe(overridden(document, overrides, REPLACES) if overrides else document, settings)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, with defaults. Reading it gives an equal recipe."""
    lines = list[str]()
    for name, value in recipe:
        if (name == "epochs" and value is None) or (name == "steps" and not value):
            continue  # the recipe has one of the two
        if not isinstance(value, Section | Mapping):
            lines.append(f"{name}: {written(value)}")
            continue
        pairs = _written_pairs(value) if isinstance(value, Section) else list(value.items())
        if pairs:
            lines.append(f"{name}:")
            lines += [f"  {written(key)}: {written(inner)}" for key, inner in pairs]
    return "\n".join(lines) + "\n"


def _written_pairs(section: Section) -> list[tuple[str, Any]]:
    """The pairs to write: those that are not empty; with a preset only those that differ from the default, because
    the defaults would contradict the preset.
    """
    fields = type(section).model_fields
    defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
    brief = getattr(section, "preset", None) is not None
    said = [(k, v) for k, v in section if v != defaults[k] or not (brief or defaults[k] in (None, {}))]
    return [(k, _as_mappings(v)) for k, v in said]


def _as_mappings(value: Any) -> Any:
    """Sections as mappings, also in lists."""
    if isinstance(value, tuple):
        return [_as_mappings(item) for item in value]
    return dict(_written_pairs(value)) if isinstance(value, Section) else value


def _checked_recipe(document: YamlDocument, settings: Sequence[Setting[Any]]) -> Recipe:
    """The recipe of `document`, with whole paths. Raises RecipeError for its first fault."""
    document = with_whole_paths(_with_sections(document), settings)
    values = {k: {} if v is None and k in (*_ALWAYS, "strategy") else v for k, v in document.values.items()}
    strategy, complaints = _parse_strategy(values.pop("strategy", {}), settings)
    values = _without_unset(values, Recipe)
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


def _with_sections(document: YamlDocument) -> YamlDocument:
    """The document with the section that is written as its name alone as a section."""
    name = document.find(NAMED)
    if not isinstance(name, str):
        return document
    origins = {**document.origins, (*NAMED, "name"): document.origin(NAMED)}
    return replace(document, values={**document.values, str(NAMED[0]): {"name": name}}, origins=origins)


def _without_unset(values: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """Without the keys that are null where null is no value: they keep their defaults, or are missing."""
    settings = dict[str, Any]()
    for key, value in values.items():
        field = section.model_fields.get(key)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        if value is None and field is not None and type(None) not in kinds:
            continue
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        settings[key] = _without_unset(value, inner) if inner and isinstance(value, Mapping) else value
    return settings


def _parse_strategy(pins: Any, settings: Sequence[Setting[Any]]) -> tuple[dict[str, object], list[Complaint]]:
    """Parsed values of the pinned keys; a null value does not pin."""
    if not isinstance(pins, Mapping):
        return {}, [_complaint_of_section("strategy", pins)]
    known = {setting.key: setting for setting in settings}
    parsed = dict[str, object]()
    complaints = list[Complaint]()
    homes = _homes(settings)
    for key, value in pins.items():
        path = ("strategy", str(key))
        if key not in known:
            names = list(known) if len(complaints) < _COMPARED_KEYS else []
            complaints.append(unknown_key(path, names, homes))
        elif value is not None:
            try:
                parsed[key] = known[key].parse(value)
            except ValueError as reason:
                # A setting with a note (`not in this version yet`) was not misspelled.
                choices = [] if known[key].note else [str(choice) for choice in known[key].choices]
                near = nearest_name(value, choices) if isinstance(value, str) else None
                fix = f"did you mean '{near}'?" if near else ""
                complaints.append(Complaint(path, f"bad value for {key}", str(reason), fix))
    return parsed, complaints


def _complaint_of_section(name: str, value: object) -> Complaint:
    fault: Any = {"loc": (name,), "type": "mapping_type", "input": value, "msg": ""}
    return explain(fault)


def _complaints(error: ValidationError, settings: Sequence[Setting[Any]]) -> Iterator[Complaint]:
    """Pydantic's faults as complaints. A misspelled key is not reported as missing, too."""
    faults = error.errors(include_url=False)
    homes = _homes(settings)
    meant = set[str]()
    unknown = [tuple(fault["loc"]) for fault in faults if fault["type"] == "extra_forbidden"]
    for number, path in enumerate(unknown):
        names = list(_section_at(path).model_fields) if number < _COMPARED_KEYS else []
        if len(path) == 1 and (near := nearest_name(str(path[0]), names)):
            meant.add(near)
        yield unknown_key(path, names, homes)
    for fault in faults:
        key = str(fault["loc"][-1])
        if fault["type"] == "missing" and len(fault["loc"]) == 1:
            if key not in meant:
                yield Complaint((key,), f"{key} is missing", fix=f"add `{_EXAMPLES[key]}`", absent=True)
        elif fault["type"] != "extra_forbidden":
            yield explain(fault)


def _section_at(path: KeyPath) -> type[Section]:
    """The section with the last key of `path`."""
    section: type[Section] = Recipe
    for key in (key for key in path[:-1] if isinstance(key, str)):
        annotation = section.model_fields[key].annotation
        kinds = (
            annotation,
            *get_args(annotation),
            *(k for argument in get_args(annotation) for k in get_args(argument)),
        )
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    return section


def _homes(settings: Sequence[Setting[Any]]) -> dict[str, str]:
    """Key -> section, for hints; without keys that several sections have."""
    homes = {setting.key: "strategy" for setting in settings}
    seen = [(key, name) for name, section in SECTIONS.items() for key in section.model_fields]
    keys = [key for key, _ in seen]
    return homes | {key: name for key, name in seen if keys.count(key) == 1}
