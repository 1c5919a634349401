"""Adapter folders in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

The files equal those of PEFT's ``save_pretrained`` for a LoRA adapter, plus a header entry that PEFT ignores: a
fingerprint of the frozen weights. PEFT records only the base's name, and an adapter on another base of the same shape
silently does harm.

An adapter with unsupported parts (other trained weights, ranks of single layers) is refused: without them it would be
another adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from shardwise.core.errors import CheckpointError, RecipeError, one_line
from shardwise.core.paths import no_folder
from shardwise.model.files.safetensors_reader import WeightFiles
from shardwise.recipe.sections import AdapterSpec

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
"""PEFT's task type by objective; it has none for masked language models."""
FINGERPRINT = "shardwise_base"
"""Header key of the fingerprint of the frozen weights."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
}
"""Neutral values of config keys whose other values are not supported."""

_OTHER_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Prefixes of ``init_lora_weights`` values with which PEFT changes the base before it trains."""


class AdapterFiles(WeightFiles):
    """An adapter's folder. Raises CheckpointError, naming the file, if it is missing, damaged or of another kind."""

    def __init__(self, folder: Path) -> None:
        self.config = _read_config(folder)
        super().__init__(folder, single=TENSORS)
        self.shapes = {name.removeprefix(PREFIX): shape for name, shape in self.shapes.items()}
        self.kinds = {name.removeprefix(PREFIX): kind for name, kind in self.kinds.items()}
        self._files = {name.removeprefix(PREFIX): file for name, file in self._files.items()}
        for name in self.shapes:
            self.require_floating(name)

    def stored_name(self, name: str) -> str:
        return PREFIX + name

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the base; None if the file has none."""
        return self.metadata(TENSORS).get(FINGERPRINT)

    def spec(self, targets: str | tuple[str, ...]) -> AdapterSpec:
        """The recipe section that describes this adapter. Raises CheckpointError if no recipe can."""
        try:
            return AdapterSpec(
                name="dora" if self.config.get("use_dora") else "lora",
                rank=self.config["r"],
                alpha=float(self.config["lora_alpha"]),
                rank_stabilized=bool(self.config.get("use_rslora")),
                targets=targets,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the adapter's config cannot be read",
                where=str(self.folder / CONFIG),
                why=one_line(str(error)),
            ) from error

    def require(self, spec: AdapterSpec, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise if the adapter differs from the recipe's, or does not fit a model with these tensors."""
        self._require_config(spec)
        where = str(self.folder / TENSORS)
        for name in sorted(self.shapes.keys() | expected.keys()):
            found, wanted = self.shapes.get(name), expected.get(name)
            if wanted is None:
                raise CheckpointError(
                    "the adapter is of another model, or of other targets",
                    where=where,
                    why=f"it has {name}, which this model lacks",
                    fix="give the model it was trained on, and its targets",
                )
            if found != wanted:
                raise CheckpointError(
                    "the adapter is of another model, or of other targets",
                    where=where,
                    why=f"{name} is {list(found) if found else 'absent'} there and {list(wanted)} in this model",
                    fix="give the model it was trained on, and its targets",
                )

    def _require_config(self, spec: AdapterSpec) -> None:
        compared = {
            "rank": (self.config.get("r"), spec.rank),
            "alpha": (self.config.get("lora_alpha"), spec.alpha),
            "name": ("dora" if self.config.get("use_dora") else "lora", spec.name),
            "rank_stabilized": (bool(self.config.get("use_rslora")), spec.rank_stabilized),
        }
        for key, (there, here) in compared.items():
            if there != here:
                raise RecipeError(
                    f"{key} differs from the adapter to start from",
                    where=f"adapter.{key}",
                    why=f"it is {here} here and {there} in {self.folder / CONFIG}",
                    fix=f"set it to {there}",
                )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        why = f"it has no {CONFIG}" if folder.is_dir() else no_folder(folder)
        raise CheckpointError("not an adapter's folder", where=str(folder), why=why) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "the adapter's config cannot be read", where=str(path), why=str(error)
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError("not a LoRA adapter", where=str(path), why=f"its peft_type is {kind}")
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise CheckpointError(
                "the adapter uses an unsupported option", where=str(path), why=f"{key} is {config[key]}"
            )
    if str(initial := config.get("init_lora_weights")).lower().startswith(_OTHER_BASE):
        raise CheckpointError(
            "PEFT changed the base of this adapter",
            where=str(path),
            why=f"init_lora_weights is {initial}",
            fix="save it with path_initial_model_for_weight_conversion, as PEFT's documentation says",
        )
    return config


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    fingerprint: str | None,
    entries: Mapping[str, str] | None = None,
) -> None:
    """Write tensors, by canonical name, and a config into a new folder. Raises OSError.

    Args:
        entries: more entries of the safetensors header; PEFT ignores them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header = {"format": "pt", **(entries or {})} | ({FINGERPRINT: fingerprint} if fingerprint else {})
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / TENSORS, metadata=header)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def config_of(
    spec: AdapterSpec, targets: Iterable[str], transposed: bool, base: str | None, task: str | None = None
) -> dict[str, Any]:
    """PEFT's config of an adapter on ``targets``: paths, or last parts of paths."""
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": transposed,
        "use_rslora": spec.rank_stabilized,
        "use_dora": spec.name == "dora",
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
