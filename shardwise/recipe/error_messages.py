"""Error messages for recipes: pydantic's faults in the terms of a recipe, and the first of them as the error.

A message says the expected value, the found value, and a spelling that works. An error is one line, so the first fault
in reading order is shown with the number of others; the first fault often causes the rest.

Suggestions come from edit distance and from the names of keys in other trainers (`hidden_size` is `width`). Those
names are not accepted as keys.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from shardwise.core.errors import RecipeError, one_line, shorten
from shardwise.recipe.yaml_source import KeyPath, YamlDocument, describe, dotted

OTHER_NAMES = {
    "lr": "learning_rate", "max_lr": "learning_rate", "eps": "epsilon", "grad_clip": "clip_norm",
    "max_grad_norm": "clip_norm", "gradient_clipping": "clip_norm", "warmup_steps": "warmup",
    "warmup_ratio": "warmup", "min_lr": "floor", "lr_scheduler": "schedule", "scheduler": "schedule",
    "hidden_size": "width", "d_model": "width", "n_embd": "width", "dim": "width", "hidden_dim": "ffn",
    "num_layers": "layers", "n_layers": "layers", "n_layer": "layers", "num_hidden_layers": "layers",
    "depth": "layers", "num_heads": "heads", "n_heads": "heads", "n_head": "heads",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "n_kv_heads": "kv_heads",
    "intermediate_size": "ffn", "d_ff": "ffn", "vocab_size": "vocab", "max_position_embeddings": "context",
    "block_size": "context", "tie_word_embeddings": "tied", "seq_len": "sequence_length",
    "max_seq_len": "sequence_length", "seq_length": "sequence_length", "dataset": "source", "path": "source",
    "max_steps": "steps", "num_steps": "steps", "iterations": "steps", "global_batch_size": "batch_size",
    "train_batch_size": "batch_size", "gpus": "devices_per_node", "gpus_per_node": "devices_per_node",
    "nproc_per_node": "devices_per_node", "num_nodes": "nodes", "nnodes": "nodes", "eval": "evaluation",
    "save_every": "every", "interval": "every", "zero": "zero_stage", "stage": "zero_stage",
    "dtype": "precision", "micro_batch": "micro_batch_size", "tp": "tensor_parallel",
    "pp": "pipeline_parallel", "decay_steps": "decay", "cooldown": "decay", "resume_from": "start_from",
    "model_name_or_path": "hf", "pretrained_model_name_or_path": "hf", "name_or_path": "hf",
    "base_model": "hf", "load_from": "start_from", "init_from": "start_from", "base_batch_size": "from_batch",
}  # fmt: skip
"""Names of keys in other trainers -> the key of a recipe. Used for hints only."""

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of reasonable size",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "dict_type": "a section of keys",
    "mapping_type": "a section of keys",
    "model_type": "a section of keys",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "written as package.module:function",
}
_NUMERIC = {"int_type", "int_from_float", "float_type"}


@dataclass(frozen=True)
class Complaint:
    """One fault: its key path and the parts of the error line.

    Attributes:
        absent: the fault is that the recipe has no value at `path`.
    """

    path: KeyPath
    what: str
    why: str = ""
    fix: str = ""
    absent: bool = False


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The most similar of `names`; None if none is similar."""
    known = {_folded(candidate): candidate for candidate in names}
    if not known:
        return None
    plain = _folded(name)
    if plain in known:
        return known[plain]
    if (ours := OTHER_NAMES.get(name.lower().replace("-", "_"))) and _folded(ours) in known:
        return ours
    matches = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    return known[matches[0]] if matches else None


def suggestion(name: str, names: Sequence[str], label: str) -> str:
    """`did you mean 'width'?`, or the list of all names if none is similar."""
    if (near := nearest_name(name, names)) is not None:
        return f"did you mean '{near}'?"
    return f"{label}: {', '.join(names)}" if names else ""


def unknown_key(path: KeyPath, names: Sequence[str], homes: Mapping[str, str]) -> Complaint:
    """The fault of an unknown key. `homes` maps each key of a recipe to its section."""
    name = shorten(one_line(str(path[-1])), 60)
    section = dotted(path[:-1])
    why = f"'{section}' has no such key" if section else "a recipe has no such key"
    home = homes.get(name) or homes.get(OTHER_NAMES.get(name, ""))
    if "." in name and not section:
        fix = f"write the section '{name.split('.')[0]}:' with the key below it"
    elif nearest_name(name, names) is None and home is not None and home != section:
        fix = f"'{name if name in homes else OTHER_NAMES[name]}' belongs under '{home}'"
    else:
        fix = suggestion(name, names, "known keys")
    return Complaint(path, f"unknown key '{name}'", why, fix)


def explain(fault: ErrorDetails) -> Complaint:
    """A fault of a value that pydantic found, as a complaint. For unknown keys see `unknown_key`."""
    path = tuple(fault["loc"])
    kind = fault["type"]
    entry = fault["input"]
    key = dotted(path[-2:] if isinstance(path[-1], int) else path[-1:])
    context = fault.get("ctx", {})
    if kind == "missing":
        return Complaint(path, f"{key} is missing", absent=True)
    if kind == "value_error":
        return Complaint(path, f"{key} must be {context['error']}", f"found {describe(entry)}")
    if kind == "string_too_short":
        return Complaint(path, f"{key} must not be empty")
    expected = _EXPECTED.get(kind, "").format(
        **{name: _short_value(value) for name, value in context.items()}
    )
    what = f"{key} must be {expected}" if expected else f"{key} is not acceptable: {fault['msg']}"
    fix = ""
    if kind == "literal_error" and isinstance(entry, str):
        near = nearest_name(entry, re.findall(r"'([^']+)'", str(context["expected"])))
        fix = f"did you mean '{near}'?" if near else ""
    elif kind in _NUMERIC:
        fix = _respelled(entry)
    elif kind == "tuple_type" and isinstance(entry, str | int | float):
        fix = f"write [{shorten(one_line(str(entry)), 60)}]"
    elif kind in ("dict_type", "mapping_type", "model_type") and isinstance(entry, str) and ":" in entry:
        fix = "put a space after each colon"
    return Complaint(path, what, f"found {describe(entry)}", fix)


def first_error(complaints: Sequence[Complaint], document: YamlDocument) -> RecipeError:
    """The first complaint in reading order as an error, with the number of others. Missing keys come last."""
    order = sorted(complaints, key=lambda complaint: (complaint.absent, document.origin(complaint.path)))
    first = order[0]
    others = len({complaint.path for complaint in order}) - 1
    why, fix = first.why, first.fix
    if others:
        why, fix = (why, f"{fix} (+{others} more)") if fix else (f"{why} (+{others} more)".lstrip(), fix)
    return RecipeError(first.what, where=document.where(first.path), why=why, fix=fix)


def _folded(name: str) -> str:
    return re.sub(r"[-_. ]", "", name).lower()


def _short_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace("'", "")


def _respelled(value: object) -> str:
    """How to write the number that was probably intended; "" if unknown."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e18:
        return f"write {int(value)}"
    if isinstance(value, str):
        text = re.sub(r"[_,' ]", "", value)
        if re.fullmatch(r"[-+]?[0-9]+", text):
            return f"write {text[:30]}" + (" without quotes" if text == value else "")
        if re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?", text):
            return f"write {text[:30]}" + (" without quotes" if text == value else "")
    return ""
