"""Adapter folders in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

The files equal those of PEFT's ``save_pretrained`` for a LoRA adapter, plus a header entry that PEFT ignores: a
fingerprint of the frozen weights. PEFT records only the base's name, and an adapter on another base of the same shape
silently does harm.

Ranks and alphas of single layers, and modules that are trained in full (``modules_to_save``), are read and written.
Where an output layer has an adapter, PEFT also saves the base's own weight of it. Such a copy must equal the base's:
else the base was changed, and is not the one that is given here.

An adapter with unsupported parts is refused, with their name: without them it would be another adapter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.core.errors import CheckpointError, RecipeError, one_line
from shardwise.core.paths import no_folder
from shardwise.model.expert_lora import EXPERT_A, expert_adapter
from shardwise.model.files.peft_experts import (
    are_known,
    layout_here,
    layout_there,
    names_here,
    names_there,
    shape_here,
    targets_parameter,
)
from shardwise.model.files.safetensors_reader import WeightFiles
from shardwise.model.lora import A, is_adapter
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.parallel.shard_slices import local_part, local_slices

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
"""PEFT's task type by objective; it has none for masked language models."""
FINGERPRINT = "shardwise_base"
"""Header key of the fingerprint of the frozen weights."""

_READ = (
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout",
    "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "task_type", "use_dora",
    "use_rslora",
)  # fmt: skip
"""Config keys that are read, or that say nothing about the adapter's function."""
_INERT = ("loftq_config", "eva_config", "corda_config", "lora_ga_config")
"""Of the start of training; ``init_lora_weights`` says whether the base was changed."""
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
}
"""Unsupported keys whose neutral values are not empty or false, and others to name."""

_OTHER_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Prefixes of ``init_lora_weights`` values with which PEFT changes the base before it trains."""

_COPY = ".base_layer."
"""In the names of the base's own tensors of adapted layers."""


class AdapterFiles(WeightFiles):
    """An adapter's folder. Raises CheckpointError, naming the file, if it is missing, damaged or of another kind.

    Attributes:
        copies: names of tensors that are the base's own.
    """

    def __init__(self, folder: Path) -> None:
        self.config = _read_config(folder)
        super().__init__(folder, single=TENSORS)
        plain = {stored.removeprefix(PREFIX): stored for stored in self.shapes}
        described = self.spec("all")  # for ranks alone, which do not depend on the targets
        shapes = {name: self.shapes[stored] for name, stored in plain.items()}
        experts = names_here(shapes, self.config, lambda path: described.strength(path)[0])
        self._stored = {experts.get(name, name.replace(_COPY, ".")): stored for name, stored in plain.items()}
        self.shapes = {name: self.shapes[stored] for name, stored in self._stored.items()}
        self.kinds = {name: self.kinds[stored] for name, stored in self._stored.items()}
        self._files = {name: self._files[stored] for name, stored in self._stored.items()}
        for name in self.shapes:
            self.require_floating(name)
            if ".lora_embedding_" in name:
                raise CheckpointError(
                    "the adapter adapts an embedding",
                    where=str(folder / TENSORS),
                    why=f"it has {name}, and adapters are on linear layers here",
                    fix="train the embedding in full instead (modules_to_save), or merge it with PEFT",
                )
        self.copies = {name for name in self.shapes if not is_adapter(name) and not self._is_saved(name)}
        for name in experts.values():
            if (adapter := expert_adapter(name)) is not None:
                self.shapes[name] = shape_here(name, self.shapes[name], described.strength(adapter[0])[0])
        for name, path in sorted(self._inputs()):
            shape = self.shapes[name]
            rank, _ = described.strength(path)
            if shape[-2:-1] != (rank,):  # A [r, i], or [E, r, i]
                raise self._incomplete(f"{name} is {list(shape)}, and {CONFIG} gives it the rank {rank}")

    def stored_name(self, name: str) -> str:
        return self._stored[name]

    def _is_saved(self, name: str) -> bool:
        """Whether a tensor belongs to a module to save, by the end of the module's path."""
        ends = tuple(self.config.get("modules_to_save") or ())
        parts = name.split(".")
        return any(".".join(parts[:count]).endswith(ends) for count in range(1, len(parts)))

    def _inputs(self) -> Iterator[tuple[str, str]]:
        """(name, path of the layer or of the stack of experts) of every A."""
        for name in self.shapes:
            if (stack := expert_adapter(name)) is not None:
                if stack[1] == EXPERT_A:
                    yield name, stack[0]
            elif name.endswith(f".{A}.weight"):
                yield name, name.removesuffix(f".{A}.weight")

    @property
    def layers(self) -> set[str]:
        """Paths of the linear layers, and of the stacks of experts, with an adapter."""
        return {path for _, path in self._inputs()}

    def read(self, name: str) -> Tensor:
        stored = super().read(name)
        return layout_here(name, stored, self.shapes[name]) if expert_adapter(name) else stored

    def _matched_pieces(self, tensor: Tensor, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of experts' adapters as one piece, because the file has another layout."""
        if expert_adapter(name) is None:
            yield from super()._matched_pieces(tensor, name)
        elif (part := local_part(tensor)).numel():
            yield part, self.read(name)[local_slices(tensor)]

    @property
    def saved(self) -> set[str]:
        """Names of the tensors of modules that are trained in full."""
        return {name for name in self.shapes.keys() - self.copies if not is_adapter(name)}

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the base; None if the file has none."""
        return self.metadata(TENSORS).get(FINGERPRINT)

    def spec(self, targets: str | tuple[str, ...]) -> AdapterSpec:
        """The recipe section that describes this adapter. Raises CheckpointError if no recipe can."""
        config = self.config
        try:
            return AdapterSpec(
                name="dora" if config.get("use_dora") else "lora",
                rank=config["r"],
                alpha=float(config["lora_alpha"]),
                rank_pattern=config.get("rank_pattern") or {},
                alpha_pattern={key: float(v) for key, v in (config.get("alpha_pattern") or {}).items()},
                rank_stabilized=bool(config.get("use_rslora")),
                lora_bias=bool(config.get("lora_bias")),
                modules_to_save=tuple(config.get("modules_to_save") or ()),
                targets=targets,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                "the adapter's config cannot be read",
                where=str(self.folder / CONFIG),
                why=one_line(str(error)),
            ) from error

    def require(
        self,
        spec: AdapterSpec,
        expected: Mapping[str, tuple[int, ...]],
        base: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Raise if the adapter differs from the recipe's, or does not fit a model.

        Args:
            expected: shapes of the model's trained tensors. base: of all tensors of its base, if they are known.
        """
        self._require_config(spec)
        if base is not None:
            self.require_base(base)
        for name in sorted((self.shapes.keys() - self.copies) | expected.keys()):
            stored_shape = self.shapes.get(name)
            expected_shape = expected.get(name)
            if stored_shape == expected_shape:
                continue
            why = f"it has {name}, which this model lacks"
            if expected_shape is not None:
                there = list(stored_shape) if stored_shape else "absent"
                why = f"{name} is {there} there and {list(expected_shape)} in this model"
            raise CheckpointError(
                "the adapter is of another model, or of other targets",
                where=str(self.folder / TENSORS),
                why=why,
                fix="give the model it was trained on, and its targets",
            )

    def require_base(self, base: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError if modules to save are missing, or the base's own tensors have other shapes."""
        for name in sorted(base):
            if self._is_saved(name) and name not in self.shapes:
                raise self._incomplete(f"its config has {name} trained in full, and it has no such tensor")
        for name in sorted(self.copies):
            if name not in base:
                raise self._other_base(f"it has {name}, which this model lacks, and which is not trained")
            if self.shapes[name] != base[name]:
                here = list(base[name])
                raise self._other_base(f"{name} is {list(self.shapes[name])} there, and {here} here")

    def _incomplete(self, why: str) -> CheckpointError:
        where = str(self.folder / TENSORS)
        return CheckpointError("the adapter is incomplete", where=where, why=why, fix="save or copy it again")

    def require_copies(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise CheckpointError if the base's own tensors in the file are not those of this base.

        Args:
            tensors: of the base by name, plain or DTensors, perhaps of a stage of it. Each is compared in the narrower
                of the two dtypes.
        """
        for name, tensor in tensors:
            if name not in self.copies:
                continue
            if tuple(tensor.shape) != self.shapes[name] or not self._is_copy(tensor, name):
                raise self._other_base(f"its {name} is not the base's, which was resized or trained")

    @torch.no_grad()
    def _is_copy(self, tensor: Tensor, name: str) -> bool:
        for part, value in self._matched_pieces(tensor, name):
            narrow = min(part.dtype, value.dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(part.to(narrow), value.to(part.device, narrow)):
                return False
        return True

    def _other_base(self, why: str) -> CheckpointError:
        fix = "give the base it was trained on, saved with its changes"
        return CheckpointError(
            "the adapter is for another base", where=str(self.folder / TENSORS), why=why, fix=fix
        )

    def _require_config(self, spec: AdapterSpec) -> None:
        there = self.spec(spec.targets)
        for key in ("name", "rank_stabilized", "lora_bias"):
            self._require_same(key, getattr(there, key), getattr(spec, key))
        layers = sorted(self.layers)
        for index, key in enumerate(("rank", "alpha")):
            for path in layers:
                if there.strength(path)[index] != spec.strength(path)[index]:
                    pattern = getattr(there, f"{key}_pattern") or getattr(spec, f"{key}_pattern")
                    named = f"{key} of {path}" if pattern else key
                    self._require_same(named, there.strength(path)[index], spec.strength(path)[index])

    def _require_same(self, key: str, there: object, here: object) -> None:
        if there != here:
            raise RecipeError(
                f"{key} differs from the adapter to start from",
                where=f"adapter.{key.partition(' ')[0]}",
                why=f"it is {here} here and {there} in {self.folder / CONFIG}",
                fix=f"set it to {there}" + (", by a pattern for this layer" if " " in key else ""),
            )

    def lacks(self, paths: Iterable[str]) -> Iterator[str]:
        """Those of the model's linear layers and stacks of experts that the config targets and the file lacks."""
        for path in paths:
            named = any(targets_parameter(self.config, name) for name in (path, f"{path}.weight"))
            if (named or targeted_by(self.config, path)) and path not in self.layers:
                yield path


def targeted_by(config: Mapping[str, Any], path: str) -> bool:
    """Whether PEFT adapts the layer at ``path``, as its ``check_target_module_exists`` says."""
    targets = config.get("target_modules") or ()
    excluded = config.get("exclude_modules") or ()
    if targets == "all-linear" or _matches_names(excluded, path):
        return False  # all-linear depends on the classes of the model
    if any(re.match(rf"(^|.*\.){name}($|\..*)", path) for name in config.get("modules_to_save") or ()):
        return False
    if not _matches_names(targets, path):
        return False
    numbers = config.get("layers_to_transform")
    if isinstance(targets, str) or numbers in (None, []):
        return True
    patterns = config.get("layers_pattern") or []
    kinds = [patterns] if isinstance(patterns, str) else patterns
    forms = [rf"(?:^|.*?\.){kind}\.(\d+)\." for kind in kinds] or [r".*?\.[^.]*\.(\d+)\."]
    match = next((matched for form in forms if (matched := re.match(form, path))), None)
    return match is not None and int(match[1]) in ([numbers] if isinstance(numbers, int) else numbers)


def _matches_names(names: str | Collection[str], path: str) -> bool:
    """Whether a regular expression matches a path, or the path ends with one of several names."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


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
    for key, value in config.items():
        if _asks_for_more(key, value) or (key == "target_parameters" and not are_known(value or ())):
            raise CheckpointError(
                "the adapter uses an unsupported option", where=str(path), why=f"{key} is {value}"
            )
    if str(initial := config.get("init_lora_weights")).lower().startswith(_OTHER_BASE):
        raise CheckpointError(
            "PEFT changed the base of this adapter",
            where=str(path),
            why=f"init_lora_weights is {initial}",
            fix="save it with path_initial_model_for_weight_conversion, as PEFT's documentation says",
        )
    return config


def _asks_for_more(key: str, value: object) -> bool:
    """Whether a key asks for something that is not read here: one of newer versions of PEFT, too, if it is on."""
    if key in _READ or key in _INERT:
        return False
    if key in _UNSUPPORTED:
        return value not in _UNSUPPORTED[key]
    return value is True or (isinstance(value, dict | list) and bool(value))


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
    experts = names_there(tensors)
    stored = {experts.get(n, n): layout_there(n, t) if n in experts else t for n, t in tensors.items()}
    named = {PREFIX + name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(named, folder / TENSORS, metadata=header)
    text = json.dumps(dict(sorted(config.items())), indent=2)  # the first pattern that matches counts
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def adapter_config(
    spec: AdapterSpec,
    targets: Iterable[str],
    stacks: Collection[str],
    transposed: bool,
    base: str | None,
    task: str | None = None,
) -> dict[str, Any]:
    """PEFT's config of an adapter on the layers ``targets`` and the experts' ``stacks``: paths, or ends of paths."""
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": _as_whole_number(spec.alpha),
        # PEFT refuses dropout for parameters, and only training asks for it.
        "lora_dropout": 0.0 if stacks else spec.dropout,
        "target_modules": sorted(targets),
        "target_parameters": sorted(stacks) or None,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "use_rslora": spec.rank_stabilized,
        "use_dora": spec.name == "dora",
        "init_lora_weights": True,
        "inference_mode": True,
        "lora_bias": spec.lora_bias,
        "modules_to_save": list(spec.modules_to_save) or None,
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": {key: _as_whole_number(alpha) for key, alpha in spec.alpha_pattern.items()},
    }


def _as_whole_number(value: float) -> int | float:
    return int(value) if value.is_integer() else value
