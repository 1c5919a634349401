"""A language model of transformers, from a folder or a hub id: causal, masked or encoder-decoder (`objective`).

transformers provides the class. The model is built on the meta device, its blocks come from ``_no_split_modules``, and
weights are read from safetensors by slice. ``from_pretrained`` is not used: it loads before techniques can shard.

Three defaults of transformers are changed. Dropout is off unless ``model.dropout`` asks for it, and so is the router's
noise: their draws depend on the sharding. ``departures`` says so where config.json asks for them. A causal model's pad
token and the detection of packed sequences are off, since both wait for the device; packed documents get an explicit
mask, and a model that would ignore it is refused.

Quantized weights (files/quantized_files.py) are dequantized when they are read, and can be a frozen base in their
stored form (``packings``).

Refused: ``trust_remote_code`` and pickled weights.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.hub_folder import folder_of
from shardwise.model.blueprint import Batch, Blueprint, LossSum, SampleShapes, token_shapes
from shardwise.model.files.folder_layout import HFFolder
from shardwise.model.files.quantized_files import QuantizedFiles, formats_of
from shardwise.model.files.safetensors_reader import STORED_DTYPES, WeightFiles, weights_folder
from shardwise.model.hf.attention import document_masks, takes_windows
from shardwise.model.hf.calls import no_guessing
from shardwise.model.hf.conversion import excuse_non_text, fill_from_files, match_names, restore_buffers
from shardwise.model.hf.experts import adds_router_loss, router_coefficient, router_losses
from shardwise.model.hf.folder_weights import FolderWeights, stored_groups, untrained_groups
from shardwise.model.hf.objective import build_for, decoder_inputs, require_objective, stored_objective
from shardwise.model.hf.source import load_config, non_text_configs
from shardwise.model.hf.stages import BASE_PARTS, cut, cut_obstacle, ends, hidden_states, per_layer
from shardwise.model.hf.tensor_plan import tensor_plan_of
from shardwise.model.lora import linear_layers
from shardwise.model.narrow import narrowed
from shardwise.model.repetition import Repetition, repetition_of
from shardwise.model.stage import Stage
from shardwise.runtime.language_loss import language_loss, with_auxiliary
from shardwise.runtime.parallel.shard_slices import shared_names
from shardwise.runtime.parallel.tensor import TensorPlan
from shardwise.runtime.quantization.as_parameter import StoredPacking
from shardwise.runtime.quantization.weights import QuantizedWeight

_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Config keys of attention over a part of the sequence."""
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types that mix tokens by attention alone."""
_ROPE_BY_LENGTH = ("'dynamic'", "'longrope'")
_COPIED = ("generation_config.json", "*processor_config.json")


class HuggingFaceModel(Blueprint):
    """A language model whose ``config.json`` transformers knows.

    Args:
        source: a folder, or a hub id such as ``org/name``.
        sequence_length: training sequence length.
        completion_length: that of the decoder under seq2seq.
        objective: causal, masked or seq2seq; None for the one of the class that saved the folder.
        dropout: train with the dropout that config.json asks for.

    Raises RecipeError if it is missing, needs custom code, is quantized in a way that is not read, or has a shorter
    context.
    """

    objective: str

    def __init__(
        self,
        source: str,
        sequence_length: int,
        objective: str | None = "causal",
        completion_length: int = 1,
        dropout: bool = False,
    ) -> None:
        self.source = source
        self.sequence_length = sequence_length
        self.completion_length = completion_length
        opened = load_config(source, objective, dropout)
        self.config = opened.config
        self._quantization = opened.quantization
        self._departures = opened.departures
        self.quantized = bool(self._quantization)
        self.objective = objective or stored_objective(self.config)
        text = self.config.get_text_config()
        self.name = Path(source).name or source
        self.origin = source
        self.vocab = text.vocab_size
        self.trained_in = self.config.dtype
        plan = getattr(text, "base_model_pp_plan", None) or {}
        # Without this plan it is not known what passes between blocks, and the model is not cut.
        self.width = text.hidden_size if plan.keys() == BASE_PARTS else None
        context = getattr(text, "max_position_embeddings", None)  # some configs have -1
        self.context = context if context and context > 0 else None
        if self.context is not None and sequence_length > self.context:
            raise RecipeError(
                "the sequences are longer than the model's context",
                where="data.sequence_length",
                why=f"{sequence_length} tokens exceed max_position_embeddings {context}",
                fix=f"use at most {context}",
            )

    def require_objective(self) -> None:
        """Raise RecipeError if the model's attention does not fit the objective."""
        require_objective(self.objective, self.config, self.source)

    @cached_property
    def _reference(self) -> nn.Module:
        """The whole model on the meta device; the weight files must match it."""
        with torch.device("meta"):
            model = self.build()
        if self.objective == "causal" and non_text_configs(self.config):
            excuse_non_text(model)
        return model

    @property
    def depth(self) -> int | None:  # type: ignore[override]
        """Number of blocks if all are identical, else None."""
        blocks = self.repetition
        if blocks is None or blocks.period != 1 or blocks.first != 0:
            return None
        return blocks.blocks

    def departures(self, compute: str) -> tuple[str, ...]:
        notes = list(self._departures)
        if self._quantization:
            method = self._quantization["quant_method"]
            notes.append(f"config.json says {method}: weights that are trained or exported are dequantized")
        if self.objective == "causal" and (parts := non_text_configs(self.config)):
            notes.append(
                f"only the language model is trained; exports copy what {', '.join(parts)} describes"
            )
        return (*notes, *narrowed(self._reference, compute))

    @property
    def config_text(self) -> str:  # type: ignore[override]
        return str(self.config.to_json_string())

    def build(self, depth: int | None = None) -> nn.Module:
        return build_for(self.objective, self.shallow_config(depth), self.source)

    def shallow_config(self, depth: int | None = None) -> Any:
        """A copy of the config, with another number of blocks."""
        config = copy.deepcopy(self.config)
        if depth is not None:
            text = config.get_text_config()
            lists = per_layer(config)  # before the number changes: it tells which lists are per layer
            text.num_hidden_layers = depth
            for key, values in lists.items():
                setattr(text, key, values[:depth])
        return config

    @cached_property
    def block_kinds(self) -> tuple[object, ...] | None:  # type: ignore[override]
        """Shapes and config values of every block, if the model can be cut between them."""
        if self.width is None:
            return None
        return self._kinds

    @cached_property
    def _kinds(self) -> tuple[object, ...] | None:
        """Shapes and config values of every block; None if the config has values for other layers than these."""
        values = zip(*per_layer(self.config).values(), strict=True)
        blocks = self.blocks(self._reference)
        rows = list(values) or [()] * len(blocks)
        if len(rows) != len(blocks):
            return None
        return tuple((_block_signature(block), str(row)) for block, row in zip(blocks, rows, strict=True))

    @cached_property
    def repetition(self) -> Repetition | None:
        layers = self.config.get_text_config().num_hidden_layers
        if self._kinds is None or len(self._kinds) != layers:
            return None
        return repetition_of(self._kinds)

    def stage_obstacle(self) -> str:
        return self._obstacle or super().stage_obstacle()

    def compile_obstacle(self) -> str:
        recorded = (
            "its router's auxiliary loss reads tensors from within the blocks, where a compiled one has none"
        )
        return recorded if adds_router_loss(self.config) else ""

    @cached_property
    def _obstacle(self) -> str:
        if adds_router_loss(self.config):
            return "its router's auxiliary loss is one of all blocks together"
        if self.width is None or self.block_kinds is None:
            return f"transformers has no plan of embedding, blocks and norm for {self.config.model_type}"
        with torch.device("meta"):
            return cut_obstacle(self.build(), self.width)

    def stage(self, stage: Stage) -> nn.Module:
        """Cut the model by its class's ``base_model_pp_plan``: a shorter model may scale its blocks otherwise."""
        return super().stage(stage) if self._obstacle else cut(self.build(), stage)

    def tied(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shared_names(self._reference).values()))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        names = set(getattr(model, "_no_split_modules", None) or ())
        embedding = cast("Any", model).get_input_embeddings()  # BERT lists its embeddings too
        # FSDP2 subclasses the block's class, so search the base classes too.
        blocks = {
            path: module
            for path, module in model.named_modules()
            if any(base.__name__ in names for base in type(module).__mro__)
            and embedding not in module.modules()
        }
        return [module for path, module in blocks.items() if not _inside(path, blocks)]

    def head(self, model: nn.Module) -> list[nn.Module]:
        """The modules with parameters that are registered after the last block: usually a norm and the output layer."""
        inside = {module for block in self.blocks(model) for module in block.modules()}
        owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
        last = max((i for i, module in enumerate(owners) if module in inside), default=len(owners))
        before, after = owners[: last + 1], owners[last + 1 :]
        # FSDP2 groups root modules only; an adapter's layers are in the output layer.
        nested = {inner for module in after for inner in module.modules() if inner is not module}
        if _parameters(before) & _parameters(after):
            return []
        return [module for module in after if module not in nested]

    def output(self, model: nn.Module) -> nn.Linear | None:
        layer = cast("Any", model).get_output_embeddings()
        return layer if type(layer) is nn.Linear else None  # a subclass may not call its own forward

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        return tensor_plan_of(model, self.config)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        if self.objective == "seq2seq":
            return language_loss(lambda m, *_: self._decoder_logits(m, batch), model, batch)
        with self.router_loss(model, batch["labels"]) as auxiliary:
            loss = language_loss(self.logits, model, batch)
        return with_auxiliary(loss, auxiliary())

    @contextmanager
    def router_loss(self, model: nn.Module, labels: Tensor) -> Iterator[Callable[[], Tensor | None]]:
        if not adds_router_loss(self.config):
            yield lambda: None
            return
        weight = router_coefficient(model, self.config)
        with router_losses(model, labels) as balance:  # [] where the model computes none
            yield lambda: weight * torch.stack(balance).sum() if balance else None

    def _decoder_logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits [b, t, vocab] of a seq2seq batch. The decoder reads the labels, shifted right."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        ids = decoder_inputs(batch["labels"], self.config)
        with no_guessing():
            return cast("Tensor", model(**inputs, decoder_input_ids=ids, use_cache=False).logits)

    def logits(
        self,
        model: nn.Module,
        input_ids: Tensor,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        name = "inputs_embeds" if input_ids.is_floating_point() else "input_ids"
        # Under seq2seq only the merged weights of two models are compared, and any decoder input will do.
        inputs: dict[str, Any] = {"decoder_input_ids": input_ids} if self.objective == "seq2seq" else {}
        if positions is not None and positions.dim() == 1:
            inputs = {"position_ids": positions.unsqueeze(0)}
        elif positions is not None:
            inputs = {"position_ids": positions, "attention_mask": document_masks(model, positions, starts)}
        with no_guessing():
            if not ends(model):
                return hidden_states(model, {name: input_ids, **inputs})
            return cast("Tensor", model(**{name: input_ids}, use_cache=False, **inputs).logits)

    def packing_obstacle(self, model: nn.Module) -> str:
        """Models that use ``create_causal_mask`` take a 4-D mask unchanged, or one for each kind of layer."""
        text = self.config.get_text_config()
        kind = type(model).__name__
        if not hasattr(sys.modules[type(model).__module__], "create_causal_mask"):
            return f"{kind} builds its own attention mask"
        if self._window() and not takes_windows(model):
            return f"{kind} builds its own mask of {self._window()}"
        if getattr(text, "alibi", False):
            return f"{kind} uses ALiBi, whose distances ignore the borders of packed documents"
        if other := set(getattr(text, "layer_types", None) or ()) - _ATTENDING:
            return f"it has layers of the type {min(other)}"
        return self._positions_obstacle(model)

    def context_parallel_obstacle(self, model: nn.Module) -> str:
        if window := self._window():
            tokens = getattr(self.config.get_text_config(), window)
            return f"its attention sees no more than {window} = {tokens} tokens back"
        return self._positions_obstacle(model)

    def _window(self) -> str:
        """The config key of attention over a part of the training sequence, "" if all layers see the whole."""
        for key in _WINDOWS:
            value = getattr(self.config.get_text_config(), key, None)
            if isinstance(value, int) and 0 < value < self.sequence_length:
                return key
        return ""

    def _positions_obstacle(self, model: nn.Module) -> str:
        """Why tokens cannot have other positions than those in their row."""
        text = self.config.get_text_config()
        if self.objective != "causal":
            return "its attention is not causal"
        if adds_router_loss(self.config):
            return "its router's auxiliary loss is one of whole sequences"
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return f"{type(model).__name__} takes no position_ids"
        if any(kind in str(getattr(text, "rope_parameters", None)) for kind in _ROPE_BY_LENGTH):
            return "its rotary angles depend on the longest position that a rank sees"
        return ""

    def weights(self) -> FolderWeights:
        """The weights on disk, under the model's names. Raises CheckpointError."""
        return FolderWeights(self._reference, self._files())

    def _files(self) -> WeightFiles:
        folder = weights_folder(self.source)
        if not self._quantization:
            return WeightFiles(folder)
        formats = formats_of(self._quantization, f"model.hf: {self.source}")
        return QuantizedFiles(folder, formats, STORED_DTYPES[self.trained_in or torch.float32])

    def packings(self) -> Mapping[str, StoredPacking]:
        return self._packings

    @cached_property
    def _packings(self) -> Mapping[str, StoredPacking]:
        if not self._quantization:
            return {}  # without a look at the weights, which a plan does not need
        files = self._files()
        assert isinstance(files, QuantizedFiles)
        stored = match_names(self._reference, files).direct
        names = {path: stored.get(f"{path}.weight", "") for path in linear_layers(self._reference, [])}
        with torch.device("cpu"):  # a caller may build its model under another
            return {path: files.packing(name) for path, name in names.items() if files.is_quantized(name)}

    def stored_weights(self) -> Callable[[str], QuantizedWeight]:
        files = self._files()
        assert isinstance(files, QuantizedFiles)
        stored = match_names(self._reference, files).direct
        return lambda path: files.stored(stored[f"{path}.weight"])

    def restore(self, model: nn.Module) -> None:
        restore_buffers(model)

    def hf_folder(self) -> HFFolder:
        """The source's own form and config, without the changes made for training."""
        folder = folder_of(self.source, ["config.json", *_COPIED])
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key in ("quantization_config", "auto_map"):
            config.pop(key, None)
        files = self._files()
        groups = list(stored_groups(self._reference, files))
        untrained = list(untrained_groups(self._reference, files))
        copied = [file for name in _COPIED for file in sorted(folder.glob(name))]
        return HFFolder(config, groups, copied, untrained=untrained)

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        shapes = token_shapes(sequence_length)
        if self.objective != "seq2seq":
            return shapes
        labels = ((self.completion_length,), torch.int64)
        return {**shapes, "attention_mask": shapes["input_ids"], "labels": labels}

    def fill(self, model: nn.Module, seed: int) -> None:
        """Read the weights; ``seed`` is unused. Raises CheckpointError, naming the tensor, if the files do not fit."""
        files = self._files()
        restore_buffers(model)
        fill_from_files(model, self._reference, files)


def _parameters(modules: list[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def _inside(path: str, blocks: dict[str, nn.Module]) -> bool:
    parents = path.split(".")[:-1]
    return any(".".join(parents[:count]) in blocks for count in range(1, len(parents) + 1))


def _block_signature(block: nn.Module) -> tuple[str, ...]:
    shapes = [f"{name}{tuple(p.shape)}" for name, p in block.named_parameters()]
    return (type(block).__name__, *shapes)
