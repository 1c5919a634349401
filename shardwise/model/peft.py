"""Adapters on disk in the format of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT's names are ours after ``base_model.model.``, which is how it wraps a model. What is written is what PEFT's own
``save_pretrained`` writes of a LoRA adapter, and one thing more, in the header of the tensors, which PEFT leaves be:
a fingerprint of the frozen weights that were trained beside. An adapter says nothing of the base that it belongs to but
a name, and on another of the same shape it does harm without a word.

A folder that asks for what is not done here (weights trained beside the adapter, ranks of single layers) is refused:
read without it, it would be another adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from shardwise.core.errors import CheckpointError, RecipeError, one_line
from shardwise.core.sections import AdapterSpec
from shardwise.model.weights import WeightFiles

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FINGERPRINT = "shardwise_base"
"""The key, in the header of the tensors, of what identifies the frozen weights."""

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
"""Keys of a config whose other values ask for what is not done here, and their neutral values."""

_OTHER_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Beginnings of values of ``init_lora_weights`` with which PEFT trains beside a base that it has changed."""


class AdapterFiles(WeightFiles):
    """An adapter's folder. Raises CheckpointError, naming the file, for what is missing, damaged or of another kind."""

    def __init__(self, folder: Path) -> None:
        self.config = _read_config(folder)
        super().__init__(folder, single=TENSORS)
        self.shapes = {name.removeprefix(PREFIX): shape for name, shape in self.shapes.items()}
        self.kinds = {name.removeprefix(PREFIX): kind for name, kind in self.kinds.items()}
        self._files = {name.removeprefix(PREFIX): file for name, file in self._files.items()}

    def stored_name(self, name: str) -> str:
        return PREFIX + name

    @property
    def fingerprint(self) -> str | None:
        """What identifies the base; None where whoever wrote the adapter did not say."""
        return self.metadata(TENSORS).get(FINGERPRINT)

    def spec(self, targets: str | tuple[str, ...]) -> AdapterSpec:
        """The section of a recipe that would ask for this adapter. Raises CheckpointError for what none can ask for."""
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
        """Raise for an adapter that is not the one a recipe asks for, or not of a model with these tensors."""
        self._require_config(spec)
        where = str(self.folder / TENSORS)
        for name in sorted(self.shapes.keys() | expected.keys()):
            found, wanted = self.shapes.get(name), expected.get(name)
            if wanted is None:
                raise CheckpointError(
                    "the adapter is of another model, or of other targets",
                    where=where,
                    why=f"it has {name}, for which there is no place",
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
        said = {
            "rank": (self.config.get("r"), spec.rank),
            "alpha": (self.config.get("lora_alpha"), spec.alpha),
            "name": ("dora" if self.config.get("use_dora") else "lora", spec.name),
            "rank_stabilized": (bool(self.config.get("use_rslora")), spec.rank_stabilized),
        }
        for key, (there, here) in said.items():
            if there != here:
                raise RecipeError(
                    f"{key} is not that of the adapter to start from",
                    where=f"adapter.{key}",
                    why=f"it is {here} here and {there} in {self.folder / CONFIG}",
                    fix=f"set it to {there}",
                )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            "not an adapter's folder", where=str(folder), why=f"it has no {CONFIG}"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the adapter's config cannot be read", where=str(path), why=str(error)
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError("not a LoRA adapter", where=str(path), why=f"its peft_type is {kind}")
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise CheckpointError(
                "the adapter asks for what is not done here", where=str(path), why=f"{key} is {config[key]}"
            )
    if str(initial := config.get("init_lora_weights")).lower().startswith(_OTHER_BASE):
        raise CheckpointError(
            "the adapter is of a base that PEFT has changed",
            where=str(path),
            why=f"init_lora_weights is {initial}",
            fix="save it with path_initial_model_for_weight_conversion, as PEFT's documentation says",
        )
    return config


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], fingerprint: str | None
) -> None:
    """Write tensors, under our names, and a config into a folder, which is made. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {"format": "pt"} | ({FINGERPRINT: fingerprint} if fingerprint else {})
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / TENSORS, metadata=header)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def config_of(
    spec: AdapterSpec, targets: Iterable[str], transposed: bool, base: str | None
) -> dict[str, Any]:
    """PEFT's config of an adapter on ``targets``, paths or the last parts of paths."""
    return {
        "peft_type": "LORA",
        "task_type": None,
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
