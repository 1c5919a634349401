"""Data sets of other trainers as the source of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.importers.draft import Draft


def datasets(draft: Draft) -> None:
    """Set the data of the recipe."""
    facts = draft.facts
    if (config := facts.get("dataset_config")) and "data.source" in draft.values:
        draft.put("data.source", f"{draft.values['data.source']}:{config}", "dataset_config")
    if "litgpt_data" in facts:
        _litgpt_data(draft)
    if not (paths := facts.get("dataset:path")):
        return
    for key in (key for name in draft.keys if name.startswith("dataset:") for key in draft.keys[name]):
        if f"[{min(paths)}]" not in key:
            draft.lost[key] = "a recipe has one source: put all files into one folder"
    listed = {name.partition(":")[2]: found for name, found in facts.items() if name.startswith("dataset:")}
    first = {kind: found.get(min(paths)) for kind, found in listed.items()}
    draft.put(
        "data.source", _source(first), *(f"dataset:{kind}" for kind in ("path", "files", "config", "split"))
    )
    _format(draft, first)


def _source(asked: Mapping[str, Any]) -> str:
    """A data set of Axolotl as ``data.source``."""
    if files := asked.get("files"):
        return str(files[0] if isinstance(files, list) else files)
    config, split = asked.get("config"), asked.get("split")
    name = str(asked["path"]) + (f":{config}" if config else "")
    return name + (f"#{split}" if split not in (None, "train") else "")


_FORMATS = {
    "alpaca": "alpaca", "chat_template": "messages", "sharegpt": "sharegpt", "completion": "text", "pretrain": "text",
}  # fmt: skip
_CHAT_FIELDS = "fields of a chat are messages with role and content, or conversations with from and value"


def _format(draft: Draft, asked: Mapping[str, Any]) -> None:
    """The format of records from the type of a data set, and from its fields for chats."""
    kind = re.split(r"[:.]", str(asked.get("type") or "none").lower())[0]
    form = _FORMATS.get(kind)
    usual = {"field": "messages", "role": "role", "content": "content"}
    fields = tuple(asked.get(name) or value for name, value in usual.items())
    if form == "messages" and fields == ("conversations", "from", "value"):
        form = "sharegpt"
    elif form == "messages" and fields != ("messages", "role", "content"):
        for name in ("field", "role", "content"):
            draft.lose(f"dataset:{name}", _CHAT_FIELDS)
    if form is not None:
        draft.put("data.format", form, *(f"dataset:{name}" for name in ("type", "field", "role", "content")))
    elif kind != "none":
        draft.lose("dataset:type", "formats are text, prompt, messages, sharegpt and alpaca")


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
        elif name == "textfiles":
            draft.put("data.format", "text", "litgpt_data")
        else:
            draft.put("data.format", "auto", "litgpt_data")
    elif name in _LITGPT:
        source, form = _LITGPT[name]
        draft.put("data.source", source, "litgpt_data")
        if form:
            draft.put("data.format", form, "litgpt_data")
    else:
        draft.lose("litgpt_data", "give its files or its id on the Hub as data.source")
