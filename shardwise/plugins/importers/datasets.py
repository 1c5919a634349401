"""Data sets of other trainers as the source, or the mixture of sources, of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os.path import exists
from pathlib import Path
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.paths import path_of
from shardwise.plugins.importers.dataset_info import names_of, registered
from shardwise.plugins.importers.draft import Draft

_TURN_FIELDS = {"field": "messages", "role": "role", "content": "content"}
_CHAT_FIELDS = "fields of a chat are messages with role and content, or conversations with from and value"
_KNOWN_FORMATS = "formats are text, prompt, messages, sharegpt and alpaca"
_AXOLOTL_TYPES = {
    "alpaca": "alpaca", "chat_template": "messages", "sharegpt": "sharegpt", "completion": "text", "pretrain": "text",
}  # fmt: skip
_AXOLOTL_PREFERENCES: Mapping[str, Mapping[str, str]] = {
    "pairs": {"chat_template": "preference", "ultra": "preference"},
    "unpaired": {"argilla_chat": "unpaired"},
    "prompts": {},
}
"""By the samples of the objective, the formats of Axolotl's types: of chat_template.default, chatml.ultra, ..."""
_PREFERENCE_TYPES = {
    "pairs": "pairs are prompt or messages, chosen and rejected in turns; texts have no chat template",
    "unpaired": "labelled completions are prompt, completion and label in turns; texts have no chat template",
    "prompts": "prompts are records of prompt or messages; the functions of objective.rewards get their other fields",
}
_WEIGHTS_NOTE = "data sets are concatenated there; here a mixture has weights, all 1: give data.mixture"


def datasets(draft: Draft) -> None:
    """Set the data of the recipe, and further validation sets."""
    facts = draft.facts
    if (config := facts.get("dataset_config")) and "data.source" in draft.values:
        draft.put("data.source", f"{draft.values['data.source']}:{config}", "dataset_config")
    if "litgpt_data" in facts:
        _litgpt_data(draft)
    if facts.get("completion_only"):
        draft.put("data.train_on", "completion", "completion_only")
    elif facts.get("trl_sft") and "data.train_on" not in draft.values:
        draft.assume("data.train_on", "all")
        draft.notes["data.train_on"] = (
            "all turns of a chat, as in TRL; of a prompt TRL trains on its completion"
        )
    if facts.get("text_stage"):
        draft.put("data.format", "text", "text_stage")
    elif facts.get("packing") or facts.get("packing:neat"):
        draft.put("data.packing", True, "packing", "packing:neat")
        if not facts.get("packing:neat"):
            draft.notes["data.packing"] = "records do not see each other, as with neat_packing"
    listed: dict[int, dict[str, Any]] = {}
    for name in [name for name in facts if name.startswith("dataset:")]:
        _, item, kind = name.split(":")
        listed.setdefault(int(item), {})[kind] = facts[name]
    if "source_path" in facts:  # of torchtitan, instead of the data set's own
        draft.put("data.source", facts["source_path"], "source_path")
    elif listed:
        items = sorted(item for item in listed if listed[item].get("path"))
        _sources(draft, {item: _axolotl_source(draft, item, listed[item]) for item in items})
    _splits(draft)
    if "datasets" in facts:
        _registered(draft)
    _leave_out_of_text(draft)
    if facts.get("eval_strategy") == "steps" and "validation_set" in facts:
        source = facts["validation_set"]
        fact = "validation_set"
        if "validation_path" in facts:
            source = facts["validation_path"]
            fact = "validation_path"
        draft.put("evaluation.sets", {"validation": source}, fact)
    sets: dict[str, Any] = {}
    for fact in [name for name in facts if name.partition(":")[0] == "validation"]:
        for name in names_of(facts[fact]):
            values, lost = registered(draft, name)
            if values:
                sets[_identifier(name)] = values["source"]
                draft.put("evaluation.sets", sets, fact)
            if lost:
                draft.lose(fact, lost)


def _leave_out_of_text(draft: Draft) -> None:
    """Drop what plain text does not have: prompts, and records that are too long."""
    sources = draft.values.get("data.mixture") or [{"format": draft.values.get("data.format")}]
    formats = {source.get("format") for source in sources}
    if formats == {"text"} and draft.facts.get("completion_only"):
        draft.drop("data.train_on")
    if "text" in formats or (None in formats and not draft.is_said("data.too_long")):
        draft.drop("data.too_long")


def _splits(draft: Draft) -> None:
    """The splits of TRL's data set: one to train on, and one to evaluate on unless a part is held out."""
    facts = draft.facts
    source = str(draft.values.get("data.source", ""))
    if "test_split" not in facts or not _is_on_the_hub(source):
        return
    if "train_split" in facts:
        draft.put("data.source", f"{source}#{facts['train_split']}", "train_split")
    if str(facts.get("eval_strategy")).lower() in ("steps", "epoch") and "held_out" not in facts:
        test = str(facts["test_split"])
        draft.put("evaluation.sets", {_identifier(test): f"{source}#{test}"}, "test_split")


def _is_on_the_hub(source: str) -> bool:
    """Whether a source looks like a data set's id with its configuration, and is no file or folder here."""
    name = source.partition(":")[0]
    ends = (".json", ".jsonl", ".parquet", ".txt", ".csv")
    return (
        bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name))
        and not name.endswith(ends)
        and not exists(path_of(name))
    )


def _identifier(source: str) -> str:
    """A name for a validation set."""
    return re.sub(r"\W+", "_", Path(source).stem).strip("_") or "validation"


def _sources(draft: Draft, sources: Mapping[int, tuple[dict[str, Any], list[str]]]) -> None:
    """One source, or a mixture of several; each with the facts that it is from."""
    if len(sources) == 1:
        ((values, names),) = sources.values()
        for key, value in values.items():
            if key != "weight":
                draft.put(f"data.{key}", value, *names)
    elif sources:
        names = [name for _, own in sources.values() for name in own]
        draft.put("data.mixture", [values for values, _ in sources.values()], *names)
        if not any("weight" in values for values, _ in sources.values()):
            draft.notes["data.mixture"] = _WEIGHTS_NOTE


def _axolotl_source(draft: Draft, item: int, asked: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A data set of Axolotl's list as a source, with the facts that it is from."""
    config, split, files = asked.get("config"), asked.get("split"), asked.get("files")
    name = str(asked["path"]) + (f":{config}" if config else "")
    source = name + (f"#{split}" if split not in (None, "train") else "")
    if files:
        source = str(files[0] if isinstance(files, list) else files)
        if isinstance(files, list) and len(files) > 1:
            why = "a source is one file, folder or glob; only the first is read"
            draft.lose(f"dataset:{item}:files", why)
    names = [f"dataset:{item}:{kind}" for kind in asked]
    values = {"source": source} | {key: asked[key] for key in ("text_key", "weight") if asked.get(key)}
    kind, *rest = re.split(r"[:.]", str(asked.get("type") or "none").lower())
    if samples := draft.facts.get("samples"):
        forms = _AXOLOTL_PREFERENCES[samples]
        if form := forms.get(kind) or forms.get((rest or [""])[0]):
            values["format"] = form
        elif kind != "none":
            draft.lose(f"dataset:{item}:type", _PREFERENCE_TYPES[samples])
        return values, names
    form = _AXOLOTL_TYPES.get(kind)
    fields = tuple(asked.get(name) or value for name, value in _TURN_FIELDS.items())
    if form == "messages" and fields == ("conversations", "from", "value"):
        form = "sharegpt"
    elif form == "messages" and fields != ("messages", "role", "content"):
        for field in _TURN_FIELDS:
            draft.lose(f"dataset:{item}:{field}", _CHAT_FIELDS)
    if form is not None:
        values["format"] = form
        if form == "alpaca" and rest:
            draft.lose(
                f"dataset:{item}:type", f"records have Stanford Alpaca's wording, and not that of {rest[-1]}"
            )
    elif kind != "none":
        draft.lose(f"dataset:{item}:type", _KNOWN_FORMATS)
    return values, names


def _registered(draft: Draft) -> None:
    """Data sets of LLaMA-Factory, by their names in dataset_info.json."""
    named = names_of(draft.facts["datasets"])
    shares = _mixture_weights(draft, len(named))
    sources = {}
    lost = list[str]()
    for item, (name, share) in enumerate(zip(named, shares, strict=True)):
        values, reason = registered(draft, name)
        lost += [reason] * bool(reason)
        if values:
            whole = values | ({"weight": share} if share else {})
            whole |= {"format": "text"} if draft.facts.get("text_stage") else {}
            sources[item] = whole, ["datasets", "dataset_folder", *["dataset_weights"] * bool(share)]
    _sources(draft, sources)
    if lost:
        draft.lose("datasets", "; ".join(dict.fromkeys(lost)))


def _mixture_weights(draft: Draft, count: int) -> list[float]:
    """A weight for each data set, 0 where none is said. Raises RecipeError for others."""
    if (weights := draft.facts.get("dataset_weights")) is None:
        return [0.0] * count
    try:
        shares = [float(share) for share in names_of(weights)]
    except ValueError:
        shares = []
    if len(shares) != count:
        why = f"it is {weights}, and there are {count} data sets"
        raise RecipeError("not one weight per data set", where=draft.origin("dataset_weights"), why=why)
    return shares


_LITGPT = {
    "alpaca": ("tatsu-lab/alpaca", "alpaca"), "alpaca2k": ("mhenrichsen/alpaca_2k_test", "alpaca"),
    "alpacagpt4": ("vicgalle/alpaca-gpt4", "alpaca"), "lima": ("GAIR/lima", None),
    "tinystories": ("roneneldan/TinyStories", "text"), "openwebtext": ("Skylion007/openwebtext", "text"),
}  # fmt: skip


def _litgpt_data(draft: Draft) -> None:
    name = str(draft.facts["litgpt_data"]).rpartition(".")[2].lower()
    if name in ("json", "textfiles", "litdata"):
        if "data.source" not in draft.values:
            draft.lose("litgpt_data", "it has no path to its data")
        else:
            draft.put("data.format", "text" if name == "textfiles" else "auto", "litgpt_data")
    elif name in _LITGPT:
        source, form = _LITGPT[name]
        draft.put("data.source", source, "litgpt_data")
        if form:
            draft.put("data.format", form, "litgpt_data")
    else:
        draft.lose("litgpt_data", "give its files or its id on the Hub as data.source")
