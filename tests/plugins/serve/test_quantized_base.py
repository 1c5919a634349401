"""A folder of quantized weights as a base: generated from, adapted under ZeRO 3, merged, trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwise.checkpoint.adapter import leave
from shardwise.checkpoint.checkpoint import save_checkpoint
from shardwise.cli.main import run as run_cli
from shardwise.core.errors import RecipeError
from shardwise.core.scheme import scheme_of
from shardwise.engine.build import build
from shardwise.engine.train_state import TrainState
from shardwise.exporter.export_run import export_run
from shardwise.model.lora import is_adapter
from shardwise.model.open import blueprint_of
from shardwise.plugins.merge.merging import merge_adapter
from shardwise.plugins.serve.requests import Request
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import load_model
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.shard_slices import local_part, named_parameters
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.parity import Parity, Trial
from tests.harness.pool import Pool
from tests.harness.quantized import native_model, write_quantized_folder

pytest.importorskip("transformers")

SCHEMES = ("w4a16-g16", "w8a8", "fp8")
IDS = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(0))


def recipe_on(folder: Path, adapter: dict[str, Any] | None) -> Recipe:
    values = {"model": {"hf": str(folder)}, "data": {"sequence_length": 16}, "steps": 4, "batch_size": 4}
    return recipe_of({**values, "adapter": adapter}, SETTINGS)


@pytest.mark.parametrize("name", SCHEMES)
def test_it_generates(name: str, tmp_path: Path) -> None:
    """From packed weights, as the dequantized model does."""
    tensors = write_quantized_folder(tmp_path / "base", scheme_of(name))
    served = load_model(tmp_path / "base", tokenizer="bytes")
    held = dict(named_parameters(served.model))
    packed = [each for name, each in held.items() if name.endswith(".packed")]
    assert len(packed) == 14 and {each.dtype for each in packed} == {torch.uint8}
    assert (served.model(IDS).logits - native_model(tensors)(IDS)).abs().max() <= 1e-5
    (text,) = served.complete([Request("x", None, Sampling(tokens=4, temperature=0.0))])
    assert text


@pytest.mark.parametrize("adapter", [{"rank": 3}, {"rank": 3, "name": "dora", "targets": "attention"}])
def test_adapters_train_under_zero_3_as_in_one_process(
    adapter: dict[str, Any], parity: Parity, tmp_path: Path
) -> None:
    write_quantized_folder(tmp_path / "base", scheme_of("w4a16-g16"), symmetric=False)
    trial = Trial(recipe_on(tmp_path / "base", adapter), 2, {"precision": "fp32", "zero_stage": 3})
    parity.all_pass(trial)


def adapted_run(folder: Path, recipe: Recipe) -> None:
    """A saved run, with a random adapter if the recipe has one; called on every rank."""
    run = build(recipe, blueprint_of(recipe), strategy_from({"zero_stage": 3}), torch.device("cpu"))
    torch.manual_seed(torch.distributed.get_rank())
    for name, parameter in named_parameters(run.model):
        if is_adapter(name):
            local_part(parameter).normal_(0.0, 0.3)
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    save_checkpoint(run, TrainState(1, 4), folder / "checkpoints", 1)
    if recipe.adapter is not None:
        leave(run, folder)


def test_a_run_on_it_is_exported_and_merged_dense(pool: Pool, tmp_path: Path) -> None:
    """``export`` of the run and ``merge`` of its adapter write the same model, without quantization."""
    base, run = tmp_path / "base", tmp_path / "run"
    tensors = write_quantized_folder(base, scheme_of("w4a16-g16"))
    pool.run(2, adapted_run, run, recipe_on(base, {"rank": 3, "alpha": 6}))
    _, merged = export_run(run, tmp_path / "exported")
    assert merged is not None and merged.layers == 14 and merged.unpacked == ("int4",)
    merge_adapter(str(base), run / "adapter", tmp_path / "merged")
    found = {name: load_file(tmp_path / name / "model.safetensors") for name in ("exported", "merged")}
    assert found["exported"].keys() == found["merged"].keys()
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        stored = name if name.startswith("lm_head") else f"model.{name}"
        added = _product(adapter, f"base_model.model.{stored.removesuffix('.weight')}")
        for written in found.values():
            assert (written[stored] - tensor - added).abs().max() <= 1e-6, name
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    own = load_model(run, tokenizer="bytes")
    assert own.adapters == ["own", "base"]
    assert (own.model(IDS).logits - native_model(tensors)(IDS)).abs().max() <= 1e-5


def _product(adapter: dict[str, Tensor], path: str) -> Tensor:
    if f"{path}.lora_A.weight" not in adapter:
        return torch.zeros(())
    return 2 * adapter[f"{path}.lora_B.weight"] @ adapter[f"{path}.lora_A.weight"]


def test_adapters_of_packed_weights_have_no_tensor_parallelism(tmp_path: Path) -> None:
    write_quantized_folder(tmp_path / "base", scheme_of("nf4"))
    blueprint = blueprint_of(recipe_on(tmp_path / "base", {"rank": 2}))
    with pytest.raises(RecipeError, match="no tensor parallelism"):
        blueprint.tensor_plan(blueprint.build())


def test_weights_that_all_train_are_dequantized(pool: Pool, tmp_path: Path) -> None:
    """The run's model is dense, while the folder's own model is served from packed weights."""
    tensors = write_quantized_folder(tmp_path / "base", scheme_of("fp8"))
    recipe = recipe_on(tmp_path / "base", None)
    blueprint = blueprint_of(recipe)
    assert "dequantized" in blueprint.departures("fp32")[0]
    model = blueprint.build()
    blueprint.fill(model, 0)
    with torch.no_grad():
        logits = blueprint.logits(model, IDS)
    assert (logits - native_model(tensors)(IDS)).abs().max() <= 1e-5
    pool.run(2, adapted_run, tmp_path / "run", recipe)
    trained = load_model(tmp_path / "run", tokenizer="bytes")
    assert (trained.model(IDS).logits - logits).abs().max() <= 1e-5
    packed = load_model(tmp_path / "base", tokenizer="bytes")
    assert (packed.model(IDS).logits - logits).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["nf4", "w4a16-g16"])
def test_a_folder_is_exported_dense(name: str, tmp_path: Path) -> None:
    """For readers that do not know its format; transformers has none for NF4."""
    tensors = write_quantized_folder(tmp_path / "base", scheme_of(name))
    assert run_cli(["export", str(tmp_path / "base"), str(tmp_path / "out")]) == 0
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert (model(IDS).logits - native_model(tensors)(IDS)).abs().max() <= 1e-5
