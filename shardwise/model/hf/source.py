"""Opens the source of a transformers model, a folder or a hub id, and checks its config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.extras import install
from shardwise.core.hub_folder import folder_of, refuse_lfs_pointer
from shardwise.model.files.quantized_files import formats_of
from shardwise.model.hf.objective import stored_objective

_NEEDS_CODE = "auto_map"
"""Many models keep it after transformers got a class for them (Phi-3, DeepSeek-V3); then that class is used."""
MTP_BLOCKS = "num_nextn_predict_layers"
"""Key of config.json: blocks of multi-token prediction, after the last one. transformers does not build them."""
_OF_OTHER_HEADS = ("classif", "summary", "qa_")
"""Words in keys of dropout that only other heads than the language model's have."""
_BEYOND_DROPOUT = ("layerdrop", "drop_path", "jitter")
"""Words in keys of other noise: ranks would run different layers, or send tokens to different experts."""
_NO_NOISE = {("phimoe", "router_jitter_noise")}
"""Also a threshold without noise. Its routers never draw experts (`objective.build_for`)."""
_LARGEST_SIZES = {"vocab_size": 100_000_000, "num_hidden_layers": 10_000, "hidden_size": 10_000_000}
"""Sizes that every config has, and the largest that is believed."""


def transformers_library() -> Any:
    """transformers without its warnings. Raises RecipeError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise RecipeError("transformers is not installed", where="model.hf", fix=install("hf")) from error
    transformers.logging.set_verbosity_error()
    return transformers


@dataclass(frozen=True)
class OpenedConfig:
    """A model's config, changed as `model` says.

    Attributes:
        quantization: the value of ``quantization_config`` if the model is quantized.
        departures: settings of config.json that the changes leave out, in sentences.
    """

    config: Any
    quantization: dict[str, Any] | None
    departures: tuple[str, ...]


def load_config(source: str, objective: str | None, dropout: bool = False) -> OpenedConfig:
    """The model's config; ``dropout`` keeps its dropout. Raises RecipeError."""
    where = f"model.hf: {source}"
    path = folder_of(source, ["config.json"]) / "config.json"
    refuse_lfs_pointer(path, RecipeError)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError("config.json cannot be read", where=where, why=str(error)) from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise RecipeError("config.json names no model_type", where=where)
    transformers = transformers_library()
    if _NEEDS_CODE in raw and raw["model_type"] not in transformers.CONFIG_MAPPING:
        raise RecipeError(
            "the model needs its own code (trust_remote_code)",
            where=where,
            why=f"config.json has {_NEEDS_CODE}, and transformers has no class for {raw['model_type']!r}",
            fix="use a model that transformers knows",
        )
    quantization = raw.get("quantization_config")
    if quantization:
        formats_of(quantization, where)
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
        _quiet(config, keep_padding=(objective or stored_objective(config)) != "causal")
        departures = (*_without_noise(config, dropout), *_without_mtp(config))
        _require_sizes(config.get_text_config())
        if quantization:
            del config.quantization_config
    except Exception as error:  # each model validates its config in its own way
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise RecipeError("config.json is not valid", where=where, why=why) from error
    return OpenedConfig(config, quantization, departures)


def _require_sizes(text: Any) -> None:
    """Raise ValueError for a config without the sizes that are read here, or with impossible ones."""
    for key, most in _LARGEST_SIZES.items():
        value = getattr(text, key, None)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{key} is {value!r}, not a whole number from 1 to {most:,}")


def _config_parts(config: Any) -> list[Any]:
    """The config, and that of its language model if it is another one."""
    return list({id(part): part for part in (config, config.get_text_config())}.values())


def _quiet(config: Any, keep_padding: bool) -> None:
    """No cache, and no pad token unless positions depend on it (see `model`).

    The language model of a larger one keeps its pad token: Gemma 4 puts it in the place of images.
    """
    for part in _config_parts(config):
        part.use_cache = False
        if not keep_padding and part is config:
            # Each config checks in its own way. Some must have one, which build_for ignores.
            with suppress(Exception):
                part.pad_token_id = None


def _without_noise(config: Any, dropout: bool) -> Iterator[str]:
    """Turn off what draws random numbers, but dropout if it is wanted; yield what that leaves out."""
    dropped: dict[str, float] = {}
    other: dict[str, float] = {}
    for part in _config_parts(config):
        for key, value in part.to_dict().items():
            is_noise = "drop" in key or "jitter" in key
            if not is_noise or (part.model_type, key) in _NO_NOISE:
                continue
            if not isinstance(value, float) or value == 0:
                continue
            beyond = any(word in key for word in _BEYOND_DROPOUT)
            if not any(word in key for word in _OF_OTHER_HEADS):
                (other if beyond else dropped)[key] = value
            if beyond or not dropout:
                setattr(part, key, 0.0)
    if dropped and not dropout:
        yield f"config.json asks for {_listed_values(dropped)}: dropout is off, and model.dropout=true turns it on"
    if dropout and not dropped:
        yield "model.dropout is true, and config.json asks for none: there is no dropout"
    if other:
        yield f"config.json asks for {_listed_values(other)}, which is off"


def _without_mtp(config: Any) -> Iterator[str]:
    count = getattr(config.get_text_config(), MTP_BLOCKS, None)
    if count:
        yield f"blocks of multi-token prediction ({MTP_BLOCKS} {count}) are not trained; exports copy the folder's"


def non_text_configs(config: Any) -> list[str]:
    """Keys of a config's sections that describe other models than its language model, such as ``vision_config``."""
    text = config.get_text_config()
    if text is config:
        return []
    return [key for key, part in vars(config).items() if hasattr(part, "model_type") and part is not text]


def _listed_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in values.items())
