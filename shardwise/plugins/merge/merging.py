"""Merging an adapter into a model on disk, and unmerging it: ``shardwise merge BASE ADAPTER OUT [--undo]``.

The output folder has a record for unmerging in ``merge/``: a hash of the adapter's values and scale, the dtypes of
the base, and DoRA's row norms. Unmerging is an error with another adapter, without the record, or after rounding to
16 bits, because the result would not be the base. PEFT does not check this, and a wrong adapter damages the model
silently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from shardwise.checkpoint.adapter import adapter_folder
from shardwise.checkpoint.shards import DTYPES_BY_NAME
from shardwise.core.atomic_file import require_new
from shardwise.core.errors import CheckpointError
from shardwise.core.paths import path_of
from shardwise.data import open_tokenizer
from shardwise.exporter.ends import with_ends
from shardwise.exporter.export_run import EXPORT_DTYPES, Merge, compared, tokenizer_files
from shardwise.exporter.hf_writer import Contents, ExtraFile, Written, config_in, write_model
from shardwise.model.adapted import AdaptedModel, shapes_of
from shardwise.model.expert_lora import expert_stacks
from shardwise.model.files.peft import TENSORS, AdapterFiles
from shardwise.model.files.safetensors_reader import STORED_DTYPES, WeightFiles
from shardwise.model.hf import FolderWeights, HuggingFaceModel
from shardwise.model.lora import A, linear_layers
from shardwise.model.merging import Merged, Unmerged
from shardwise.recipe.data_sections import brings_tokenizer
from shardwise.runtime.fingerprint import fingerprint_of_tensors, refuse_other_base
from shardwise.runtime.parallel.shard_slices import named_parameters, shared_names
from shardwise.runtime.quantization.as_parameter import StoredPacking
from shardwise.trainer.meter import frees_returned

RECORD_FILE, NORMS_FILE = "merge/record.json", "merge/norms.safetensors"
"""In a folder of their own, so that they are not read as weights of the model."""


@dataclass(frozen=True)
class _Pair:
    """A model on disk and an adapter for it."""

    base: HuggingFaceModel
    weights: FolderWeights
    files: AdapterFiles
    blueprint: AdaptedModel
    adapted: nn.Module

    def read(self, name: str) -> Tensor:
        return self.files.read(name) if name in self.blueprint.adapter_shapes else self.weights.read(name)

    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the model's tensors on disk."""
        names = {name for group in self.base.hf_folder().groups for name in group.sources}
        return {name: DTYPES_BY_NAME[self.weights.kind(name)] for name in sorted(names)}


@frees_returned()
def merge_adapter(base: str, adapter: Path, target: Path, dtype: str | None = None) -> tuple[Written, Merge]:
    """Merge an adapter in PEFT format into the model of a folder or Hub id. Raises ShardwiseError."""
    require_new(target)
    pair = _base_and_adapter(base, adapter)
    fingerprint = _require_base(pair)
    base_dtypes = pair.dtypes()
    dtypes = _in_dtype(base_dtypes, dtype)
    merged = Merged(pair.adapted, pair.read)

    def record() -> bytes:
        values = {
            "format": 1,
            "adapter": adapter_hash(pair.files),
            "base": fingerprint,
            "dtypes": {name: STORED_DTYPES[kind] for name, kind in base_dtypes.items()},
        }
        return json.dumps(values, indent=1).encode() + b"\n"

    extra_files: dict[str, ExtraFile] = {RECORD_FILE: record}
    if pair.blueprint.spec.name == "dora":
        # A function: the norms are known only after the weights have been read and merged.
        extra_files[NORMS_FILE] = lambda: save(
            {path: norms.contiguous() for path, norms in merged.norms.items()}
        )
    written = _write_merged(target, pair, dtypes, merged.read, extra_files)
    return written, compared(merged, (pair.blueprint, pair.read), pair.base, dtypes)


@frees_returned()
def unmerge(merged: str, adapter: Path, target: Path, dtype: str | None = None) -> Written:
    """Restore the base from a folder that ``merge_adapter`` wrote, up to fp32 rounding. Raises ShardwiseError."""
    require_new(target)
    pair = _base_and_adapter(merged, adapter)
    if pair.files.saved:
        raise CheckpointError(
            "the base cannot be restored",
            where=str(pair.files.folder),
            why=f"the adapter has trained {min(pair.files.saved)} in full, so the merged model lacks the base's",
            fix="keep the base",
        )
    folder = path_of(merged)
    record = _record_of(folder)
    if record["adapter"] != adapter_hash(pair.files):
        raise CheckpointError(
            "another adapter was merged into this model",
            where=str(pair.files.folder),
            why=f"{folder / RECORD_FILE} says {record['adapter'][:16]}, this one is {adapter_hash(pair.files)[:16]}",
            fix="give the adapter that was merged",
        )
    dtypes = pair.dtypes()
    for name in Merged(pair.adapted, pair.read).weights:
        # 16 bits round the sum of weight and update, and subtracting the update does not give the weight back.
        if dtypes[name].itemsize < 4:
            raise CheckpointError(
                "the base cannot be restored",
                where=str(folder),
                why=f"the merged weights were rounded to {STORED_DTYPES[dtypes[name]]}",
                fix="keep the base, or merge with --dtype fp32",
            )
    norms: dict[str, Tensor] = {}
    if pair.blueprint.spec.name == "dora":
        norm_files = WeightFiles((folder / NORMS_FILE).parent, single=Path(NORMS_FILE).name)
        norms = {path: norm_files.read(path) for path in norm_files.shapes}
    # The base may have had fewer bits than the merged model, which was written with --dtype fp32.
    base_dtypes = {
        name: DTYPES_BY_NAME[record["dtypes"].get(name, STORED_DTYPES[kind])] for name, kind in dtypes.items()
    }
    unmerged = Unmerged(pair.adapted, pair.read, norms)
    return _write_merged(target, pair, _in_dtype(base_dtypes, dtype), unmerged.read, {})


def _write_merged(
    target: Path,
    pair: _Pair,
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[str], Tensor],
    more: Mapping[str, ExtraFile],
) -> Written:
    layout = pair.base.hf_folder()
    config = layout.config
    floats = {kind for kind in dtypes.values() if kind.is_floating_point}
    if len(floats) == 1:  # a config has one dtype; for tensors of several it stays as it is
        config = config_in(config, floats.pop())
    extra_files: dict[str, ExtraFile] = {path.name: path for path in layout.copied}
    extra_files |= tokenizer_files(pair.base.source, required=False)
    contents = Contents(replace(layout, config=config), dtypes, read, {**extra_files, **more})
    if pair.base.objective == "causal" and brings_tokenizer(pair.base.source):
        contents = with_ends(contents, open_tokenizer(pair.base.source).ends)
    return write_model(target, contents)


def _in_dtype(dtypes: Mapping[str, torch.dtype], dtype: str | None) -> dict[str, torch.dtype]:
    if dtype is None:
        return dict(dtypes)
    new = EXPORT_DTYPES[dtype]
    return {name: new if kind.is_floating_point else kind for name, kind in dtypes.items()}


# ---- checks of base and adapter --------------------------------------------------------------------------------


def _base_and_adapter(source: str, adapter: Path) -> _Pair:
    """Raises CheckpointError for an adapter that is damaged or of another model."""
    files = AdapterFiles(adapter_folder(adapter))
    base = HuggingFaceModel(source, 1, objective=None)
    with torch.device("meta"):
        model = base.build()
    _require_targets(files, model)
    spec = files.spec(tuple(sorted(files.layers)))
    blueprint = _Anywhere(base, spec)
    files.require(spec, blueprint.adapter_shapes, shapes_of(model))
    with torch.device("meta"):
        adapted = blueprint.build()
    return _Pair(base, base.weights(), files, blueprint, adapted)


class _Anywhere(AdaptedModel):
    """An adapted model whose targets may be outside the blocks, as in PEFT."""

    def targetable(self, model: nn.Module) -> list[nn.Module]:
        return []

    def packings(self) -> Mapping[str, StoredPacking]:
        """None: the weights of a quantized base are read dequantized."""
        return {}


def _require_targets(files: AdapterFiles, model: nn.Module) -> None:
    """Raise CheckpointError if the adapter has layers that the model lacks, or lacks layers that its config names."""
    where = str(files.folder / TENSORS)
    layers = [*linear_layers(model, []), *expert_stacks(model, [])]
    if not files.layers:
        raise CheckpointError("the adapter is empty", where=where, why=f"it has no {A}.weight")
    tied = {name.removesuffix(".weight") for name in shared_names(model)}
    for path in sorted(files.layers - set(layers)):
        if path in tied:
            raise CheckpointError(
                "the adapter cannot be merged",
                where=where,
                why=f"{path} shares its weight with the embedding",
                fix="serve it on its base: --adapter",
            )
        raise CheckpointError(
            "the adapter is of another model",
            where=where,
            why=f"it has {path}.{A}.weight, and this model has no linear layer {path}",
            fix="give the model it was trained on",
        )
    for path in files.lacks(layers):
        raise CheckpointError(
            "the adapter is incomplete",
            where=where,
            why=f"its config names {path}, and it has no {path}.{A}.weight",
            fix="restore the file from a copy",
        )


def _require_base(pair: _Pair) -> str:
    """The fingerprint of the base. Raises CheckpointError if the adapter was trained on another base."""
    names = [name for name, parameter in named_parameters(pair.adapted) if not parameter.requires_grad]
    pair.files.require_copies((name, pair.weights.read(name)) for name in sorted(pair.files.copies))
    fingerprint = fingerprint_of_tensors((name, pair.weights.read(name)) for name in names)
    refuse_other_base(pair.files.fingerprint, fingerprint, str(pair.files.folder / TENSORS))
    return fingerprint


def adapter_hash(files: AdapterFiles) -> str:
    """A hash of an adapter's values and scale."""
    spec = files.spec("all")
    scales = " ".join(f"{spec.scale(path)}" for path in sorted(files.layers))
    digest = hashlib.blake2b(f"{spec.name} {scales}".encode(), digest_size=16)
    for name in sorted(files.shapes):
        # Name, dtype and shape too: tensors with other borders may have the same bytes in a row.
        digest.update(f" {name} {files.kinds[name]} {list(files.shapes[name])} ".encode())
        # As bytes, since numpy has no bf16.
        digest.update(files.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _record_of(folder: Path) -> dict[str, Any]:
    path = folder / RECORD_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if (
            record["format"] == 1
            and isinstance(record["adapter"], str)
            and isinstance(record["dtypes"], dict)
        ):
            return dict(record)
    except FileNotFoundError as error:
        raise CheckpointError(
            "this model has no record of a merge",
            where=str(folder),
            why=f"it has no {RECORD_FILE}",
            fix="give a folder that shardwise merge wrote",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "the record of a merge cannot be read", where=str(path), why=str(error)
        ) from error
    raise CheckpointError(
        "the record of a merge cannot be read", where=str(path), why="it has another format"
    )
