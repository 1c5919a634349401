"""The model with an output layer of its own, for one whose output layer shares the embedding's weight.

A changed model may need two weights where one was stored: a rotation gives only the output layer the gain of the last
norm. The folder then has one more tensor, and its config says ``tie_word_embeddings: false``.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from shardwise.model.blueprint import Blueprint
from shardwise.model.files.folder_layout import HFFolder, unchanged_tensor
from shardwise.model.hf import FolderWeights, HuggingFaceModel
from shardwise.model.native import NativeModel
from shardwise.runtime.parallel.shard_slices import shared_names


def untied(blueprint: Blueprint) -> Blueprint:
    """The untied model; the model itself if nothing is shared, or if it does not say how to build it otherwise."""
    with torch.device("meta"):
        shared = shared_names(blueprint.build())
    if shared and isinstance(blueprint, NativeModel):
        return NativeModel(replace(blueprint.dimensions, tied=False), blueprint.name)
    if shared and isinstance(blueprint, HuggingFaceModel):
        return _Untied(blueprint, list(shared))
    return blueprint


class _Untied(HuggingFaceModel):
    """A model of transformers whose output layers ``heads`` are not in the files of its folder."""

    def __init__(self, tied: HuggingFaceModel, heads: list[str]) -> None:
        # Without the cached properties, which would be those of the tied model.
        shared_state = {
            name: value for name, value in vars(tied).items() if name not in ("depth", "_reference")
        }
        self.__dict__.update(shared_state)
        self._tied = tied
        self._heads = heads
        self.config = copy.deepcopy(tied.config)
        for config in (self.config, self.config.get_text_config()):
            config.tie_word_embeddings = False

    def weights(self) -> FolderWeights:
        """The weights on disk, under the names of the tied model."""
        return self._tied.weights()

    def hf_folder(self) -> HFFolder:
        layout = self._tied.hf_folder()
        with torch.device("meta"):
            shapes = {name: tuple(parameter.shape) for name, parameter in self.build().named_parameters()}
        own = [unchanged_tensor(name, name, shapes[name]) for name in self._heads]
        config = {**layout.config, "tie_word_embeddings": False}
        return replace(layout, config=config, groups=[*layout.groups, *own])
