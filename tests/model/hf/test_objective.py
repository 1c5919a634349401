"""Which objective a transformers model is trained for, and the refusal of the wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.errors import RecipeError
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS
from tests.harness.families import config_of

transformers = pytest.importorskip("transformers")


def _blueprint(folder: Path, objective: str) -> Any:
    model = {"hf": str(folder), "objective": objective}
    data: dict[str, Any] = {"sequence_length": 16}
    if objective == "seq2seq":
        data |= {"source": "x.jsonl", "format": "prompt"}
    return blueprint_of(recipe_of({"model": model, "data": data, "steps": 1, "batch_size": 1}, SETTINGS))


def _saved(config: Any, folder: Path) -> Path:
    config.architectures = None
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "objective", "says"),
    [
        (
            "bert",
            {"tie_word_embeddings": False},
            "causal",
            "the model is not causal.*model.objective: masked",
        ),
        ("bert", {}, "causal", "the model is not causal.*model.objective: masked"),
        ("bert", {"is_decoder": True}, "masked", "does not see the tokens after.*model.objective: causal"),
        ("bert", {}, "seq2seq", "not an encoder-decoder.*model.objective: causal"),
        ("xlnet", {}, "causal", "the model is not causal.*use a model with causal attention"),
        ("t5", {}, "causal", "not a causal language model.*model.objective: seq2seq"),
        ("bart", {}, "causal", "not a causal language model.*model.objective: seq2seq"),
        ("t5", {}, "masked", "not a masked language model.*model.objective: seq2seq"),
        ("t5", {"decoder_start_token_id": None}, "seq2seq", "the decoder has no start token"),
        ("bart", {"output_router_logits": True}, "seq2seq", "auxiliary loss of an encoder-decoder"),
        ("llama", {}, "masked", "not a masked language model.*model.objective: causal"),
    ],
)
def test_a_model_of_another_objective_is_refused_in_a_line(
    name: str, changes: dict[str, Any], objective: str, says: str, tmp_path: Path
) -> None:
    folder = _saved(config_of(name, **changes), tmp_path)
    with pytest.raises(RecipeError, match=says) as caught:
        _blueprint(folder, objective).parameter_count()
    assert "\n" not in caught.value.line() and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "changes", "objective"),
    [
        ("llama", {}, "causal"),
        ("mamba", {}, "causal"),
        ("mixtral", {}, "causal"),
        ("bert", {"is_decoder": True}, "causal"),
        ("bert", {}, "masked"),
        ("roberta", {}, "masked"),
        ("t5", {}, "seq2seq"),
        ("bart", {}, "seq2seq"),
    ],
)
def test_a_model_of_the_objective_is_accepted(
    name: str, changes: dict[str, Any], objective: str, tmp_path: Path
) -> None:
    state = torch.get_rng_state()
    assert _blueprint(_saved(config_of(name, **changes), tmp_path), objective).parameter_count() > 0
    assert torch.equal(torch.get_rng_state(), state), "the probe draws no random numbers of the run"


def test_the_probe_of_a_large_model_is_narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two blocks of Llama-3-70B have 1.7 billion weights; the probe has as many blocks and two heads."""
    from shardwise.model.hf import objective

    sizes = []
    probe = objective._sees_later_tokens
    monkeypatch.setattr(
        objective,
        "_sees_later_tokens",
        lambda model, *rest: sizes.append(sum(p.numel() for p in model.parameters())) or probe(model, *rest),
    )
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    _blueprint(_saved(config, tmp_path), "causal")
    assert len(sizes) == 1 and sizes[0] < 1_000_000


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model": {"preset": "tiny", "objective": "masked"}}, "objective cannot be masked here"),
        ({"data": {"packing": True, "source": "x.jsonl"}}, "packing cannot be true here"),
        ({"data": {"format": "prompt", "source": "x.jsonl"}}, "the masked objective needs plain text"),
        ({"model": {"hf": "m", "objective": "seq2seq"}}, "the seq2seq objective needs prompts"),
        (
            {
                "model": {"hf": "m", "objective": "seq2seq"},
                "data": {"source": "x.jsonl", "format": "prompt", "train_on": "all"},
            },
            "train_on cannot be all here",
        ),
    ],
)
def test_settings_that_contradict_the_objective_are_refused(values: dict[str, Any], says: str) -> None:
    base = {"model": {"hf": "m", "objective": "masked"}, "steps": 1, "batch_size": 1}
    with pytest.raises(RecipeError, match=says):
        recipe_of(base | values, SETTINGS)
