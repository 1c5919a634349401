"""The base that LoftQ leaves: written for PEFT, which then has the run's logits; the model it came from is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.adapter import leave
from shardwise.checkpoint.checkpoint import save_checkpoint
from shardwise.cli.main import run as run_cli
from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.engine.build import build
from shardwise.engine.train_state import TrainState
from shardwise.exporter import export_run
from shardwise.model.files.peft import AdapterFiles
from shardwise.model.open import blueprint_of
from shardwise.plugins.merge.merging import merge_adapter
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.pool import Pool
from tests.harness.quantized import write_quantized_folder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IDS = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(0))


def started_run(folder: Path, base: Path, adapter: dict[str, Any]) -> Tensor:
    """Save a run at its start under ZeRO 3; its logits. Called on every rank."""
    values = {"model": {"hf": str(base)}, "data": {"sequence_length": 16}, "steps": 4, "batch_size": 4}
    recipe = recipe_of({**values, "adapter": adapter}, SETTINGS)
    run = build(recipe, blueprint_of(recipe), strategy_from({"zero_stage": 3}), torch.device("cpu"))
    with torch.no_grad():
        found = run.blueprint.logits(run.model, IDS)
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    save_checkpoint(run, TrainState(1, 4), folder / "checkpoints", 1)
    leave(run, folder)
    return found


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def test_peft_reads_the_base_and_the_adapter(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run, frozen = tmp_path / "base", tmp_path / "run", tmp_path / "frozen"
    write_quantized_folder(base, None)
    adapter = {"rank": 3, "alpha": 6, "quantize": "nf4", "init": "loftq:2"}
    logits = pool.run(2, started_run, run, base, adapter)[0]
    assert run_cli(["export", str(run), str(frozen), "--base"]) == 0
    assert "merged" not in capsys.readouterr().out
    theirs = peft.PeftModel.from_pretrained(loaded(frozen), str(run / "adapter"))
    assert theirs.peft_config["default"].init_lora_weights is True
    assert (theirs(IDS).logits - logits).abs().max() <= 1e-5
    assert (loaded(frozen)(IDS).logits - logits).abs().max() > 1e-3  # the adapter is part of the start
    merge_adapter(str(frozen), run / "adapter", tmp_path / "merged")
    assert (loaded(tmp_path / "merged")(IDS).logits - logits).abs().max() <= 1e-5
    with pytest.raises(CheckpointError, match="the adapter is for another base"):
        merge_adapter(str(base), run / "adapter", tmp_path / "wrong")


def test_other_packed_bases_have_no_fingerprint(pool: Pool, tmp_path: Path) -> None:
    """Their adapters also fit the unquantized model, nearly."""
    write_quantized_folder(tmp_path / "base", None)
    adapter = {"rank": 3, "quantize": "nf4", "targets": "attention"}
    pool.run(1, started_run, tmp_path / "run", tmp_path / "base", adapter)
    assert AdapterFiles(tmp_path / "run" / "adapter").fingerprint is None


def test_a_model_or_a_full_run_has_no_base_to_write(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized_folder(tmp_path / "base", None)
    assert run_cli(["export", str(tmp_path / "base"), str(tmp_path / "out"), "--base"]) == 2
    assert "--base is for runs" in capfd.readouterr().err
    values = {"model": {"hf": str(tmp_path / "base")}, "data": {"sequence_length": 16}, "steps": 1}
    recipe = recipe_of({**values, "batch_size": 1}, SETTINGS)
    monkeypatch.setattr(export_run, "checkpoint_of", lambda folder, which: (recipe, folder))
    with pytest.raises(RecipeError, match="this run has no frozen base"):
        export_run.open_run(tmp_path, base=True)
