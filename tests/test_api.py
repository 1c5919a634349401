"""The public names are what users import, whatever was imported before; and they do their work without printing."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file

import shardwise
from shardwise import api
from shardwise.core.errors import RankError
from shardwise.recipe.sections import AdapterSpec
from tests.plugins.quantize.stubs import unpredicted


def test_public_names_are_listed_and_are_functions_and_classes() -> None:
    assert set(shardwise.__all__) < set(dir(shardwise)) and "ModuleType" not in dir(shardwise)
    assert all(callable(getattr(shardwise, name)) for name in shardwise.__all__)


def test_an_import_of_a_room_hides_no_function() -> None:
    code = (
        "import shardwise, shardwise.planner.search, shardwise.plugins.quantize.settings, shardwise.trainer.loop\n"
        "from shardwise.planner.search import plan_for\n"
        "assert callable(shardwise.plan) and callable(shardwise.train) and callable(plan_for)\n"
        "assert callable(shardwise.export) and callable(shardwise.merge) and callable(shardwise.quantize)\n"
        "from shardwise import api\n"
        "recipe = shardwise.load('recipes/quickstart.yaml', ['model.layers=1', 'steps=2'])\n"
        "assert isinstance(recipe, shardwise.Recipe)\n"
        "api.plan = api.train = lambda *arguments: arguments\n"
        "assert shardwise.plan(recipe) == (recipe,) and shardwise.train(recipe, 'run') == (recipe, 'run')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_it_loads_nothing() -> None:
    code = "import sys, shardwise; assert 'torch' not in sys.modules and shardwise.__version__"
    subprocess.run([sys.executable, "-c", code], check=True)


RECIPE = """
model: {layers: 1, width: 16, heads: 2, ffn: 32, vocab: 256, context: 16}
data: {source: CORPUS, sequence_length: 16}
steps: 2
batch_size: 4
strategy: {zero_stage: 0, micro_batch_size: 2, activation_checkpointing: none, loss: logits}
evaluation: {sequences: 4}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> api.Recipe:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "corpus.txt").write_text(Path(__file__).read_text(encoding="utf-8") * 3, encoding="utf-8")
    text = RECIPE.replace("CORPUS", str(folder / "corpus.txt"))
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return api.load(folder / "recipe.yaml")


@pytest.fixture(scope="module")
def plan(recipe: api.Recipe) -> api.Plan:
    plan = api.plan(recipe)
    assert isinstance(plan, api.Plan) and plan.fits
    return plan


def never(*arguments: Any) -> NoReturn:
    raise AssertionError("ranks were started")


@pytest.mark.long
def test_a_run_is_trained_exported_merged_and_quantized_in_silence(
    recipe: api.Recipe,
    plan: api.Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 tells its log alone. A run that is done is returned as it is."""
    run = tmp_path / "run"
    record = api.train(recipe, plan, run, exact_memory=True)
    assert "step 2/2" in (run / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert [step.step for step in record.steps] == [1, 2] and record.outcome is not None

    report = (run / "report.html").stat().st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr(api, "run_ranks", never)
        again = api.train(recipe, plan, run)
    assert (again.steps, again.outcome) == (record.steps, record.outcome)
    assert (run / "report.html").stat().st_mtime_ns == report

    base = api.export(run, tmp_path / "base", dtype="fp32")
    assert base == tmp_path / "base" and (base / "config.json").exists()
    adapter = adapter_for(base, tmp_path / "adapter")
    merged = api.merge(base, adapter, tmp_path / "merged")
    back = api.merge(merged, adapter, tmp_path / "back", undo=True)
    first, changed, last = (load_file(folder / "model.safetensors") for folder in (base, merged, back))
    assert first.keys() == changed.keys() == last.keys()
    assert any(not torch.equal(first[name], changed[name]) for name in first)
    for name in first:
        torch.testing.assert_close(last[name], first[name], rtol=0, atol=1e-6)

    named: dict[str, Any] = {"scheme": "w4a16-g16", "method": "rtn", "sequences": 0}
    with unpredicted():
        above = shardwise.quantize(run, tmp_path / "small", **named, max_kl=0.0)
        assert above.folder is None and above.lost.kl > 0 and not (tmp_path / "small").exists()
        below = shardwise.quantize(run, tmp_path / "small", **named)
    assert below.folder == tmp_path / "small" and (below.lost, below.layers) == (above.lost, above.layers)
    assert any(name.endswith("weight_packed") for name in load_file(below.folder / "model.safetensors"))
    assert capfd.readouterr().out == ""


def adapter_for(base: Path, folder: Path) -> Path:
    """An adapter of random weights, for a model in Hugging Face's format."""
    from shardwise.model.adapted import AdaptedModel
    from shardwise.model.files.peft import write_adapter
    from shardwise.model.hf import HuggingFaceModel
    from shardwise.model.lora import is_adapter
    from shardwise.runtime.parallel.shard_slices import named_parameters

    adapted = AdaptedModel(HuggingFaceModel(str(base), 8), AdapterSpec(rank=2, alpha=8.0))
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in named_parameters(adapted.build()) if is_adapter(name)}
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    write_adapter(folder, tensors, adapted.config(), None)
    return folder


def test_why_ranks_failed_is_in_the_error(
    recipe: api.Recipe,
    plan: api.Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And nowhere else but in the logs, which stay, also where the folder was ours."""
    line = "error: cannot write the checkpoint (here): No space left on device"
    monkeypatch.setattr(api, "run_ranks", lambda *arguments, **named: (7, line))
    with pytest.raises(RankError, match=r"cannot write the checkpoint .*No space left on device"):
        api.train(recipe, plan, tmp_path / "run")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RankError, match="No space left on device"):
        api.verify(recipe, plan, steps=2)
    assert len(list(tmp_path.glob("shardwise-verify-*"))) == 1
    monkeypatch.setattr(api, "run_ranks", lambda *arguments, **named: (75, ""))
    with pytest.raises(RankError, match=r"the run stopped .*the same call goes on"):
        api.train(recipe, plan, tmp_path / "run")
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "recipes/quickstart.yaml"])
def test_an_installed_recipe_is_loaded_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert api.load(name).steps
