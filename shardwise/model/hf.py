"""Any causal language model of transformers, from a folder or a hub id.

The class comes from transformers, the rest does not: the model is built on the meta device, its blocks are
what its class says must not be split, and weights are read from safetensors by slice, so a rank never holds
more than its part. ``from_pretrained`` is not used, because it loads before techniques can divide.

Three things differ from transformers' defaults, each because a step must be the same function on every rank,
real or fake. Dropout is zero: its masks would depend on the sharding. The pad token is forgotten: batches are
packed, and looking for it in the ids waits for the device. And packed sequences are not guessed from the
position ids, which waits for the device too: of packed documents the model is given the mask itself, and a model that
would not keep to it is refused (``unpackable``).

Refused: ``trust_remote_code``, pickled weights, and quantized weights, which cannot be trained.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import Batch, Blueprint, LossSum, SampleShapes, language_loss, token_shapes
from shardwise.model.conversion import fill_from_files, restore_buffers
from shardwise.model.decoder import document_mask, same_document
from shardwise.model.hf_layout import FolderWeights, groups_of
from shardwise.model.hf_split import tensor_plan_of
from shardwise.model.layout import Layout
from shardwise.model.parts import Part, renumbered
from shardwise.model.slices import shared_names
from shardwise.model.split import TensorPlan
from shardwise.model.weights import WeightFiles

_NEEDS_CODE = "auto_map"
_CUTTABLE = {"embed_tokens", "layers", "norm"}
"""The modules of a decoder whose plan for pipelines is the one that ``part`` knows."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Settings of attention that sees a part of the sequence."""
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers in which tokens meet through attention alone."""
_ROPE_BY_LENGTH = ("'dynamic'", "'longrope'")
GENERATION = "generation_config.json"
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


class HuggingFaceModel(Blueprint):
    """A causal language model whose ``config.json`` transformers knows.

    Args:
        source: a folder, or a hub id such as ``org/name``.
        sequence_length: what it will be trained on.

    Raises RecipeError when there is no such model, it asks for custom code, is quantized or is too short.
    """

    def __init__(self, source: str, sequence_length: int) -> None:
        self.source, self.sequence_length = source, sequence_length
        self.config = _load_config(source)
        text = self.config.get_text_config()
        self.name, self.origin = Path(source).name or source, source
        self.vocab = text.vocab_size
        self.trained_in = self.config.dtype
        plan = getattr(text, "base_model_pp_plan", None) or {}
        self.width = text.hidden_size if plan.keys() == _CUTTABLE else None
        context = getattr(text, "max_position_embeddings", None)
        if context is not None and sequence_length > context:
            raise RecipeError(
                "the sequences are longer than the model was trained for",
                where="data.sequence_length",
                why=f"{sequence_length} tokens against max_position_embeddings {context}",
                fix=f"use at most {context}",
            )

    @cached_property
    def _reference(self) -> nn.Module:
        """The whole model on the meta device: what the weight files must contain."""
        with torch.device("meta"):
            return self.build()

    @cached_property
    def depth(self) -> int | None:  # type: ignore[override]
        """Number of blocks if all are alike, else None: then a shallow model says nothing of the deep one."""
        layers = self.config.get_text_config().num_hidden_layers
        units = self.units(self._reference)
        alike = len({_signature(unit) for unit in units}) == 1
        uniform = all(len(set(map(str, values))) == 1 for values in _per_layer(self.config).values())
        return layers if alike and uniform and len(units) == layers else None

    def build(self, depth: int | None = None) -> nn.Module:
        transformers = _transformers()
        config = copy.deepcopy(self.config)
        if depth is not None:
            text = config.get_text_config()
            per_layer = _per_layer(config)
            text.num_hidden_layers = depth
            for key, values in per_layer.items():
                setattr(text, key, values[:depth])
        try:
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
        except (ValueError, ImportError) as error:
            raise RecipeError(
                "not a causal language model", where=f"model.hf: {self.source}", why=str(error)
            ) from error

    def part(self, part: Part) -> nn.Module:
        """By the class's own plan for pipelines: what is left out is an identity, or is never called."""
        if self.width is None or self.depth is None:
            return super().part(part)
        model: Any = self.build(len(part.blocks))
        base, tied = model.base_model, bool(shared_names(model))
        if not _starts_with_its_blocks(base, self.width):
            return super().part(part)
        renumbered(base.layers, part.blocks.start)
        if not part.first and not (part.last and tied):
            base.embed_tokens = nn.Identity()
        if not part.last:
            base.norm = nn.Identity()
            model.set_output_embeddings(nn.Identity())
        return cast("nn.Module", model)

    def units(self, model: nn.Module) -> list[nn.Module]:
        names = set(getattr(model, "_no_split_modules", None) or ())
        # Wrapping derives a new class from the block's own, hence the search through its bases.
        blocks = {
            path: module
            for path, module in model.named_modules()
            if any(base.__name__ in names for base in type(module).__mro__)
        }
        return [module for path, module in blocks.items() if not _inside(path, blocks)]

    def head(self, model: nn.Module) -> list[nn.Module]:
        """What owns parameters and is registered after the last block: a norm and the output layer, as a rule."""
        inside = {module for unit in self.units(model) for module in unit.modules()}
        owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
        last = max((i for i, module in enumerate(owners) if module in inside), default=len(owners))
        before, after = owners[: last + 1], owners[last + 1 :]
        return [] if _parameters(before) & _parameters(after) else after

    def output(self, model: nn.Module) -> nn.Linear | None:
        layer = cast("Any", model).get_output_embeddings()
        return layer if type(layer) is nn.Linear else None  # a subclass may not call its own forward

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        return tensor_plan_of(model, self.config)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return language_loss(self, model, batch)

    def logits(self, model: nn.Module, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        name = "inputs_embeds" if input_ids.is_floating_point() else "input_ids"
        given = {}
        if positions is not None and positions.dim() == 1:
            given = {"position_ids": positions.unsqueeze(0)}
        elif positions is not None:
            given = {"position_ids": positions, "attention_mask": _mask(model, positions)}
        with _no_guessing():
            return cast("Tensor", model(**{name: input_ids}, use_cache=False, **given).logits)

    def unpackable(self, model: nn.Module) -> str:
        """A mask of four dimensions is taken as it is by models that make theirs with ``create_causal_mask``."""
        text, kind = self.config.get_text_config(), type(model).__name__
        if not hasattr(sys.modules[type(model).__module__], "create_causal_mask"):
            return f"{kind} makes its mask in a way of its own"
        if getattr(text, "alibi", False):
            return f"{kind} tells positions by the distance in the sequence, which packing changes"
        if other := set(getattr(text, "layer_types", None) or ()) - _ATTENDING:
            return f"it has layers of the type {min(other)}"
        return self.indivisible(model)

    def indivisible(self, model: nn.Module) -> str:
        text = self.config.get_text_config()
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return f"{type(model).__name__} takes no position_ids"
        for key in _WINDOWS:
            window = getattr(text, key, None)
            if isinstance(window, int) and window < self.sequence_length:
                return f"its attention sees no more than {key} = {window} tokens back"
        if any(kind in str(getattr(text, "rope_parameters", None)) for kind in _ROPE_BY_LENGTH):
            return "its rotary angles depend on the longest position that a rank sees"
        return ""

    def weights(self) -> FolderWeights:
        """What is on disk, under the names of the model. Raises CheckpointError."""
        return FolderWeights(self._reference, WeightFiles(folder_of(self.source, _WEIGHTS)))

    def restore(self, model: nn.Module) -> None:
        restore_buffers(model)

    def layout(self) -> Layout:
        """As the source has it; the config is the source's own, not the one that is trained with."""
        beside = folder_of(self.source, ["config.json", GENERATION])
        config = json.loads((beside / "config.json").read_text(encoding="utf-8"))
        files = WeightFiles(folder_of(self.source, _WEIGHTS))
        groups = list(groups_of(self._reference, files))
        copied = [beside / GENERATION] if (beside / GENERATION).is_file() else []
        return Layout(config, groups, copied)

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        return token_shapes(sequence_length)

    def fill(self, model: nn.Module, seed: int) -> None:
        """Read the weights. ``seed`` changes nothing: every value is on disk.

        Raises CheckpointError, naming the tensor, when one is missing, has another shape, or has no place.
        """
        folder = folder_of(self.source, _WEIGHTS)
        restore_buffers(model)
        fill_from_files(model, self._reference, folder)


def _parameters(modules: list[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def _starts_with_its_blocks(base: Any, width: int) -> bool:
    """Whether embeddings reach the first block as they are; some models scale them first, at every call.

    ``base`` lies on the meta device.
    """
    layers, norm = base.layers, base.norm
    base.layers, base.norm = nn.ModuleList(), nn.Identity()
    try:
        given = torch.empty((1, 1, width), device="meta")
        with _no_guessing():
            result = base(inputs_embeds=given, use_cache=False).last_hidden_state
        return result is given
    finally:
        base.layers, base.norm = layers, norm


def _inside(path: str, blocks: dict[str, nn.Module]) -> bool:
    parents = path.split(".")[:-1]
    return any(".".join(parents[:count]) in blocks for count in range(1, len(parents) + 1))


def _signature(unit: nn.Module) -> tuple[str, ...]:
    shapes = [f"{name}{tuple(p.shape)}" for name, p in unit.named_parameters()]
    return (type(unit).__name__, *shapes)


def _mask(model: nn.Module, positions: Tensor) -> Tensor:
    """Which tokens see which, as the model's attention takes it: eager attention adds it to the scores."""
    kernel = cast("Any", model).config._attn_implementation
    return same_document(positions) if kernel == "sdpa" else document_mask(positions, torch.float32)


def _per_layer(config: Any) -> dict[str, list[Any]]:
    """The config's lists of one value per layer, such as ``layer_types``."""
    text = config.get_text_config()
    layers = text.num_hidden_layers
    return {
        k: v
        for k, v in text.to_dict().items()
        if isinstance(v, list) and len(v) == layers and not k.endswith(("_token_id", "architectures"))
    }


@contextmanager
def _no_guessing() -> Iterator[None]:
    """Keep transformers from looking for packed sequences in the position ids, which there are none of."""
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise RecipeError(
            "transformers is not installed", where="model.hf", fix="pip install 'shardwise[hf]'"
        ) from error
    transformers.logging.set_verbosity_error()
    return transformers


def _load_config(source: str) -> Any:
    where = f"model.hf: {source}"
    path = folder_of(source, ["config.json"]) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecipeError("not a model folder", where=where, why="it has no config.json") from error
    except (OSError, ValueError) as error:
        raise RecipeError("config.json cannot be read", where=where, why=str(error)) from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise RecipeError("config.json names no model_type", where=where)
    if _NEEDS_CODE in raw:
        raise RecipeError(
            "the model asks to run its own code",
            where=where,
            why=f"config.json has {_NEEDS_CODE}",
            fix="use a model that transformers itself knows",
        )
    if raw.get("quantization_config"):
        raise RecipeError("quantized weights cannot be trained", where=where, fix="use the unquantized model")
    try:
        config = _transformers().AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    except Exception as error:  # any validation of any model's config
        raise RecipeError("config.json is not valid", where=where, why=str(error)) from error
    _make_deterministic(config)
    return config


def _make_deterministic(config: Any) -> None:
    """No dropout, no cache, no pad token (see the module's docstring)."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
        part.use_cache = False
        part.pad_token_id = None


def folder_of(source: str, files: list[str]) -> Path:
    """The folder itself, or where the hub's ``files`` lie once downloaded."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    where = f"model.hf: {source}"
    if folder.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise RecipeError("no such folder", where=where)
    _transformers()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=files))
    except Exception as error:  # the network, the name, the licence: the reason is in the text
        raise RecipeError(
            "the model cannot be downloaded",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix="check the name and the network, or give a local folder",
        ) from error
