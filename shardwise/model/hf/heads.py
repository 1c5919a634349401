"""Models of transformers with another head: ``score`` instead of logits (model/scalar_head.py), or a value head
(model/value_head.py).

The class of the built model is a subclass of the causal one. With ``score`` its forward pass leaves out what the causal
class does to logits, such as a cap, as transformers' ForSequenceClassification does.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any, Self, cast

import torch
from torch import nn

from shardwise.core.errors import RecipeError
from shardwise.model.files.folder_layout import HFFolder, unchanged_tensor
from shardwise.model.files.native_folder import scoring_config
from shardwise.model.hf.conversion import excuse, match_names
from shardwise.model.hf.model import HuggingFaceModel
from shardwise.model.scalar_head import SCORE, fill_score, no_head, score_layer, scoring_plan
from shardwise.model.stage import Stage
from shardwise.model.value_head import VALUE_HEAD, add_value_head, fill_zeros, valuing_plan
from shardwise.runtime.parallel.tensor import TensorPlan


class _OtherHead(HuggingFaceModel):
    """The model of ``base`` with another head."""

    def __init__(self, base: HuggingFaceModel) -> None:
        # Cached properties are in ``__dict__``, too, and describe the model with the old head.
        cached: set[str] = set()
        for kind in type(base).__mro__:
            cached |= {name for name, value in vars(kind).items() if isinstance(value, cached_property)}
        self.__dict__.update({name: value for name, value in vars(base).items() if name not in cached})

    @classmethod
    def of(cls, base: HuggingFaceModel) -> Self:
        """Raises RecipeError if the model is not causal, or has no plain linear output layer."""
        if base.objective != "causal":
            raise no_head(base, "the last token has to see the whole text, so attention has to be causal")
        with torch.device("meta"):
            model: Any = base.build()
        if type(model.get_output_embeddings()) is not nn.Linear or model.base_model is model:
            raise no_head(
                base, f"{type(model).__name__} has no plain linear layer on the output of its base model"
            )
        return cls(base)

    @cached_property
    def has_score(self) -> bool:
        """Whether the folder has the layer."""
        return match_names(self._reference, self._files()).covers(f"{SCORE}.weight")


class ScoringModel(_OtherHead):
    """A model of transformers with ``score``."""

    new_layers = (SCORE,)
    peft_task = "SEQ_CLS"

    def build(self, depth: int | None = None) -> nn.Module:
        return _scoring(super().build(depth))

    def output(self, model: nn.Module) -> None:
        return None

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        return scoring_plan(super().tensor_plan(model))

    def fill(self, model: nn.Module, seed: int) -> None:
        super().fill(model, seed)
        if not self.has_score:
            fill_score(model, seed)

    def departures(self, compute: str) -> tuple[str, ...]:
        unknown = f"transformers has no class that reads the scores of {self.config.model_type}: it cannot be exported"
        notes = super().departures(compute)
        return notes if self._architecture else (*notes, unknown)

    @cached_property
    def _architecture(self) -> str:
        """transformers' class of this model with ``score``; "" if it has none."""
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

        kind: Any = CLASSES.get(type(self.config), None)
        if kind is None:
            return ""
        with torch.device("meta"):
            return kind.__name__ if hasattr(kind(self.shallow_config(1)), SCORE) else ""

    def hf_folder(self) -> HFFolder:
        if not self._architecture:
            raise RecipeError(
                "this reward model cannot be written for transformers",
                where=f"model.hf: {self.source}",
                why=f"transformers has no sequence classification of {self.config.model_type} with a {SCORE} layer",
                fix="the run's checkpoints hold its weights as safetensors",
            )
        layout = super().hf_folder()
        groups = list(layout.groups)
        if not self.has_score:
            name = f"{SCORE}.weight"
            groups.append(unchanged_tensor(name, name, tuple(self._reference.get_parameter(name).shape)))
        return HFFolder(scoring_config(layout.config, self._architecture), groups)


class ValuingModel(_OtherHead):
    """A model of transformers with a value head."""

    private_layers = (VALUE_HEAD,)

    def build(self, depth: int | None = None) -> nn.Module:
        model: Any = super().build(depth)
        add_value_head(model, model.get_output_embeddings())
        excuse(model, VALUE_HEAD)
        return cast("nn.Module", model)

    def stage(self, stage: Stage) -> nn.Module:
        model = super().stage(stage)
        if not stage.last:
            delattr(model, VALUE_HEAD)
        return model

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        return valuing_plan(super().tensor_plan(model))

    def fill(self, model: nn.Module, seed: int) -> None:
        super().fill(model, seed)
        fill_zeros(model)


def _scoring(model: Any) -> nn.Module:
    """A causal model whose output layer is replaced by ``score``."""
    causal = type(model)
    output = model.get_output_embeddings()
    path = next(path for path, module in model.named_modules() if module is output)
    owner = model.get_submodule(path.rpartition(".")[0])
    delattr(owner, path.rpartition(".")[2])
    model.add_module(SCORE, score_layer(output.in_features))

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        hidden = self.base_model(*args, **inputs).last_hidden_state
        return CausalLMOutput(logits=self.score(hidden))

    # Callers look up the names of the arguments, such as position_ids.
    forward.__signature__ = inspect.signature(causal.forward)  # type: ignore[attr-defined]
    # ``__module__`` stays the causal class's: its mask and its auxiliary loss are looked up there.
    members = {
        "forward": forward,
        "get_output_embeddings": lambda self: self.score,
        "set_output_embeddings": lambda self, layer: setattr(self, SCORE, layer),
        "__module__": causal.__module__,
    }
    model.__class__ = type(causal.__name__, (causal,), members)
    excuse(model, SCORE, path)
    return cast("nn.Module", model)
