"""LLaMA-Factory's data sets: what a name means, by the ``dataset_info.json`` of its folder (its data/parser.py)."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import isfile
from pathlib import Path
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.plugins.importers.draft import Draft
from shardwise.plugins.importers.foreign import read_foreign

_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
"""Fields of a record, and names of roles, where an entry has no ``columns`` or no ``tags``."""

_COLUMN_FORMATS: Mapping[tuple[str | None, ...], str] = {
    ("instruction", "input", "output"): "alpaca",
    ("instruction", None, "output"): "alpaca",
    ("prompt", None, "completion"): "prompt",
    ("conversations", "from", "value", "human", "gpt"): "sharegpt",
    ("messages", "role", "content", "user", "assistant"): "messages",
}
_MEDIA = ("images", "videos", "audios")
_OTHER_COLUMNS = ("system", "tools", "history", *_MEDIA)


def names_of(listed: Any) -> list[str]:
    """The names of a list, or of text with commas."""
    return [str(name).strip() for name in (listed if isinstance(listed, list) else str(listed).split(","))]


def registered(draft: Draft, name: str) -> tuple[dict[str, Any], str]:
    """A data set as a source (source, format, text_key), and what of it is lost.

    Without a folder of LLaMA-Factory the name is the source. Raises RecipeError for a name that its file does not list.
    """
    folder = draft.facts.get("dataset_folder")
    if not isinstance(folder, str) or folder == "ONLINE":
        return {"source": name}, ""
    places = (draft.path.parent / folder, Path(folder))
    root = next((path for path in places if isfile(path / "dataset_info.json")), None)
    if root is None:
        return {}, f"there is no {folder}/dataset_info.json: give data.source"
    info = read_foreign(root / "dataset_info.json")
    entry = info.get(name)
    if not isinstance(entry, Mapping):
        where = f"{root / 'dataset_info.json'}: {name}"
        raise RecipeError("no such data set", where=where, why=f"it lists {', '.join(sorted(info))}")
    source = str(root / str(entry.get("file_name", name)))
    if hub := entry.get("hf_hub_url"):
        config, split = entry.get("subset"), entry.get("split", "train")
        source = str(hub) + (f":{config}" if config else "") + (f"#{split}" if split != "train" else "")
    values, lost = _record(entry)
    samples = draft.facts.get("samples")
    if samples in ("pairs", "unpaired"):
        values, lost = _preference(entry, samples)
    unread = ("num_samples", "folder", "script_url", *["ranking"] * (samples != "pairs"))
    lost += [key for key in unread if entry.get(key)]
    return {"source": source, **values}, f"{name}: {', '.join(lost)}" if lost else ""


def _record(entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The format of the records, and the columns that it does not read."""
    columns, tags = entry.get("columns") or _COLUMNS, entry.get("tags") or _TAGS
    chat = entry.get("formatting", "alpaca") != "alpaca"
    fields = ("messages",) if chat else ("prompt", "query", "response")
    names = tuple(columns.get(key) for key in fields) + tuple(tags.get(key) for key in _TAGS if chat)
    lost = [key for key in _OTHER_COLUMNS if columns.get(key) and (key in _MEDIA or columns[key] != key)]
    if names in _COLUMN_FORMATS:
        return {"format": _COLUMN_FORMATS[names]}, lost
    if not chat and names[1:] == (None, None):  # a set of plain text has one column
        return {"format": "text", "text_key": names[0]}, lost
    return {}, [f"the fields {', '.join(str(name) for name in names if name)} are of no format here", *lost]


def _preference(entry: Mapping[str, Any], samples: str) -> tuple[dict[str, Any], list[str]]:
    """The format of pairs (``ranking``) or labelled completions (``kto_tag``), and columns that it does not read."""
    columns = entry.get("columns") or {}
    chat = entry.get("formatting", "alpaca") != "alpaca"
    read = {
        "prompt": ("instruction", "prompt"),
        "query": ("input",),
        "messages": ("messages", "conversations"),
        "chosen": ("chosen",),
        "rejected": ("rejected",),
        "kto_tag": ("kto_tag", "label"),
    }
    needed = ("chosen", "rejected") if samples == "pairs" else ("kto_tag",)
    names = [*needed, *(("messages",) if chat else ("prompt", "query"))]
    asked = {key: columns.get(key) for key in names if columns.get(key) or key in needed}
    lost = [f"{key}: {name}" for key, name in asked.items() if name not in read[key]]
    lost += [key for key in _OTHER_COLUMNS if columns.get(key) and (key in _MEDIA or columns[key] != key)]
    return {"format": "preference" if samples == "pairs" else "unpaired"}, lost
