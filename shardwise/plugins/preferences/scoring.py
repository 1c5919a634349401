"""Scores of texts by a trained reward model, in one process: PPO's rewards, and the evaluation of a reward model.

The score of a text is the value at its last token. Texts are padded on the right: attention is causal, so padding
changes no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.run_folder import RECIPE, load_run_recipe
from shardwise.core.errors import DataError, RecipeError
from shardwise.data import Tokenizer, open_tokenizer
from shardwise.exporter.export_run import open_run
from shardwise.model.blueprint import Blueprint
from shardwise.model.hf import HuggingFaceModel, ScoringModel
from shardwise.model.narrow import narrow
from shardwise.model.scalar_head import values
from shardwise.recipe.data_sections import brings_tokenizer
from shardwise.runtime.parallel.shard_slices import named_parameters

BATCH = 8
"""Texts that are scored together."""


@dataclass(frozen=True)
class RewardModel:
    """A whole reward model on one device. Call it with lists of token ids; the scores are [n], fp32, on the CPU.

    Attributes:
        tokenizer: that of its folder or run; None if the folder has none.
    """

    blueprint: Blueprint
    model: nn.Module
    tokenizer: Tokenizer | None
    device: torch.device

    @torch.no_grad()
    def __call__(self, documents: Sequence[Sequence[int]]) -> Tensor:
        """Documents of similar lengths are scored together. Raises DataError if one is longer than the context."""
        longest = max(map(len, documents), default=0)
        context = self.blueprint.context
        if context is not None and longest > context:
            where = self.blueprint.origin
            why = f"it has {longest:,} tokens, and the model's context is {context:,}"
            raise DataError("a text is too long for the reward model", where=where or "", why=why)
        scores = torch.empty(len(documents))
        order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            ids = nn.utils.rnn.pad_sequence([torch.tensor(documents[row]) for row in rows], batch_first=True)
            token_scores = (
                values(self.blueprint, self.model, {"input_ids": ids.to(self.device)}).cpu().float()
            )
            last = torch.tensor([len(documents[row]) - 1 for row in rows]).unsqueeze(1)
            scores[rows] = token_scores.gather(1, last).squeeze(1)
        return scores


def require_scores(folder: Path) -> None:
    """Raises RecipeError unless the folder is of a reward model. It reads no weights."""
    if (folder / RECIPE).is_file():
        objective = load_run_recipe(folder).objective
        if objective is None or objective.head != "score":
            raise _no_scores(folder, "its recipe has another objective than reward")
    elif not ScoringModel.of(HuggingFaceModel(str(folder), sequence_length=1)).has_score:
        raise _no_scores(folder, "its files have no score.weight")


def load_reward_model(
    folder: Path, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> RewardModel:
    """The reward model of a run's folder, or of a sequence classification of transformers with one label.

    Raises RecipeError for a model without ``score``, and as ``open_run`` does.
    """
    on = device or torch.device("cpu")
    require_scores(folder)
    if (folder / RECIPE).is_file():
        run = open_run(folder)
        model = _empty_model(run.plain, dtype, on)
        run.plain.restore(model)
        with torch.no_grad():
            for name, tensor in (*named_parameters(model), *model.named_buffers()):
                if name in run.weights.dtypes:
                    tensor.copy_(run.merged.read(name))
        return RewardModel(run.plain, model, open_tokenizer(run.recipe.data.tokenizer), on)
    blueprint = ScoringModel.of(HuggingFaceModel(str(folder), sequence_length=1))
    model = _empty_model(blueprint, dtype, on)
    with torch.no_grad():
        blueprint.fill(model, 0)
    tokenizer = open_tokenizer(str(folder)) if brings_tokenizer(str(folder)) else None
    return RewardModel(blueprint, model, tokenizer, on)


def scores(model: RewardModel, texts: Sequence[str]) -> Tensor:
    """The score of each text, [n], after the token that begins a document, if there is one.

    Raises DataError for a model without a tokenizer.
    """
    cuts = model.tokenizer
    if cuts is None:
        raise DataError(
            "the reward model has no tokenizer",
            where=model.blueprint.origin or model.blueprint.name,
            fix="copy the files of its tokenizer into its folder, or score tokens",
        )
    return model([cuts.begun(cuts.encode(text)) for text in texts])


def _empty_model(blueprint: Blueprint, dtype: torch.dtype, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        model = narrow(blueprint.build(), dtype)
    blueprint.compute_in(model, dtype)
    return model.to_empty(device=device).eval().requires_grad_(False)


def _no_scores(folder: Path, why: str) -> RecipeError:
    fix = "give the folder of a run with objective: reward, or what shardwise export made of it"
    return RecipeError("not a reward model", where=str(folder), why=why, fix=fix)
