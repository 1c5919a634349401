"""What adapters and packing do not reach is counted in the built model, and named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.model.adapted import AdaptedModel
from shardwise.model.factory import FactoryModel
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.native import NativeModel
from shardwise.model.unreached import matrices, percent, reach_in_words, reached_shares
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.sections import AdapterSpec
from tests.harness.families import config_of

transformers = pytest.importorskip("transformers")

ADAPTED = ("mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "olmoe", "deepseek_v3")
"""Mixtures whose experts get adapters; those of the others have modules of their own."""
MIXTURES = (*ADAPTED, "dbrx", "jetmoe")
TARGETS: tuple[Any, ...] = (
    "all",
    "attention",
    ("o_proj", "out_proj", "o"),
    r".*attn.*|.*attention.*|.*mlp.*",
)


def notes_of(base: Any, **values: Any) -> tuple[str, ...]:
    """Of the adapters, not of the base."""
    spec = AdapterSpec(**{"rank": 4, "alpha": 8.0, "targets": "all"} | values)
    of_base = base.departures("bf16")
    return tuple(note for note in AdaptedModel(base, spec).departures("bf16") if note not in of_base)


def said(note: str) -> dict[str, float]:
    """The shares in a sentence, by name."""
    return {name: float(value) for name, value in re.findall(r"(\S+) \(<?([\d.]+) %", note)}


def saved(folder: Path, family: str) -> tuple[HuggingFaceModel, Any]:
    """A blueprint, and the model on the meta device."""
    config = config_of(family)
    config.save_pretrained(folder)
    with torch.device("meta"):
        return HuggingFaceModel(str(folder), 12), transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_says_what_stays_frozen(family: str, tmp_path: Path) -> None:
    """The share is that of all matrices of the blocks in modules that are neither linear layers nor known experts."""
    blueprint, model = saved(tmp_path, family)
    kinds = set(model._no_split_modules)
    inside = {m for block in model.modules() if type(block).__name__ in kinds for m in block.modules()}
    left = [
        parameter.numel()
        for module in inside
        if not isinstance(module, nn.Linear)
        and not (family in ADAPTED and type(module).__name__.endswith("Experts"))
        for parameter in module.parameters(recurse=False)
        if parameter.dim() > 1
    ]
    whole = sum(parameter.numel() for parameter in model.parameters())
    (note,) = notes_of(blueprint)
    assert sum(said(note).values()) == pytest.approx(100 * sum(left) / whole, abs=0.3)
    assert "stay frozen in bf16" in note
    assert sum(left) < 0.05 * whole if family in ADAPTED else sum(left) > 0.2 * whole


def test_a_router_that_transformers_keeps_in_fp32_is_named(tmp_path: Path) -> None:
    blueprint, _ = saved(tmp_path, "deepseek_v3")
    always = blueprint.departures("fp32")
    (note,) = (note for note in blueprint.departures("bf16") if note not in always)
    names = "model.layers.*.mlp.gate.weight"
    assert note == f"transformers keeps {names} in fp32; training computes with bf16 copies"


@pytest.mark.parametrize("targets", ["attention", ("q_proj",), "experts", r".*\.v_proj"], ids=str)
def test_every_choice_of_targets_says_so(targets: Any, tmp_path: Path) -> None:
    """The router cannot be a target. What could be one and is not was the recipe's choice."""
    blueprint, _ = saved(tmp_path, "qwen3_moe")
    (note,) = notes_of(blueprint, targets=targets)
    assert set(said(note)) == {"model.layers.*.mlp.gate"} and "of the weights)" in note


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_quantize_says_what_it_packs_and_what_it_leaves(quantize: str, tmp_path: Path) -> None:
    """The two shares are all matrices of the model."""
    blueprint, model = saved(tmp_path, "qwen3_moe")
    _, note = notes_of(blueprint, quantize=quantize)
    parameters = dict(model.named_parameters())
    whole = sum(parameter.numel() for parameter in parameters.values())
    packed = sum(p.numel() for name, p in parameters.items() if "self_attn" in name and p.dim() == 2)
    packed += sum(p.numel() for name, p in parameters.items() if ".experts." in name)
    left = said(note)
    assert "model.layers.*.mlp.experts" not in left and "model.layers.*.mlp.gate" in left
    assert note.endswith(
        f"stay in bf16: {quantize} packs the blocks' linear layers and experts, {100 * packed / whole:.1f} %"
    )
    vectors = sum(p.numel() for p in parameters.values() if p.dim() == 1)
    assert sum(left.values()) + 100 * (packed + vectors) / whole == pytest.approx(100, abs=0.3)


def test_a_dense_model_has_nothing_to_say_but_its_embeddings() -> None:
    base = NativeModel(Dimensions(2, 24, 2, 1, 40, vocab=53, context=32))
    assert notes_of(base) == ()
    (note,) = notes_of(base, quantize="nf4")
    assert set(said(note)) == {"embed_tokens", "lm_head"}


def test_a_users_module_is_counted_too() -> None:
    """A stack of matrices and a bare matrix in its blocks; a vector of three dimensions is none."""
    (note,) = notes_of(FactoryModel("tests.harness.stacked:stacked", {}))
    model = FactoryModel("tests.harness.stacked:stacked", {}).build()
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert said(note) == {"blocks.*": pytest.approx(100 * 2 * (4 * 16 * 16 + 4 * 16) / whole, abs=0.06)}


class _Tied(nn.Module):
    """Two names of one stack, a convolution, and a layer that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Module(), nn.Module()
        self.one.stack = self.two.stack = nn.Parameter(torch.empty(3, 4, 5))
        self.conv, self.layer = nn.Conv1d(4, 4, 3, groups=4), nn.Linear(4, 4)


def test_matrices_are_counted_once() -> None:
    found = list(matrices(_Tied(), [], ["layer"]))
    assert [(each.name, each.numel, each.kind) for each in found] == [
        ("one.stack", 60, "Module"),
        ("conv.weight", 12, "Conv1d"),
    ]


def test_sentences_name_the_largest_and_sum_the_rest() -> None:
    parts = [
        (f"blocks.{i}.{name}", size)
        for i in range(2)
        for name, size in zip("abcdefg", range(7, 0, -1), strict=True)
    ]
    found = reached_shares([*parts, ("tiny", 1)], 10_000)
    assert list(found) == [*(f"blocks.*.{name}" for name in "abcdefg"), "tiny"]
    assert reach_in_words(found, "the weights") == (
        "blocks.*.a (0.1 % of the weights), blocks.*.b (0.1 %), blocks.*.c (0.1 %),"
        " blocks.*.d (0.1 %), 4 others (0.1 %)"
    )
    assert percent(1e-6) == "<0.1 %" and percent(0.0) == "0.0 %"
